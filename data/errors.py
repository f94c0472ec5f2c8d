"""Errors of the tools: one line on stderr with what was found and what to do, and exit status 2."""
import argparse
import contextlib
import errno
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # disk full, quota used up, file size limit


class DataError(ValueError):
    """Something that the user has to put right. The message says what was found and what to do."""


def printable(text: str) -> str:
    """`text` for a terminal: characters that could steer it are shown as escapes, except ends of lines."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def open_streams() -> None:
    """Make standard output and error fit to print to: what their character set lacks is printed as "?".

    Python has None for a stream that was closed, as by `>&-`. What is printed to it then goes nowhere.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
        getattr(sys, name).reconfigure(errors="replace")


def keep_nothing(stream: TextIO) -> None:
    """Send a failed stream to nowhere. Else Python would write its buffer at the end, and fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def one_line_errors(parser: argparse.ArgumentParser, place: str = "out") -> Iterator[argparse.Namespace]:
    """Run a tool: gives the arguments of the command line, and ends the block's failures in one line.

    DataError, OSError and Ctrl-C become a line, headed by the name of the program, and an exit status. The
    argument `place` is named where the system does not say which file it was. A reader of our output that has
    gone, as in `… | head`, is no error: the program ends with status 0.
    """
    arguments = argparse.Namespace()
    open_streams()
    try:
        try:
            yield parser.parse_args(namespace=arguments)
        finally:
            sys.stdout.flush()
        return
    except DataError as error:
        message, status = str(error), 2
    except OSError as error:
        message, status = system_error(error, getattr(arguments, place, None))
        if isinstance(error, BrokenPipeError):
            raise SystemExit(0) from None
    except KeyboardInterrupt:
        message, status = "interrupted; nothing unfinished is left in place", 130
    print(f"{parser.prog}: {printable(message)}".replace("\n", " "), file=sys.stderr)
    raise SystemExit(status)


def system_error(error: OSError, place: Path | str | None = None) -> tuple[str, int]:
    """What to say of an error of the system, and an exit status."""
    try:
        sys.stdout.flush()
    except OSError:
        keep_nothing(sys.stdout)
        place = "standard output"
    advice = ""
    if error.errno in NO_SPACE:
        advice = "; free some" + (" or choose another folder with --out" if isinstance(place, Path) else "")
    where = error.filename or place
    return f"{f'{where}: ' if where else ''}{error.strerror or error}{advice}", 2


def tool_parser(module: str, text: str) -> argparse.ArgumentParser:
    """The parser of `python -m module`, whose help begins with this text as it stands."""
    return argparse.ArgumentParser(prog=f"python -m {module}", description=text,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)


def whole(least: int, most: float = math.inf) -> Callable[[str], int]:
    """The type of a command-line option that is a whole number; 100_000 and 100,000 are 100000."""
    def number(text: str) -> int:
        value = int(text.replace(",", ""))
        if not least <= value <= most:
            bounds = f"at least {least}" + f" and at most {most:,}" * (most < math.inf)
            raise argparse.ArgumentTypeError(f"{text}: must be {bounds}")
        return value
    return number


positive = whole(1)
