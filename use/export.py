"""A trained model as a folder that the library transformers loads.

    python -m use.export FOLDER --out OTHER
    python -m use.export FOLDER --out OTHER --shards data/shards/mine    says what leaving the table costs

    AutoModelForCausalLM.from_pretrained("OTHER", trust_remote_code=True)

OTHER holds the weights in float32, and `modeling_speedrun.py`, which computes them. Rows of the n-gram table
are exported if they take no more than --most and are for n-grams of tokens alone, because
`modeling_speedrun.py` knows no classes of tokens and no guesses. A larger table would make a download that
nobody wants. Without its table a model has a higher loss: --shards measures the loss with and without the
table, and writes both into the model's card.
"""
import shutil
from pathlib import Path

import torch
from torch import Tensor

from data.errors import DataError, positive, printable, tool_parser, whole
from kernels.loss.cross_entropy import SOFTCAP
from kernels.ngrams import HASH
from records.run.weights import TensorFiles, name_files, new_folder, write_json
from use.model import PLAIN, Saved, choose_device, load, one_line
from use.score import score_shards

MODELING = Path(__file__).with_name("modeling_speedrun.py")
CARD = """\
---
library_name: transformers
---
# {name}

A small language model, trained with the readable speedrun for {steps:,} steps to a validation loss of
{loss:.4f} nats a token. {table}

    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True)

Its vocabulary is {vocabulary}. A text begins with token {start}, which no tokenizer puts there by itself.
"""


def settings_of(saved: Saved, with_table: bool, positions: int) -> dict:
    """config.json for transformers."""
    model, config, step = saved.model, saved.model.config, saved.step
    cos, _, scale = model.rotary[step.windows[1] * config.window_block]
    layers = [{"window": layer.window(step.windows) * config.window_block, "source": model.sources[i],
               "values": i in model.value_index, "key_offset": config.key_offset and layer.long_window}
              for i, layer in enumerate(config.layers)]
    return {
        "model_type": "readable_speedrun", "architectures": ["SpeedrunForCausalLM"], "dtype": "float32",
        "auto_map": {"AutoConfig": "modeling_speedrun.SpeedrunConfig",
                     "AutoModelForCausalLM": "modeling_speedrun.SpeedrunForCausalLM"},
        "vocab_size": config.vocab_size, "padded_vocab": config.padded_vocab, "width": config.width,
        "heads": config.heads, "head_dim": config.head_dim, "qk_dim": config.qk_dim, "rotary": cos.shape[1],
        "max_position_embeddings": positions, "attention_scale": scale, "softcap": SOFTCAP,
        "attention_gate_channels": model.attention_gates[0].size(1) if model.attention_gates else 0,
        "gate_channels": config.gate_channels, "smear": config.smear, "backout": model.backout_stream,
        "copy_channels": config.copy_channels, "copy_scale": model.copy_head.scale,
        "layers": layers, "ngrams": config.ngrams if with_table else (), "ngram_count": saved.facts["rows"],
        "ngram_written": saved.facts["written"] if with_table else 0, "ngram_hash": HASH, "use_cache": False,
        "bos_token_id": config.document_start, "eos_token_id": config.document_start,
        "pad_token_id": config.document_start, "tie_word_embeddings": False}


def weights_of(saved: Saved, with_table: bool, positions: int) -> dict[str, Tensor]:
    """The weights by their names in modeling_speedrun.py."""
    model, config = saved.model, saved.model.config
    cos, sin, _ = model.rotary[saved.step.windows[1] * config.window_block]
    weights = {"head": model.head, "scalars": model.scalars,
               "cos": cos[:positions], "sin": sin[:positions]}
    if model.smear_gate is not None:
        weights["smear_gate"] = model.smear_gate
    weights |= {f"copy_head.{name}": x for name, x in model.copy_head.named_parameters()}
    for i in range(len(config.layers)):
        scaled = zip(("qkv", "out"), model.weights(i), model.attention_scalars[i])
        mine = {name: (matrix * scale[None]).type_as(matrix) for name, matrix, scale in scaled}
        mine["mlp_in"], mine["mlp_out"] = model.weights(i)[2:]
        mine["scales"] = model.residual_scalars[i]
        if (place := model.value_index.get(i)) is not None:
            mine |= {"values": model.value_tables[place], "gate": model.value_gates[place]}
        if model.attention_gates:
            mine["attention_gate"] = model.attention_gates[i]
        if with_table:
            mine["ngram_scale"] = model.ngrams.scales[i]
        weights |= {f"layers.{i}.{name}": x for name, x in mine.items()}
    weights = {name: x.detach().float().clone() for name, x in weights.items()}
    if with_table:
        rows = saved.written
        weights |= {"ngram_numbers": rows.numbers, "ngram_rows": torch.cat(rows.rows).float()}
    return weights


