"""Budgets of size, names that nobody uses, and files that must not be committed.

Every message names a file and a line, and says what to do. The rules are checked on made-up sources first.
"""
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import mutate
import pytest
from conftest import ROOT

COLUMNS, PROSE_COLUMNS = 110, 120       # of Python, and of prose in Markdown
PROGRAM_LINES, PROGRAM_TOKENS = 1200, 11_000
KERNEL_FILE_LINES = 250
FUNCTION_LINES, MAIN_LINES = 60, 80
PARAMETERS, LAUNCHER_PARAMETERS = 8, 16


def is_ours(path: Path) -> bool:
    """Not an environment, another hidden folder, data, or a past run, which stays as it ran."""
    parts = path.relative_to(ROOT).parts
    past = parts[0] == "records" and (parts[1] == "runs" or re.match(r"\d{4}-\d\d-\d\d_", parts[1]))
    return not past and parts[:2] != ("data", "shards") and not any(part.startswith(".") for part in parts)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


PYTHON = {name_of(path): path.read_text() for path in sorted(ROOT.rglob("*.py")) if is_ours(path)}
MARKDOWN = {name_of(path): path.read_text() for path in sorted(ROOT.rglob("*.md")) if is_ours(path)}
KERNELS = {name: text for name, text in PYTHON.items() if name.startswith("kernels/")}


# ---- Lines

def long_lines(name: str, text: str) -> list[str]:
    return [f"{name}:{i}: {len(line)} columns; shorten or break this line, at most {COLUMNS}"
            for i, line in enumerate(text.splitlines(), 1) if len(line) > COLUMNS]


LINK = r"\[?!?\[[^\]]*\]\([^)]*\)(\]\([^)]*\))?"            # or an image, or an image in a link
LINKS_ALONE = re.compile(rf"\s*([-*] )?(({LINK}|<?https?://\S+|\[[^\]]+\]: \S+)[\s.,;]*)+")


def long_prose(name: str, text: str) -> list[str]:
    """Lines of prose that are too long; tables, code and lines that are links alone may be longer."""
    faults, in_code = [], False
    for i, line in enumerate(text.splitlines(), 1):
        fence = line.lstrip().startswith(("```", "~~~"))
        in_code ^= fence
        prose = not (fence or in_code or line.lstrip().startswith("|") or LINKS_ALONE.fullmatch(line))
        if prose and len(line) > PROSE_COLUMNS:
            faults.append(f"{name}:{i}: {len(line)} columns; break this paragraph, at most {PROSE_COLUMNS}")
    return faults


@pytest.mark.parametrize("name", PYTHON)
def test_lines_of_python_are_short(name):
    assert not (faults := long_lines(name, PYTHON[name])), "\n".join(faults)


@pytest.mark.parametrize("name", MARKDOWN)
def test_lines_of_prose_are_short(name):
    assert not (faults := long_prose(name, MARKDOWN[name])), "\n".join(faults)


def test_what_a_long_line_is():
    assert long_lines("a.py", "x" * 110 + "\n" + "y" * 111) == [
        "a.py:2: 111 columns; shorten or break this line, at most 110"]
    long = "word " * 30
    free = f"| {long} |\n```sh\n{long}\n```\n- [{long}](https://a.b)\n[![{long}](a.svg)](b) ![c](d)\n"
    free += "https://" + "a" * 200 + f"\n[a]: https://{'a' * 200}\n"
    assert long_prose("a.md", free) == []
    for prose in (long, f"- {long}", f"[a](b) {long}", f"    {long}"):
        assert [fault.split(" ")[0] for fault in long_prose("a.md", free + prose)] == ["a.md:9:"], prose


# ---- The program and the kernels' files

