"""Every command that the README shows is run, here or by the test that the table names."""
import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT, TINY, environment

import train_gpt

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
SHORT = ["--preset", "cpu", "--steps", "3", "--extra_steps", "0", "--val_tokens", "2048",
         "--batch_tokens", "512,768,1024"]
README = (ROOT / "README.md").read_text()
COMMANDS = [line.split("  #")[0].strip() for block in re.findall(r"```sh\n(.*?)```", README, re.S)
            for line in block.splitlines() if line.strip()]
# How a command is run here: what is added to make it short, or why it is not run.
ELSEWHERE = {
    "./run.sh": "test_run.py::test_the_preset_for_a_laptop",
    "./run.sh test": "this is it: CI runs it",
}
GPUS = ("torchrun --standalone --nproc_per_node=8", "srun ", "torchrun --nnodes")   # Only their settings run.


def test_the_readme_has_the_two_commands():
    assert set(ELSEWHERE) <= set(COMMANDS) and len(COMMANDS) > 12
    for where in ELSEWHERE.values():
        if "::" in where:
            file, name = where.split("::")
            assert f"def {name}(" in (ROOT / "tests" / file).read_text()


def settings_for_gpus() -> set[tuple[str, ...]]:
    """What the program is given in these commands, each once: they differ in their launchers."""
    lines = [line for line in COMMANDS if line.startswith(GPUS)]
    return {tuple(shlex.split(line.partition("train_gpt.py")[2])) for line in lines}


def test_the_commands_for_gpus_start_the_program_with_torchrun():
    lines = [line for line in COMMANDS if line.startswith(GPUS)]
    assert all("torchrun" in line and "train_gpt.py" in line for line in lines) and settings_for_gpus()


@pytest.mark.parametrize("settings", sorted(settings_for_gpus()), ids=" ".join)
def test_settings_of_commands_for_gpus(settings):
    """With two ranks on this machine's processor instead of GPUs, whichever launcher starts them."""
    train_gpt.parse_config([*settings, "--preset", "cpu"])
    words = [*TORCHRUN, "train_gpt.py", *settings, *SHORT, "--write_log", "false"]
    result = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the logs of two runs, named as in the README, for the commands that read them."""
    runs = tmp_path_factory.mktemp("readme")
    flags = ["--preset", "cpu", *TINY, "--micro_batches", "2", "--batch_tokens", "256,512,768"]
    for name in ("short", "other"):
        subprocess.run([sys.executable, "train_gpt.py", *flags, "--name", name], cwd=ROOT, check=True,
                       env=environment(RUNS_PATH=str(runs)), timeout=120, capture_output=True)
    return runs


HERE = [line for line in COMMANDS if line not in ELSEWHERE and not line.startswith(GPUS)]


@pytest.mark.parametrize("line", HERE)
def test_a_command(line, place, tmp_path):
    for shown, here in (("records/runs", place), ("--out plots", f"--out {tmp_path}"),
                        ("--out traces", f"--out {tmp_path}"), ("--save model", f"--save {tmp_path}/model")):
        line = line.replace(shown, str(here))
    words = shlex.split(line)
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
    if words[0] == "python":
        words[0] = sys.executable
    if "train_gpt.py" in words or "./run.sh" in words:
        words += [] if "--help" in words else SHORT
    variables["RUNS_PATH"] = str(place if "records" in words else tmp_path / "runs")
    result = subprocess.run(words, cwd=ROOT, env=environment(**variables), capture_output=True, text=True,
                            timeout=120)
    assert result.returncode == 0, result.stderr
