"""What a training run needs beside the program: in reading order

- `settings.py`  a command line becomes a configuration
- `kinds.py`     the rule of each setting by itself, which is the type of its field
- `checks.py`    refuses settings that cannot work together or on this machine, naming the one to change
- `explain.py`   what `--explain` prints: the learning rate and decay of every group of parameters
- `sources.py`   which files make a run what it is, their hash, and how they differ from the commit
- `memory.py`    counts what a run holds on each GPU
- `fit.py`       chooses settings that fit into the GPUs' memory
- `machine.py`   facts about devices, driver and versions
- `log.py`       the run's folder and the lines of its log
- `terminal.py`  what a run outlives of its terminal: readers that go, streams that are closed, signals
- `ending.py`    how a run that failed ends: in one line, with an exit status
- `clock.py`     what is timed, and how
- `progress.py`  the progress bar, a log line for each step, and the summary
- `weights.py`   the folder of a trained model, which `use/` reads
- `checkpoint.py`  all that a run needs to go on, written beside it
"""

LOG_NAME, PATCH_NAME = "log.jsonl", "changes.patch"     # what a run's folder holds
