"""The readable speedrun: trains a GPT-2-small-class language model to a validation loss of 3.28, fast.

    torchrun --standalone --nproc_per_node=8 train_gpt.py     # 8, 4 or 2 GPUs
    python train_gpt.py                                       # one GPU, or a laptop's CPU (a small model)
    ./run.sh                                                  # the same, with its own environment and data
    python train_gpt.py --preset speedrun --timetable 4       # which collectives run when, on 4 ranks
    python train_gpt.py --help                                # every setting but the layers is a flag

How to read it:

    1. Recipe      the table of layers, the table of stages, every setting with its reason, origin and worth
    2. Operations  what runs each operation: a Triton kernel, torch.compile, or plain PyTorch
    3. Model       `GPT.forward` is the model; the methods below it are its parts
    4. Optimizer   which parameter gets which algorithm and rates; the step and its collectives
    5. Schedule    what changes from step to step
    6. Training    one step, the warm-up, the timed loop, `main` (the clock: records/run/clock.py)

`kernels/` has a folder for each part of the model. Every Triton kernel has a reference in plain PyTorch.
"""
import gc
import os
import sys
import time
from collections import deque
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

PROCESS_START = time.time()
from records.run.terminal import end_quietly, outlive_terminal

if __name__ == "__main__":
    end_quietly()       # Ctrl-C ends the imports, which take seconds, in one line.
    gc.disable()        # until the timed run ends: collections took 2.8 s of a 29 s start (1×H200, 21033d5)

import torch
from torch import Tensor, nn

from data import canonical, embedded
from data.classes import gpt2_classes, gpt2_features
from data.loader import Batch, Loader, StepShape, TextSettings, to_device
from data.packing import round_up
from data.scoring import ScoredText, check_scores, other_texts, scored_text
from kernels import attention, copying, embedding, fp8, loss, mlp, ngrams, retrieval
from kernels import optimizer as updates
from kernels.backend import compiled
from kernels.gradients import gradient_of
from kernels.ranks.collectives import Collectives, Work, wait
from kernels.ranks.timetable import SMALL, UPDATE, Traffic, Transfer, due, stops_of, timetable
from kernels.ranks.world import World, launched
from kernels.sequence import Sequences, starts
from kernels.streams import beside, recorded, side_stream
from records import recipes
from records.run import explain, settings
from records.run.checkpoint import Keeper, check_saving, find, restore
from records.run.checks import Backend, NGram, Part, Rows, check_config, check_machine
from records.run.clock import Clock
from records.run.ending import EXPECTED, exit_status, leave, whole_caches
from records.run.fit import fit
from records.run.kinds import Beta, Blocks, Count, Factor, Few, Positive, Seed, Share, Size, Steps, Tokens
from records.run.log import RunLog
from records.run.machine import device_name, ending_facts
from records.run.progress import Report, summarise
from records.run.weights import prepare, save_model

ROOT = Path(__file__).resolve().parent


# ========== 1. Recipe ================================================================================

@dataclass(frozen=True)
class Layer:
    """What one layer has besides attention and an MLP. The model names no layer by its number."""
    long_window: bool = False       # Attention has the long window, and `key_offset` acts.
    narrow: bool = False            # Attention's window is always one block.
    value_embedding: bool = False   # The token's row of a table is added to V, through a gate.
    kept: bool = False              # Later layers can read what leaves this layer.
    reads_kept: bool = False        # Attention reads the latest kept output, not the residual stream.
    backout: bool = False           # Part of what leaves this layer is subtracted before the head.

    def window(self, windows: tuple[Blocks, Blocks]) -> Blocks:
        """This layer's window in blocks, in a step with the short and the long window `windows`."""
        return 1 if self.narrow else windows[self.long_window]


SPEEDRUN_LAYERS = (                 # Tokens enter at the top; the head is below.
    Layer(),
    Layer(value_embedding=True),
    Layer(value_embedding=True),
    Layer(long_window=True),
    Layer(kept=True, backout=True),
    Layer(reads_kept=True, value_embedding=True),
    Layer(reads_kept=True, value_embedding=True),
    Layer(reads_kept=True, value_embedding=True, long_window=True),
)

CPU_LAYERS = (                      # Every part of the table above, in 4 layers.
    Layer(value_embedding=True), Layer(long_window=True, kept=True), Layer(backout=True),
    Layer(reads_kept=True, value_embedding=True, long_window=True),
)


@dataclass(frozen=True)
class Stage:
    """A part of the schedule. The stages share `Config.steps` equally."""
    batch_tokens: Positive          # tokens a step, over all ranks
    sequence_length: Tokens         # Longer documents are cut to this many tokens.
    windows: tuple[Blocks, Blocks]  # short and long attention window, in blocks of `window_block` tokens
    lr_scale: Factor                # multiplies every learning rate
    multi_token: tuple[tuple[Factor, Factor], ...]  # each next token's loss weight at a stage's start and end
    # Training computes logits for the targets and for a sample of the other tokens (Jean et al., arXiv
    # 1412.2007; @devenpzak #360). Validation is exact. 8,192 samples cost 0.004 and saved 8 of 42 s (4×H200).
    softmax_samples: Count = 6144   # tokens in the sample; 0: logits of all tokens


SPEEDRUN_STAGES = (
    #     tokens a step  sequence  windows  learning rate  loss weight of the next 1, 2, 3 tokens
    Stage(131_072,        896,     (1, 3),  1.0,           ((1, 1), (0.5, 0.5), (0.25, 0.0))),
    Stage(262_144,        2048,    (3, 7),  1.52,          ((1, 1), (0.5, 0.0))),
    Stage(393_216,        2048,    (5, 11), 1.73,          ((1, 1),)),
)


