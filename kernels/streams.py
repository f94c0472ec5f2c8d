"""CUDA streams by name, a block of code on one of them, and a block of code as a CUDA graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

SPARE = 0.04        # of a graph's memory: what gets lost between its tensors


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


@contextmanager
def recorded(pool: tuple[int, int] | None = None) -> Iterator[torch.cuda.CUDAGraph]:
    """Record the block as a graph, in the memory of `pool` (another graph's, or None: memory of its own).

    Memory of its own begins with one piece. The piece is as large as torch's peak since its last reset minus
    what is held now, with SPARE and 128 MiB that cuBLAS will keep. This graph and later ones cut their
    tensors out of the piece. Without it each tensor would bring a piece of its own size. Such a piece stays,
    and no larger tensor of a later graph fits into it.
    If the block fails, its error is raised. If it leaves streams behind, the recording ends with an error as
    well ("capturing stream has unjoined work"). That would hide the block's error, such as a lack of memory.
    Other threads, such as the loader's, may pin and allocate memory meanwhile, and launch kernels on streams
    of their own.
    """
    graph, failure = torch.cuda.CUDAGraph(), None
    room = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            try:
                if pool is None:
                    torch.empty(int((1 + SPARE) * room) + 2 ** 27, dtype=torch.uint8, device="cuda")
                yield graph
            except BaseException as error:
                failure = error
                raise
    except RuntimeError as error:
        raise failure or error
