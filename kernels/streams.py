"""CUDA streams by name, and a block of code on one of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@cache
def side_stream(name: str) -> torch.cuda.Stream:
    """The process's stream of that name, made once and never again.

    torch has a pool of 32 streams and hands them out in turn. A later run in the same process that asked for
    new ones could get the stream on which CUDA graphs are recorded, and nothing runs beside that.
    """
    return torch.cuda.Stream()


@contextmanager
def beside(stream: torch.cuda.Stream | None, behind: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Run the block on `stream`, after everything already queued on `behind` (default: the current stream).

    With None, run on the current stream.
    """
    if stream is None:
        yield
        return
    stream.wait_stream(behind or torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