@dataclass(frozen=True)
class Config:
    """Every setting. Its fields but `layers` and `stages` are flags; so are a stage's (`--lr_scale 1,1,1`).

    @names and #numbers are authors and pull requests of the public speedrun (KellerJordan/modded-nanogpt).
    An ingredient's worth is how much higher the loss of a run without it ends, and the seconds that it saves:
    those of the extra steps that such a run needs for the same loss, minus those that the ingredient takes.
    A: measured by one pair of runs with older settings, 33.9 s on four H200s. B: by such a pair, 58.6 s on
    two H200s. A loss of less than 0.003 says little (runs: records/ideas.md; method: records/measuring.md).
    `val` is the validation text of a corpus that stands in for FineWeb. `clean` holds those of its documents
    that share no 13 tokens in a row with the training text.
    """
    preset: str = ""                # the preset's name; unless given: "speedrun" with a GPU, "cpu" without
    name: str = ""                  # the run's folder; the preset's name if empty
    seed: Seed = 0                  # seed of the initial weights and of the softmax's samples
    runs: Positive = 1              # runs in this process, which compiles once; seeds are seed, seed + 1, …
    target: Factor = 3.28           # the validation loss that the run is after, in nats a token; for the log

    # ---- Data
    data_path: str = ""             # folder of token shards: the flag, else $DATA_PATH, else the preset's
    vocab_size: Size = 50257        # The last token of the vocabulary starts every document.
    epochs: Positive = 1            # how often a token may be seen; a schedule that needs more is refused
    # Sequences begin where documents do (@ClassicLarry #108). What a cut leaves over can be sequences, too.
    keep_tails: bool = False        # True: more tokens an epoch. Where they last, it costs 0.019 of loss.
    # Passages that the text had before can be left out, since they teach that text repeats (arXiv 2107.06499;
    # data/repeats.py). Worth 0.017 on `clean`, or 7% of the time; `val`, whose text repeats, rises by 0.046.
    drop_repeats: Count = 0         # tokens of the shortest passage that is left out; 0: all are kept
    micro_batches: Positive = 8     # of a step, on all GPUs; unless given, raised to one a GPU and to fit

    # ---- Model. Without a setting it has ReLU² (So et al., arXiv 2109.08668), QK-norm (arXiv 2010.04245),
    # logits bounded by 23·sigmoid((z + 5)/7.5) (@ClassicLarry #181), MLP-out that starts at 0 (@Grad62304977)
    # and learned scalars, on the residual stream and on the weights of Q, K, V and O (@roeeshenberg #166).
    layers: tuple[Layer, ...] = SPEEDRUN_LAYERS
    width: Size = 768               # channels of the residual stream
    heads: Size = 6                 # heads of each layer's attention; heads · head_dim need not be the width
    head_dim: Size = 128            # channels of a head's value
    # Queries and keys need fewer channels than values (@Glitchfix #344: 96 of 128).
    qk_dim: Size = 64               # channels of a query or key. B: 3.1 s, together with `attention_scale`.
    attention_scale: Factor = 0.15  # QK-norm wants a factor of q·k set by hand (@leloykun, @YouJiacheng #72).
    # Half of each query and key turns with its position (arXiv 2104.09864), half matches by content alone.
    rotary_share: Share = 0.5
    rotary_base: Factor = 1024.0    # how many times faster the fastest channel pair turns than the slowest
    # Slow rotations get slower as windows grow (arXiv 2309.00071; @ClassicLarry #122). A: 0.004, 0.7 s.
    yarn: bool = True
    # Each n-gram has a row in a hashed table. Head 0 adds the row of the last 2 tokens to its values, head 1
    # the row of the last 3, … So the model looks short contexts up and need not compute them. The table holds
    # most of the parameters (kernels/ngrams/README.md; @ClassicLarry #201; Cheng et al., arXiv 2601.07372).
    ngrams: tuple[NGram, ...] = (2, 3, 4, 5)    # tokens of n-grams; B: 0.103, 30 s; genuine FineWeb: 0.036
    ngram_rows: Rows = 67_108_864   # rows of the n-gram table, each as wide as a head; 0: no table
    # N-grams ignore case, accents and leading spaces (record 92 of the public speedrun). Worth 0.005.
    ngram_classes: bool = False     # only for GPT-2's tokens
    # Tokens also read an n-gram row for a guess of the next token. The guess followed the longest earlier
    # match of the last tokens in the sequence (kernels/retrieval; proposed to the public speedrun).
    near_match: tuple[Few, ...] = ()    # lengths of the matches, in tokens; worth 0.006 to 0.008
    # When the model is scored, the training text has a share in the probabilities (kernels/retrieval): how
    # often a token followed the last 1, 2 or 3, and what followed similar inputs of the last MLP, up to 27%.
    retrieval: tuple[Few, ...] = ()     # lengths of contexts that are counted; 2, 3: worth 0.006 to 0.021
    states: Count = 0   # how many of these inputs are kept, of all ranks; worth 0.039 on `clean`
    # Tokens that followed similar places earlier in the sequence get part of the next one's probability, by
    # queries and keys (kernels/copying; proposed to the public speedrun). Half a run: 0.016 on `clean`.
    copy_channels: Count = 0        # channels of each query and key: a power of two, as 128; 0: no copying
    # When the model is scored, the head gives no probability to tokens that GPT-2's encoder never writes next
    # (data/canonical.py; record 91 of the public speedrun). Worth 0.002 on `val`, by the weights of one run.
    canonical: bool = False
    # How many tokens share one softmax sample; 0: all. Fewer tokens have fewer targets, so need fewer logits.
    softmax_tokens: Count = 0       # 8,192 with 4,096 samples: 4% faster than 16,384 with 6,144, loss +0.004
    # Attention's values get each token's row of a table, so a token's identity skips the earlier layers
    # (Zhou et al., arXiv 2410.17897; @KoszarskyB; gates: @ClassicLarry #186, @photomz #218). A: 0.061, 8.3 s.
    value_embeddings: bool = True
    gate_channels: Size = 12        # inputs of a gate: for smear 12 of x, for values 6 of x and 6 of the row
    # Each embedding gets a gated share of the previous token's, so that no head need look one token back.
    smear: bool = True              # @ClassicLarry #130. A: 0.004.
    # With a long window, the half of a key that has no position comes from the previous token. So one layer
    # can find what followed a token the last time, which is induction (@ClassicLarry #169). A: 0.008, 1.3 s.
    key_offset: bool = True
    # What a head reads is multiplied by a gate that sees its query. So a head can pass on nothing, as softmax
    # alone cannot (@ClassicLarry #117; arXiv 2505.06708). Worth 0.005 on `clean`, 0.008 to 0.012 in quarters.
    attention_gates: bool = False
    # Some of what early layers write serves later layers alone. So a learned share of the output of the layer
    # marked `Layer.backout` is subtracted before the head (@ClassicLarry #140). A: 0.003, 0.5 s.
    backout: bool = True
    # Where `Layer.reads_kept` is set, attention reads an earlier output, which lacks what later MLPs wrote
    # for the prediction (@ClassicLarry #241, after @msisovic #230). A: 0.008, 1.5 s.
    late_input: bool = True

    # ---- Schedule. Batches grow (@varunneal #163), and so do windows (@hi_tysam). Early losses count the two
    # tokens after the next, too (Gloeckle et al., arXiv 2404.19737; @varunneal #178). A: 0.010, 1.6 s.
    stages: tuple[Stage, ...] = SPEEDRUN_STAGES
    steps: Steps = 1270             # steps of all stages together
    extra_steps: Steps = 15         # steps after the stages, at the last stage's final values
    extra_samples: Count = 0        # `softmax_samples` of the extra steps
    window_block: Blocks = 128      # tokens in a block of a window
    final_windows: tuple[Blocks, Blocks] = (6, 13)    # windows of the extra steps, in blocks
    cooldown: Share = 0.6           # the share of the steps over which the learning rate falls linearly
    final_lr: Share = 0.15          # the share of the learning rate that is left at the end (@YouJiacheng)
    adam_every: Few = 2             # Adam takes the gradients of two steps together (@ClassicLarry #136).

    # ---- Optimizer. Muon (Jordan et al., kellerjordan.github.io/posts/muon) moves a matrix by the orthogonal
    # matrix nearest to its momentum. The bits that bfloat16 lacks are kept for all weights but n-gram rows.
    muon_lr: Factor = 0.023         # learning rate of hidden matrices, times each matrix's own factor
    muon_momentum: tuple[Beta, Beta] = (0.85, 0.95)     # momentum at both ends of the run, and in between
    momentum_warmup: Positive = 300     # steps from the first momentum to the second
    momentum_cooldown: Positive = 50    # steps back to the first momentum, at the end (@ClassicLarry #136)
    # A slower average of gradients takes part of the momentum's place (@orange4664 #340). Worth up to 0.006.
    slow_share: Share = 0.0
    slow_beta: Beta = 0.97          # decay of the slower average
    slow_from: tuple[Share, Share] = (0.3, 0.4)     # parts of the run: where slow_share begins and is whole
    muon_beta2: Beta = 0.9          # decay of a neuron's running size, by which NorMuon divides
    muon_decay: Factor = 1.2        # weight decay, times muon_lr squared and the matrix's own factor
    polar_steps: Few = 4            # Newton-Schulz steps (Polar Express: Amsel et al., arXiv 2505.16932)
    # Before Newton-Schulz, a matrix's rows are scaled, which saves one of 5 steps at the same loss.
    aol: bool = True                # arXiv 2208.03160, arXiv 2512.04632
    # NorMuon divides each neuron's update by its running size (Li et al., arXiv 2510.05491). A: 0.015, 2.6 s.
    neuron_norm: bool = True
    adam_lr: Factor = 0.008         # learning rate of all other weights, times their group's factor
    value_lr: Factor = 150.0        # learning rate of the value embeddings, times adam_lr
    ngram_lr: Factor = 75.0         # learning rate of the n-gram table, times adam_lr
    ngram_beta2: Beta = 0.99        # decay of an n-gram row's mean squares
    ngram_block: Positive = 16      # neighbouring columns of an n-gram row share a mean square; worth 0.005
    adam_decay: Factor = 0.005      # weight decay, times adam_lr squared and both factors of the group
    # At the end weights are mixed with their moving averages (record 92 of the public speedrun). Worth 0.017.
    average_steps: Count = 0        # number of last steps whose weights are averaged; 0: no averages
    average_every: Positive = 5     # steps from one averaging to the next
    average_share: Share = 0.65     # share of the average in the mixture
    cautious: bool = True   # Decay only where the update agrees in sign (arXiv 2510.12402; @varunneal #154).
    # Tokens of like spelling share part of their updates (kernels/optimizer/shared_updates.py). Worth 0.014
    # on `val`, 0.017 and 0.021 on two other texts, by one pair of runs, for 0.6% of the time.
    shared_updates: bool = False    # only for GPT-2's tokens

    # ---- Validation
    val_tokens: Positive = 10_485_760   # how many tokens are scored, from the start of the validation text
    val_every: Count = 250          # steps from one validation to the next; 0: only at the end
    val_chunk: Tokens = 65_536      # tokens of a forward pass; more take more memory, for the same result
    val_sequence_length: Tokens = 16_384            # Longer documents are scored in pieces.
    val_window: Blocks = 20         # blocks of the long window in the last validation (@ClassicLarry #127)
    val_fp8: bool = True            # Score in FP8 what is trained in it. In bfloat16 the loss is 0.002 lower.
    # Other texts are scored after the run, off the clock: name=FOLDER:TOKENS, or name:TOKENS for a folder of
    # that name beside the shards, if it exists. `val` alone flatters the n-gram table (records/measuring.md).
    score: tuple[str, ...] = ()

    # ---- Machine
    attention: Backend = "auto"     # kernel: "bounded", "flash4", "varlen", "plain", or the fastest that runs
    # These parts run in FP8 where the GPU can (kernels/fp8/formats.py; the head: @YouJiacheng; all parts:
    # @Glitchfix #344, @devenpzak #360). A: 5.9 s for the MLP and 1.5 s for attention, at the same loss.
    fp8: tuple[Part, ...] = ("head", "attention", "mlp")
    reference: tuple[str, ...] = ()                 # fields of `Ops` that run their reference, or "all"
    compile: bool = True            # torch.compile of references, on GPUs
    capture: bool = True            # Each kind of step is one CUDA graph: 13 ms a step, not 37 (4×H200).
    overlap: bool = True            # Collectives run under computation: 12.7 ms a step, not 13.9 (4×H200).
    peer_copies: bool = True        # Collectives are copies between GPUs with peer access; false: by NCCL.
    doctor: bool = False            # Look at the machine first (./run.sh doctor); the log gets the figures.
    check_ranks: Count = 0          # steps between comparisons of the ranks' weights, 4 ms each; 0: never
    deterministic: bool = False     # The same bits in every run, also in attention's backward: 0.5% slower.
    write_log: bool = True          # Write a run folder under `records/runs`.
    checkpoint: str = ""            # folder for checkpoints of training (records/run/checkpoint.py)
    checkpoint_every: Count = 0     # steps from one checkpoint to the next; 0: no checkpoint
    checkpoint_on_stop: bool = False                # A run that SIGTERM or Ctrl-C stops writes a checkpoint.
    resume: str = ""                # Go on from the newest checkpoint in this folder.
    save: str = ""                  # folder for the trained model (`use/`); "log": `model` beside the log

    # Rows of the head: FP8 matmuls need a multiple of 16, and the matrix units prefer one of 64.
    padded_vocab = property(lambda self: round_up(self.vocab_size, 64))
    document_start = property(lambda self: self.vocab_size - 1)     # the token that begins every document


