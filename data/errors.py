"""Errors of the data tools: one line on stderr with what was found and what to do, and exit status 2."""
import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # disk full, quota used up, file size limit


class DataError(ValueError):
    """Something that the user has to put right. The message says what was found and what to do."""


@contextlib.contextmanager
def one_line_errors(program: str, place: Path | None = None) -> Iterator[None]:
    """Turn DataError, OSError and Ctrl-C in the block into one line, headed by `program`, and an exit status.

    `place` is named where the system does not say which file it was.
    """
    try:
        yield
    except DataError as error:
        message, status = str(error), 2
    except BrokenPipeError:  # the reader of our output has gone: `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)
    except OSError as error:
        where = f"{error.filename or place}: " if error.filename or place else ""
        advice = "; free some or choose another folder with --out" if error.errno in NO_SPACE else ""
        message, status = f"{where}{error.strerror or error}{advice}", 2
    except KeyboardInterrupt:
        message, status = "interrupted; nothing unfinished is left in place", 130
    else:
        return
    print(f"{program}: {message}", file=sys.stderr)
    raise SystemExit(status)


def positive(text: str) -> int:
    """The type of a command-line option that counts: 1 or more; 100_000 and 100,000 are 100000."""
    value = int(text.replace(",", ""))
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value
