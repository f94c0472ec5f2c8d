"""Refuses settings that cannot work together or on this machine, at once and by the setting's name.

The values that a setting may have by itself are the type of its field (kinds.py).
"""
import math
from collections.abc import Iterable, Iterator
from typing import Annotated

import torch

from data.classes import GPT2_SIZE
from data.repeats import SHORTEST
from kernels import ngrams
from kernels.attention import ATTENTION, why_not
from kernels.copying.pointer import LARGEST
from kernels.retrieval.counts import LARGEST_VOCABULARY, LONGEST
from records.run.kinds import Between, OneOf
from records.run.settings import UserError, check, defaults, shown

Backend = Annotated[str, OneOf(("auto", *ATTENTION))]
Part = Annotated[str, OneOf(("head", "attention", "mlp"))]     # what can run in FP8
NGram = Annotated[int, Between(1, len(ngrams.HASH))]
Rows = Annotated[int, Between(0, 2 ** 30)]

Fault = tuple[object, str, str]     # whether something is wrong, with which settings, what to do


def check_config(config, operations: tuple[str, ...]) -> None:
    """Refuse settings that cannot work. `operations`: the names that `--reference` takes."""
    check(config)
    for faults in (schedule_faults, model_faults, layer_faults):
        refuse(config, faults(config))
    known = {*operations, "all"}
    refuse(config, [(not known.issuperset(config.reference), "reference",
                     f"use names out of {', '.join(operations)}, all, or none")])


def refuse(config, faults: Iterable[Fault]) -> None:
    """Raise UserError for the first fault whose condition is true."""
    for broken, names, advice in faults:
        if broken:
            values = {name: defaults(config)[name] for name in names.split()}
            given = " ".join(f"--{name} {shown(','.join(map(str, value)) if type(value) is tuple else value)}"
                             for name, value in values.items())
            raise UserError(f"{given}: {advice}" if given else advice)


def schedule_faults(c) -> Iterator[Fault]:
    """Batches divide into micro-batches, each stage has a step, a chunk holds a sequence."""
    unit, stages = 16 * c.micro_batches, len(c.stages)
    batches = "batch_tokens micro_batches"
    yield not stages, "", "the table of stages is empty"
    yield (any(stage.batch_tokens % unit for stage in c.stages), batches,
           f"use multiples of {unit}, which is 16 tokens a micro-batch")
    yield (max(stage.batch_tokens for stage in c.stages) > 2 ** 20 * c.micro_batches, batches,
           f"a micro-batch has at most {2 ** 20} tokens; use more of them")
    yield (any(not 1 <= len(stage.multi_token) <= 3 for stage in c.stages), "multi_token",
           "use 1 to 3 pairs for each stage")
    yield c.steps < stages, "steps", f"at least one step for each of {stages} stages"
    yield (c.slow_from[0] > c.slow_from[1], "slow_from",
           "the slow average's share cannot be whole before it begins")
    yield (0 < c.drop_repeats < SHORTEST, "drop_repeats",
           f"passages of fewer than {SHORTEST} tokens cannot be told from others; use 0 or at least that")
    yield (c.val_sequence_length > c.val_chunk, "val_chunk val_sequence_length",
           "a chunk holds whole sequences; raise it or lower the other")


def model_faults(c) -> Iterator[Fault]:
    """Heads fill whole matrices, n-grams fit the heads, value gates read as much of x as of a value row, and
    attention's gates see channels that do not turn."""
    yield c.vocab_size < 2, "vocab_size", "at least a token and the one that starts documents"
    unit = c.head_dim // math.gcd(c.head_dim, 2)    # If it divides qk_dim, head_dim divides 2 qk_dim.
    yield (c.qk_dim % unit, "qk_dim", f"the queries and keys of {c.heads} heads fill no whole number of "
           f"{c.heads * c.head_dim} x {c.width} matrices, which NorMuon takes; use a multiple of {unit}")
    yield c.rotary_base < 1, "rotary_base", "use 1 or more"
    yield (c.gate_channels % 2 or c.gate_channels > c.width, "gate_channels",
           f"half are of x and half of a value row; use an even number of at most {c.width}")
    yield (c.value_embeddings and c.gate_channels // 2 > c.heads * c.head_dim, "gate_channels heads head_dim",
           "a gate sees half as many channels of a value row; use fewer")
    yield (c.attention_gates and int(c.qk_dim * c.rotary_share) == c.qk_dim, "attention_gates rotary_share",
           "the gates see the channels that do not turn; use less than 1")
    in_heads = (len(c.ngrams) if c.ngram_rows else 0) + bool(c.near_match)
    yield (in_heads > c.heads, "ngrams near_match" if c.near_match else "ngrams",
           f"each takes a head, of which there are {c.heads}")
    yield (c.near_match and not (c.ngrams and c.ngram_rows), "ngrams ngram_rows",
           "near_match needs the n-gram table, which is off; use --near_match none")
    yield (any(length > LONGEST for length in c.retrieval), "retrieval",
           f"contexts of up to {LONGEST} tokens are counted")
    yield (c.retrieval and c.vocab_size > LARGEST_VOCABULARY, "retrieval vocab_size",
           f"at most {LARGEST_VOCABULARY} different tokens can be counted; use --retrieval none")
    yield (c.ngram_classes and c.vocab_size != GPT2_SIZE, "ngram_classes vocab_size",
           f"only GPT-2's {GPT2_SIZE} tokens have classes; use --ngram_classes false")
    yield (c.shared_updates and c.vocab_size != GPT2_SIZE, "shared_updates vocab_size",
           f"only GPT-2's {GPT2_SIZE} tokens have features; use --shared_updates false")
    yield (c.canonical and c.vocab_size != GPT2_SIZE, "canonical vocab_size",
           f"only of GPT-2's {GPT2_SIZE} tokens is known which never follow; use --canonical false")


