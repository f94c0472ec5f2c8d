"""What a run says while it trains: one progress bar, a line of the log a step, and the summary."""
import math
import os
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from data import embedded
from records.clock import Clock, Lap
from records.machine import peak_flops
from records.run_log import RunLog

if TYPE_CHECKING:
    from train_gpt import Step, Trainer


class Diverged(Exception):
    """A loss that is not finite. The message says at which step, and what to try."""


class Report:
    """The console's one progress bar and the log's line a step. Losses are read when they have arrived, never waited for."""

    def __init__(self, trainer: "Trainer", log: RunLog, clock: Clock):
        self.trainer, self.log, self.clock = trainer, log, clock
        on_gpu = trainer.world.device.type == "cuda"
        self.losses = torch.empty(len(trainer.schedule), pin_memory=on_gpu)      # here, since to pin memory can wait for the GPU
        self.pending: deque[tuple["Step", Lap]] = deque()
        self.step_ms: list[float] = []
        self.tokens, self.loss, self.validation_loss = 0, math.nan, math.nan
        self.peak = peak_flops(trainer.world.device)
        self.bar = tqdm(total=len(trainer.schedule), unit="step", disable=trainer.world.rank > 0, dynamic_ncols=True, mininterval=0.5)

    def add(self, step: "Step", loss: Tensor) -> None:
        self.losses[step.index].copy_(loss, non_blocking=True)
        self.pending.append((step, self.clock.lap()))
        while self.pending and self.pending[0][1].ready():
            self.take()

    def take(self) -> None:
        step, lap = self.pending.popleft()
        if not lap.ready():
            lap.end.synchronize()
        self.loss, ms = self.losses[step.index].item(), lap.ms()
        if not math.isfinite(self.loss):
            raise Diverged(f"step {step.index + 1}: the training loss is {self.loss}; stopped before its update. Lower "
                            "--muon_lr and --adam_lr, or try --fp8 false")
        self.tokens += step.batch_tokens
        self.step_ms.append(ms)
        self.log.write("step", step=step.index + 1, loss=self.loss, lr=step.lr, momentum=step.momentum,
                       windows=step.windows, tokens=self.tokens, ms=round(ms, 3))
        rate = step.batch_tokens / ms * 1e3
        flops = self.trainer.model.flops_per_token(step, self.trainer.loader.columns_of(step))
        mfu = f"{rate * flops / self.peak / self.trainer.world.size:.0%}" if self.peak else "n/a"
        validation = {} if math.isnan(self.validation_loss) else {"val": f"{self.validation_loss:.4f}"}
        self.bar.set_postfix(loss=f"{self.loss:.4f}", **validation, tok_s=f"{rate:,.0f}", MFU=mfu, refresh=False)
        self.bar.update()

    def validation(self, steps_done: int, loss: float) -> None:
        while self.pending:
            self.take()
        self.validation_loss = loss
        self.log.write("validation", step=steps_done, loss=loss, time_s=round(self.clock.seconds, 4), tokens=self.tokens)


def summarise(trainer: "Trainer", log: RunLog, report: Report, startup: dict[str, float]) -> None:
    config, device, seconds, loss = trainer.config, trainer.world.device, report.clock.seconds, report.validation_loss
    p50, p95 = np.percentile(report.step_ms, [50, 95])
    summary = {"steps": len(trainer.schedule), "time_s": round(seconds, 4), "loss": loss, "tokens": report.tokens,
               "tokens_per_s": round(report.tokens / seconds, 1),
               "step_ms": {"p50": round(p50, 3), "p95": round(p95, 3), "max": round(max(report.step_ms), 3)},
               "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None, **startup}
    log.write("summary", **summary)
    if trainer.world.rank:
        return
    per_byte = f" = {loss / math.log(2):.3f} bits per byte" if config.vocab_size == embedded.VOCAB_SIZE else ""
    print(f"validation loss {loss:.4f} nats a token{per_byte} after {summary['steps']} steps in {seconds:.1f} s (target {config.target})")
    memory = summary["peak_memory_bytes"]
    print(f"{summary['tokens_per_s']:,.0f} tokens/s; step p50 {p50:.1f}, p95 {p95:.1f}, max {max(report.step_ms):.1f} ms; "
          f"peak memory {f'{memory / 2**30:.1f} GiB' if memory else 'n/a'}; started in {startup['startup_s']:.1f} s")
    if log.path:
        print(f"log {os.path.relpath(log.path)}")