SPEEDRUN = Config(preset="speedrun", data_path=str(ROOT / "data/shards/fineweb"))
# Smaller batches want lower learning rates and a shorter memory of the momentum.
HALF_BATCHES = dict(batch_tokens=(65_536, 131_072, 196_608), lr_scale=(0.7, 1.0, 1.25),
                    muon_momentum=(0.85, 0.92), momentum_warmup=600, momentum_cooldown=100)
PRESETS = recipes.added_to({        # adds `sprint` and `medium`, which are made from these
    "speedrun": SPEEDRUN,
    # The records' preset, as it was at the commits that they name. 1% more steps gain 0.002. So no layer 2
    # (11% of the time for 0.018), no sixth head (6%, 0.002 to 0.01), narrow windows (2.5% for 0.001).
    "corpus": settings.change(
        SPEEDRUN, preset="corpus", data_path="", keep_tails=True, drop_repeats=16, micro_batches=1, heads=5,
        layers=tuple(replace(layer, narrow=i in (0, 1, 3))
                     for i, layer in enumerate(SPEEDRUN_LAYERS[:2] + SPEEDRUN_LAYERS[3:])),
        ngram_rows=268_435_456, ngram_classes=True, near_match=(1, 2, 4, 8), copy_channels=128,
        attention_gates=True, average_steps=400, cooldown=0.8, final_lr=0.25, slow_share=0.4, steps=1320,
        extra_steps=8, softmax_tokens=8192, softmax_samples=(4096,), extra_samples=16_384, canonical=True,
        shared_updates=True, val_fp8=False, score=("clean:4194304", "fineweb:561000"), **HALF_BATCHES),
    # The preset for a GPU of 24 GB takes the speedrun's tokens in smaller batches: 337 s in 24 GB of an H200.
    "single": settings.change(
        SPEEDRUN, preset="single", micro_batches=16, ngram_rows=33_554_432, val_chunk=16_384, steps=2540,
        extra_steps=30, **HALF_BATCHES),
    "cpu": settings.change(
        Config(preset="cpu", target=2.0, data_path=str(embedded.FOLDER), vocab_size=embedded.VOCAB_SIZE,
               micro_batches=2, layers=CPU_LAYERS, width=128, heads=2, head_dim=64, attention_scale=0.1,
               ngrams=(2, 4), ngram_rows=65_536, ngram_block=1, steps=120, extra_steps=10, window_block=32,
               momentum_warmup=70, momentum_cooldown=15, polar_steps=5, aol=False, val_tokens=65_536,
               val_every=50, val_chunk=4096, val_sequence_length=1024, save="log"),
        batch_tokens=(2048, 3072, 4096), sequence_length=(256, 512, 512), softmax_samples=(0,)),
})


def parse(argv: list[str]) -> tuple[Config, dict]:
    """The configuration of a command line, checked, and the options that are not settings."""
    default = "speedrun" if torch.cuda.is_available() else "cpu"
    config, options = settings.parse(argv, PRESETS, default, __doc__, os.environ)
    check_config(config, Ops._fields)
    check_saving(config)
    return config, options


# ========== 2. Operations ============================================================================

class Ops(NamedTuple):
    """What runs each operation: a Triton kernel, torch.compile of its reference, or the reference itself.

    Tests and experiments swap one: `model.ops = model.ops._replace(smear=embedding.smear_reference)`.
    """
    lookup: Callable                # reads rows of a table; the gradient reaches only the rows that were read
    smear: Callable                 # norms embeddings, adds a share of the previous token's, norms the sum
    ngram_index: Callable           # hashes the n-grams that end at each token
    suffix_keys: Callable           # hashes the last k tokens at each token, for several lengths k
    norm_fork: Callable             # adds up a stream's summands and norms the sum, once for each reader
    qkv: Callable                   # queries, keys and values from the normed stream
    share_values: Callable          # gives n-gram rows to all layers, and sums the gradients of all layers
    mlp_input: Callable             # for y = a (stream + update): c y, which bypasses the MLP, and norm(y)
    feed_forward: Callable          # relu(x W_inᵀ)² W_out
    before_head: Callable           # both heads' input: the norm of the stream less a share of an earlier one
    copy_inputs: Callable           # queries and keys of the copy head, and its score of not copying
    pointer_sums: Callable          # log Σ e^s over the copy head's scores s of earlier tokens
    head_loss: Callable             # the head, its softcap and the loss
    nesterov_momentum: Callable
    newton_schulz: Callable
    neuron_update: Callable
    adam_update: Callable
    feature_update: Callable        # Adam for each feature that tokens share
    row_adam: Callable              # Adam on the rows of the n-gram table that were read


def references(compile: Callable = lambda function: function) -> Ops:
    """Every operation in plain PyTorch, most of them passed through `compile`."""
    plain = dict(
        lookup=embedding.lookup_reference, smear=embedding.smear_reference, norm_fork=mlp.norm_fork_reference,
        ngram_index=ngrams.ngram_index_reference, suffix_keys=retrieval.suffix_keys_reference,
        mlp_input=mlp.mlp_input_reference, feed_forward=mlp.feed_forward_reference,
        before_head=mlp.before_head_reference, copy_inputs=copying.project_reference,
        head_loss=loss.head_loss_reference, nesterov_momentum=updates.nesterov_momentum_reference,
        newton_schulz=updates.newton_schulz_reference, neuron_update=updates.neuron_update_reference,
        adam_update=updates.adam_update_reference, feature_update=updates.feature_update_reference,
        row_adam=updates.row_adam_reference)
    return Ops(**{name: compile(function) for name, function in plain.items()},
               qkv=partial(attention.project_heads, compile(attention.qkv_heads_reference)),
               share_values=ngrams.share_values_reference, pointer_sums=copying.pointer_sums_reference)


def choose_ops(config: Config, device: torch.device) -> tuple[Ops, tuple[str, ...]]:
    """The operations for this device, and the parts of `config.fp8` that really run in FP8 there."""
    if device.type != "cuda":
        return references(), ()
    plain = references(compiled) if config.compile else references()
    off = set(Ops._fields if "all" in config.reference else config.reference)
    if off & {"qkv", "share_values"}:               # `qkv` stores the gradients that `share_values` sums.
        off |= {"qkv", "share_values"}
    off |= {"row_adam"} if "lookup" in off else set()   # Only lookup's kernel lists the rows for row_adam.
    can = {"head": True, "attention": "qkv" not in off,
           "mlp": "feed_forward" not in off and mlp.has_feed_forward_fp8(device)}
    parts = tuple(part for part in config.fp8 if can[part] and fp8.has_fp8(device))
    kernels = Ops(
        lookup=embedding.lookup, smear=embedding.smear, ngram_index=ngrams.ngram_index,
        suffix_keys=retrieval.suffix_keys, share_values=ngrams.share_values, norm_fork=mlp.norm_fork,
        qkv=partial(attention.project_heads, attention.qkv_heads), mlp_input=mlp.mlp_input,
        feed_forward=plain.feed_forward, before_head=mlp.before_head, copy_inputs=copying.project,
        pointer_sums=copying.pointer_sums, head_loss=loss.head_loss, newton_schulz=updates.newton_schulz,
        nesterov_momentum=updates.nesterov_momentum, neuron_update=updates.neuron_update,
        adam_update=updates.adam_update, feature_update=updates.feature_update, row_adam=updates.row_adam)
    if "attention" in parts:
        kernels = kernels._replace(qkv=attention.qkv_fp8, norm_fork=mlp.norm_fork_fp8)
    if "mlp" in parts:
        kernels = kernels._replace(feed_forward=mlp.feed_forward_fp8, mlp_input=mlp.mlp_input_fp8)
    return kernels._replace(**{name: getattr(plain, name) for name in off}), parts


