"""Budgets of size, and what must stay out of the files."""
import ast
import subprocess

import pytest
from conftest import ROOT

# Without environments, and without the sources of past runs, which stay as they ran.
PYTHON = sorted(p for p in ROOT.rglob("*.py") if not any(x == "sources" or x.startswith(".") for x in p.relative_to(ROOT).parts))


def test_the_program_is_read_in_an_evening():
    assert len((ROOT / "train_gpt.py").read_text().splitlines()) <= 1200


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_kernel_files_are_small(path):
    assert len(path.read_text().splitlines()) <= 250


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: str(p.relative_to(ROOT)))
def test_functions_are_small(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            budget = 80 if node.name == "main" else 60
            assert node.end_lineno - node.lineno + 1 <= budget, f"{path.name}:{node.lineno} {node.name}"


def test_no_data_module_shadows_the_standard_library():
    import sys
    assert not {p.stem for p in (ROOT / "data").glob("*.py")} & set(sys.stdlib_module_names)


def test_no_generated_file_is_committed():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert not [name for name in tracked if name.endswith((".bin", ".pyc")) or name.startswith(("records/runs/", "data/shards/"))]
