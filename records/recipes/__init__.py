"""What is not part of the program: a preset (`medium.py`)."""
