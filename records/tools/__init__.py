"""Tools that read runs and records, and tools that measure the program or the machine: in reading order

- `schema.py`, `logs.py`, `foreign.py`: what a log holds; reading our logs and those of the public speedrun
- `stats.py`, `pool.py`, `compare.py`: t-tests, which runs may be pooled, two configurations side by side
- `history.py`, `record.py`, `classes.py`, `rules.py`, `check.py`, `report.py`: what a commit ran; record
  folders made, put into classes, held against the rules, their logs and commits, shown as a page
- `schedule.py`, `plots.py`, `svg.py`, `markdown.py`, `headline.py`: pictures and tables, that of the README
- `launch.py`, `sweep.py`, `watch.py`: starting runs in turn, tables of settings, following a running log
- `ablate.py`, `screen.py`, `against.py`, `worker.py`, `profile.py`: what a setting costs in time and loss,
  many settings in few runs, two checkouts timed in turn, where the time of a step goes
- `scaling.py`, `memory.py`: how many times as fast several GPUs are as one; what runs hold on a GPU
- `doctor.py`, `caches.py`: whether a machine is in order; its compiled kernels as one file
"""