# ========== 3. Model =================================================================================

@dataclass(eq=False)
class Transit:
    """What the micro-batches of a step share. It tells the optimizer which stop of the model a pass is at.

    The stops of a pass are "embedding", "smear", "layer 0", "mlp 0", "layer 1", …, "head".
    """
    optimizer: "Optimizer | None" = None    # None in validation: nobody waits for weights or sums gradients.
    accumulate: bool = True         # Later micro-batches add to a gradient that the first one writes.
    last: bool = False              # the last micro-batch, after which gradients are complete
    fp8_weights: dict[int, tuple] = field(default_factory=dict)     # by layer; all micro-batches read them

    def reach(self, stop: str, x: Tensor | None = None) -> None:
        """The forward pass comes to `stop`, which reads x.

        Autograd runs in reverse order of creation. So once x has its gradient, the gradients of all weights
        that this stop and later stops use are complete.
        """
        if self.optimizer is None:
            return
        self.optimizer.weights_needed(stop)
        if self.last and x is not None:
            x.register_hook(lambda _: self.optimizer.gradients_complete(stop))


class Context(NamedTuple):
    """What all layers read in one forward pass."""
    step: "Step"
    transit: Transit
    sequences: Sequences
    positions: attention.Positions          # rotary tables, and where sequences start
    attention_scale: float
    by_token: embedding.RowOrder            # the tokens, sorted for the gradients of tables of tokens
    ngrams: ngrams.InFlight                 # rows of the n-gram table, on their way from the other ranks
    attention_scalars: tuple[Tensor, ...]   # for each layer (2,): one for Q, K and V, one for O
    value_gates: tuple[Tensor, ...]         # for each value embedding (heads, gate_channels)


class GPT(nn.Module):
    """The model: a decoder of `Config.layers`, with value embeddings, n-gram rows and FP8 matmuls.

    `bank` holds all hidden matrices, layer by layer: Q, K and V stacked, (heads (2 qk_dim + head_dim),
    width); O, (width, heads head_dim); MLP-in and MLP-out, (4 width, width). A row is an output neuron of Q,
    K, V or O, or a hidden unit of the MLP. The ranks of `collectives` share the columns of the n-gram table.
    The operations are those of the device `like`: so a GPU's memory can be counted on the meta device.
    """

    def __init__(self, config: Config, device: torch.device, collectives: Collectives,
                 like: torch.device | None = None):
        super().__init__()
        self.config, self.device, like = config, device, like or device
        self.dtype = torch.bfloat16 if like.type == "cuda" else torch.float32
        self.attention_backend, self.attention_note = attention.choose_attention(
            config.attention, like, (config.qk_dim, config.head_dim), config.attention_scale)
        self.attention = attention.ATTENTION[self.attention_backend]
        self.ops, self.fp8 = choose_ops(config, like)
        no_fp8 = choose_ops(replace(config, fp8=(), compile=False), like)[0]  # `score` is too rare to compile
        self.no_fp8 = {op: getattr(no_fp8, op) for op in "norm_fork qkv mlp_input feed_forward".split()}
        depth, kept, self.sources = len(config.layers), 0, []   # Layer i's attention reads stream sources[i].
        for i, layer in enumerate(config.layers):
            self.sources.append(kept if layer.reads_kept and config.late_input else i)
            kept = i + 1 if layer.kept else kept
        marked = (i + 1 for i, layer in enumerate(config.layers) if layer.backout and config.backout)
        self.backout_stream = next(marked, None)
        self.readers = [self.sources.count(stream) for stream in range(depth + 1)]  # of each stream's norm
        long = [*(stage.windows[1] for stage in config.stages), config.final_windows[1], config.val_window]
        most = max(config.val_chunk, *(stage.batch_tokens // config.micro_batches for stage in config.stages))
        turned = int(config.qk_dim * config.rotary_share)       # channels of a query that show its position
        self.rotary = attention.rotary_tables(
            [window * config.window_block for window in long], most, turned, config.rotary_base,
            config.attention_scale, config.yarn, device)
        self.loss_weights = torch.ones(3, device=device)    # of the next 1, 2, 3 tokens; each step sets them
        self.never = canonical.Never(config.padded_vocab, device) if config.canonical else None
        valued = [i for i in range(depth) if config.layers[i].value_embedding and config.value_embeddings]
        self.value_index = {layer: i for i, layer in enumerate(valued)}     # which table and gate a layer has

        def table(*shape: int, dtype: torch.dtype = self.dtype) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, device=device, dtype=dtype))

        scalars = partial(table, dtype=torch.float32)       # few numbers, with small updates
        width, values = config.width, config.heads * config.head_dim
        in_attention, in_mlp = (2 * config.heads * config.qk_dim + values, width), (4 * width, width)
        shapes = [in_attention, (width, values), in_mlp, in_mlp] * depth
        self.bank = nn.ParameterList(table(*shape) for shape in shapes)
        # The head is also the embedding (arXiv 1608.05859; @varunneal #175): worth 0.033 in a quarter run.
        self.head = table(config.padded_vocab, width)
        self.value_tables = nn.ParameterList(table(config.padded_vocab, values) for _ in valued)
        classes = torch.from_numpy(gpt2_classes()) if config.ngram_classes else None
        self.ngrams = ngrams.NGrams(config.ngrams, config.ngram_rows, config.head_dim, depth, collectives,
                                    self.dtype, device, classes)
        self.ngrams.find_by(self.ops.ngram_index, retrieval.Guesses(config.near_match, self.ops.suffix_keys))
        self.memory = retrieval.TextMemory(config.retrieval, config.states, self.head, collectives,
                                           sum(step.batch_tokens for step in Schedule(config)))
        self.copy_head = copying.CopyHead(
            config.copy_channels, config.width, config.attention_scale, self.dtype, device)
        self.attention_scalars = scalars(depth, 2)                          # one for Q, K and V, one for O
        self.attention_gates = nn.ParameterList(
            scalars(config.heads, config.qk_dim - turned) for _ in config.layers if config.attention_gates)
        self.residual_scalars = scalars(depth, 2)                           # a and c of `mlp_input`
        self.scalars = scalars(2)                                           # shares of smear and of backout
        self.smear_gate = scalars(config.gate_channels) if config.smear else None
        self.value_gates = scalars(len(valued), config.heads, config.gate_channels)
        if device.type != "meta":
            self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Initial values from the seed alone, drawn on the device; the same on every rank."""
        generator = torch.Generator(self.device).manual_seed(self.config.seed)
        bound = 3 ** 0.5 * 0.5 * self.config.width ** -0.5      # a standard deviation of 0.5 / √width
        for matrix in (matrix for i, matrix in enumerate(self.bank) if i % 4 < 3):      # MLP-out stays zero.
            matrix.uniform_(-bound, bound, generator=generator)
        self.head.normal_(std=0.005, generator=generator)
        for value_table in self.value_tables:
            value_table.normal_(std=0.01, generator=generator)
        growth = 1.1 ** 0.5         # factor of the stream, twice a layer; O's scalar starts at the inverse
        self.residual_scalars.fill_(growth)
        self.attention_scalars.copy_(torch.tensor([0.5, 1.0 / growth]))
        self.ngrams.initialise()
        self.copy_head.initialise(bound, generator)
        self.scalars.copy_(torch.tensor([0.0, 0.5]))        # Smear starts at nothing, backout at half.

    def forward(self, batch: Batch, step: "Step", transit: Transit | None = None) -> tuple[Tensor, Tensor]:
        """The training loss and the next-token loss, summed over the batch's tokens, in nats (0-dim)."""
        ops, transit = self.ops, transit or Transit()
        positions, scale = self.positions(batch, step)      # `scale` is attention's.
        sequences = Sequences.of(batch.cu_seqlens, batch.max_length, len(batch.tokens))
        by_token = self.sort(batch.tokens)
        rows = self.ngrams.index(batch)
        transit.reach("embedding")
        # Sent before x is made. So backward does the embedding's part before it waits for these gradients.
        in_flight = self.ngrams.send(rows, ops.lookup, self.sort, ops.share_values)
        smear_scale, backout_scale = self.scalars
        x = ops.lookup(self.head, by_token)
        x = ops.smear(x, positions.is_start, self.smear_gate, smear_scale)
        transit.reach("smear")      # This starts gathers, behind the n-gram rows, which layer 0 needs first.
        context = Context(step, transit, sequences, positions, scale, by_token, in_flight,
                          self.attention_scalars.unbind(), self.value_gates.unbind())
        streams = [mlp.Residual(x, readers=self.readers[0])]    # inputs of layers 0, 1, … and of the head
        for i, scales in enumerate(self.residual_scalars.unbind()):
            transit.reach(f"layer {i}", streams[i].newest)
            update = self.attend(i, streams[self.sources[i]], context)
            transit.reach(f"mlp {i}", update)
            stream, x = ops.mlp_input((*streams[i].summands, update), scales)
            update = self.feed_forward(i, x, transit)
            streams.append(mlp.Residual(stream, update, readers=self.readers[i + 1]))
        early = streams[self.backout_stream].later if self.backout_stream else None     # its autograd copy
        x, twin = ops.before_head(streams[-1].summands, early, backout_scale)
        transit.reach("head", x)    # One node makes x and twin, so x's hook waits for the gradients of both.
        return self.loss(x, twin, stream, batch, context)   # `stream`: the last MLP's input, before its norm

    @torch.no_grad()
    def score(self, batch: Batch, step: "Step") -> Tensor:
        """The next-token loss, summed over the batch's tokens, in nats (0-dim); see `Config.val_fp8`."""
        model = copy(self)      # with the same weights
        if not self.config.val_fp8:
            model.ops, model.fp8 = self.ops._replace(**self.no_fp8), ()
        return model(batch, step)[1]

    def positions(self, batch: Batch, step: "Step") -> tuple[attention.Positions, float]:
        """Rotary tables and starts of sequences for the batch's tokens, and attention's scale."""
        n = len(batch.tokens)
        cos, sin, scale = self.rotary[step.windows[1] * self.config.window_block]
        return attention.Positions(cos[:n], sin[:n], starts(batch.cu_seqlens, n)), scale

    def sort(self, index: Tensor) -> embedding.RowOrder:
        """Rows to look up, sorted if a kernel's backward pass will need the order."""
        if self.ops.lookup is embedding.lookup and torch.is_grad_enabled():
            return embedding.sort_beside(index)
        return embedding.unsorted(index)

    def attend(self, i: int, stream: mlp.Residual, context: Context) -> Tensor:
        """The update (n, width) of layer i's attention, which reads the norm of `stream`."""
        config, layer, transit = self.config, self.config.layers[i], context.transit
        x = stream.normed(self.ops.norm_fork)       # x may exist only in FP8.
        scale_qkv, scale_out = context.attention_scalars[i]
        if i not in transit.fp8_weights:
            transit.fp8_weights[i] = self.make_fp8_weights(i, scale_qkv)
        value_rows = None
        if (place := self.value_index.get(i)) is not None:
            value_rows = attention.value_rows(
                self.ops.lookup, self.value_tables[place], context.by_token, context.value_gates[place])
        w_qkv, w_out, *_ = self.weights(i)
        projection = attention.Projection(
            w_qkv, scale_qkv, gradient_of(w_qkv, transit.accumulate), transit.fp8_weights[i][0])
        shape = attention.HeadShape(config.qk_dim, config.head_dim, config.key_offset and layer.long_window)
        q, k, v = self.ops.qkv(x, projection, context.positions, value_rows, context.ngrams.values(i), shape)
        window = layer.window(context.step.windows) * config.window_block
        gate = self.attention_gates[i] if self.attention_gates else None
        y = self.attention(q, k, v, context.sequences, window, context.attention_scale, gate)
        grad = gradient_of(w_out, transit.accumulate)
        return attention.scaled_linear(y.flatten(1), w_out, scale_out, grad=grad)[0]

    def feed_forward(self, i: int, x: Tensor | fp8.Quantized, transit: Transit) -> Tensor:
        """The update (n, width) of layer i's MLP, from the normed stream."""
        matrices = self.weights(i)[2:]
        grads = tuple(gradient_of(w, transit.accumulate) for w in matrices) if "mlp" in self.fp8 else None
        return self.ops.feed_forward(x, *matrices, grads, transit.fp8_weights[i][1])

    def loss(self, x: Tensor, twin: Tensor, state: Tensor, batch: Batch,
             context: Context) -> tuple[Tensor, Tensor]:
        """Training and next-token loss. `twin`: x again, for the copy head; `state`: see `Config.states`."""
        ops, in_fp8, is_start = self.ops, "head" in self.fp8, context.positions.is_start
        mixture = self.copy_head.mixture(twin, batch, context.sequences, ops.copy_inputs, ops.pointer_sums)
        mixture = self.memory.mixed(mixture, state, batch, is_start)
        wanted = loss.Targets(batch.targets, is_start, self.loss_weights[:len(context.step.multi_token)],
                              mixture, loss.ruled_out(self.never, batch.tokens))
        if not len(batch.candidates):       # Otherwise the loss is over this sample of tokens.
            return ops.head_loss(x, self.head, wanted, in_fp8, grad=gradient_of(self.head))
        return loss.sampled_head_loss(
            ops.head_loss, ops.lookup, self.sort, x, self.head, wanted, batch.sample, in_fp8)

    def weights(self, i: int) -> tuple[nn.Parameter, ...]:
        """Layer i's matrices: Q, K and V stacked, O, MLP-in and MLP-out."""
        return tuple(self.bank[4 * i:4 * i + 4])

    def make_fp8_weights(self, i: int, scale_qkv: Tensor) -> tuple:
        """Layer i's weights in FP8, of attention and of the MLP; None for what does not run in FP8."""
        in_attention, in_mlp = "attention" in self.fp8, "mlp" in self.fp8
        wanted = self.weights(i)[:1] * in_attention + self.weights(i)[2:] * in_mlp
        made, width = iter(fp8.fp8_weights(wanted) if wanted else ()), self.config.width
        qkv = attention.qkv_weight(next(made), scale_qkv, width) if in_attention else None
        return qkv, mlp.feed_forward_weights(*made, width) if in_mlp else None


