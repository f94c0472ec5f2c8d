"""What a training run needs beside the program: in reading order

- `settings.py`  a command line becomes a configuration
- `kinds.py`     the values that a setting may have: they are the type of its field
- `checks.py`    refuses settings that cannot work together or on this machine, naming the one to change
- `explain.py`   what `--explain` prints: the learning rate and decay of every group of parameters
- `sources.py`   which files make a run what it is, their hash, and how they differ from the commit
- `memory.py`    counts what a run holds on each GPU
- `ahead.py`     compiles kernels during that count, before their first launch
- `notes.py`     keeps that count for the next start
- `fit.py`       chooses settings that fit into the GPUs' memory
- `machine.py`   facts about devices, driver and versions
- `log.py`       the run's folder and the lines of its log
- `terminal.py`  lets a run outlive its terminal, and end in order at a signal
- `ending.py`    how a run that failed ends: in one line, with an exit status
- `clock.py`     what is timed, and how
- `progress.py`  the progress bar, a log line for each step, and the summary
- `weights.py`   the folder of a trained model, which `use/` reads
- `checkpoint.py`  all that a run needs to go on, written while it trains
"""

LOG_NAME, PATCH_NAME = "log.jsonl", "changes.patch"     # what a run's folder holds
