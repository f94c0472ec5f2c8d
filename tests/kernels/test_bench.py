"""The benchmark finds all examples, keeps results of different days, and writes the README's tables."""
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from kernels.attention import output
from kernels.bench import __main__ as bench
from kernels.bench import discover, results, timing
from kernels.optimizer import sparse_adam, symmetric

ROOT = Path(bench.__file__).parents[2]
CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def row(name: str = "gram XXᵀ", shape: str = "4 × 768 × 768", **known) -> dict:
    start = dict(name=name, shape=shape, flop=1e9, bytes=1e6, rate=1.0, us=5.0, baseline_us=10.0,
                 device="some GPU", torch="0", triton="0", date="2026-11-21", commit=None,
                 file=results.source_hash(symmetric))
    return start | known


@pytest.mark.parametrize("size", ["odd", "real"])
def test_every_example_has_a_name_of_its_own(size):
    """In its module; among the real ones everywhere, because results go by name and shape."""
    found = [(module.__name__ * (size == "odd"), e.name, e.shape)
             for module, e in discover.every_example(size, CPU, torch.bfloat16)]
    assert found and max(Counter(found).values()) == 1


def test_the_tables_of_the_readme_are_those_of_the_result_files():
    text = results.README.read_text()
    assert text == results.with_tables(text, bench.tables()), "run: python -m kernels.bench --write"


def test_every_result_belongs_to_an_example():
    assert not results.without_example(results.read())


def test_a_row_says_whether_its_kernel_changed_since():
    usual, module = ("some GPU", "0", "0"), symmetric
    assert results.measured(row(), module, usual) == "2026-11-21"
    old = row(commit="1655bde", file=None)
    assert results.measured(old, module, usual) == "2026-11-21; 1655bde; changed since"
    assert results.measured(row(torch="1"), module, usual) == "2026-11-21; some GPU, 1, 0"


def test_times_are_grouped_by_room_and_computed_from_the_row():
    shown = row("scaled weight", "1536 × 768", us=100.0, baseline_us=1250.0, flop=79e9,
                file=results.source_hash(output))
    table = results.times([shown, row("no such kernel"), row("gram XXᵀ")])
    assert table.startswith("One some GPU, torch 0, triton 0") and "**attention**" in table
    assert table.endswith("| scaled weight | 1536 × 768 | 100 | 1,250 | 12.50× | 790 | 100% | 2026-11-21 |")
    assert "no such kernel" not in table and "gram" not in table        # The figure draws gram.


def test_numbers_with_and_without_commas_are_the_same():
    assert results.key("a", "49,152 × 768, 1 reader") == results.key("a", "49152 × 768, 1 reader")
    assert results.key("a", "4 × 768") != results.key("a", "47 × 68")


def test_new_rows_take_the_place_of_old_ones(tmp_path):
    old, new = [row(), row("polynomial")], [row(us=4.0), row("new")]
    results.write(results.merged(old, new), tmp_path / "results.json")
    assert results.read(tmp_path / "results.json") == [row(us=4.0), row("polynomial"), row("new")]


def test_a_readme_without_markers_is_refused():
    text = "# A\n<!-- times: by hand -->\nold\n<!-- end of times -->\nrest\n"
    assert results.between_markers(text, "times", "new") == text.replace("old\n", "\nnew\n\n")
    with pytest.raises(ValueError, match="no section"):
        results.between_markers(text, "polar errors", "new")


def test_a_line_says_what_was_measured():
    errors = dict(error=1e-3, plain_error=2e-3, correct=True)
    assert "ok" in timing.line(row() | errors) and "2.00×" in timing.line(row() | errors)
    assert "WRONG" in timing.line(dict(name="x", shape="1", **errors | dict(correct=False)))


def test_the_figure_is_drawn_from_rows(tmp_path):
    pytest.importorskip("matplotlib")
    names = "gram XXᵀ", "polynomial", "orthogonalise, AOL 4", "orthogonalise, plain 5"
    rows = [row(name, shape) for name in names
            for shape in ("4 × 768 × 768", "1 × 768 × 768", "4 × 3072 × 768", "1 × 4096 × 4096")]
    results.write([*rows, row("another kernel", "any shape")], tmp_path / "kernels.json")
    path = tmp_path / "figures" / "tflops.svg"
    assert bench.main(["--draw", str(tmp_path / "kernels.json"), "--figure", str(path)]) == 0
    drawn = path.read_text()
    texts = ("XXᵀ, XᵀX: gram", "batch × 3072 × 768", "4096", "effective TFLOP/s",
             "some GPU, torch 0, triton 0, 2026-11-21")
    assert all(f">{text}<" in drawn for text in texts)


def test_each_kernel_is_launched_and_what_is_not_finite_is_named(monkeypatch, capsys):
    """In two runs, the second one with a kernel that gives NaN."""
    found = [(sparse_adam, example) for example in sparse_adam.examples("odd", DEVICE, torch.float32)][-1:]
    monkeypatch.setattr(bench, "every_example", lambda *_: found)
    assert bench.main(["--odd"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("ok: kernels.optimizer.sparse_adam: Adam") == 1 + len(sparse_adam.CONFIGS)
    found[0][1].kernel, found[0][1].configs = lambda state, *_: state[0] * torch.nan, ()
    assert bench.main(["--odd"]) == 1
    assert capsys.readouterr().out.startswith("NOT FINITE: kernels.optimizer.sparse_adam")
    with pytest.raises(SystemExit, match="no example holds sparse_adma"):      # It has checked nothing.
        bench.main(["--odd", "sparse_adma"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_without_a_gpu_the_benchmark_ends_with_one_line():
    result = subprocess.run([sys.executable, "-m", "kernels.bench"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith("kernels.bench needs a CUDA GPU") and result.stderr.count("\n") == 1


def test_every_kernel_file_has_its_line_in_the_map():
    text = results.README.read_text()
    table = text[text.index("## One line a file"):text.index("## How to test")]
    for path in results.README.parent.glob("*/[!_]*.py"):
        if (room := path.parent.name) not in discover.TOOLS:
            lines = [line for line in table.splitlines() if line.startswith(f"| `{room}/")]
            assert any(f"{path.name}`" in line for line in lines), f"{room}/{path.name}"
