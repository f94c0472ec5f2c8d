"""The ranks of a run, and what they send to each other. One rank alone sends nothing. In reading order:

- `world.py`: this process's rank and device.
- `collectives.py`: `Collectives` by torch.distributed.
- `copies.py`: `PeerCopies`, the same by the GPUs' copy engines.
- `nodes.py`: `Nodes`, for several machines: copies inside each, torch.distributed between them.
- `timetable.py`: which collective of a step starts where.
- `watchdog.py`: notices a rank that no longer answers or goes on.
"""
from kernels.ranks.collectives import Collectives, Work, wait
from kernels.ranks.copies import PeerCopies, can_copy
