"""Tools that read runs and records, and two that measure the program: in reading order

- `schema.py`, `logs.py`, `foreign.py`: what a log holds; reading our logs and those of the public speedrun
- `stats.py`, `pool.py`, `compare.py`: t-tests, which runs may be pooled, two configurations side by side
- `history.py`, `record.py`, `check.py`, `report.py`: what a commit ran; record folders made, held against
  their logs and commits, shown as a page
- `schedule.py`, `plots.py`, `markdown.py`: pictures and tables
- `launch.py`, `sweep.py`, `watch.py`: starting runs in turn, tables of settings, following a running log
- `ablate.py`, `against.py`, `worker.py`, `profile.py`: what a setting costs in milliseconds, two checkouts
  timed in turn, where the time of a step goes
"""
