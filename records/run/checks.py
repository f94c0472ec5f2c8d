"""Settings that cannot work, and what a machine cannot train: refused at once, naming the setting."""
from data.classes import GPT2_SIZE
from kernels import ngrams
from kernels.attention import ATTENTION
from records.run.settings import UserError

PARTS = ("head", "attention", "mlp")    # what can run in FP8


def check_config(config, operations: tuple[str, ...]) -> None:
    """Refuse settings that cannot work. `operations`: the names that `--reference` takes."""
    check_schedule(config)
    check_model(config)
    for name, known in (("fp8", PARTS), ("reference", (*operations, "all"))):
        if unknown := [part for part in getattr(config, name) if part not in known]:
            raise UserError(f"--{name} {unknown[0]}: choose of {', '.join(known)}, or none")
    if config.attention not in ("auto", *ATTENTION):
        raise UserError(f"--attention {config.attention}: choose auto, {', '.join(ATTENTION)}")


def check_schedule(config) -> None:
    """Batches that divide, at least a step for each stage, chunks that hold a sequence."""
    unit = 16 * config.micro_batches
    for tokens in (stage.batch_tokens for stage in config.stages):
        if tokens % unit:
            raise UserError(f"--batch_tokens {tokens} is no multiple of 16 tokens x {config.micro_batches} "
                            f"micro-batches; use {tokens // unit * unit}")
    if config.runs < 1:
        raise UserError(f"--runs {config.runs}: at least 1")
    if config.val_sequence_length > config.val_chunk:
        raise UserError(f"--val_chunk {config.val_chunk} is smaller than --val_sequence_length "
                        f"{config.val_sequence_length}; a chunk holds whole sequences: raise it or lower the "
                        "other")
    stages = len(config.stages)
    if config.steps < stages or config.extra_steps < 0:
        raise UserError(f"--steps {config.steps} --extra_steps {config.extra_steps}: at least one step for "
                        f"each of {stages} stages")
    untied = config.steps + config.extra_steps - round(config.tied_share * config.steps)
    if not 0 <= config.average_steps <= untied:
        raise UserError(f"--average_steps {config.average_steps}: 0 for none, at most {untied}, the steps "
                        "after the embedding and the head part")
    for name in ("momentum_warmup", "momentum_cooldown", "average_every"):
        if getattr(config, name) < 1:
            raise UserError(f"--{name} {getattr(config, name)}: at least 1 step")
    if config.softmax_samples < 0:
        raise UserError(f"--softmax_samples {config.softmax_samples}: a number of tokens, 0 for all")


def check_model(config) -> None:
    """Heads that fill matrices, n-grams that fit the heads, and layers whose marks agree."""
    if config.qk_dim < 1 or 2 * config.heads * config.qk_dim % config.width:
        raise UserError(f"--qk_dim {config.qk_dim}: the queries and keys of {config.heads} heads fill no "
                        f"whole number of {config.width} x {config.width} matrices, which NorMuon takes; use "
                        f"a multiple of {config.head_dim // 2}, half of --head_dim")
    longest = len(ngrams.HASH)
    if len(config.ngrams) > config.heads or not all(1 <= length <= longest for length in config.ngrams):
        raise UserError(f"--ngrams {config.ngrams}: lengths of 1 to {longest} tokens, one for each of "
                        f"{config.heads} heads at most")
    if config.ngram_classes and config.vocab_size != GPT2_SIZE:
        raise UserError(f"--ngram_classes true: only GPT-2's {GPT2_SIZE:,} tokens have classes, not "
                        f"--vocab_size {config.vocab_size}")
    if not 0 <= config.ngram_rows <= 2 ** 30:
        raise UserError(f"--ngram_rows {config.ngram_rows}: 0 for no table, at most {2 ** 30}")
    if sum(layer.backout for layer in config.layers) > 1:
        raise UserError("the table of layers has more than one `backout`; the head can subtract one output")
    for i, layer in enumerate(config.layers):
        if layer.reads_kept and not any(above.kept for above in config.layers[:i]):
            raise UserError(f"row {i + 1} of the table of layers has `reads_kept`, but no row above it is "
                            "`kept`")


def check_machine(config, ranks: int) -> None:
    """Refuse what so many ranks cannot share."""
    width = config.head_dim if config.ngram_rows else 0         # of the n-gram table
    if config.micro_batches % ranks or width % ranks:
        divisors = [str(n) for n in range(1, config.micro_batches + 1)
                    if config.micro_batches % n == width % n == 0]
        raise UserError(f"{ranks} ranks do not divide the {config.micro_batches} micro-batches of a step and "
                        f"the width of a head, {width}; use {', '.join(divisors)} ranks or another "
                        "--micro_batches")
    columns, block = width // ranks, config.ngram_block
    if block < 1 or columns % block or block & (block - 1):
        raise UserError(f"--ngram_block {block}: use a power of two that divides a rank's {columns} columns")
