"""The readable speedrun: trains a GPT-2-small-class language model to a validation loss of 3.28 in as little time as possible.

    torchrun --standalone --nproc_per_node=8 train_gpt.py     # 8, 4 or 2 GPUs
    python train_gpt.py                                       # one GPU, or a laptop's CPU (a small byte-level model)
    ./run.sh                                                  # the same, after making its own environment and data

The whole program, top to bottom: configuration, model, optimizer, schedule, log, main; the batches come from
`data/loader.py`, a step's by its number alone, and the Triton kernels and their plain twins from `kernels/`. Every setting of
`Config` is a flag (`--steps 300 --fp8 false`); `--help` lists them. Importing this file does nothing but define it.
"""
import argparse
import ast
import difflib
import gc
import math
import os
import signal
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

PROCESS_START = time.time()

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data import embedded
from data.loader import Batch, Loader, to_device, validation_batches
from data.shards import ShardError
from kernels.attention.flash import ATTENTION, choose_attention
from kernels.attention.fp8_qkv import QKVWeight, fp8_qkv_heads, qkv_weight
from kernels.attention.output import scaled_linear
from kernels.attention.qkv import qkv_heads, qkv_heads_reference
from kernels.attention.rotary import rotary_tables
from kernels.embedding.rows import Sorted, embedding, embedding_reference, sort_beside
from kernels.embedding.smear import smear, smear_reference
from kernels.fp8.formats import has_fp8
from kernels.fp8.weights import fp8_weights
from kernels.gradients import gradient
from kernels.loss.head_loss import among_candidates, head_loss, head_loss_reference
from kernels.mlp.fp8_mlp import MLPWeights, has_mlp, mlp, mlp_reference, mlp_weights
from kernels.mlp.residual import (
    Summands,
    add_up,
    mlp_input,
    mlp_input_reference,
    norm,
    norm_fork,
    norm_fork_reference,
)
from kernels.mlp.residual_fp8 import mlp_input_fp8, norm_fork_fp8
from kernels.ngrams.exchange import ColumnExchange, whole_rows
from kernels.ngrams.row_gradients import RowGradients, no_gradients
from kernels.ngrams.shared_gradient import Term, share, share_reference
from kernels.optimizer.adam import adam_update
from kernels.optimizer.coefficients import lower_end, polar_express
from kernels.optimizer.newton_schulz import newton_schulz, newton_schulz_reference
from kernels.optimizer.normuon import nesterov_momentum, neuron_update
from kernels.optimizer.row_adam import row_adam, row_adam_reference
from kernels.ranks.collectives import Collectives, PeerCopies, Work, can_copy, wait
from kernels.sequence import previous
from kernels.streams import beside, side_stream
from records.clock import Clock
from records.machine import device_name, machine_facts
from records.progress import Diverged, Report, summarise
from records.run_log import LogError, RunLog, disk_errors

ROOT = Path(__file__).resolve().parent


class UserError(Exception):
    """Something the person who started the run can mend. The message is one line: what was found, and what to do."""


# ========== Configuration ============================================================================================

@dataclass(frozen=True)
class Layer:
    """What one layer has beside attention and an MLP. The forward pass walks a tuple of these; layer numbers stand nowhere else."""
    long_window: bool = False           # the long attention window, and with it the key offset
    value_embedding: bool = False       # a table of its own, one row a token, added to V through a gate
    attends_to: int | None = None       # attention reads that earlier layer's output in place of the running residual


SPEEDRUN_LAYERS = (
    Layer(),
    Layer(value_embedding=True),
    Layer(value_embedding=True),
    Layer(long_window=True),
    Layer(),                                                             # its output is also subtracted before the head
    Layer(value_embedding=True, attends_to=4),
    Layer(value_embedding=True, attends_to=4),
    Layer(value_embedding=True, attends_to=4, long_window=True),
)

MEDIUM_LAYERS = tuple(Layer(long_window=i % 4 == 3, value_embedding=i in (1, 2, 13, 14, 15), attends_to=12 if i > 12 else None)
                      for i in range(16))

CPU_LAYERS = (                                                           # every part of the table above, in 4 layers
    Layer(value_embedding=True),
    Layer(long_window=True),
    Layer(),
    Layer(value_embedding=True, attends_to=1, long_window=True),
)


@dataclass(frozen=True)
class Config:
    """Every setting. Tuples over stages have one entry a stage; the stages share the scheduled steps equally."""
    preset: str = ""                    # resolved by `parse_config`: "speedrun" with a GPU, "cpu" without
    name: str = ""                      # of the run's folder; the preset's name if empty
    seed: int = 0
    runs: int = 1                       # one after the other in one process, which compiles once; each its own seed, counted up
    target: float = 3.28                # validation loss that the run is after, nats a token; for the log

    # Data
    data_path: str = ""                 # folder of token shards; if empty $DATA_PATH, else the preset's own folder
    vocab_size: int = 50257             # its last token starts every document
    epochs: int = 1                     # how often a token may be seen; more is refused before the run starts
    keep_tails: bool = False            # train on what a cut document leaves over, as sequences of their own
    micro_batches: int = 8              # a step's batch is always packed as this many, on any number of ranks

    # Model
    layers: tuple[Layer, ...] = SPEEDRUN_LAYERS
    backout_layer: int = 4              # part of this layer's output is subtracted before the head
    width: int = 768
    head_dim: int = 128                 # channels of a head's value
    qk_dim: int = 64                    # and of its query and key
    rotary_share: float = 0.5           # of each query and key has a position, the rest has none
    rotary_base: float = 1024.0
    attention_scale: float = 0.15
    gate_channels: int = 12             # that a gate sees: the smear gate of the token's vector, a value gate half of them of its value row
    ngrams: tuple[int, ...] = (2, 3, 4, 5)      # the first head's values get a row for the last 2 tokens, the second's for 3 ...
    ngram_rows: int = 67_108_864        # of the hashed table of all these, as wide as a head; 0: no table
    value_embeddings: bool = True
    smear: bool = True                  # each token's embedding adds a gated share of the previous one's
    key_offset: bool = True             # long windows: the position-free half of K comes from the token before
    backout: bool = True
    late_input: bool = True             # honour `Layer.attends_to`

    # Schedule
    steps: int = 1270                   # over the stages
    extra_steps: int = 15               # after them, at their end values
    batch_tokens: tuple[int, ...] = (131_072, 262_144, 393_216)
    sequence_length: tuple[int, ...] = (896, 2048, 2048)
    window_block: int = 128             # tokens
    windows: tuple[tuple[int, int], ...] = ((1, 3), (3, 7), (5, 11))     # short and long, in blocks
    final_windows: tuple[int, int] = (6, 13)                             # in the extra steps
    yarn: bool = True                   # rescale rotary frequencies and attention when the long window grows
    multi_token: tuple[tuple[tuple[float, float], ...], ...] = (         # loss weight of the next 1, 2, 3 tokens:
        ((1, 1), (0.5, 0.5), (0.25, 0.0)), ((1, 1), (0.5, 0.0)), ((1, 1),))   # at the stage's start and at its end
    tied_share: float = 2 / 3           # of the steps during which the embedding is the head's weight
    lr_scale: tuple[float, ...] = (1.0, 1.52, 1.73)
    cooldown: float = 0.6               # share of the steps over which the learning rate falls linearly ...
    final_lr: float = 0.15              # ... to this share of itself
    adam_every: int = 2                 # steps whose gradients one Adam update takes together
    softmax_samples: int = 8192         # tokens whose logits a micro-batch computes beside its own targets'; 0, and extra steps: all

    # Optimizer
    muon_lr: float = 0.023
    muon_momentum: tuple[float, float] = (0.85, 0.95)
    momentum_warmup: int = 300          # steps from the first of these to the second
    momentum_cooldown: int = 50         # and back again before the end
    muon_beta2: float = 0.9
    muon_decay: float = 1.2             # times the squared learning rate
    polar_steps: int = 5                # of Newton-Schulz
    aol: bool = False                   # precondition it with AOL in place of the plain normalisation
    neuron_norm: bool = True            # NorMuon's normalisation of each output neuron
    adam_lr: float = 0.008
    value_lr: float = 150.0             # times adam_lr: of the value embeddings
    value_beta1: float = 0.75           # of value embeddings; 0: no first moment, and no bits beyond the weight's own
    ngram_lr: float = 75.0              # times adam_lr: of the n-grams' table
    ngram_beta2: float = 0.99           # of that table, and
    ngram_block: int = 16               # how many neighbouring columns of a row share a mean square there
    adam_decay: float = 0.005           # times the squared learning rate
    cautious: bool = True               # decay only where the update and the weight agree in sign

    # Validation
    val_tokens: int = 10_485_760        # scored: the first of the validation stream
    val_every: int = 250                # steps; 0: only at the end
    val_chunk: int = 65_536             # tokens a forward pass: memory, not the result, depends on it
    val_sequence_length: int = 16_384   # longer documents are scored in pieces
    val_window: int = 20                # blocks of the long window in the last validation

    # Machine
    attention: str = "auto"             # "flash4", "varlen", "plain", or the fastest that runs here
    fp8: bool = True                    # FP8 products where the GPU has them; also off with DISABLE_FP8=1
    fp8_mlp: bool = True                # with fp8 and fused_mlp: the MLPs' as well as the head's
    fp8_weight_grads: bool = True       # with fp8_mlp: the gradients of the MLPs' weights as well
    fp8_attention: bool = True          # with fp8 and fused_qkv: the product Q, K, V, both ways
    fused_loss: bool = True             # on GPUs the Triton kernels in place of their plain twins: head and loss,
    fused_embedding: bool = True        # tables' gradients for only the rows read, and what smears the token's,
    fused_mlp: bool = True              # MLP,
    fused_residual: bool = True         # what enters attention and MLP, and the sum of its gradients,
    fused_orthogonalisation: bool = True        # Newton-Schulz,
    fused_qkv: bool = True              # what stands between the product Q, K, V and attention,
    fused_row_update: bool = True       # with fused_embedding, which lists them: update of the n-grams' rows read, no others
    compile: bool = True                # torch.compile of the blocks, on GPUs
    capture: bool = True                # each kind of step as one CUDA graph
    overlap: bool = True                # collectives under computation; false: all before it and all behind it
    peer_copies: bool = True            # collectives by copy engines between GPUs that see each other's memory; false: by NCCL
    check_ranks: bool = False           # after every step compare the ranks' weights, bit for bit; slow, for finding faults
    write_log: bool = True              # write a run folder under `records/runs`
    save: str = ""                      # file for the trained weights, by name and unsharded; in corpus 275 GB, of the host's memory too

    @property
    def heads(self) -> int:
        return self.width // self.head_dim

    @property
    def padded_vocab(self) -> int:
        """FP8 products want multiples of 16, the matrix units like 64."""
        return self.vocab_size + -self.vocab_size % 64

    @property
    def document_start(self) -> int:
        return self.vocab_size - 1


