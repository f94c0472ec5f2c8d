"""What is not part of the program: a preset (`medium.py`), and ideas to try on whole runs (`ideas.py`)."""