# ========== 4. Optimizer =============================================================================

@dataclass
class Group:
    """Parameters that one algorithm updates with one set of rates. The optimizer knows groups, not names."""
    name: str
    params: list[nn.Parameter]
    stops: list[str]                # where the forward pass first uses each parameter
    lr: float                       # learning rate, times `Step.lr`
    betas: tuple[float, float]      # NorMuon uses only the second, since each step sets the momentum.
    decay: float                    # An update removes this much of a weight, times lr and `Step.lr` squared.
    algorithm: type                 # Adam, NorMuon or RowAdam
    matrix_lr: list[float] = field(default_factory=list)    # NorMuon: multiplies the rate of each matrix
    height: int = 0     # NorMuon: orthogonalises blocks of so many rows, as Q with K, and V; 0: all rows
    memory: float = 0.0     # time constant of the weights' average, in `average_steps`; 0: no average
    replicated: bool = False        # too small to share out: every rank makes the whole update
    shared: bool = False            # Adam: tokens of like spelling share updates.

    def rounds(self, ranks: int) -> list[tuple[list[nn.Parameter], str, int]]:
        """For each collective: its parameters, the stop that uses them first, and their padded length.

        NorMuon gives each rank one whole matrix, or padding in the last round. Adam splits each parameter.
        """
        if self.algorithm is NorMuon:
            return [(self.params[i:i + ranks], self.stops[i], ranks)
                    for i in range(0, len(self.params), ranks)]
        sent = zip(self.params, self.stops, strict=True) if self.algorithm is Adam else ()
        return [([p], stop, round_up(p.numel(), 16 * ranks)) for p, stop in sent]   # Parts are aligned.

    def rule(self, finite: Tensor, lr: Tensor, cautious: bool) -> updates.Rule:
        """How a step moves these weights. `lr` is `Step.lr`."""
        return updates.Rule(finite, lr * self.lr, lr * self.decay, cautious)

    def traffic(self, ranks: int) -> Traffic:
        return Traffic(self.name, [stop for _, stop, _ in self.rounds(ranks)], self.algorithm is NorMuon,
                       self.replicated)


