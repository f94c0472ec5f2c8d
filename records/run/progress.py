"""What a run says while it trains: one progress bar, a log line for each step, and the summary."""
import math
from collections import deque

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from data import embedded
from data.errors import printable
from data.scoring import ScoredText
from records.run.clock import Clock, Lap
from records.run.log import RunLog, place_of
from records.run.machine import peak_flops


class Diverged(Exception):
    """A loss that is not finite. The message says at which step, and what to try."""


class Report:
    """The console's one progress bar and a log line for each step.

    A loss is read once it has arrived on the host. The report never makes the host wait for the device,
    except before a validation, which waits anyway.
    """

    def __init__(self, log: RunLog, clock: Clock, steps: int, world):
        """`steps`: how many the run has; `world`: the ranks of the program."""
        self.log, self.clock = log, clock
        self.device, self.rank, self.ranks = world.device, world.rank, world.size
        # One buffer for all steps is made here, because pinning memory during the run can wait for the GPU.
        self.losses = torch.empty(steps, pin_memory=self.device.type == "cuda")
        self.pending: deque[tuple[object, float, Lap]] = deque()
        self.step_ms: list[float] = []
        self.scores: dict[str, float] = {}      # of other texts, after the run
        self.lines: list[str] = []              # what a person reads behind the run
        self.tokens, self.loss, self.validation_loss = 0, math.nan, math.nan
        self.steps_done, self.tokens_before = 0, 0      # of the training; before this process
        self.peak = peak_flops(self.device)
        self.bar = tqdm(total=steps, unit="step", disable=self.rank > 0, dynamic_ncols=True, mininterval=0.5)

    def add(self, step, flops: float, loss: Tensor) -> None:
        """A `train_gpt.Step` of so many FLOP on all ranks has been launched.

        `loss` (0-dim, on the device) will be its training loss.
        """
        self.losses[step.index].copy_(loss, non_blocking=True)
        self.pending.append((step, flops, self.clock.lap()))
        while self.pending and self.pending[0][2].ready():
            self.log_oldest()

    def log_oldest(self) -> None:
        """Log the oldest pending step; raises Diverged if its loss is not finite."""
        step, flops, lap = self.pending.popleft()
        if not lap.ready():
            lap.end.synchronize()
        self.loss, ms = self.losses[step.index].item(), lap.ms()
        self.check_finite(f"step {step.index + 1}: the training loss", self.loss, "stopped before its update")
        self.tokens_before = self.tokens_before if self.step_ms else self.tokens
        self.tokens += step.batch_tokens
        self.steps_done = step.index + 1
        self.step_ms.append(ms)
        self.log.write("step", step=step.index + 1, loss=self.loss, lr=step.lr, momentum=step.momentum,
                       windows=step.windows, tokens=self.tokens, ms=round(ms, 3))
        mfu = f"{flops / ms * 1e3 / self.peak / self.ranks:.0%}" if self.peak else "n/a"
        validation = {} if math.isnan(self.validation_loss) else {"val": f"{self.validation_loss:.4f}"}
        self.bar.set_postfix(loss=f"{self.loss:.4f}", **validation, MFU=mfu,
                             tok_s=f"{step.batch_tokens / ms * 1e3:,.0f}", refresh=False)
        self.bar.update()

    def check_finite(self, what: str, loss: float, done: str = "nothing is scored") -> None:
        if not math.isfinite(loss):
            raise Diverged(f"{what} is {loss}; {done}. Lower --muon_lr and --adam_lr, or try --fp8 none")

    def validation(self, steps_done: int, loss: float) -> None:
        """The model after `steps_done` steps has this validation loss, nats a token.

        Call it while the clock is paused. Raises Diverged if the loss is not finite: no training loss
        shows what the last update did to the weights.
        """
        while self.pending:
            self.log_oldest()
        self.check_finite(f"after step {steps_done:,}: the validation loss", loss)
        self.validation_loss = loss
        self.log.write("validation", step=steps_done, loss=loss, time_s=round(self.clock.seconds, 4),
                       tokens=self.tokens)

    def score(self, text: ScoredText, loss: float) -> None:
        """The trained model has this loss, nats a token, on another text."""
        self.check_finite(f"the loss on {text.name}", loss)
        self.scores[text.name] = loss
        self.log.write("score", text=text.name, loss=loss, tokens=text.tokens, sha256=text.sha256)

    def say(self) -> None:
        """Print what a person reads behind the run; rank 0 alone has such lines."""
        for line in self.lines:
            print(printable(line))


def summarise(report: Report, log: RunLog, config, ending: dict[str, object]) -> list[str]:
    """Log the summary of a run; returns lines for a person.

    `config` is a `train_gpt.Config`; `ending` has more fields of the summary: of the start, data and devices.
    """
    seconds, loss, on_gpu = report.clock.seconds, report.validation_loss, report.device.type == "cuda"
    p50, p95 = np.percentile(report.step_ms, [50, 95])
    memory = torch.cuda.max_memory_allocated(report.device) if on_gpu else None
    reserved = torch.cuda.max_memory_reserved(report.device) if on_gpu else None    # with what lies idle
    summary = {"steps": len(report.step_ms), "time_s": round(seconds, 4), "loss": loss,
               "tokens": report.tokens,
               "tokens_per_s": round((report.tokens - report.tokens_before) / seconds, 1),
               "step_ms": {"p50": round(p50, 3), "p95": round(p95, 3), "max": round(max(report.step_ms), 3)},
               "peak_memory_bytes": memory, "reserved_memory_bytes": reserved,
               "began": round(report.clock.began, 3), "ended": round(report.clock.ended, 3),
               "paused_s": round(report.clock.paused_s, 3), **ending}
    log.write("summary", **summary)
    if report.rank:
        return []
    bytewise, taken = config.vocab_size == embedded.VOCAB_SIZE, len(report.step_ms)     # A token is a byte.
    per_byte = f" = {loss / math.log(2):.3f} bits per byte" if bytewise else ""
    lines = [f"validation loss {loss:.4f} nats a token{per_byte} after {report.steps_done} steps"
             f"{f', the last {taken} of them' * (taken < report.steps_done)} in {seconds:.1f} s (target "
             f"{config.target})",
             f"{summary['tokens_per_s']:,.0f} tokens/s; step p50 {p50:.1f}, p95 {p95:.1f}, max "
             f"{max(report.step_ms):.1f} ms; peak memory {f'{memory / 2**30:.1f} GiB' if memory else 'n/a'}; "
             f"started in {ending['startup_s']:.1f} s"]
    if "ngram_rows_read" in ending:
        lines.append(f"n-gram rows that training read and updated: {ending['ngram_rows_read']:,}")
    if report.scores:
        lines.append("scored: " + ", ".join(f"{name} {loss:.4f}" for name, loss in report.scores.items()))
    return lines + ([f"log {place_of(log.path)}"] if log.path else [])
