"""What a run says of itself: the groups' rates, the first lines on the console, the FLOP of a token."""
import sys
import time
from pathlib import Path

from kernels.ranks.timetable import UPDATE, Transfer, timetable, timetable_text
from records.run import settings
from records.run.machine import machine_facts


def rates(groups) -> list[dict[str, object]]:
    """What each group's learning rate and decay come to in a step whose multiplier is 1, for a log's header.

    decays: the share of a weight that an update removes. Matrices may differ, as their rates do.
    """
    return [{"group": group.name, "algorithm": group.algorithm.__name__, "tensors": len(group.params),
             "numbers": sum(p.numel() for p in group.params),
             "learning_rates": sorted({group.lr * scale for scale in group.matrix_lr or [1.0]}),
             "decays": sorted({group.lr * scale * group.decay for scale in group.matrix_lr or [1.0]}),
             "betas": group.betas} for group in groups]


def rates_text(rows: list[dict]) -> str:
    """The rates as a table for a person."""
    lines = [f"{'group':17} {'algorithm':9} {'tensors':>7} {'numbers':>15}  {'learning rate':15} "
             f"{'decay':19}  betas"]
    for row in rows:
        learning = " / ".join(f"{rate:.3g}" for rate in row["learning_rates"])
        decays = " / ".join(f"{decay:.2g}" for decay in row["decays"])
        betas = ", ".join(f"{beta:g}" for beta in row["betas"])
        lines.append(f"{row['group']:17} {row['algorithm']:9} {row['tensors']:7} {row['numbers']:15,}  "
                     f"{learning:15} {decays:19}  {betas}")
    return "\n".join(lines)


def tables_text(groups, schedule, ranks: int | None) -> str:
    """The timetable of every kind of step. `ranks`: 0 is one a micro-batch; None gives the groups' rates."""
    if ranks is None:
        return rates_text(rates(groups))
    config, parts, ranks = schedule.config, [], ranks or schedule.config.micro_batches
    traffic = [group.traffic(ranks) for group in groups]
    layers, shared = len(config.layers), {group.name for group in groups if group.shared}
    for step in schedule.kinds():
        table = timetable(traffic, layers, step.adam_updated, step.update_adam, config.overlap)
        for update in table.updates:
            if update.group in shared:          # The update sends its features itself.
                table.model.extend(Transfer(kind, f"features of {update.group}", None, update.start, UPDATE)
                                   for kind in ("reduce_scatter", "all_gather"))
        if config.retrieval:        # The trainer sends the text.
            table.model.append(Transfer("all_gather", "text of the step", None, UPDATE, UPDATE))
        parts += [f"\nSteps from {step.index} on, {ranks} ranks, Adam {step.update_adam}\n",
                  timetable_text(table, layers)]
    return "\n".join(parts)


def parameter_count(model) -> int:
    """Of the whole model, the columns of the n-gram table on the other ranks included."""
    return sum(p.numel() for p in model.parameters()) + model.ngrams.numbers_elsewhere()


def run_facts(trainer, resumed=None) -> dict[str, object]:
    """What the log's header says; `resumed`: the checkpoint that the run goes on from."""
    config, model, loader, world = trainer.config, trainer.model, trainer.loader, trainer.world
    return {
        "command": sys.argv, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "preset": config.preset, "seed": config.seed, "target": config.target,
        "world_size": world.size,
        "attention": model.attention_backend, "attention_note": model.attention_note,
        "dtype": str(model.dtype), "fp8": bool(model.fp8), "fp8_parts": model.fp8,
        "parameters": parameter_count(model), "vocabulary": config.padded_vocab,
        "shards": len(loader.plan.text.paths), "epochs": loader.epochs,
        "candidates": list(loader.candidates.values()),     # in the order of the schedule
        "groups": rates(trainer.optimizer.groups),
        **world.found, **machine_facts(world.device, world.size), **(resumed.facts() if resumed else {}),
        "config": settings.flat(config) | {"data_path": Path(config.data_path).name}}


def ngram_facts(optimizer) -> dict[str, int]:
    """How many rows of the n-gram table were read and updated, for a log's summary; nothing without a table.

    If Adam updates in every second step, what an odd last step reads does not count.
    """
    tables = [shard.table for shard in optimizer.shards.values() if hasattr(shard, "table")]
    return {"ngram_rows_read": tables[0].rows_updated()} if tables else {}


def announcement(facts: dict, devices: str) -> str:
    """The first lines of a run, from the facts that its log's header has."""
    note = f" ({facts['attention_note']})" if facts["attention_note"] else ""
    lines = [f"{facts['preset']}: {facts['parameters'] / 1e6:.1f} M parameters in {facts['dtype']}, "
             f"{devices}",
             f"attention: {facts['attention']}{note}",
             f"FP8: {', '.join(facts['fp8_parts']) or 'no part'}; the rest: {facts['dtype']}"]
    if facts["candidates"]:
        computed = ", ".join(f"{n:,}" for n in facts["candidates"])
        lines.append(f"sampled softmax: {computed} of {facts['vocabulary']:,} logits a token")
    if facts["epochs"] > 1:
        end = "tokens repeat after the first" if facts["config"]["epochs"] > 1 else "it may end too soon"
        lines.append(f"data: the schedule takes about {facts['epochs']:.2f} epochs of {facts['shards']} "
                     f"shards; {end}")
    if facts["dirty"]:
        lines.append("git: changes or new files are not in the commit, so no record can be made of this run")
    elif facts["dirty"] is None:
        lines.append("git: it names no commit here, so no record can be made of this run")
    return "\n".join(lines)


def flops_per_token(config, step, candidates: int | None = None) -> float:
    """FLOP of forward and backward: 6 for each weight of a matmul, and attention over full windows.

    A sequence's first tokens see fewer, so the count is up to 2% too high, and more for short documents.

    `candidates`: tokens whose logits a sampled softmax computes.
    """
    keys, values, width = config.heads * config.qk_dim, config.heads * config.head_dim, config.width
    weights = len(config.layers) * (2 * keys + 2 * values + 8 * width) * width
    weights += (candidates or config.padded_vocab) * width + 2 * config.copy_channels * width
    seen = sum(min(layer.window(step.windows) * config.window_block, step.sequence_length)
               for layer in config.layers)
    return 6 * weights + 6 * (keys + values) * seen + 6 * config.copy_channels * step.sequence_length
