"""What a run will hold on each GPU, counted before the run starts.

No formula is used: the program itself runs. Its model and optimizer are made on torch's meta device, where
tensors have shapes and no memory. There they take each step that may need the most memory, and a validation,
as they will on the GPU. Kernels are not launched, only compiled if wanted. A dispatch mode sees when each
tensor is made and freed. The count takes a few seconds and needs no free memory. Three things have
stand-ins: what torch.compile fuses, FlashAttention, and the other ranks.
"""
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import ge
from types import ModuleType, SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data.candidates import sample_parts
from data.loader import AHEAD, Batch
from data.packing import round_up
from kernels import attention
from kernels.attention.plain import gated
from kernels.ranks.collectives import Collectives
from kernels.sequence import Sequences
from kernels.streams import SPARE
from records.run.ahead import Launch, no_launch
from records.run.checkpoint import copied_bytes

META = torch.device("meta")
WORKSPACES = 12 * 2 ** 25               # of cuBLAS: 32 MiB a stream and thread; runs took 6, 10 and 12
LOST = SPARE + 0.03                     # share of a step's memory that is free in pieces too small to use
MATMULS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten._scaled_mm)


class Counter(TorchDispatchMode):
    """Counts the bytes of meta tensors: those that live, and the most that lived at once since `restart`."""

    def __init__(self):
        super().__init__()
        self.sizes: dict[int, int] = {}         # by storage
        self.live = self.peak = self.shared = 0
        self.fused: set[int] | None = None      # storages that a compiled function has made so far

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten._scaled_mm.out:       # It has no form for the meta device.
            return kwargs["out"]
        made = function(*args, **kwargs)
        for x in tree_leaves(made):
            if isinstance(x, Tensor) and x.device == META:
                self.see(x, kept=function.overloadpacket in MATMULS)
        return made

    def see(self, x: Tensor, kept: bool) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self.sizes:
            return
        self.sizes[key] = round_up(storage.nbytes(), 512)   # as torch's allocator does
        self.live += self.sizes[key]
        weakref.finalize(storage, self.forget, key)
        if self.fused is None:
            self.peak = max(self.peak, self.live)
        elif not kept:
            self.fused.add(key)

    def forget(self, key: int) -> None:
        self.live -= self.sizes.pop(key)
        if self.fused is not None:
            self.fused.discard(key)             # The next storage may get the same number.

    def restart(self) -> int:
        """Forget the peak; returns the bytes that live now."""
        self.peak = self.live
        return self.live

    def share(self, x: Tensor) -> Tensor:
        """x lies in memory that ranks share, which torch's allocator does not count."""
        key = x.untyped_storage()._cdata
        self.shared, self.live = self.shared + self.sizes[key], self.live - self.sizes[key]
        self.sizes[key] = 0
        return x

    def compiled(self, function: Callable, **options) -> Callable:
        """`function` as torch.compile would run it: tensors between its inputs and outputs take no memory.

        For the backward pass it keeps inputs, outputs and results of matmuls, and recomputes other tensors.
        """
        def pack(x: Tensor):
            made_here = self.fused is not None and x.untyped_storage()._cdata in self.fused
            return (x.shape, x.stride(), x.dtype) if made_here else x

        def unpack(kept) -> Tensor:
            shape, stride, dtype = (None,) * 3 if isinstance(kept, Tensor) else kept
            return kept if shape is None else torch.empty_strided(shape, stride, dtype=dtype, device=META)

        def run(*args, **kwargs):
            self.fused = set()
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                made = function(*args, **kwargs)
            self.fused = None
            self.peak = max(self.peak, self.live)
            return made
        return run

    @contextmanager
    def counting(self, launch: Launch) -> Iterator[None]:
        """In the block meta tensors are counted and pass for a GPU's, and `compiled` replaces torch.compile.

        `launch`: what is done instead of launching a kernel; see records/run/ahead.py.
        """
        import triton
        launches = mock.patch.object(triton.runtime.jit.KernelInterface, "__getitem__", launch)
        flash = mock.patch.dict(attention.ATTENTION, {name: flash_memory for name in ("flash4", "varlen")})
        on_gpu = mock.patch.object(Tensor, "is_cuda", True)
        with launches, flash, on_gpu, mock.patch("torch.compile", self.compiled), without_compilers(), self:
            yield