def cost_of_leaving(saved: Saved, shards: Path, tokens: int) -> tuple[float, float]:
    """The validation loss with the n-gram table and without, nats a token."""
    losses, model = [], saved.model
    lookup = model.ops.lookup
    for of_table in (1, 0):
        model.ops = model.ops._replace(lookup=lambda table, *more: lookup(table, *more) * (
            of_table if table.is_meta else 1))
        losses.append(score_shards(saved, shards, tokens))
    model.ops = model.ops._replace(lookup=lookup)
    return tuple(losses)


def table_text(saved: Saved, with_table: bool, shards: Path | None, tokens: int) -> str:
    """What the card says about the n-gram table."""
    if not saved.facts["written"]:
        return "It has no n-gram table."
    count, of = saved.facts["written"], f"{saved.facts['rows']:,}"
    if with_table:
        return f"Of its n-gram table it has the {count:,} of {of} rows that training wrote."
    text = f"Its n-gram table, {count:,} rows of {of} written, was left out"
    if shards is None:
        return f"{text}; what that costs was not measured."
    whole, without = cost_of_leaving(saved, shards, tokens)
    return (f"{text}: on the first {tokens:,} tokens of {shards.name} the loss is {without:.4f} nats a "
            f"token, with the table {whole:.4f}.")


def room(saved: Saved) -> int:
    """The positions that a model has rotary tables for."""
    return len(saved.model.rotary[saved.step.windows[1] * saved.model.config.window_block][0])


def export(saved: Saved, out: Path, with_table: bool, shards: Path | None, tokens: int,
           positions: int | None = None) -> str:
    """Write the folder `out`; returns what its card says about the n-gram table."""
    positions = positions or room(saved)
    table = table_text(saved, with_table, shards, tokens)
    config = settings_of(saved, with_table, positions)
    with new_folder(out) as part:
        files = TensorFiles(part, "model")
        for name, x in weights_of(saved, with_table, positions).items():
            files.add(name, x)
        files.flush()
        name_files(files)
        write_json(part / "config.json", config)
        special = {name: config[name]
                   for name in ("bos_token_id", "eos_token_id", "pad_token_id", "use_cache")}
        write_json(part / "generation_config.json", special)
        shutil.copy(MODELING, part)
        card = CARD.format(**saved.facts | {"vocabulary": saved.facts["vocabulary"] or "one of its own"},
                           table=table, start=config["bos_token_id"])
        (part / "README.md").write_text(card)
    return table


def main() -> None:
    parser = tool_parser("use.export", __doc__)
    option = parser.add_argument
    option("folder", type=Path, metavar="FOLDER", help="of --save")
    option("--out", type=Path, required=True, metavar="OTHER", help="a new folder")
    option("--most", type=float, default=2.0, metavar="GB", help="of the n-gram table (default: %(default)s)")
    option("--shards", type=Path, metavar="DIR", help="token shards, to measure the loss without the table")
    option("--tokens", type=positive, metavar="N", help="of their validation text (default: as in training)")
    option("--positions", type=whole(1, 1_000_000), metavar="N",
           help="tokens that the model takes (default: as in training)")
    with one_line(parser) as options:
        if options.out.exists():
            raise DataError(f"{options.out}: exists; choose another --out or remove it")
        saved = load(options.folder, choose_device(options.device), **PLAIN)
        if (options.positions or 0) > room(saved):
            saved = load(options.folder, saved.model.device, **PLAIN, val_chunk=options.positions)
        config = saved.model.config
        size = saved.facts["written"] * (4 * config.head_dim + 4)
        # modeling_speedrun.py looks up n-grams of tokens alone.
        with_table = 0 < size <= options.most * 1e9 and not (config.ngram_classes or config.near_match)
        if options.shards is None and size and not with_table:
            print("python -m use.export: the n-gram table is left out; --shards DIR measures what that costs")
        tokens = options.tokens or config.val_tokens
        table = export(saved, options.out, with_table, options.shards, tokens, options.positions)
        print(printable(f"{options.out}: {table}"))


if __name__ == "__main__":
    main()
