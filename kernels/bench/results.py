"""What was measured, one row an example, and the tables that kernels/README.md makes of it.

Each row says where, when and of which code it was measured, so that rows of different days can stand side by
side. A row whose kernel's file is another now is marked "changed since". The mark says nothing about the
files it imports.
"""
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from types import ModuleType

import torch

from kernels.backend import triton
from kernels.bench.discover import every_example
from kernels.bench.timing import roofline, tflops
from kernels.example import Example
from records.run.machine import output_of

RESULTS = Path(__file__).parent / "results.json"
README = Path(__file__).parents[1] / "README.md"
MACHINE = ("device", "torch", "triton")
DRAWN = "gram", "polynomial", "orthogonalise, AOL 4", "orthogonalise, plain 5"  # how the names begin


def source_hash(module: ModuleType) -> str:
    """sha256 of the file of a kernel's module."""
    return hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()


def commit() -> str | None:
    """The checked-out commit, with a + if files differ from it; None outside a git checkout."""
    found = output_of("git", "rev-parse", "--short=7", "HEAD")
    return found and found + "+" * bool(output_of("git", "status", "--porcelain", "-uno"))


def origin(module: ModuleType) -> dict:
    """What a row says of where it comes from."""
    machine = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__)
    return machine | dict(date=date.today().isoformat(), commit=commit(), file=source_hash(module))


def read(path: Path = RESULTS) -> list[dict]:
    return json.loads(path.read_text())["rows"]


def write(rows: list[dict], path: Path) -> None:
    """As JSON with a line for each row, so that a change can be read."""
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text('{"rows": [\n' + lines + "\n]}\n")


def key(name: str, shape: str) -> str:
    """What makes a row that of an example, however its numbers are written: 49152 or 49,152."""
    return re.sub(r"(?<=\d),(?=\d)", "", f"{name}: {shape}")


def by_key(rows: list[dict]) -> dict[str, dict]:
    return {key(row["name"], row["shape"]): row for row in rows}


def merged(old: list[dict], new: list[dict]) -> list[dict]:
    """New rows take the place of old ones of the same example; others are added at the end."""
    return list((by_key(old) | by_key(new)).values())


def real_examples() -> Iterator[tuple[ModuleType, Example]]:
    return every_example("real", torch.device("cpu"), torch.bfloat16)


def without_example(rows: list[dict]) -> list[str]:
    """The rows that belong to no example any more."""
    real = {key(example.name, example.shape) for _, example in real_examples()}
    return [name for name in by_key(rows) if name not in real]


def number(us: float | None) -> str:
    return "–" if us is None else f"{us:,.0f}" if us >= 100 else f"{us:.1f}"


def measured(row: dict, module: ModuleType, usual: tuple) -> str:
    """When, and whatever else a reader must know to trust a row."""
    machine = tuple(row[key] for key in MACHINE)
    parts = [row["date"], row["commit"], row.get("note"), ", ".join(machine) if machine != usual else None,
             "changed since" if row["file"] != source_hash(module) else None]
    return "; ".join(part for part in parts if part)


def times(rows: list[dict]) -> str:
    """The tables of times in Markdown: a table for each folder, in the order of the model.

    Rows that the figure draws are left out.
    """
    found = by_key([row for row in rows if not row["name"].startswith(DRAWN)])
    usual = Counter(tuple(row[key] for key in MACHINE) for row in rows).most_common(1)[0][0]
    lines, room = ["One {}, torch {}, triton {}, unless a row says otherwise.".format(*usual)], None
    for module, example in real_examples():
        row = found.get(key(example.name, example.shape))
        if row is None:
            continue
        if room != (room := module.__name__.split(".")[1]):
            lines += ["", f"**{room}**", "",
                      "| example | shape | kernel, µs | against, µs | gain | TFLOP/s | roofline | measured |",
                      "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |"]
        gain = f"{row['baseline_us'] / row['us']:.2f}×" if row["baseline_us"] else "–"
        rate = f"{tflops(row):,.0f}" if row["flop"] else "–"
        cells = (example.name, example.shape, number(row["us"]), number(row["baseline_us"]), gain, rate,
                 f"{roofline(row):.0%}", measured(row, module, usual))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def between_markers(text: str, name: str, content: str) -> str:
    """`text` with its generated section of that name replaced. Raises ValueError if it has none."""
    pattern = re.compile(rf"(<!-- {name}: .*?-->\n).*?(<!-- end of {name} -->)", re.S)
    if not pattern.search(text):
        raise ValueError(f"no section between <!-- {name}: … --> and <!-- end of {name} -->")
    return pattern.sub(lambda match: f"{match[1]}\n{content}\n\n{match[2]}", text)


def with_tables(text: str, tables: Iterable[tuple[str, str]]) -> str:
    """A README with all generated sections as they should be."""
    for name, content in tables:
        text = between_markers(text, name, content)
    return text