@contextmanager
def without_compilers() -> Iterator[None]:
    """Inside, torch does not import torch._dynamo, which takes 3 s.

    It would do so only to exclude functions that work on the meta device from being compiled.
    """
    name, imported, met = "torch._dynamo", "torch._dynamo" in sys.modules, []

    def disable(function: Callable, *_, **__) -> Callable:
        met.append(function)
        return function

    sys.modules.setdefault(name, SimpleNamespace(disable=disable, config=SimpleNamespace()))
    try:
        yield
    finally:
        if not imported:
            del sys.modules[name]
        for function in met:        # The function keeps the stand-in's answer; torch may need the real one.
            vars(function).pop("__dynamo_disable", None)


class FlashMemory(torch.autograd.Function):
    """What fused attention allocates: the output and a number a query, later a float32 gradient of q."""
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, sums = torch.empty_like(v), q.new_empty(q.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx, out_grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, _, sums = ctx.saved_tensors
        made = [torch.empty_like(x) for x in (q, k, v, sums, sums)]     # and all live at once
        made.append(torch.empty_like(v, dtype=torch.float32))
        return tuple(made[:3])


def flash_memory(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, window: int, scale: float,
                 gate: Tensor | None = None) -> Tensor:
    return gated(FlashMemory.apply(q, k, v), q, gate)


class OtherRanks(Collectives):
    """Collectives that only allocate, on the meta device; with `copies` as `PeerCopies` allocates."""

    def __init__(self, size: int, counter: Counter, copies: bool):
        super().__init__(size)
        self.counter, self.copies, self.staging = counter, copies, {}
        self.moves_own = not copies
        self.summed = 0     # the most bytes of parts that copies bring to be added up

    def zeros(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        x = torch.zeros(*shape, dtype=dtype, device=device)
        return self.counter.share(x) if self.copies else x

    def add_up(self, out: Tensor) -> None:
        if self.copies:
            parts = torch.empty(self.size, *out.shape, dtype=out.dtype, device=META)
            self.summed = max(self.summed, parts.nbytes)

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> None:
        self.add_up(shard)

    def all_gather(self, whole: Tensor, shard: Tensor) -> None:
        pass

    def all_gathered(self, x: Tensor) -> Tensor:
        return x.new_empty(self.size * len(x), *x.shape[1:]) if self.size > 1 else x

    def all_reduce(self, x: Tensor) -> None:
        self.add_up(x)

    def outgoing(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        kind = math.prod(shape), dtype
        if not self.copies:
            return torch.empty(*shape, dtype=dtype, device=device)
        if kind not in self.staging:
            self.staging[kind] = self.zeros(kind[0], dtype=dtype, device=device)
        return self.staging[kind].view(shape)

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        if self.copies:     # What is sent is there, or it is staged.
            self.outgoing(*sent.shape, dtype=sent.dtype, device=META)


class Need(NamedTuple):
    """Bytes of one GPU."""
    table: int          # the n-gram table with its optimizer's state
    held: int           # all other weights, gradients and state, rotary tables, batches
    shared: int         # the part of `held` that ranks share, which torch's allocator does not see
    snapshot: int       # the copy of the first weights that warm-up puts back
    copy: int           # a checkpoint's copy of weights and state
    step: int           # the most that a step holds beside all this
    apart: int          # what updates and sums hold on their own streams, which reuse no memory of others
    validation: int     # the most that the forward pass of a validation holds

    @property
    def allocated(self) -> int:
        """The peak that torch will report, the one that a log's summary has."""
        most = max(self.snapshot + int((1 + SPARE) * self.step), self.copy + max(self.step, self.validation))
        return self.table + self.held - self.shared + most + WORKSPACES

    def total(self, graphs: bool) -> int:
        """Bytes that have to be free. CUDA `graphs` keep their memory while a validation runs."""
        step, validation = (int((1 + LOST) * most) for most in (self.step, self.validation))
        step += self.apart
        later = step + validation if graphs else max(step, validation)
        return self.table + self.held + max(self.snapshot + step, self.copy + later) + WORKSPACES


def heaviest(steps: Iterable) -> list:
    """The steps that may need the most memory: no other step is at least as large in every respect."""
    sizes = {(step.batch_tokens, step.samples or math.inf, len(step.multi_token), step.update_adam): step
             for step in steps}
    return [step for size, step in sizes.items()
            if not any(other != size and all(map(ge, other, size)) for other in sizes)]


def empty_batch(tokens: int, candidates: tuple[int, ...], rows: int, longest: int) -> Batch:
    """A batch on the meta device, with room for short sequences.

    candidates: the shape of the batch's samples; rows: how many rows of the n-gram table its tokens read, 0
    if that is not known yet or there is no table.
    """
    sizes = tokens, tokens, tokens // 16, candidates, candidates, rows
    return Batch(*(torch.empty(size, dtype=torch.int32, device=META) for size in sizes), longest)


def count(program: ModuleType, config, ranks: int, device: torch.device, copies: bool,
          candidates: dict[tuple[int, int], int], chunks: Iterable[int],
          launch: Launch = no_launch) -> dict[int, Need]:
    """What each of `ranks` GPUs like `device` will hold, by the `val_chunk` of `chunks`. Allocates nothing.

    `program` is train_gpt.py as a module; `copies`: ranks exchange by copies; `candidates`: how
    many a sample of the softmax has, by tokens and samples of its step. `launch`: see `Counter.counting`.
    """
    counter, peaks, finding, schedule = Counter(), [], 0, program.Schedule(config)
    on_each, kinds = config.micro_batches // ranks, schedule.kinds()
    with counter.counting(launch):
        others = OtherRanks(ranks, counter, copies)
        world = SimpleNamespace(size=ranks, rank=0, device=META, collectives=others)
        model = program.GPT(config, META, others, like=device)
        optimizer = program.Optimizer(model, config, world)
        trainer = object.__new__(program.Trainer)       # without data
        vars(trainer).update(config=config, world=world, model=model, optimizer=optimizer,
                             loss=torch.zeros((), device=META))
        made = counter.live
        for step in heaviest(kinds):
            tokens, sampled = step.batch_tokens // config.micro_batches, (0,)
            if step.samples:
                sampled = (sample_parts(tokens, config.softmax_tokens),
                           candidates[step.batch_tokens, step.samples])
            batch = empty_batch(tokens, sampled, tokens * model.ngrams.heads, step.sequence_length)
            before = counter.restart()
            model.ngrams.find(batch)    # as the loader does beside earlier steps
            finding = max(finding, counter.peak - before)
            before = counter.restart()
            trainer.program(step, [batch] * min(on_each, 2))
            peaks.append(counter.peak - before)
        apart = others.summed
        for shard in optimizer.shards.values() if config.overlap else ():
            before = counter.restart()
            shard.update(optimizer.ops, optimizer.finite, optimizer.lr, optimizer.rates)
            apart += counter.peak - before
        # The graph of each kind of step has its own inputs, and each batch on its way is held twice.
        inputs = on_each * sum(x.nbytes for x in batch.tensors) * (len(kinds) + 2 * (AHEAD + 2))
        inputs += finding       # of rows, while a step runs
        validation = {}
        for chunk in chunks:
            batch = empty_batch(chunk, (0,), 0, config.val_sequence_length)
            before = counter.restart()
            model.score(batch, schedule.validation(len(schedule)))
            validation[chunk] = counter.peak - before
        shards = [shard for shard in optimizer.shards.values() if hasattr(shard, "all_weights")]
        snapshot = sum(x.nbytes for shard in shards for x in {shard.all_weights, shard.own_weights})
        by_row = [shard.state() for shard in optimizer.shards.values() if not hasattr(shard, "all_weights")]
        table = sum(x.nbytes for state in by_row for x in state if x.ndim and len(x) == config.ngram_rows)
        held, copy = made - table + counter.shared + inputs, copied_bytes(model, optimizer, config)
    return {chunk: Need(table, held, counter.shared, snapshot, copy, max(peaks), apart, peak)
            for chunk, peak in validation.items()}