def parameter_groups(model: GPT, config: Config) -> list[Group]:
    """Which parameters get which algorithm, rate and decay: the one table of the optimizer."""
    depth, height = len(config.layers), config.heads * config.head_dim
    each = [f"layer {i}" for i in range(depth)]
    both = [f"mlp {i // 2}" for i in range(2 * depth)]     # MLP-in and MLP-out of each layer
    valued = [each[i] for i in model.value_index]

    def adam(name: str, params: list, stops: list[str], lr: float, betas: tuple, decay: float = 0.0,
             algorithm: type = Adam, **more) -> Group:
        return Group(name, params, stops, lr * config.adam_lr, betas,
                     config.adam_lr * (decay * config.adam_decay), algorithm, **more)

    def small(name: str, params: list, lr: float, betas: tuple) -> Group:
        params = [p for p in params if p is not None and p.numel()]
        return adam(name, params, ["embedding"] * len(params), lr, betas, replicated=True)

    def normuon(name: str, params: list, stops: list[str], matrix_lr: list[float], height: int = 0) -> Group:
        return Group(name, params, stops, config.muon_lr, (0.0, config.muon_beta2),
                     config.muon_lr * config.muon_decay, NorMuon, matrix_lr, height, memory=1 / 8)

    gates = [model.copy_head.gate, model.value_gates, *model.attention_gates]
    scalars = [model.attention_scalars, model.ngrams.scales, model.scalars, model.copy_head.bias]
    groups = [
        #     name, parameters                         first used     learning rate    betas         decay
        small("scalars", scalars,                                     5.0,             (0.90, 0.99)),
        small("residual scalars", [model.residual_scalars],           5.0,             (0.90, 0.95)),
        small("smear gate", [model.smear_gate],                       0.01,            (0.90, 0.99)),
        small("gates", gates,                                         1.0,             (0.90, 0.99)),
        normuon("QKV", list(model.bank[::4]),          each,          [1.0] * depth,   height),
        normuon("O", list(model.bank[1::4]),           each,          [1.0] * depth),
        normuon("mlp", [w for i, w in enumerate(model.bank) if i % 4 > 1], both, [2.0, 4.0] * depth),
        adam("head", [model.head],                     ["embedding"], 1.0,             (0.50, 0.95), 150.0,
             memory=1 / 2, shared=config.shared_updates),
        adam("copy head", [model.copy_head.weight],    ["head"],      0.03,            (0.90, 0.95)),
        adam("value tables", [*model.value_tables],    valued, config.value_lr, (0.75, 0.99), 5.0,
             shared=config.shared_updates),
        adam("n-gram table", [model.ngrams.table],     ["embedding"], config.ngram_lr,
             (0.0, config.ngram_beta2), 5.0, RowAdam),
    ]
    return [group for group in groups if group.params and group.params[0] is not None]