SPEEDRUN = Config(preset="speedrun", data_path=str(ROOT / "data/shards/fineweb"))
PRESETS = {
    "speedrun": SPEEDRUN,
    # The same on 190 M tokens and 4 GPUs: half the batches, for which momentum is shorter, a longer table, and all of a cut document, or
    # a second epoch would begin before the end, at 0.1 of loss.
    "corpus": replace(SPEEDRUN, preset="corpus", micro_batches=4, batch_tokens=(65_536, 131_072, 196_608), lr_scale=(0.7, 1.0, 1.25),
                      steps=1200, extra_steps=30, muon_momentum=(0.85, 0.92), momentum_warmup=600, momentum_cooldown=100,
                      ngram_rows=1_073_741_824, keep_tails=True, data_path=""),
    # GPT-2 medium's size. Its rates, batches and steps are guesses from the small model's, of which GPUs have seen the first 100 steps.
    "medium": replace(SPEEDRUN, preset="medium", target=2.92, layers=MEDIUM_LAYERS, backout_layer=8, width=1024, muon_lr=0.015,
                      adam_lr=0.006, steps=4500, extra_steps=30, batch_tokens=(262_144, 393_216, 524_288), lr_scale=(1.0, 1.22, 1.41)),
    "cpu": Config(
        preset="cpu", target=2.0, data_path=str(embedded.FOLDER), vocab_size=embedded.VOCAB_SIZE,
        micro_batches=2, layers=CPU_LAYERS, backout_layer=2, width=128, head_dim=64, attention_scale=0.1,
        ngrams=(2, 4), ngram_rows=65_536, ngram_block=1, steps=120, extra_steps=10, batch_tokens=(2048, 3072, 4096),
        sequence_length=(256, 512, 512), window_block=32, windows=((1, 3), (3, 7), (5, 11)), softmax_samples=0,
        momentum_warmup=70, momentum_cooldown=15, val_tokens=65_536, val_every=50, val_chunk=4096, val_sequence_length=1024),
}


def parse_config(argv: list[str]) -> Config:
    """The configuration of a command line: a preset, then `--name value` for any field of `Config`."""
    settings = [f for f in fields(Config) if f.name not in ("layers", "preset")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--preset", help=f"one of {', '.join(PRESETS)}", default="speedrun" if torch.cuda.is_available() else "cpu")
    for f in settings:
        parser.add_argument(f"--{f.name}", metavar="VALUE", help=f"default of speedrun: {getattr(SPEEDRUN, f.name)!r}")
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].split("=")[0].lstrip("-")
        nearest = difflib.get_close_matches(name, [f.name for f in settings] + ["preset"], n=1, cutoff=0)[0]
        raise UserError(f"unknown setting {unknown[0]!r}; the nearest is --{nearest} (--help lists all)")
    if given.preset not in PRESETS:
        raise UserError(f"--preset {given.preset}: choose {', '.join(PRESETS)}")
    config = PRESETS[given.preset]
    values = {f.name: parse_value(f.name, getattr(given, f.name), getattr(config, f.name))
              for f in settings if getattr(given, f.name) is not None}
    if "data_path" not in values and os.environ.get("DATA_PATH"):
        values["data_path"] = os.environ["DATA_PATH"]
    if os.environ.get("DISABLE_FP8", "0") not in ("", "0"):
        values["fp8"] = False
    config = replace(config, **values)
    check_config(config)
    return config


def parse_value(name: str, text: str, default: object) -> object:
    """`text` as a value of the type that `default` has."""
    if isinstance(default, str):
        return text
    try:
        value = {"true": True, "false": False}.get(text.lower(), None)
        value = ast.literal_eval(text) if value is None else value
    except (ValueError, SyntaxError):
        value = text
    if isinstance(default, tuple) and isinstance(value, (int, float)):
        value = (value,)
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    if type(value) is not type(default):
        raise UserError(f"--{name} {text}: expected a value like {default!r}")
    return value


def check_config(config: Config) -> None:
    """Refuse settings that cannot work, naming the one to change."""
    stages = len(config.batch_tokens)
    for name in ("sequence_length", "windows", "lr_scale", "multi_token"):
        if len(getattr(config, name)) != stages:
            raise UserError(f"--{name} has {len(getattr(config, name))} stages, --batch_tokens has {stages}; give one entry a stage")
    for tokens in config.batch_tokens:
        if tokens % (16 * config.micro_batches):
            raise UserError(f"--batch_tokens {tokens} is no multiple of 16 tokens x {config.micro_batches} micro-batches; "
                            f"use {tokens // (16 * config.micro_batches) * 16 * config.micro_batches}")
    if config.runs < 1:
        raise UserError(f"--runs {config.runs}: at least 1")
    if config.val_sequence_length > config.val_chunk:
        raise UserError(f"--val_chunk {config.val_chunk} is smaller than --val_sequence_length {config.val_sequence_length}; "
                        "a chunk holds whole sequences: raise it or lower the other")
    if config.steps < stages or config.extra_steps < 0:
        raise UserError(f"--steps {config.steps} --extra_steps {config.extra_steps}: at least one step for each of {stages} stages")
    if config.qk_dim < 1 or 2 * config.heads * config.qk_dim % config.width:
        raise UserError(f"--qk_dim {config.qk_dim}: the queries and keys of {config.heads} heads fill no whole number of {config.width} x "
                        f"{config.width} matrices, which NorMuon takes; use a multiple of {config.head_dim // 2}, half of --head_dim")
    if len(config.ngrams) > config.heads or not all(1 <= length <= len(HASH) for length in config.ngrams):
        raise UserError(f"--ngrams {config.ngrams}: lengths of 1 to {len(HASH)} tokens, one for each of {config.heads} heads at most")
    if not 0 <= config.ngram_rows <= 2 ** 30:
        raise UserError(f"--ngram_rows {config.ngram_rows}: 0 for no table, at most {2 ** 30}")
    if config.softmax_samples < 0:
        raise UserError(f"--softmax_samples {config.softmax_samples}: a number of tokens, 0 for all")
    if config.attention not in ("auto", *ATTENTION):
        raise UserError(f"--attention {config.attention}: choose auto, {', '.join(ATTENTION)}")


