"""What is not part of the program: presets (`medium.py`, `sprint.py`)."""
