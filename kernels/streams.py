"""CUDA streams beside the current one, by name."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@cache
def side_stream(name: str) -> torch.cuda.Stream:
    """The process's stream of that name.

    Made once: torch deals out 32 in turn, and a later run's new one could be that which records graphs, beside which nothing runs.
    """
    return torch.cuda.Stream()


@contextmanager
def beside(stream: torch.cuda.Stream | None, behind: torch.cuda.Stream | None = None) -> Iterator[None]:
    """What is launched inside runs on that stream, behind all that `behind`, or else the current one, was given; None: on the current one."""
    if stream is None:
        yield
        return
    stream.wait_stream(behind or torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