def table_row_bytes(config: Config, ranks: int) -> int:
    """What a row of the n-grams' table takes of each GPU: weights, mean squares, number of its last update, place of its gradient."""
    columns = config.head_dim // ranks
    return 2 * columns + 4 * (columns // config.ngram_block) + 4 + 4


def check_machine(config: Config, ranks: int, memory: float) -> None:
    """Refuse what so many ranks, each on a device of so many bytes, cannot train."""
    width = config.head_dim if config.ngram_rows else 0                  # of the n-grams' table
    if config.micro_batches % ranks or width % ranks:
        divisors = [str(n) for n in range(1, config.micro_batches + 1) if config.micro_batches % n == width % n == 0]
        raise UserError(f"{ranks} ranks do not divide the {config.micro_batches} micro-batches of a step and the width of a head, {width}; "
                        f"use {', '.join(divisors)} ranks or another --micro_batches")
    columns, block = width // ranks, config.ngram_block
    if block < 1 or columns % block or block & (block - 1):
        raise UserError(f"--ngram_block {block}: use a power of two that divides a rank's {columns} columns")
    if (table := config.ngram_rows * table_row_bytes(config, ranks)) > 0.7 * memory:
        fitting = int(0.6 * memory / table * config.ngram_rows) >> 20 << 20
        raise UserError(f"--ngram_rows {config.ngram_rows}: with {ranks} GPUs that takes {table / 1e9:.0f} of the {memory / 1e9:.0f} GB "
                        f"of each, and the rest needs room too; use {fitting} rows or more GPUs")


# ========== Ranks ====================================================================================================

class World:
    """The ranks of this run and what they say to each other. One rank says nothing."""

    def __init__(self):
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local = int(os.environ.get("LOCAL_RANK", 0))
        self.device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
        if self.device.type == "cuda":
            if local >= torch.cuda.device_count():
                raise UserError(f"{local + 1} or more processes on a machine with {torch.cuda.device_count()} GPUs; "
                                f"use --nproc_per_node={torch.cuda.device_count()}")
            torch.cuda.set_device(self.device)
            os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")        # or a memset goes before every FP8 product: 0.7% of a step
        if self.size > 1:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo",
                                    device_id=self.device if self.device.type == "cuda" else None)
        self.collectives = Collectives(self.size)

    @property
    def memory(self) -> float:
        """Bytes of the device."""
        return torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else math.inf

    def choose_collectives(self, copies: bool) -> None:
        """By the copy engines, if wanted and possible. What their `zeros` made lives as long as they."""
        try:
            self.collectives = PeerCopies(dist.group.WORLD) if copies and can_copy(self.device, self.size) else Collectives(self.size)
        except RuntimeError as error:
            raise UserError(f"the GPUs cannot share memory ({str(error).splitlines()[0]}); use --peer_copies false") from None

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x (n, ...) in rank order, (size * n, ...)."""
        whole = x.new_empty(self.size * len(x), *x.shape[1:]) if self.size > 1 else x
        wait(Collectives(self.size).all_gather(whole, x))
        return whole

    def broadcast(self, x: Tensor) -> Tensor:
        """What x is on rank 0."""
        x = x.clone()
        if self.size > 1:
            dist.broadcast(x, 0)
        return x

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


# ========== Model ====================================================================================================

# ---- The parts that torch.compile fuses: pure functions of tensors, one for each kind of work ------------------------

HASH = 998_244_353, 1_000_003, 2_654_435_761, 3_266_489_917, 668_265_263, 374_761_393      # odd factors, of a token and of those before


def ngram_index(tokens: Tensor, is_start: Tensor, lengths: tuple[int, ...], count: int) -> Tensor:
    """Which of `count` rows belongs to the so many tokens that end with each (n,), token by token (n len(lengths),) int32.

    Tokens count from 1; what is before a sequence is 0.
    """
    token, index, found = tokens.long() + 1, 0, []
    for factor in HASH[:max(lengths)]:
        found.append(index := token * factor ^ index)
        token = previous(token, is_start)
    return torch.stack([found[length - 1] % count for length in lengths], 1).flatten().int()


def head_input(last: Summands, early: Summands | None, backout: Tensor) -> Tensor:
    """What the head sees (n, width): the normed residual, less a share of an earlier layer's output."""
    return norm(add_up(last) if early is None else add_up(last) - backout * add_up(early))


KERNELS = {                                                 # setting: Triton kernels by their plain twins
    "fused_loss": {head_loss_reference: head_loss},
    "fused_mlp": {mlp_reference: mlp},
    "fused_residual": {mlp_input_reference: mlp_input, norm_fork_reference: norm_fork},
    "fused_qkv": {qkv_heads_reference: qkv_heads},
    "fused_embedding": {embedding_reference: embedding, smear_reference: smear},
    "fused_orthogonalisation": {newton_schulz_reference: newton_schulz},
    "fused_row_update": {row_adam_reference: row_adam},
}


def compiled(config: Config, device: torch.device, *functions: Callable) -> dict[Callable, Callable]:
    """For each function what runs in its place: on a GPU its kernel or torch's compiled form, elsewhere the function itself."""
    if device.type != "cuda":
        return {f: f for f in functions}
    torch._dynamo.config.recompile_limit = 64               # one for each kind of layer and, at first, each batch size
    kernels = {twin: kernel for setting, pairs in KERNELS.items() for twin, kernel in pairs.items()
               if getattr(config, setting) and (kernel is not mlp or has_mlp(device))
               and (kernel is not row_adam or config.fused_embedding)}       # whose backward pass lists the rows that it takes
    return {f: kernels.get(f) or (torch.compile(f) if config.compile else f) for f in functions}


