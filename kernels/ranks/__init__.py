"""The ranks of a run, and what they send to each other. One rank alone sends nothing. In reading order:

- `world.py`: this process's rank and device.
- `collectives.py`: `Collectives` by torch.distributed, and `PeerCopies`, the same by the GPUs' copy engines.
- `nodes.py`: `Nodes`, of which both kinds are halves, where there are several machines.
- `timetable.py`: which collective of a step starts where.
"""
from kernels.ranks.collectives import Collectives, PeerCopies, Work, can_copy, wait
