"""Lets a run outlive its terminal, whose reader may go, and end in order when a signal asks it to."""
import os
import signal
import sys
from collections.abc import Callable
from typing import TextIO

from data.errors import NO_SPACE, keep_nothing, open_streams


class Lasting:
    """A stream whose reader or terminal may go, as in `… | head`. What is written after that is dropped.

    Errors whose number is in `told` are raised all the same.
    """

    def __init__(self, stream: TextIO, told: set[int]):
        self.stream, self.told = stream, told

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self.tried(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self.tried(self.stream.flush)

    def tried(self, action: Callable, *given: str) -> None:
        try:
            action(*given)
        except OSError as error:
            if error.errno in self.told:
                raise
            keep_nothing(self.stream)


def end_quietly() -> None:
    """Let Ctrl-C end this process in one line, also while it still imports. Python gives the status."""
    def hook(kind: type, error: BaseException, trace: object) -> None:
        if kind is not KeyboardInterrupt:
            sys.__excepthook__(kind, error, trace)
        elif os.environ.get("RANK", "0") == "0":
            print("train_gpt.py: interrupted", file=sys.stderr)

    sys.excepthook = hook


def ending_signals() -> list[signal.Signals]:
    """Signals that ask a run to end. SIGHUP, of a lost terminal, is one unless `nohup` is used."""
    hangup = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM] + [signal.SIGHUP] * hangup


def interrupt(number: int, frame: object) -> None:
    """Raise KeyboardInterrupt. The shell and the system may both send SIGHUP; the second one is ignored."""
    if number == signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)
    signal.default_int_handler(number, frame)


def outlive_terminal() -> None:
    """Let this process end in order when it is asked to, and train on when nobody reads what it prints.

    Each line is written at once, so that a full disk below standard output shows before the training.
    """
    for number in ending_signals()[1:]:                     # torchrun forwards Ctrl-C as SIGTERM.
        signal.signal(number, interrupt)
    open_streams()
    sys.stdout.reconfigure(line_buffering=True)
    sys.stdout, sys.stderr = Lasting(sys.stdout, NO_SPACE), Lasting(sys.stderr, set())