def count_tokens(text: str) -> int:
    """Python's tokens, without comments, line ends and indents. A string, or an f-string, is one token."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
               tokenize.ENDMARKER}
    begin, end = getattr(tokenize, "FSTRING_START", None), getattr(tokenize, "FSTRING_END", None)
    count, depth = 0, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        count += depth == 0 and token.type not in skipped
        depth += (token.type == begin) - (token.type == end) if begin else 0
    return count


def test_the_program_is_read_in_an_evening():
    text = PYTHON["train_gpt.py"]
    lines, tokens = len(text.splitlines()), count_tokens(text)
    assert lines <= PROGRAM_LINES, (
        f"train_gpt.py:{PROGRAM_LINES}: {lines} lines, at most {PROGRAM_LINES}; have less, not longer ones")
    assert tokens <= PROGRAM_TOKENS, (
        f"train_gpt.py:1: {tokens:,} tokens, at most {PROGRAM_TOKENS:,}; have less of them")


def test_what_a_token_is():
    assert count_tokens('"""Two\nlines."""\nx = 1  # one\n') == 4
    assert count_tokens('def f(a):\n    """What."""\n    return f"{a} {a:>3} and {a + 1}"\n') == 9
    assert count_tokens('x = """no\ndocstring"""\n') == 3


@pytest.mark.parametrize("name", KERNELS)
def test_files_of_kernels_are_small(name):
    lines = len(KERNELS[name].splitlines())
    assert lines <= KERNEL_FILE_LINES, (
        f"{name}:{KERNEL_FILE_LINES}: {lines} lines, at most {KERNEL_FILE_LINES}; split it by subject")


# ---- Functions

def functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, ast.ClassDef | None]]:
    """Every function, nested ones too, and the class that it is a method of."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield child, node if isinstance(node, ast.ClassDef) else None


def is_triton(function: ast.FunctionDef) -> bool:
    """Whether Triton compiles it: its decorators are `triton.jit`, or `triton.jit(...)` and the like."""
    return any(ast.unparse(decorator).startswith("triton.") for decorator in function.decorator_list)


@cache                      # Not when this file is imported: every worker of pytest-xdist does that.
def triton_functions() -> set[str]:
    texts = (text for text in PYTHON.values() if "@triton." in text)
    return {function.name for text in texts for function, _ in functions(ast.parse(text))
            if is_triton(function)}


def most_parameters(function: ast.FunctionDef, of_class: ast.ClassDef | None) -> float:
    """How many parameters a function may have, which depends on what it is for."""
    if is_triton(function):
        return float("inf")
    bases = [] if of_class is None else of_class.bases
    of_autograd = any(ast.unparse(base).endswith("Function") for base in bases)
    launches = any(isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
                   and isinstance(node.func.value, ast.Name) and node.func.value.id in triton_functions()
                   for node in ast.walk(function))
    passes = of_autograd and function.name in ("forward", "backward")
    return LAUNCHER_PARAMETERS if launches or passes else PARAMETERS


def parameters_of(function: ast.FunctionDef) -> int:
    """Without self and cls."""
    args = function.args
    every = (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg)
    return sum(arg is not None and arg.arg not in ("self", "cls") for arg in every)


def large_functions(name: str, text: str) -> list[str]:
    faults = []
    for function, of_class in functions(ast.parse(text)):
        where = f"{name}:{function.lineno}: {function.name}"
        lines = function.end_lineno - function.lineno + 1
        most = MAIN_LINES if function.name == "main" else FUNCTION_LINES
        if lines > most:
            faults.append(f"{where} has {lines} lines, at most {most}; split it where its subject changes")
        count, most = parameters_of(function), most_parameters(function, of_class)
        if count > most:
            faults.append(f"{where} has {count} parameters, at most {most}; group what goes together")
    return faults


@pytest.mark.parametrize("name", PYTHON)
def test_functions_are_small(name):
    assert not (faults := large_functions(name, PYTHON[name])), "\n".join(faults)


