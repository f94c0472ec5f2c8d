"""Runs and records: what a run logged, whether a number may be believed, and how to show it.

`python -m records --help` lists the commands. A *run* is a folder with a `log.jsonl` (`records/runs/`, not in git); a
*record* is a folder beside this file that keeps finished runs of one configuration, their sources and their statistics.
"""