class Shard:
    """A group's flat buffers: `all_…` hold the whole group, `own_…` and optimizer state a rank's part of it.

    The model's parameters become views of `all_weights`, so that collectives take slices of it, uncopied.
    On one rank the `own_…` buffers are the `all_…` buffers. A subclass's `update` changes `own_weights` by
    the summed gradients `own_grads`; its arguments `finite` and `lr`, which is `Step.lr`, are 0-dim.
    """

    def __init__(self, group: Group, config: Config, world: World, grads: Tensor | None = None):
        self.group, self.config, ranks = group, config, 1 if group.replicated else world.size
        first = group.params[0]
        unit = first.shape if group.algorithm is NorMuon else torch.Size()      # a matrix, or a number
        form, rounds = dict(dtype=first.dtype, device=first.device), group.rounds(ranks)
        zeros = world.collectives.zeros if ranks > 1 else torch.zeros       # Other ranks may read the buffer.
        self.all_weights = torch.zeros(sum(length for *_, length in rounds), *unit, **form)
        self.all_grads = zeros(*self.all_weights.shape, **form) if grads is None else grads
        self.places, start = [], 0      # each round's slices of `all_…` and of `own_…`
        for params, _, length in rounds:
            for i, p in enumerate(params):
                place = slice(start + i, start + i + (1 if unit else p.numel()))
                self.all_weights[place].view(p.shape).copy_(p.data)
                p.data, p.grad = self.all_weights[place].view(p.shape), self.all_grads[place].view(p.shape)
            own = slice(start // ranks, (start + length) // ranks)
            self.places.append((slice(start, start + length), own))
            start += length

        self.own_weights, self.own_grads = self.all_weights, self.all_grads
        if ranks > 1:
            self.own_weights = zeros(start // ranks, *unit, **form)
            for whole, own in self.places:
                self.own_weights[own] = self.all_weights[whole].chunk(ranks)[world.rank]
            self.own_grads = torch.zeros_like(self.own_weights)
        self.mantissa_bits = (torch.zeros_like(self.own_weights, dtype=torch.int16)
                              if first.dtype == torch.bfloat16 else None)
        self.momentum = torch.zeros_like(self.own_weights, dtype=torch.float32)
        self.second = torch.zeros_like(self.momentum[..., :1] if unit else self.momentum)
        self.slow: Tensor | None = None     # NorMuon's second average of the gradients
        self.steps = torch.zeros((), device=first.device)
        self.shared = updates.SharedUpdates(gpt2_features(), group.params, world) if group.shared else None

    def state(self) -> list[Tensor]:
        """All that a step changes."""
        own = [self.own_weights] if self.own_weights is not self.all_weights else []
        own += self.shared.moments if self.shared else []
        return [x for x in (self.all_weights, *own, self.all_grads, self.mantissa_bits, self.slow,
                            self.momentum, self.second, self.steps) if x is not None]


class Adam(Shard):
    """Adam. Every rank updates an equal part of each parameter, or all of a replicated one."""

    def update(self, ops: Ops, finite: Tensor, lr: Tensor, rates: updates.Rates) -> None:
        shared = self.shared and self.shared.update(ops, self.own_grads, self.steps, finite, self.group.betas)
        ops.adam_update(
            updates.Master(self.own_weights, self.mantissa_bits), self.own_grads, self.momentum, self.second,
            self.steps, self.group.rule(finite, lr, self.config.cautious), self.group.betas, shared)
        self.all_grads.zero_()


class NorMuon(Shard):
    """NorMuon for matrices of one shape. Every rank updates whole matrices."""

    def __init__(self, group: Group, config: Config, world: World, grads: Tensor | None = None):
        super().__init__(group, config, world, grads)
        ranks, (rows, columns) = world.size, group.params[0].shape
        height = group.height or rows
        self.shape = torch.Size([-1, height, columns])      # shape of orthogonalised matrices
        padding = [1.0] * (len(self.all_weights) - len(group.matrix_lr))
        rates = torch.tensor(group.matrix_lr + padding, device=self.all_weights.device)
        self.matrix_lr = rates.view(-1, ranks)[:, world.rank].repeat_interleave(rows // height).view(-1, 1, 1)
        self.normalisation = "aol" if config.aol else "frobenius"
        self.triples = updates.polar_express(
            config.polar_steps, updates.lower_end(self.normalisation, config.polar_steps))
        self.slow = torch.zeros_like(self.momentum) if config.slow_share else None

    def update(self, ops: Ops, finite: Tensor, lr: Tensor, rates: updates.Rates) -> None:
        weight, bits, grad, momentum, slow = (
            x if x is None else x.view(self.shape) for x in
            (self.own_weights, self.mantissa_bits, self.own_grads, self.momentum, self.slow))
        direction = ops.nesterov_momentum(grad, momentum, slow, rates, finite)
        direction = ops.newton_schulz(direction, self.triples, self.normalisation)
        rule = self.group.rule(finite, lr, self.config.cautious)
        rule = rule._replace(lr=rule.lr * self.matrix_lr)
        ops.neuron_update(updates.Master(weight, bits), direction, self.second.view(-1, self.shape[1], 1),
                          rule, self.group.betas[1], self.config.neuron_norm)
        self.all_grads.zero_()      # Where a reference runs, autograd adds to the gradients.


class RowAdam:
    """Adam without a first moment, on the rows of the n-gram table that were read (kernels/ngrams/README.md).

    Every rank holds and updates its own columns of the table, so nothing is summed or gathered.
    """

    def __init__(self, group: Group, config: Config, model: GPT):
        self.group, self.config = group, config
        by_row = model.ops.row_adam is updates.row_adam
        most = max(stage.batch_tokens for stage in config.stages) * model.ngrams.heads * config.adam_every
        self.table = model.ngrams.optimizer_state(config.ngram_block, most if by_row else None)

    def update(self, ops: Ops, finite: Tensor, lr: Tensor, rates: updates.Rates) -> None:
        rule = self.group.rule(finite, lr, self.config.cautious)
        self.table.update(ops.row_adam, rule, self.group.betas[1])

    def state(self) -> list[Tensor]:
        weight, gradients, *rest = self.table
        return [weight, *([gradients] if isinstance(gradients, Tensor) else gradients), *rest]


class Optimizer:
    """NorMuon for the hidden matrices and Adam for the rest, fused and sharded over the ranks.

    Every rank computes gradients of its micro-batches for all weights, but updates only its own part. (Every
    rank sums and updates small groups whole. The n-gram table needs no sums: each rank owns columns of it.)

        gradients --reduce-scatter--> summed, own part --update--> weights, own part --all-gather--> weights

    A timetable (kernels/ranks/timetable.py, `--timetable`) says which collective starts and ends where:

    1. In the first micro-batch's forward pass `weights_needed` gathers weights that the last step updated.
    2. In the last micro-batch's backward pass `gradients_complete` starts the sums of complete gradients. A
       group's update waits for the group's sums on a CUDA stream of its own: one update alone fills no GPU.
    3. `step` starts the sums and updates left after the backward pass, and waits for all updates.

    So a rank's weights are whole from the end of a forward pass, or from `gather`, until the next update.
    Updates ignore the gradients' scale, so the loss is summed over tokens and nothing is divided.
    """

    def __init__(self, model: GPT, config: Config, world: World):
        self.ops, self.config, self.world, groups = model.ops, config, world, parameter_groups(model, config)
        self.groups, self.stops = groups, stops_of(len(config.layers))
        sizes = [sum(length for *_, length in group.rounds(1)) if group.replicated else 0 for group in groups]
        self.small_grads = torch.zeros(sum(sizes), device=world.device)         # of all replicated groups
        self.shards = {group.name: RowAdam(group, config, model) if group.algorithm is RowAdam else
                       group.algorithm(group, config, world, grads if group.replicated else None)
                       for group, grads in zip(groups, self.small_grads.split(sizes))}
        self.averages = updates.Averages(
            [updates.Averaged(shard.own_weights, shard.mantissa_bits, shard.group.memory)
             for shard in self.shards.values() if shard.group.memory],
            config.steps + config.extra_steps, config.average_steps, config.average_every,
            config.average_share, config.width)
        apart = config.overlap and world.device.type == "cuda"
        self.streams = {name: side_stream(name) for name in self.shards if apart}   # where groups are updated
        self.loss_stream = side_stream("loss") if apart else None   # sums and checks losses, counts text
        self.lr, *rates = (torch.zeros((), device=world.device) for _ in range(3))
        self.rates = updates.Rates(*rates, config.slow_beta)    # rates: `Step.momentum`, `Step.slow_share`
        self.finite = torch.ones((), dtype=torch.bool, device=world.device)     # False: no more updates.
        self.traffic = [group.traffic(world.size) for group in groups]
        # Three queues hold what has not started of the timetable; `gathers` holds the gathers under way.
        self.to_gather, self.to_sum, self.to_update, self.gathers = (deque() for _ in range(4))
        self.sums: dict[str, list[Work]] = {}                               # sums under way, by group

    def begin(self, step: "Step") -> None:
        """Take this step's timetable."""
        table = timetable(self.traffic, len(self.config.layers), step.adam_updated, step.update_adam,
                          self.config.overlap)
        self.to_gather, self.to_sum, self.to_update = map(deque, table[:3])
        self.sums, self.updates = {}, table.updates

    def weights_needed(self, stop: str) -> None:
        """The forward pass comes to `stop`: start the gathers that are due, wait for the weights it needs."""
        reached = self.stops[:self.stops.index(stop) + 1]
        for transfer in due(self.to_gather, reached):
            self.gathers.append((transfer, self.start_gather(transfer)))
        while self.gathers and self.gathers[0][0].wait in reached:
            wait(self.gathers.popleft()[1])

    def start_gather(self, transfer: Transfer) -> Work:
        shard = self.shards[transfer.what]
        whole, own = shard.places[transfer.round]
        return self.world.collectives.all_gather(shard.all_weights[whole], shard.own_weights[own])

    @torch.no_grad()
    def gather(self) -> None:
        """Make this rank's copy of all weights whole."""
        table = timetable(self.traffic, len(self.config.layers), adam_updated=True, update_adam=False)
        for work in list(map(self.start_gather, table.gathers)):    # All start before one is waited for.
            wait(work)

    @torch.no_grad()
    def gradients_complete(self, stop: str) -> None:
        """The backward pass has left `stop`: start the sums and updates due; at UPDATE, all the rest."""
        left = [*self.stops, UPDATE] if stop == UPDATE else self.stops[self.stops.index(stop):]
        for transfer in due(self.to_sum, left):
            if transfer.what == SMALL:
                work = self.world.collectives.all_reduce(self.small_grads)
            else:
                shard = self.shards[transfer.what]
                whole, own = shard.places[transfer.round]
                work = self.world.collectives.reduce_scatter(shard.own_grads[own], shard.all_grads[whole])
            self.sums.setdefault(transfer.what, []).append(work)
        for update in due(self.to_update, left):
            shard, sums = self.shards[update.group], self.sums.get(update.behind, [])
            summed = sums and self.world.size > 1
            # Every update waits for the check of the step's loss. One with sums waits for these as well, and
            # one without for the backward pass, which runs on this stream.
            if self.loss_stream and not summed:
                torch.cuda.current_stream().wait_stream(self.loss_stream)
            with beside(self.streams.get(update.group), self.loss_stream if summed else None):
                for work in sums:
                    wait(work)
                shard.update(self.ops, self.finite, self.lr, self.rates)

    @torch.no_grad()
    def step(self) -> None:
        """Update what is left to update from the accumulated gradients, and wait for all updates."""
        self.gradients_complete(UPDATE)
        for update in self.updates if self.streams else ():
            torch.cuda.current_stream().wait_stream(self.streams[update.group])

    @torch.no_grad()
    def check_ranks(self) -> None:
        """RankError if ranks differ in a weight that the last step used. The n-gram table is not compared."""
        self.world.check_equal({f"the weights of group {name!r}": shard.all_weights
                                for name, shard in self.shards.items() if isinstance(shard, Shard)})

    def state(self) -> list[Tensor]:
        return [self.finite, *self.averages.state, *(x for one in self.shards.values() for x in one.state())]


# ========== 5. Schedule ==============================================================================

class Step(NamedTuple):
    """What is particular to one step. Steps of one `kind` run the same program on other numbers."""
    index: int
    batch_tokens: int
    sequence_length: int
    windows: tuple[int, int]        # short and long, in blocks
    multi_token: tuple[float, ...]  # the loss weights of the next 1, …, k tokens
    samples: int                    # The softmax has the targets and about this many other tokens; 0: all.
    update_adam: bool               # This step updates Adam's groups.
    adam_updated: bool              # The step before updated Adam's groups, or this is the first step.
    lr: float                       # multiplies every group's learning rate
    momentum: float
    slow_share: float               # share of the slow average in the momentum

    @property
    def kind(self) -> tuple:
        return (self.batch_tokens, self.sequence_length, self.windows, len(self.multi_token), self.samples,
                self.update_adam, self.adam_updated)

    @property
    def shape(self) -> StepShape:
        return StepShape(self.batch_tokens, self.sequence_length, self.samples)


@dataclass(eq=False)
class Schedule:
    """The whole run as a function of the step's number: `schedule.at(step)`. Iterating gives every step."""
    config: Config

    def __len__(self) -> int:
        return self.config.steps + self.config.extra_steps

    def __iter__(self) -> Iterator[Step]:
        return map(self.at, range(len(self)))

    def at(self, index: int) -> Step:
        c, stages = self.config, self.config.stages
        position = min(index, c.steps - 1) * len(stages) / c.steps          # Extra steps stay at the end.
        stage = stages[int(position)]
        fraction = position % 1 if index < c.steps else 1.0
        multi_token = tuple(first + (last - first) * fraction for first, last in stage.multi_token)
        fallen = min(max((index / c.steps - (1 - c.cooldown)) / c.cooldown, 0.0), 1.0) if c.cooldown else 0.0
        low, high = c.muon_momentum
        warm = min(index / c.momentum_warmup, (len(self) - 1 - index) / c.momentum_cooldown, 1.0)
        start, whole = c.slow_from
        slow = min(max((index / len(self) - start) / max(whole - start, 1e-9), 0.0), 1.0)
        windows, samples = stage.windows, stage.softmax_samples
        if index >= c.steps:    # Extra steps have windows and samples of their own.
            windows, samples = c.final_windows, c.extra_samples
        return Step(
            index, stage.batch_tokens, stage.sequence_length, windows, multi_token, samples,
            update_adam=index % c.adam_every == c.adam_every - 1, adam_updated=not index % c.adam_every,
            lr=stage.lr_scale * (1 - (1 - c.final_lr) * fallen), momentum=low + (high - low) * warm,
            slow_share=c.slow_share * slow)

    def validation(self, steps_done: int) -> Step:
        """The step to score with after `steps_done`: the last one, but at the end with a longer window."""
        last = self.at(max(steps_done - 1, 0))
        windows = (last.windows[0], self.config.val_window) if steps_done == len(self) else last.windows
        return last._replace(multi_token=(1.0,), windows=windows)

    def kinds(self, steps: Iterator[Step] | None = None) -> list[Step]:
        """The first step of each kind, in the run's order, of `steps` or of all."""
        first = {}
        for step in steps or self:
            first.setdefault(step.kind, step)
        return list(first.values())


# ========== 6. Training ==============================================================================

class Trainer:
    """Model, optimizer and data, with the one step function, for warm-up and run, and the one validation."""

    def __init__(self, config: Config, world: World):
        check_machine(config, world.size, world.device)
        self.config, self.world = config, world
        world.choose_collectives(config.peer_copies)
        self.schedule = Schedule(config)
        embedded.provide(config.data_path, world.rank, world.barrier)
        check_scores(config.score)
        world.be_deterministic(config.deterministic)
        self.text = TextSettings.of(config)
        self.loader = Loader(
            self.text, [step.shape for step in self.schedule], world.rank, world.size, world.device)
        self.scoring = config.val_tokens, config.val_chunk, config.val_sequence_length, world.size
        self.validation = scored_text("val", self.text, *self.scoring)
        self.model = GPT(config, world.device, world.collectives)
        self.optimizer = Optimizer(self.model, config, world)
        self.loss = torch.zeros((), device=world.device)
        self.graphs = {}    # by kind of step: its CUDA graph, and the batches that the graph reads

    def prepared(self, batch: Batch) -> Batch:
        """The batch on the device, with its rows of n-grams. The loader calls this during earlier steps."""
        batch = to_device(batch, self.world.device)
        return batch if len(batch.rows) else batch._replace(rows=self.model.ngrams.find(batch))

    def step(self, step: Step, batches: list[Batch]) -> Tensor:
        """Train on this rank's `batches`; return all ranks' mean next-token loss (0-dim) without a wait."""
        # Steps of one kind differ in these numbers, which a captured step reads on the device.
        numbers = self.optimizer.lr, *self.optimizer.rates[:2], *self.model.loss_weights
        for number, value in zip(numbers, (step.lr, step.momentum, step.slow_share, *step.multi_token)):
            number.fill_(value)
        self.model.ngrams.heed(batches)         # It learns only from a text's last reading.
        self.model.memory.before(step.batch_tokens)     # chooses the states' directions when it is time
        batches = [self.prepared(batch) for batch in batches]
        if step.kind in self.graphs:
            graph, inputs = self.graphs[step.kind]
            into, given = ([x for batch in side for x in batch.tensors] for side in (inputs, batches))
            torch._foreach_copy_(into, given)
            graph.replay()
        else:
            self.program(step, batches)
        self.optimizer.averages.after(step.index)
        if self.config.check_ranks and not (step.index + 1) % self.config.check_ranks:
            self.optimizer.check_ranks()
        return self.loss.clone()                    # The next replay writes over `self.loss`.

    def program(self, step: Step, batches: list[Batch]) -> None:
        """What a step does on the device: the same for all steps of its kind, without a wait for the host."""
        optimizer, total = self.optimizer, torch.zeros_like(self.loss)
        optimizer.begin(step)
        transit = Transit(optimizer)
        for i, batch in enumerate(batches):
            transit.accumulate, transit.last = i > 0, i == len(batches) - 1
            training_loss, next_token = self.model(batch, step, transit)
            total += next_token.detach()
            if transit.last:
                with beside(optimizer.loss_stream):
                    wait(self.world.collectives.all_reduce(total))
                    self.loss.copy_(total / step.batch_tokens)
                    optimizer.finite &= self.loss.isfinite()    # Once false, nothing is updated any more.
                    self.model.memory.learn(batches)
            training_loss.backward()
        optimizer.step()

    def capture(self, step: Step, batches: list[Batch]) -> None:
        """Record what a step of this kind does as a CUDA graph, which later steps replay by one launch."""
        inputs = [to_device(batch, self.world.device, copy=True) for batch in batches]
        # Graphs never run at the same time, so they share one pool, as large as the peak of an eager step.
        pool = next(iter(self.graphs.values()))[0].pool() if self.graphs else None
        with recorded(pool) as graph:
            self.program(step, inputs)
        self.graphs[step.kind] = graph, inputs
        self.step(step, batches)                    # The first replay uploads the graph.

    def validate(self, step: Step, text: ScoredText | None = None) -> float:
        """The mean loss over the scored tokens of `text`, or of the validation text, in nats a token."""
        self.optimizer.gather()
        text, world = text or self.validation, self.world
        total = torch.zeros((), dtype=torch.float64, device=world.device)
        for batch in text.batches[world.rank::world.size]:
            total += self.model.score(to_device(batch, world.device), step)
        wait(world.collectives.all_reduce(total))
        return total.item() / text.tokens

    def warm_up(self) -> None:
        """On a GPU, compile and capture off the clock. A CPU does neither."""
        if self.world.device.type == "cuda":
            self.rehearse()
        self.world.barrier()                        # Start-up takes as long as the slowest rank's.

    def rehearse(self) -> None:
        """Run every kind of step and of validation, then put everything back as it was."""
        before, kinds = updates.snapshot(self.optimizer.state()), self.schedule.kinds()
        # Batches come as in the run, so that the costs of first use are off the clock: 0.4 s on four GPUs.
        rehearsal = self.loader.rehearsal([step.shape for step in kinds])
        acts = [self.step]
        if self.config.capture:
            torch.cuda.reset_peak_memory_stats()
            acts.append(self.capture)       # Captures come last: an eager step cannot use the graphs' memory.
        for act in acts:
            for step, batches in zip(kinds, rehearsal.prefetch(range(len(kinds)), self.prepared)):
                act(step, batches)
        updates.restore(self.optimizer.state(), before)
        del before                                  # Validation needs the memory of the copies.
        self.model.memory.rehearse()
        batch = to_device(self.validation.batches[0], self.world.device)
        with canonical.without_waiting():   # for the mask, which another process works out
            for step in self.schedule.kinds(map(self.schedule.validation, self.validation_points())):
                self.model.score(batch, step)

    def validation_points(self) -> list[int]:
        """The numbers of steps after which the model is scored."""
        last = len(self.schedule)
        return [*range(every := self.config.val_every or last, last, every), last]


def train(trainer: Trainer, log: RunLog, startup: dict[str, float], first: int = 0) -> Report:
    """The timed run: every step of the schedule from `first` on, validation off the clock, the summary."""
    config, world, schedule = trainer.config, trainer.world, trainer.schedule
    clock = Clock(world.device)
    report = Report(log, clock, len(schedule), world)
    points = trainer.validation_points()
    report.tokens = sum(step.batch_tokens for step in islice(schedule, first))
    log.first = first
    report.bar.update(first)
    batches = trainer.loader.prefetch(range(first, len(schedule)), trainer.prepared)
    try:
        with Keeper(trainer, log) as keeper, clock.running(world.barrier):
            for step in islice(schedule, first, None):
                loss = world.watched(trainer.step, step, next(batches))
                report.add(step, step.batch_tokens * explain.flops_per_token(
                    config, step, trainer.loader.candidates_of(step.shape)), loss)
                done = step.index + 1
                if done in points:
                    trainer.optimizer.gather()      # on the clock, since every score needs it
                    trainer.model.memory.sort()     # on the clock, since every score needs it sorted
                    with clock.paused():
                        report.validation(done, trainer.validate(schedule.validation(done)))
                keeper.after(done)
        for text in other_texts(trainer.text, config.score, *trainer.scoring):
            report.score(text, trainer.validate(schedule.validation(len(schedule)), text))
    finally:
        report.bar.close()
    ending = startup | explain.ngram_facts(trainer.optimizer) | (
        ending_facts(world.device, config.data_path) if log.file else {})
    report.lines = summarise(report, log, config, ending)
    return report


def run(config: Config, world: World, started: float) -> Report:
    """One training run. `started`: when the run, or for the first one the process, began (epoch seconds)."""
    resumed = find(config)
    trainer = Trainer(config, world)
    facts, name = explain.run_facts(trainer, resumed), config.name or config.preset
    log = RunLog(name, enabled=not world.rank and config.write_log)
    log.write("header", schema=1, name=name, sources=log.sources, **facts)
    if world.watchdog:
        world.watchdog.on_loss = log.stopped
    if world.rank == 0:
        print(explain.announcement(facts, f"{world.size} x {device_name(world.device)}"),
              *prepare(trainer.model, trainer.schedule), sep="\n")
    begin = time.time()
    with log, whole_caches():
        trainer.warm_up()
        first = restore(trainer, resumed) if resumed else 0
        startup = {"startup_s": round(time.time() - started, 3), "compile_s": round(time.time() - begin, 3)}
        report = train(trainer, log, startup, first)
    try:
        if config.save:
            report.lines += save_model(trainer.model, report, log)
    finally:
        report.say()        # after the model is saved, so that a print that fails loses no model
    return report


def main(argv: list[str] | None = None) -> int:
    """Run from a command line; returns the exit status. Expected failures end in one line, from rank 0."""
    outlive_terminal()
    rank = 0
    try:
        rank, *_ = launched()
        config, options = parse(sys.argv[1:] if argv is None else argv)
        if options["timetable"] is not None or options["explain"]:
            groups = parameter_groups(GPT(config, torch.device("meta"), Collectives(1)), config)
            print(explain.tables_text(groups, Schedule(config), options["timetable"]))
            return 0
        world = World()
        config = fit(config, options["given"], world, Trainer)
        for i in range(config.runs):
            run(replace(config, seed=config.seed + i), world, time.time() if i else PROCESS_START)
            world.release()
        world.close()
        return 0
    except EXPECTED as error:
        return exit_status(error, rank)


if __name__ == "__main__":
    leave(main())
