"""Every command that README and CONTRIBUTING show is run, here or by the test that the table names.

Of commands that are marked with the GPUs that they need only the settings are tried.
"""
import json
import re
import runpy
import shlex
import sys
from functools import partial
from pathlib import Path

import faults
import pytest
from conftest import ROOT, TINY, command, process, succeeded

import train_gpt
from kernels.bench import __main__ as bench
from records import __main__ as records
from records.tools import ablate, markdown, profile

SHORT = ("--preset cpu --steps 3 --extra_steps 0 --batch_tokens 128,256,384 --val_tokens 1024 "
         "--sequence_length 128,256,256 --val_chunk 512 --val_sequence_length 256").split()


def commands_of(name: str) -> dict[str, str]:
    """Command -> the comment behind it, or at the head of its block."""
    found: dict[str, str] = {}
    for block in re.findall(r"```(?:sh|bash)\n(.*?)```", (ROOT / name).read_text(), re.S):
        heading = ""
        for line in filter(None, map(str.strip, re.sub(r"\\\n *", "", block).splitlines())):
            shown, _, comment = line.partition("#")
            heading = heading if shown else comment
            found |= {shown.strip(): comment or heading} if shown else {}
    return found


COMMANDS, GUIDE = (list(commands_of(name)) for name in ("README.md", "CONTRIBUTING.md"))
MARKED = [line for line, comment in commands_of("CONTRIBUTING.md").items() if "GPU" in comment]
# How a command is run here: what is added to make it short, or why it is not run.
ELSEWHERE = {
    "./run.sh": "test_run.py::test_the_preset_for_a_laptop",
    "./run.sh test": "this is it: CI runs it",
    "./run.sh sample": "test_use.py: it wants the model that ./run.sh has trained",
    "./run.sh doctor": "test_doctor.py and test_run_sh.py: it takes half a minute",
    "./run.sh caches --help": "test_caches.py and test_run_sh.py: it starts no ranks",
    "python -m data.text books/ --validation 0.06 --out data/shards/books-gpt2":
        "GPT-2's vocabulary comes from the network",
    "DATA_PATH=data/shards/books-gpt2 ./run.sh --preset corpus": "with the shards of the line above",
}
GUIDE_ELSEWHERE = {
    "git clone … && cd …": "git's own", "git add -A && git commit && git status --short": "git's own",
    "source .venv/bin/activate": "the shell's own",
    "./run.sh test": "this is it: CI runs it",
    "python -m pytest -q tests/test_model.py": "a part of it",
    "python -m ruff check .": "CONTRIBUTING says where ruff comes from; the tests do not need it",
    "python -m records.tools.ablate --preset cpu --repeat 2 --try smear=false":
        "test_ablate.py::test_the_command_prints_a_row_a_try_and_the_first_again; it takes a minute",
    "python -m pytest -q tests/kernels -k smear": "a part of it",
    "COMPILE_ALL=1 python -m pytest -q tests/test_compile_targets.py":
        "test_compile_targets.py::test_kernels_compile_and_fit; all takes minutes",
    "python -m kernels.bench --write": "test_bench.py: it writes into the project",
    'python -m records new "records/runs/*-mine" --second "records/runs/*-second" --name mine --title '
    '"3.28 in … s on …" --contributors "@you" --changed "…" --why "…" --chosen-with 1 2 3':
        "test_records.py::test_a_new_record_is_valid; its words are tried below",
    "python -m records check": "test_records.py::test_the_records_of_this_repository_are_valid",
    "python -m records report": "test_records.py::test_report",
}
GPUS = ("torchrun --standalone --nproc_per_node=8", "srun ", "torchrun --nnodes")   # Only their settings run.


def test_the_readme_has_the_two_commands():
    assert set(ELSEWHERE) <= set(COMMANDS) and len(COMMANDS) > 12
    assert set(GUIDE_ELSEWHERE) <= set(GUIDE) and len(MARKED) == 8
    for where in (ELSEWHERE | GUIDE_ELSEWHERE).values():
        if "::" in where:
            file, name = where.split(";")[0].split("::")
            assert f"def {name}(" in (ROOT / "tests" / file).read_text()


