"""How a run that failed ends: in one line that says what is wrong, and an exit status."""
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from data.errors import printable, system_error
from data.shards import ShardError
from kernels.ranks.world import RankError
from records.run.log import LogError
from records.run.progress import Diverged
from records.run.settings import UserError, shown

# Anything else is a mistake of the program and keeps its traceback.
EXPECTED = (UserError, RankError, ShardError, LogError, Diverged, torch.OutOfMemoryError,
            torch.AcceleratorError, OSError, KeyboardInterrupt)

last_failure: BaseException | None = None   # keeps what its frames hold; `exit_status` says why

# Folders of compilers. If a compiler's code fails in the warm-up, a file in its cache is damaged or cannot be
# written. An error of one of the types MISTAKES is a mistake in one of our kernels instead.
COMPILERS = "/triton/", "/torch/_inductor/", "/cutlass/"
MISTAKES = "CompilationError", "AssertionError", "NameError", "TypeError"


@contextmanager
def whole_caches() -> Iterator[None]:
    """UserError for a damaged kernel in a cache: the compiler's error names no file and no remedy."""
    try:
        yield
    except Exception as error:
        cause, frames = error, traceback.extract_tb(error.__traceback__)
        while cause.__cause__ or cause.__context__:
            cause = cause.__cause__ or cause.__context__
            frames += traceback.extract_tb(cause.__traceback__)
        theirs = any(name in frame.filename for frame in frames for name in COMPILERS)
        if isinstance(error, EXPECTED) or type(cause).__name__ in MISTAKES or not theirs:
            raise
        raise UserError("a compiled kernel is damaged, or cannot be written "
                        f"({shown(f'{type(cause).__name__}: {cause}')}); remove the caches: "
                        "$TRITON_CACHE_DIR or ~/.triton/cache, and $TORCHINDUCTOR_CACHE_DIR or "
                        "torchinductor_* in the folder for temporary files") from error


def exit_status(error: BaseException, rank: int, program: str = "train_gpt.py") -> int:
    """The exit status of a `program` that one of EXPECTED has ended; rank 0 prints the reason.

    The launcher ends all ranks when one fails. So the other ranks wait a little, in case rank 0 fails too.

    The error is kept, and with it the trainer, which its frames hold. Before torch frees memory that GPUs
    share, it waits for this GPU and holds Python's lock. A barrier on the GPU may be waiting for a lost rank,
    and then no watchdog would run.
    """
    global last_failure
    last_failure = error
    message, status = (str(error) or "interrupted").splitlines()[0], 2
    if isinstance(error, KeyboardInterrupt):
        message, status = str(error) or "interrupted; the log so far is complete", 130
    elif isinstance(error, torch.AcceleratorError):
        message += ("; this GPU failed, or waited too long for a rank, which a line above then names "
                    "(CUDA_LAUNCH_BLOCKING=1 shows where)")
    elif isinstance(error, OSError):
        message, _ = system_error(error)
    if rank:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(2)
        message = f"rank {rank}: {message}"
    if rank == 0 or status != 130:
        print(printable(f"{program}: {message}"), file=sys.stderr)
    return status


def leave(status: int) -> None:
    """End the program with this status. A program that failed ends at once, and frees nothing before.

    So it does not wait for collectives that the other ranks will not join.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)