class GPT(nn.Module):
    """The model. Its bank of hidden matrices holds, for each layer, Q, K, V, O stacked, (2 heads qk_dim + 2 width, width); then, layer by
    layer, MLP-in and MLP-out, (4 width, width). A row is an output neuron of Q, K, V, O or a hidden unit everywhere in the bank.
    """

    def __init__(self, config: Config, world: World):
        super().__init__()
        self.config, self.world, self.device = config, world, world.device
        device = world.device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.attention_backend, self.attention_note = choose_attention(config.attention, device)
        self.attend = ATTENTION[self.attention_backend]
        self.fp8 = config.fp8 and has_fp8(device)
        long_windows = [*(long for _, long in config.windows), config.final_windows[1], config.val_window]
        longest = max(config.val_chunk, *(tokens // config.micro_batches for tokens in config.batch_tokens))
        self.rotary = rotary_tables([w * config.window_block for w in long_windows], longest, int(config.qk_dim * config.rotary_share),
                                    config.rotary_base, config.attention_scale, config.yarn, device)
        self.loss_weights = torch.ones(3, device=device)
        layers, width, heads = config.layers, config.width, config.heads
        valued = [i for i, layer in enumerate(layers) if layer.value_embedding and config.value_embeddings]
        self.value_index = {layer: i for i, layer in enumerate(valued)}  # which table and gate belong to a layer

        def table(rows: int, columns: int = width) -> nn.Parameter:
            return nn.Parameter(torch.empty(rows, columns, device=device, dtype=self.dtype))

        def small(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, device=device))      # float32: few, and their updates are small

        rows = [2 * heads * config.qk_dim + 2 * width] * len(layers) + [4 * width] * 2 * len(layers)
        self.bank = nn.ParameterList(table(n) for n in rows)
        self.head, self.embedding = table(config.padded_vocab), table(config.padded_vocab)
        self.value_tables = nn.ParameterList(table(config.padded_vocab) for _ in valued)
        self.ngrams = config.ngrams if config.ngram_rows else ()
        self.ngram_table = table(config.ngram_rows, config.head_dim // world.size) if self.ngrams else None     # this rank's columns
        self.attention_scalars = small(len(layers), 2)                   # of Q, K, V and of O
        self.residual_scalars = small(len(layers), 2)                    # of the two sub-layers
        self.ngram_scalars = small(len(layers), len(self.ngrams)) if self.ngrams else None
        self.scalars = small(2)                                          # smear, backout
        self.smear_gate = small(config.gate_channels) if config.smear else None
        self.value_gates = small(len(valued), heads, config.gate_channels)
        self.initialise()
        self.part = compiled(config, device, smear_reference, ngram_index, embedding_reference, norm_fork_reference, qkv_heads_reference,
                             mlp_input_reference, mlp_reference, head_input, head_loss_reference)
        self.fp8_mlp = self.fp8 and config.fp8_mlp and self.part[mlp_reference] is mlp       # the twins' FP8 is there to compare with
        self.fp8_attention = self.fp8 and config.fp8_attention and self.part[qkv_heads_reference] is qkv_heads
        if config.fused_residual and self.fp8_attention:                 # what FP8 products alone read is normed straight into FP8
            self.part[norm_fork_reference] = norm_fork_fp8
        if config.fused_residual and self.fp8_mlp and config.fp8_weight_grads:
            self.part[mlp_input_reference] = mlp_input_fp8

    @torch.no_grad()
    def initialise(self) -> None:
        """Initial values from the seed alone, drawn on the device; the same on every rank."""
        generator = torch.Generator(self.device).manual_seed(self.config.seed)
        layers, bound = len(self.config.layers), 3 ** 0.5 * 0.5 * self.config.width ** -0.5
        for i, matrix in enumerate(self.bank):
            if i < layers or (i - layers) % 2 == 0:                      # Q, K, V, O and MLP-in; MLP-out starts at zero
                matrix.uniform_(-bound, bound, generator=generator)
            else:
                matrix.zero_()
        self.head.normal_(std=0.005, generator=generator)
        self.embedding.copy_(self.head)
        for value_table in self.value_tables:
            value_table.normal_(std=0.01, generator=generator)
        growth = 1.1 ** 0.5                                              # of the residual and of what a layer adds to it alike
        self.residual_scalars.fill_(growth)
        self.attention_scalars.copy_(torch.tensor([0.5, 1.0 / growth]))
        if self.ngrams:
            self.ngram_table.zero_()
            self.ngram_scalars.fill_(0.05)
        self.scalars.copy_(torch.tensor([0.0, 0.5]))

    def weights(self) -> dict[str, Tensor]:
        """All weights by name, whole, on rank 0; all ranks must call. The n-grams' table, which may not fit a GPU whole, on the host."""
        weights, part = self.state_dict(), 2 ** 20
        if self.ngrams:
            columns = weights.pop("ngram_table")
            table = columns.new_empty(len(columns) * (self.world.rank == 0), self.config.head_dim, device="cpu")
            for i in range(0, len(columns), part):
                rows = whole_rows(self.world.all_gather(columns[i:i + part]), self.world.size)
                table[i:i + part].copy_(rows[:len(table)])
            weights |= {"ngram_table": table} if len(table) else {}
        return weights

    def parameter_count(self) -> int:
        others = self.ngram_table.numel() * (self.world.size - 1) if self.ngrams else 0        # the columns of the other ranks
        return others + sum(p.numel() for p in self.parameters())

    def mlp_weights(self, layer: int) -> tuple[Tensor, Tensor]:
        first = len(self.config.layers) + 2 * layer
        return self.bank[first], self.bank[first + 1]

    def fp8_weights(self, layer: int, scale_qkv: Tensor) -> tuple[QKVWeight | None, MLPWeights | None]:
        """What the layer's FP8 products read that hangs on its weights alone: the same for all micro-batches of a step."""
        if not (self.fp8_attention or self.fp8_mlp):
            return None, None
        width = self.config.width
        qkv, hidden = (self.bank[layer][:-width],) * self.fp8_attention, self.mlp_weights(layer) * self.fp8_mlp
        weights = iter(fp8_weights(qkv + hidden))
        return qkv_weight(next(weights), scale_qkv, width) if qkv else None, mlp_weights(*weights, width) if hidden else None

    def heads(self, layer: Layer, x: Tensor, weight: Tensor, scale: Tensor, positions: tuple[Tensor, ...], value_row: Tensor | None,
              value_gate: Tensor | None, term: Term | None, quantized: QKVWeight | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k (n, heads, qk_dim) and v (n, heads, head_dim), from the normed residual x (n, width).

        `positions`: cos, sin (n, r) and where sequences start (n,). `term`: rows (n, k, head_dim) added to the first k heads' values.
        """
        config, run = self.config, self.part
        form = config.qk_dim, config.head_dim, config.key_offset and layer.long_window, term
        weight, into = weight[:-config.width], gradient(weight)[:-config.width]
        if self.fp8_attention:
            return fp8_qkv_heads(x, weight, scale, *positions, value_row, value_gate, *form, into, quantized)
        qkv, columns = scaled_linear(x, weight, scale, 0 if value_row is None else config.gate_channels // 2, into)
        return run[qkv_heads_reference](qkv, *positions, None if value_row is None else columns, value_row, value_gate, *form)

    def received(self, exchange: ColumnExchange) -> list[Term | None]:
        """What each layer adds to its first heads' values. It travels until the first layer asks for it; so may its gradient."""
        if not self.ngrams:
            return [None] * len(self.config.layers)
        with_heads = share if self.fp8_attention or self.part[qkv_heads_reference] is qkv_heads else share_reference
        return with_heads(exchange.receive().unflatten(0, (-1, len(self.ngrams))), self.ngram_scalars)

    def forward(self, batch: Batch, step: "Step", reached: Callable[[int, Tensor | None], None] = lambda *_: None,
                in_fp8: dict[int, tuple] | None = None, fresh: bool = False) -> tuple[Tensor, Tensor]:
        """Sums over the batch's tokens of the training loss and of the next-token loss, in nats (0-dim float32).

        `reached` is told that a layer comes next (-2: the n-grams' table, -1: the embedding, the layers' number: the head) and what
        it reads: behind that tensor's gradient, all gradients of this and later layers are complete: autograd runs the latest first.
        `in_fp8` keeps the layers' weights in FP8 from one micro-batch for the next ones of a step, of which the first is `fresh`: all
        gradients are zero, and those of the MLPs' weights may be written in place of being added.
        """
        config, run, n, in_fp8 = self.config, self.part, len(batch.tokens), {} if in_fp8 is None else in_fp8
        is_start = torch.zeros(n + 1, dtype=torch.bool, device=self.device)
        is_start = is_start.index_fill_(0, batch.cu_seqlens.long(), True)[:n]
        cos, sin, attention_scale = self.rotary[step.windows[1] * config.window_block]
        positions = cos[:n], sin[:n], is_start
        smear_share, backout = self.scalars.unbind()
        scales, residuals, value_gates = (x.unbind() for x in (self.attention_scalars, self.residual_scalars, self.value_gates))

        sort = sort_beside if run[embedding_reference] is embedding and torch.is_grad_enabled() else Sorted      # or nothing reads the order
        by_token = sort(batch.tokens)                                    # for the gradients of all tables of tokens
        if self.ngrams:                                                  # each rank looks its columns up for the tokens of all
            index = self.world.all_gather(run[ngram_index](batch.tokens, is_start, self.ngrams, len(self.ngram_table)))
        reached(-2, None)
        exchange = ColumnExchange(self.world.collectives)
        if self.ngrams:
            exchange.send(run[embedding_reference](self.ngram_table, sort(index)))
        reached(-1, None)
        rows = run[embedding_reference](self.head if step.tied else self.embedding, by_token)
        streams = [(run[smear_reference](rows, is_start, self.smear_gate, smear_share),)]    # stream i's sum enters layer i, the last the head
        sources, normed = [layer.attends_to + 1 if config.late_input and layer.attends_to is not None else i
                           for i, layer in enumerate(config.layers)], {}                   # the stream whose norm a layer's attention reads
        for i, (layer, source) in enumerate(zip(config.layers, sources)):
            reached(i, streams[-1][-1])                                  # the last summand: the MLP before goes on from its gradient
            if source not in normed:
                *normed[source], total = run[norm_fork_reference](streams[source], sources.count(source))
                streams[source] = (total,)                               # summed now
            v, (scale_qkv, scale_out) = self.value_index.get(i), scales[i].unbind()
            if i not in in_fp8:
                in_fp8[i] = self.fp8_weights(i, scale_qkv)
            if i == 0:
                terms = self.received(exchange)
            value = (None, None) if v is None else (run[embedding_reference](self.value_tables[v], by_token), value_gates[v])
            q, k, values = self.heads(layer, normed[source].pop(), self.bank[i], scale_qkv, positions, *value, terms[i], in_fp8[i][0])
            y = self.attend(q, k, values, batch.cu_seqlens, batch.max_length, step.windows[layer.long_window] * config.window_block,
                            attention_scale)
            weight_out, into = (matrix[-config.width:] for matrix in (self.bank[i], gradient(self.bank[i])))
            update, _ = scaled_linear(y.flatten(1), weight_out, scale_out, 0, into)
            entering = run[mlp_input_reference]((*streams[-1], update), residuals[i])         # the first of two is written over in bf16
            into = tuple(map(gradient, self.mlp_weights(i))) if fresh and self.fp8_mlp else None
            streams.append(run[mlp_reference](*entering, *self.mlp_weights(i), self.fp8_mlp, config.fp8_weight_grads, in_fp8[i][1], into))
        x = run[head_input](streams[-1], streams[config.backout_layer + 1] if config.backout else None, backout)
        reached(len(config.layers), x)
        head, targets, candidate_weights = self.head, batch.targets, None
        if columns := len(batch.columns):                                # sampled softmax: the rows of these tokens alone
            head = run[embedding_reference](head, Sorted(batch.columns, batch.columns, torch.arange(columns, device=self.device)))
            targets, candidate_weights = among_candidates(targets, batch.columns, len(self.head))
        return run[head_loss_reference](x, head, targets, is_start, self.loss_weights[:len(step.multi_token)], self.fp8, candidate_weights)

    def flops_per_token(self, step: "Step", columns: int | None = None) -> float:
        """Of forward and backward: 6 a weight in a product, and attention over the windows that a token really sees.

        `columns`: of how many tokens a sampled softmax computes the logits.
        """
        weights = sum(matrix.numel() for matrix in self.bank)
        weights += (columns or len(self.head)) * self.config.width
        reach = sum(min(step.windows[layer.long_window] * self.config.window_block, step.sequence_length) for layer in self.config.layers)
        return 6 * weights + 6 * (self.config.heads * self.config.qk_dim + self.config.width) * reach


# ========== Optimizer ================================================================================================

@dataclass
class Group:
    """Parameters that one algorithm updates with one set of rates. The optimizer knows groups, not names."""
    name: str
    params: list[nn.Parameter]
    layers: list[int]                               # the first that uses each: 0 ... , -1 before them, their number after them
    algorithm: str                                  # "normuon": matrices of one shape; "row adam": one long table; "adam": anything
    lr: float
    betas: tuple[float, float]                      # NorMuon: momentum comes with each step, only the second is used
    decay: float                                    # times lr * base_lr
    base_lr: float                                  # the learning rate without the group's multiplier
    matrix_lr: list[float] = field(default_factory=list)      # NorMuon: a multiplier for each matrix
    squares: bool = False                           # NorMuon: each matrix is a stack of square ones
    replicated: bool = False                        # too small to share out: every rank makes the whole update
    tied_to: str | None = None                      # until untied, this group's weights are another's and it gets no updates

    @property
    def rarely_read(self) -> bool:
        """Adam without a first moment: for tables whose rows are read now and then, which move by the whole rate or not at all.

        So their weights need no bits beyond their own (kernels/row_adam.py).
        """
        return self.algorithm != "normuon" and not self.betas[0]

    def rounds(self, ranks: int) -> list[tuple[list[nn.Parameter], int]]:
        """What one collective takes at a time, and its length: NorMuon one matrix a rank, Adam one parameter, in numbers."""
        if self.algorithm == "normuon":
            return [(self.params[i:i + ranks], ranks) for i in range(0, len(self.params), ranks)]
        return [([p], p.numel() + -p.numel() % (16 * ranks)) for p in self.params]      # 16: every part starts aligned


def parameter_groups(model: GPT, config: Config) -> list[Group]:
    """Which parameters get which algorithm, rate and decay: the one table of the optimizer."""
    last, valued = len(config.layers), list(model.value_index)
    each, both = list(range(last)), [layer for layer in range(last) for _ in range(2)]

    def adam(name: str, params: list, layers: list[int], lr: float, betas: tuple[float, float], decay: float = 0.0, algorithm: str = "adam",
             **more) -> Group:
        params = [p for p in params if p is not None and p.numel()]
        return Group(name, params, layers * (len(params) // len(layers)) if layers else [], algorithm, lr * config.adam_lr, betas,
                     decay * config.adam_decay, config.adam_lr, **more)

    def small(name: str, params: list, lr: float, betas: tuple[float, float]) -> Group:
        return adam(name, params, [-1], lr, betas, replicated=True)

    def normuon(name: str, params: list, layers: list[int], matrix_lr: list[float], squares: bool) -> Group:
        return Group(name, params, layers, "normuon", config.muon_lr, (0.0, config.muon_beta2), config.muon_decay, config.muon_lr,
                     matrix_lr, squares)

    groups = [
        # name, parameters                                              first use   lr    betas          decay
        small("scalars", [model.attention_scalars, model.ngram_scalars, model.scalars],      5.0,  (0.90, 0.99)),
        small("residual scalars", [model.residual_scalars],                         5.0,  (0.90, 0.95)),
        small("smear gate", [model.smear_gate],                                     0.01, (0.90, 0.99)),
        small("value gates", [model.value_gates],                                   1.0,  (0.90, 0.99)),
        normuon("attention", list(model.bank[:last]), each, [1.0] * last, squares=True),
        normuon("mlp", list(model.bank[last:]), both, [2.0, 4.0] * last, squares=False),         # MLP-in 2, MLP-out 4
        adam("head", [model.head],                                      [last],     1.0,  (0.50, 0.95),  150.0),
        adam("embedding", [model.embedding],                            [-1],       1.0,  (0.50, 0.95),  150.0, tied_to="head"),
        adam("value tables", list(model.value_tables),    valued, config.value_lr,   (config.value_beta1, 0.99), 5.0),
        adam("n-gram table", [model.ngram_table],         [-1],   config.ngram_lr,   (0.00, config.ngram_beta2), 5.0, "row adam"),
    ]
    return [group for group in groups if group.params]


class Round(NamedTuple):
    """The part of a group that one collective takes."""
    layer: int              # the first that uses it: its weights are needed there, and its gradient is complete behind it
    whole: slice            # of the buffers of the whole group
    own: slice              # of this rank's buffers


class Shard:
    """A group's flat buffers. Every rank holds all weights and gradients, and the optimizer state of its own part.

    The model's parameters become views of the buffers, so that a collective takes a part of a buffer as it is. Each round is
    shared out equally: NorMuon's give every rank a matrix (the last one may be padding), Adam's an equal share of a parameter.
    """

    def __init__(self, group: Group, config: Config, world: World, grads: Tensor | None = None):
        self.group, self.config, self.world = group, config, world
        device, dtype = group.params[0].device, group.params[0].dtype
        muon, ranks = group.algorithm == "normuon", 1 if group.replicated else world.size
        unit = group.params[0].shape if muon else torch.Size()
        rounds = group.rounds(ranks)
        self.weights = torch.zeros(sum(length for _, length in rounds), *unit, device=device, dtype=dtype)
        zeros = world.collectives.zeros if ranks > 1 else torch.zeros
        self.grads = zeros(*self.weights.shape, dtype=dtype, device=device) if grads is None else grads
        self.rounds, first, layers = [], 0, iter(group.layers)
        for params, length in rounds:
            for i, p in enumerate(params):
                mine = slice(first + i, first + i + (1 if muon else p.numel()))
                self.weights[mine].view(p.shape).copy_(p.data)
                p.data, p.grad = self.weights[mine].view(p.shape), self.grads[mine].view(p.shape)
            self.rounds.append(Round(min(next(layers) for _ in params), slice(first, first + length),
                                     slice(first // ranks, (first + length) // ranks)))
            first += length

        self.weight, self.grad = self.weights, self.grads                # this rank's part of them
        if ranks > 1:
            self.weight = zeros(first // ranks, *unit, dtype=dtype, device=device)
            for _, whole, own in self.rounds:
                self.weight[own] = self.weights[whole].chunk(ranks)[world.rank]
            self.grad = torch.zeros_like(self.weight)
        exact = dtype == torch.bfloat16 and not group.rarely_read
        self.mantissa_bits = torch.zeros_like(self.weight, dtype=torch.int16) if exact else None
        self.momentum = None if group.rarely_read else torch.zeros_like(self.weight, dtype=torch.float32)
        self.second = torch.zeros_like(self.weight[..., :1] if muon else self.weight, dtype=torch.float32)
        self.steps = torch.zeros((), device=device)
        if muon:
            self.shape = torch.Size([-1, unit[1] if group.squares else unit[0], unit[1]])
            lr = torch.tensor(group.matrix_lr + [1.0] * (first - len(group.matrix_lr)), device=device)
            self.matrix_lr = lr.view(-1, ranks)[:, world.rank % ranks].repeat_interleave(unit[0] // self.shape[1]).view(-1, 1, 1)
            self.normalisation = "aol" if config.aol else "frobenius"
            self.triples = polar_express(config.polar_steps, lower_end(self.normalisation, config.polar_steps))

    def update(self, part: dict[Callable, Callable], finite: Tensor, lr: Tensor, momentum_beta: Tensor) -> None:
        """Update this rank's part from its summed gradient; all gradients become zero. `lr` multiplies the group's rate (0-dim)."""
        group, config = self.group, self.config
        own, decay = (self.weight, self.mantissa_bits, self.grad), lr * (group.base_lr * group.decay)
        if group.algorithm == "adam":
            part[adam_update](*own, self.momentum, self.second, self.steps, finite, lr * group.lr, decay, group.betas, config.cautious)
        else:
            weight, mantissa_bits, grad, momentum = (x if x is None else x.view(self.shape) for x in (*own, self.momentum))
            direction = part[nesterov_momentum](grad, momentum, momentum_beta, finite)
            direction = part[newton_schulz_reference](direction, self.triples, self.normalisation)
            part[neuron_update](weight, mantissa_bits, direction, self.second.view(-1, self.shape[1], 1), finite,
                                lr * group.lr * self.matrix_lr, decay, group.betas[1], config.neuron_norm, config.cautious)
        self.grads.zero_()

    def state(self) -> list[Tensor]:
        """All that a step changes."""
        own = [self.weight] if self.weight is not self.weights else []
        rest = (self.grads, self.mantissa_bits, self.momentum, self.second, self.steps)
        return [x for x in (self.weights, *own, *rest) if x is not None]


class TableShard:
    """This rank's columns of a long table, of which rows are updated where they were read; the other ranks have theirs, nobody sums."""
    rounds = ()

    def __init__(self, group: Group, config: Config, by_row: bool):
        self.group, self.config, (self.table,) = group, config, group.params
        (rows, width), device = self.table.shape, self.table.device
        self.second = torch.zeros(rows, width // config.ngram_block, device=device)
        self.last = torch.zeros(rows, device=device)                     # the update that took each row's latest gradient
        self.steps = torch.zeros((), device=device)
        if by_row:                                                       # `embedding` fills it
            self.table.row_gradients = no_gradients(self.table.data, len(config.ngrams) * max(config.batch_tokens) * config.adam_every)
        else:
            self.table.grad = torch.zeros_like(self.table)

    @property
    def gradients(self) -> Tensor | RowGradients:
        return getattr(self.table, "row_gradients", self.table.grad)

    def update(self, part: dict[Callable, Callable], finite: Tensor, lr: Tensor, _: Tensor) -> None:
        """As `Shard.update`."""
        group = self.group
        part[row_adam_reference](self.table, self.gradients, self.second, self.last, self.steps, finite, lr * group.lr,
                            lr * (group.base_lr * group.decay), group.betas[1], self.config.cautious)

    def state(self) -> list[Tensor]:
        gradients = [self.gradients] if isinstance(self.gradients, Tensor) else self.gradients
        return [self.table.data, *gradients, self.second, self.last, self.steps]


class Optimizer:
    """NorMuon for the hidden matrices and Adam for the rest, fused and sharded over the ranks.

    Every rank computes gradients of its micro-batches for all weights, but updates only its own 1/size of each group:

        gradients (all)  --reduce-scatter-->  summed gradient (own part)  --update-->  weights (own part)  --all-gather-->  weights (all)

    The collectives run on a stream of their own, under the computation of other layers. One step, time from left to right:

        computes  look up n-grams, embed, layer 0 … head | head, layer 7, … layer 1, layer 0, embed | update n-grams | MLPs | … | last table
        wire      gather embed, 0, n-grams, 1, … head    | loss, head, sum of 7 … 1,  n-grams, 0, scalars, embed … last table

    N-grams are rows of a table of which every rank holds and updates its own columns (`ColumnExchange`), so nobody sums or gathers them.
    The updates run beside each other and the end of the backward pass, each as soon as the loss and its own sums are there.
    Gathered is what the step before this one updated, just before the layer that needs it (`weights_needed`, first micro-batch);
    a layer's gradients are summed as soon as they are complete (`gradients_complete`, last micro-batch). So a rank's weights
    are whole only from `gather` or the end of a forward pass on, until the next update.
    All algorithms ignore the scale of the gradient, so the loss is summed over tokens and nothing is divided.
    """

    def __init__(self, model: GPT, config: Config, world: World):
        self.part = compiled(config, world.device, nesterov_momentum, newton_schulz_reference, neuron_update, adam_update, row_adam_reference)
        self.world, groups = world, parameter_groups(model, config)
        sizes = [sum(length for _, length in group.rounds(1)) if group.replicated else 0 for group in groups]
        self.replicated_grads = torch.zeros(sum(sizes), device=world.device)     # of all such groups: one collective takes them
        by_row = self.part[row_adam_reference] is row_adam
        self.shards = {group.name: TableShard(group, config, by_row) if group.algorithm == "row adam" else
                       Shard(group, config, world, grads if group.replicated else None)
                       for group, grads in zip(groups, self.replicated_grads.split(sizes))}
        apart = config.overlap and world.device.type == "cuda"
        self.streams = {name: side_stream(name) for name in self.shards if apart}       # on which each group is updated: none fills the GPU
        self.judging = side_stream("judging") if apart else None         # on which the loss arrives
        self.tied = True                                                 # until `untie`
        self.lr, self.momentum_beta = torch.zeros((), device=world.device), torch.zeros((), device=world.device)
        self.finite = torch.ones((), dtype=torch.bool, device=world.device)   # false from the first non-finite loss on
        self.due: deque[tuple[int, Shard, Round]] = deque()              # sums to start, the last layer's first
        self.sums: dict[str, list[Work]] = {}                            # under way, by group
        self.to_gather: deque[tuple[int, Shard, Round]] = deque()        # gathers to start, the first layer's first
        self.gathers: deque[tuple[int, Work]] = deque()                  # under way, in the order of use

    def active(self, tied: bool, adam: bool) -> list[Shard]:
        """What a step updates, with or without Adam's groups."""
        return [shard for shard in self.shards.values() if not (tied and shard.group.tied_to)
                and (adam or shard.group.algorithm == "normuon")]

    def exchanges(self, tied: bool, adam: bool) -> list[tuple[int, Shard, Round]]:
        """The rounds of these groups, in the order of use, with the layers that first use them, or a group tied to theirs."""
        users = {shard.group.tied_to: min(shard.group.layers) for shard in self.shards.values() if tied and shard.group.tied_to}
        used = [(min(round.layer, users.get(shard.group.name, round.layer)), shard, round)
                for shard in self.active(tied, adam) if not shard.group.replicated for round in shard.rounds]
        return sorted(used, key=lambda exchange: exchange[0])

    @torch.no_grad()
    def begin(self, step: "Step") -> None:
        """Plan what this step gathers, of what the last one updated, and which sums it starts."""
        self.to_gather = deque(self.exchanges(step.tied, step.adam_updated))
        self.due = deque(reversed(self.exchanges(step.tied, step.update_adam)))

    def weights_needed(self, layer: float) -> None:
        """Wait for the weights that the model uses up to this layer, and start to gather those of the next two.

        What the model sends between two calls then comes on the wire between their gathers.
        """
        while self.to_gather and self.to_gather[0][0] <= layer + 2:
            first_use, shard, round = self.to_gather.popleft()
            self.gathers.append((first_use, self.world.collectives.all_gather(shard.weights[round.whole], shard.weight[round.own])))
        while self.gathers and self.gathers[0][0] <= layer:
            wait(self.gathers.popleft()[1])

    @torch.no_grad()
    def gather(self) -> None:
        """Make this rank's copy of all weights whole."""
        self.to_gather = deque(self.exchanges(self.tied, True))
        self.weights_needed(math.inf)

    @torch.no_grad()
    def check_ranks(self) -> None:
        """UserError if a weight differs between the ranks."""
        self.gather()
        for name, shard in self.shards.items():
            if isinstance(shard, TableShard):
                continue
            first = self.world.broadcast(shard.weights)
            if differ := int((first.view(torch.uint8) != shard.weights.view(torch.uint8)).sum()):
                raise UserError(f"rank {self.world.rank}: {differ} bytes of the weights of group {name!r} differ from rank 0's")

    @torch.no_grad()
    def gradients_complete(self, layer: int) -> None:
        """Start the sums over ranks of all gradients that are complete when the backward pass has left this layer."""
        while self.due and self.due[0][0] >= layer:
            _, shard, round = self.due.popleft()
            works = self.sums.pop(shard.group.name, [])                  # to the end: a group comes where its last round does
            self.sums[shard.group.name] = [*works, self.world.collectives.reduce_scatter(shard.grad[round.own], shard.grads[round.whole])]

    @torch.no_grad()
    def check_finite(self, loss: Tensor) -> None:
        """From a `loss` on (0-dim, the same on all ranks) that is not finite nothing is updated."""
        self.finite &= loss.isfinite()

    @torch.no_grad()
    def step(self, step: "Step") -> None:
        """Update from the accumulated gradients."""
        if step.update_adam:
            work = self.world.collectives.all_reduce(self.replicated_grads)
            self.sums |= {name: [work] for name, shard in self.shards.items() if shard.group.replicated}
            self.sums = {name: [] for name, shard in self.shards.items() if not shard.rounds} | self.sums      # first: none to wait for
        self.gradients_complete(-1)
        for name, works in self.sums.items():                            # in the order in which they arrive
            summed = works and None not in works                         # then its gradients are complete, else when the backward pass is
            with beside(self.streams.get(name), behind=self.judging if summed else None):
                for work in works:
                    wait(work)
                self.shards[name].update(self.part, self.finite, self.lr, self.momentum_beta)
        for stream in (self.judging, *map(self.streams.get, self.sums)) if self.streams else ():
            torch.cuda.current_stream().wait_stream(stream)
        self.sums = {}

    @torch.no_grad()
    def untie(self) -> None:
        """Give each tied group the weights and the state of the group it was tied to; from here on it is its own."""
        for shard in self.shards.values():
            if self.tied and shard.group.tied_to:
                torch._foreach_copy_(shard.state(), self.shards[shard.group.tied_to].state())
        self.tied = False

    def state(self) -> list[Tensor]:
        return [self.finite, *(x for shard in self.shards.values() for x in shard.state())]

    def snapshot(self) -> tuple[bool, list[Tensor | None]]:
        """All that a step changes, weights included; None for what is all zero, as most of it is before the first step."""
        return self.tied, [x.clone() if x.any() else None for x in self.state()]

    def restore(self, snapshot: tuple[bool, list[Tensor | None]]) -> None:
        self.tied = snapshot[0]
        for mine, kept in zip(self.state(), snapshot[1], strict=True):
            mine.zero_() if kept is None else mine.copy_(kept)


# ========== Schedule =================================================================================================

class Step(NamedTuple):
    """What is particular to one step. Steps of one `kind` run the same program on other numbers."""
    index: int
    batch_tokens: int
    sequence_length: int
    windows: tuple[int, int]            # short and long, in blocks
    multi_token: tuple[float, ...]      # loss weights of the next 1 ... k tokens
    sampled: bool                       # softmax over a sample of the tokens
    tied: bool
    update_adam: bool
    adam_updated: bool                  # by the step before, or this is the first
    lr: float                           # multiplies every group's rate
    momentum: float

    @property
    def kind(self) -> tuple:
        return (self.batch_tokens, self.sequence_length, self.windows, len(self.multi_token), self.sampled, self.tied, self.update_adam,
                self.adam_updated)


class Schedule:
    """The whole run as a function of the step's number: `schedule.at(step)`. Iterating gives every step."""

    def __init__(self, config: Config):
        self.config = config

    def __len__(self) -> int:
        return self.config.steps + self.config.extra_steps

    def __iter__(self) -> Iterator[Step]:
        return map(self.at, range(len(self)))

    def at(self, index: int) -> Step:
        c, stages = self.config, len(self.config.batch_tokens)
        position = min(index, c.steps - 1) * stages / c.steps            # extra steps stay at the end of the last stage
        stage = int(position)
        fraction = position - stage if index < c.steps else 1.0
        weights = tuple(first + (last - first) * fraction for first, last in c.multi_token[stage])
        fallen = min(max((index / c.steps - (1 - c.cooldown)) / c.cooldown, 0.0), 1.0) if c.cooldown else 0.0
        low, high = c.muon_momentum
        warm = min(index / c.momentum_warmup, (len(self) - 1 - index) / c.momentum_cooldown, 1.0)
        return Step(index, c.batch_tokens[stage], c.sequence_length[stage],
                    c.windows[stage] if index < c.steps else c.final_windows, weights,
                    sampled=c.softmax_samples > 0 and index < c.steps, tied=index < c.tied_share * c.steps,
                    update_adam=index % c.adam_every == c.adam_every - 1, adam_updated=index % c.adam_every == 0,
                    lr=c.lr_scale[stage] * (1 - (1 - c.final_lr) * fallen), momentum=low + (high - low) * warm)

    def validation(self, steps_done: int) -> Step:
        """How to score after so many steps: the windows of that time; after the last one the long window is longer still."""
        last = self.at(max(steps_done - 1, 0))
        windows = (last.windows[0], self.config.val_window) if steps_done == len(self) else last.windows
        return last._replace(windows=windows, multi_token=(1.0,))

    def kinds(self) -> dict[tuple, Step]:
        """The first step of each kind, in the run's order."""
        first: dict[tuple, Step] = {}
        for step in self:
            first.setdefault(step.kind, step)
        return first


# ========== Log ======================================================================================================

def log_header(log: RunLog, config: Config, model: GPT, world: World) -> None:
    if log.file is not None:
        log.write("header", schema=1, name=config.name or config.preset, started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                  preset=config.preset, config=asdict(config) | {"data_path": Path(config.data_path).name}, seed=config.seed,
                  command=sys.argv, target=config.target, world_size=world.size, sources=log.sources,
                  attention=model.attention_backend, fp8=model.fp8, parameters=model.parameter_count(),
                  **machine_facts(world.device, world.size))


# ========== Main =====================================================================================================

class Trainer:
    """Model, optimizer and data: the one step function, of the warm-up and of the run, and the one validation."""

    def __init__(self, config: Config, world: World):
        check_machine(config, world.size, world.memory)
        self.config, self.world = config, world
        world.choose_collectives(config.peer_copies)
        self.schedule = Schedule(config)
        if config.preset == "cpu" and config.data_path == PRESETS["cpu"].data_path and world.rank == 0:
            embedded.build()
        world.barrier()                                             # the others read what rank 0 has built
        self.loader = Loader(config, self.schedule, world)
        self.validation = validation_batches(config, world.size)
        self.model = GPT(config, world)
        self.optimizer = Optimizer(self.model, config, world)
        self.loss = torch.zeros((), device=world.device)
        self.graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, list[Batch]]] = {}    # by kind of step, with the input it reads

    def step(self, step: Step, batches: list[Batch]) -> Tensor:
        """Train on this rank's micro-batches of a step, on any device; returns the mean next-token loss over all ranks (0-dim, no wait)."""
        if not step.tied:
            self.optimizer.untie()
        # What differs between steps of one kind, as numbers on the device: a captured step reads them there.
        optimizer, weights = self.optimizer, zip(self.model.loss_weights, step.multi_token)
        for number, value in ((optimizer.lr, step.lr), (optimizer.momentum_beta, step.momentum), *weights):
            number.fill_(value)
        if step.kind in self.graphs:
            graph, inputs = self.graphs[step.kind]
            torch._foreach_copy_(*([x for batch in side for x in batch[:-1]] for side in (inputs, batches)))
            graph.replay()
        else:
            self.program(step, [to_device(batch, self.world.device) for batch in batches])
        if self.config.check_ranks:
            optimizer.check_ranks()
        return self.loss.clone()                                         # a replay writes where the last one did

    def program(self, step: Step, batches: list[Batch]) -> None:
        """What a step does on the device: the same work for all steps of its kind, and no word to or from the host."""
        optimizer, total, in_fp8 = self.optimizer, torch.zeros((), device=self.world.device), {}
        optimizer.begin(step)
        if not self.config.overlap:
            optimizer.weights_needed(math.inf)
        for batch in batches:
            last = batch is batches[-1]

            def reached(layer: int, x: Tensor | None) -> None:
                optimizer.weights_needed(layer)                          # no wait after the first micro-batch
                if last and x is not None and self.config.overlap:
                    x.register_hook(lambda _: optimizer.gradients_complete(layer))

            loss, next_token = self.model(batch, step, reached, in_fp8, fresh=batch is batches[0])
            total += next_token.detach()
            if last:
                with beside(optimizer.judging):
                    wait(self.world.collectives.all_reduce(total))
                    self.loss.copy_(total / step.batch_tokens)
                    optimizer.check_finite(self.loss)
            loss.backward()
        optimizer.step(step)

    def capture(self, step: Step, batches: list[Batch]) -> None:
        """Record what a step of this kind does as a CUDA graph: from now on it is replayed, which takes one launch."""
        graph, inputs = torch.cuda.CUDAGraph(), [to_device(batch, self.world.device, copy=True) for batch in batches]
        pool = next(iter(self.graphs.values()))[0].pool() if self.graphs else None      # they never run at once: one memory
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):     # the loader's thread pins memory
            self.program(step, inputs)
        self.graphs[step.kind] = graph, inputs

    @torch.no_grad()
    def validate(self, step: Step) -> float:
        """Mean loss over the scored tokens, nats a token."""
        self.optimizer.gather()
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for batch in self.validation[self.world.rank::self.world.size]:
            total += self.model(to_device(batch, self.world.device), step)[1]
        wait(self.world.collectives.all_reduce(total))
        return total.item() / self.config.val_tokens

    def warm_up(self) -> None:
        """Run every kind of step and of validation once, then put everything back as it was."""
        snapshot = self.optimizer.snapshot()
        kinds = list(self.schedule.kinds().values())
        # Batches come as in the run, or what brings them would first be launched on the clock: 0.4 s on four GPUs.
        for step, batches in zip(kinds, self.loader.prefetch([step.index for step in kinds])):
            self.step(step, batches)
            if self.config.capture and self.world.device.type == "cuda":
                self.capture(step, batches)
                self.step(step, batches)                                 # the first replay uploads the graph
        with torch.no_grad():
            for steps_done in self.validation_points():
                self.model(to_device(self.validation[0], self.world.device), self.schedule.validation(steps_done))
        self.optimizer.restore(snapshot)
        self.world.barrier()                                        # start-up takes as long as the slowest rank's

    def validation_points(self) -> list[int]:
        """Steps done when the model is scored."""
        every, last = self.config.val_every, len(self.schedule)
        return [*(range(every, last, every) if every else ()), last]


def train(trainer: Trainer, log: RunLog, startup: dict[str, float]) -> Report:
    """The timed run: every step of the schedule, validation off the clock, the summary."""
    clock = Clock(trainer.world.device)
    report = Report(trainer, log, clock)
    points = set(trainer.validation_points())
    batches = trainer.loader.prefetch(range(len(trainer.schedule)))
    try:
        with clock.running(trainer.world.barrier):
            for step in trainer.schedule:
                report.add(step, trainer.step(step, next(batches)))
                if step.index + 1 in points:
                    trainer.optimizer.gather()                           # on the clock: it is the last step's
                    with clock.paused():
                        report.validation(step.index + 1, trainer.validate(trainer.schedule.validation(step.index + 1)))
    except BaseException as error:
        log.write("stopped", step=len(report.step_ms), reason=str(error) or "interrupted")
        raise
    finally:
        report.bar.close()
    summarise(trainer, log, report, startup)
    return report


def run(config: Config, world: World, started: float) -> Report:
    """One training run, in the process that `started` then (seconds since the epoch)."""
    trainer = Trainer(config, world)
    log = RunLog(config.name or config.preset, enabled=world.rank == 0 and config.write_log)
    log_header(log, config, trainer.model, world)
    model, loader = trainer.model, trainer.loader
    say = print if world.rank == 0 else lambda *_: None
    say(f"{config.preset}: {model.parameter_count() / 1e6:.1f} M parameters in {model.dtype}, "
        f"{world.size} x {device_name(world.device)}")
    say(f"attention: {model.attention_backend}" + (f" ({model.attention_note})" if model.attention_note else ""))
    parts = ["head", *["MLP"] * model.fp8_mlp, *["attention's inputs"] * model.fp8_attention]
    say(f"{', '.join(parts)}: FP8" if model.fp8 else
        f"head: {model.dtype} (FP8 is " + ("not on this device)" if config.fp8 else "off)"))
    if loader.columns:
        say(f"sampled softmax: {', '.join(f'{n:,}' for n in loader.columns.values())} of {config.padded_vocab:,} logits a token")
    if loader.epochs > 1:
        say(f"data: the schedule takes {loader.epochs:.2f} epochs of {len(loader.text)} shards; tokens repeat after the first")
    begin = time.time()
    trainer.warm_up()
    startup = {"startup_s": round(time.time() - started, 3), "compile_s": round(time.time() - begin, 3)}
    report = train(trainer, log, startup)
    if config.save:
        trainer.optimizer.untie()
        weights = trainer.model.weights()
        if world.rank == 0:
            with disk_errors(f"the weights to {config.save}"):
                with open(f"{config.save}.part", "wb") as f:
                    torch.save(weights, f)
                os.replace(f"{config.save}.part", config.save)
    return report


def main(argv: list[str] | None = None) -> int:
    """Run from a command line; returns the exit status. Expected failures end in one line, printed by rank 0."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)            # torchrun passes Ctrl-C on as this
    rank = int(os.environ.get("RANK", 0))
    try:
        config = parse_config(sys.argv[1:] if argv is None else argv)
        world = World()
        for i in range(config.runs):
            run(replace(config, seed=config.seed + i), world, time.time() if i else PROCESS_START)
            gc.collect()                                                 # the graphs hold memory, and refer to it in circles
        world.close()
        return 0
    except (UserError, ShardError, LogError, Diverged) as error:
        message, status = str(error), 2
    except KeyboardInterrupt:
        message, status = "interrupted; the log so far is complete", 130
    if rank == 0:
        print(f"train_gpt.py: {message}", file=sys.stderr)
    else:                               # the launcher ends all ranks when the first one fails: let rank 0 say why
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(2)
    return status


if __name__ == "__main__":
    exit_status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if exit_status:
        os._exit(exit_status)           # without waiting for collectives that the other ranks will not join