def test_the_commands_for_gpus_start_the_program_with_torchrun():
    lines = [line for line in COMMANDS if line.startswith(GPUS)]
    assert lines and all("torchrun" in line and "train_gpt.py" in line for line in lines)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with texts, and with the logs of two runs, named as in the README."""
    runs = tmp_path_factory.mktemp("readme")
    (runs / "books").mkdir()
    tales = (json.dumps({"text": f"Tale {i}. " + "Once upon a time. " * 20}) for i in range(2000))
    (runs / "books" / "tales.jsonl").write_text("\n".join(tales))
    flags = [*TINY, *SHORT, "--micro_batches", "2", "--sequence_length", "64,128,128"]
    for name in ("short", "other"):
        succeeded(command(*flags, "--name", name, RUNS_PATH=str(runs)))
    return runs


HERE = [line for line in COMMANDS if line not in ELSEWHERE and not line.startswith(GPUS)]
HERE += [line for line in GUIDE if line not in {*GUIDE_ELSEWHERE, *MARKED, *COMMANDS}]


def test_the_words_of_a_new_record():
    [line] = [line for line in GUIDE if line.startswith("python -m records new")]
    assert records.parser().parse_args(shlex.split(line)[3:]).name == "mine"


@pytest.mark.parametrize("line", [*MARKED, *(line for line in COMMANDS if line.startswith(GPUS))])
def test_settings_of_a_command_for_gpus(line, monkeypatch):
    _, tool, settings = re.split(r"(-m \S+|train_gpt.py)(?= |$)", line)
    if tool == "-m records.tools.ablate":
        monkeypatch.setattr(sys, "argv", [tool, *shlex.split(settings)])
        settings = shlex.join(ablate.arguments()[1])
    if tool == "-m kernels.bench":
        assert bench.arguments(shlex.split(settings)).filters == ["smear"]
    else:
        train_gpt.parse([*shlex.split(settings), "--data_path", "x"])


def asked_of_torchrun(words: list[str], folder: Path) -> list[str]:
    """What run.sh would start on each rank: a Python that takes notes is in torchrun's place."""
    python = folder / "python"
    python.write_text("#!/bin/sh\nshift 2\necho \"$@\"\n")
    python.chmod(0o755)
    result = process(*words, PYTHON=str(python))
    *launcher, found = result.stdout.splitlines()[-1].split(" ", 2)
    assert launcher == ["--standalone", "--nproc_per_node=2"], result
    return found.split()


@pytest.mark.filterwarnings("ignore:.* found in sys.modules")
@pytest.mark.parametrize("line", HERE)
def test_a_command(line, place, tmp_path):
    """In this process where that has imported what the command needs, torch above all."""
    for shown, here in (("records/runs", place), ("-mine", "-short"), (" books/", f" {place}/books"),
                        ("data/shards/books", place / "shards"), ("--out plots", f"--out {tmp_path}"),
                        ("--out traces", f"--out {tmp_path}"), ("--save model", f"--save {tmp_path}/model")):
        line = line.replace(shown, str(here))
    words = shlex.split(line)
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
    variables["RUNS_PATH"] = str(place if "records" in words else tmp_path / "runs")
    words = asked_of_torchrun(words, tmp_path) if words[0] == "./run.sh" else words[1:]
    if words[0] == "train_gpt.py":
        succeeded(command(*words[1:], *SHORT, **variables))
    elif words[1] == "records.tools.profile":
        succeeded(command(*words[2:], *SHORT, program=profile.main, **variables))
    elif words[1].partition(".")[0] in ("records", "use"):
        module = partial(runpy.run_module, words[1], run_name="__main__")
        succeeded(command(*words[2:], program=module, **variables))
    else:
        succeeded(process(sys.executable, *words, **variables))


def test_the_table_of_faults_is_that_of_the_outcomes():
    """Each test that it names has an outcome; `python -m tests.faults --write` brings a new one in."""
    text, outcomes = (ROOT / "tests/README.md").read_text("utf-8"), faults.read(faults.KNOWN)
    assert markdown.between(text, "faults") == faults.tables(faults.table(), outcomes)
    names = [test for _, test in outcomes]
    for beginning in (word for *_, tests in faults.table() for word in tests.split()):
        assert any(name.startswith(beginning) for name in names), beginning
