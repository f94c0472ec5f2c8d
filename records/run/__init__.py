"""What a training run needs beside the program: in reading order

- `settings.py`  a command line becomes a configuration
- `sources.py`   which files make a run what it is, their hash, and how they differ from the commit
- `machine.py`   facts about devices, driver and versions
- `log.py`       the run's folder and the lines of its log
- `progress.py`  the progress bar, a log line for each step, and the summary
"""