def test_what_a_large_function_is():
    def found(text: str) -> list[str]:
        return [" ".join(fault.split()[1:5]) for fault in large_functions("a.py", text)]

    def with_parameters(count: int, more: str = "") -> str:
        return f"({more}{', '.join(f'x{i}' for i in range(count))})"

    body = "    pass\n" * 60
    assert found(f"def f():\n{body}") == ["f has 61 lines,"] and found(f"def main():\n{body}") == []
    assert found(f"class A:\n    async def f{with_parameters(8, 'self, ')}: pass\n") == []
    assert found(f"def f{with_parameters(7, '*a, b=1, ')}: pass\n") == ["f has 9 parameters,"]
    assert found(f"def f():\n    def g{with_parameters(9)}: pass\n") == ["g has 9 parameters,"]
    assert found(f"@triton.jit\ndef f{with_parameters(30)}: pass\n") == []
    one = sorted(triton_functions())[0]
    assert found(f"def f{with_parameters(16)}: {one}[1,](x0)\n") == []
    assert found(f"def f{with_parameters(17)}: {one}[1,](x0)\n") == ["f has 17 parameters,"]
    assert found(f"def f{with_parameters(9)}: anything[1](x0)\n") == ["f has 9 parameters,"]
    of_autograd = "class A(torch.autograd.Function):\n    def {}" + with_parameters(15, "ctx, ") + ": pass\n"
    assert found(of_autograd.format("forward")) == found(of_autograd.format("backward")) == []
    assert found(of_autograd.format("other")) == ["other has 16 parameters,"]


# ---- Names that nobody uses

def definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Public names that a module defines at its top level."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = [node.name]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)]
        else:
            continue
        yield from ((name, node) for name in names if not name.startswith("_"))


def uses(name: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names that a file reads or imports, with their lines; what a room passes on is not used by that."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.ImportFrom) and not name.endswith("__init__.py"):
            yield from ((alias.name, node.lineno) for alias in node.names)


def unused(sources: dict[str, str], folder: str = "kernels/") -> dict[str, list[str]]:
    """By file of that folder: its public names that nothing uses but their own definitions."""
    trees = {name: ast.parse(text) for name, text in sources.items()}
    places: dict[str, set[tuple[str, int]]] = {}
    for name, tree in trees.items():
        for used, line in uses(name, tree):
            places.setdefault(used, set()).add((name, line))
    faults: dict[str, list[str]] = {name: [] for name in trees if name.startswith(folder)}
    for name in faults:
        for defined, node in definitions(trees[name]):
            own = {(name, line) for line in range(node.lineno, node.end_lineno + 1)}
            if not places.get(defined, set()) - own:
                faults[name].append(f"{name}:{node.lineno}: nothing uses {defined}; delete it")
    return faults


@cache
def unused_names() -> dict[str, list[str]]:
    return unused(PYTHON)


@pytest.mark.parametrize("name", KERNELS)
def test_every_public_name_of_a_kernel_is_used(name):
    assert not (faults := unused_names()[name]), "\n".join(faults)


def test_what_an_unused_name_is():
    kernel = "def f(): return f()\nA = 1\nB: int = A\nclass C: pass\n"
    kernel += "def g(): pass\ndef _h(): pass\ndef k(): pass\n"
    room = "from kernels.a import f, C\n__all__ = ['f']\n"
    found = unused({"kernels/a.py": kernel, "kernels/__init__.py": room,
                    "tests/b.py": "from kernels.a import g\nx = kernels.k\n"})
    assert found == {"kernels/__init__.py": [], "kernels/a.py": [
        "kernels/a.py:1: nothing uses f; delete it", "kernels/a.py:3: nothing uses B; delete it",
        "kernels/a.py:4: nothing uses C; delete it"]}


# ---- Files

def test_no_module_of_data_shadows_the_standard_library():
    names = {name.removeprefix("data/").removesuffix(".py") for name in PYTHON if name.startswith("data/")}
    assert not (shadows := names & set(sys.stdlib_module_names)), f"rename data/{min(shadows)}.py"


def test_every_mutation_still_has_its_line():
    """Otherwise `python -m tests.mutate` tries fewer and fewer."""
    table = mutate.read_table(mutate.TABLE.read_text())
    stale = [m for m in table if (ROOT / m.file).read_text().count(m.old) != 1]
    assert not stale, f"mend tests/mutations.txt: {stale}"


def test_no_generated_file_is_committed():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    generated = [name for name in tracked if name.endswith((".bin", ".pyc"))
                 or name.startswith(("records/runs/", "data/shards/"))]
    assert not generated, f"git rm --cached {' '.join(generated)}"