def layer_faults(c) -> Iterator[Fault]:
    """The marks `backout`, `kept` and `reads_kept` of the layers agree."""
    layers = c.layers
    yield not layers, "", "the table of layers is empty"
    yield (sum(layer.backout for layer in layers) > 1, "", "the table of layers has more than one `backout`; "
           "the head can subtract one output")
    for i, layer in enumerate(layers):
        yield (layer.reads_kept and not any(above.kept for above in layers[:i]), "",
               f"row {i + 1} of the table of layers has `reads_kept`, but no row above it is `kept`")


def kernel_faults(c) -> Iterator[Fault]:
    """What the Triton kernels take; their references in PyTorch take anything."""
    off = {*c.reference}
    if not off & {"all", "qkv", "share_values"}:
        yield (any(dim & (dim - 1) for dim in (c.qk_dim, c.head_dim)), "qk_dim head_dim",
               "use powers of two, or --reference qkv and no FP8 in attention")
        yield (int(c.qk_dim * c.rotary_share) < 2, "rotary_share qk_dim",
               "at least one pair of channels turns; use more, or --reference qkv and no FP8 in attention")
    channels = c.copy_channels
    yield (channels and (channels < 16 or channels & (channels - 1)) and not off & {"all", "pointer_sums"},
           "copy_channels", "use 0, a power of two from 16 on, or --reference pointer_sums")
    yield (channels * c.attention_scale > LARGEST and not off & {"all", "pointer_sums"},
           "copy_channels attention_scale",
           f"their product is at most {LARGEST:g}, or --reference pointer_sums")
    yield (c.smear and c.gate_channels > 128 and not off & {"all", "smear"}, "gate_channels",
           "use at most 128, or --reference smear")
    yield (c.ngram_beta2 == 0 and not off & {"all", "row_adam", "lookup"}, "ngram_beta2",
           "use more than 0, or --reference row_adam")
    yield c.width > 8192, "width", "use at most 8192"
    yield (c.fp8 and (c.width % 16 or c.val_chunk % 16), "width val_chunk",
           "use multiples of 16, or --fp8 none")
    yield ("attention" in c.fp8 and c.heads * (2 * c.qk_dim + c.head_dim) % 16, "heads qk_dim head_dim",
           "queries, keys and values have together a multiple of 16 channels, or --fp8 none")


def check_machine(config, ranks: int, device: torch.device) -> None:
    """Refuse settings that this number of ranks does not divide, and those that this device cannot run."""
    width = config.head_dim if config.ngrams and config.ngram_rows else 0       # of the n-gram table
    if config.micro_batches % ranks or width % ranks:
        divisors = [str(n) for n in range(1, config.micro_batches + 1)
                    if config.micro_batches % n == width % n == 0]
        raise UserError(f"{ranks} ranks do not divide the {config.micro_batches} micro-batches of a step and "
                        f"the width of a head, {width}; use {', '.join(divisors)} ranks or another "
                        "--micro_batches")
    if config.average_steps and config.padded_vocab % ranks:
        raise UserError(f"--average_steps {config.average_steps}: averages are of whole rows, and {ranks} "
                        f"ranks do not divide the {config.padded_vocab} of the head; use 0, or other ranks")
    if config.shared_updates and config.padded_vocab % ranks:
        raise UserError(f"--shared_updates true: {ranks} ranks do not divide the {config.padded_vocab} rows "
                        "of a table of tokens; use other ranks or false")
    columns, block = width // ranks, config.ngram_block
    if block < 1 or columns % block or block & (block - 1):
        raise UserError(f"--ngram_block {block}: use a power of two that divides a rank's {columns} columns")
    if device.type == "cuda":
        refuse(config, kernel_faults(config))
    shape = (config.qk_dim, config.head_dim), config.attention_scale
    if config.attention != "auto" and (reason := why_not(config.attention, device, *shape)):
        usable = [name for name in ATTENTION if not why_not(name, device, *shape)]
        raise UserError(f"--attention {config.attention}: it does not run here ({reason}); use auto or "
                        f"{' or '.join(usable)}")
