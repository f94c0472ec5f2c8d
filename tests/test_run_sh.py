"""What run.sh installs and starts, on machines made up of an `nvidia-smi` and a Python that takes notes."""
import os
import pty
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from conftest import ROOT, environment, process


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path):
    """Runs run.sh in a checkout of nothing else; returns what it asked of Python, and its errors.

    pip fails where it is asked for `lacks`.
    """
    def run(*arguments: str, capabilities: str, lacks: str = "flash-attn", **more: str) -> tuple[str, str]:
        for name in ("run.sh", "requirements.txt"):
            shutil.copy(ROOT / name, tmp_path)
        asked = tmp_path / "asked"
        script(tmp_path / ".venv/bin/pip", "")
        script(tmp_path / ".venv/bin/python", f'echo "$@" >>{asked}\n'
               f'case "$*" in *pip*{lacks}*) echo "no such wheel" >&2; exit 1;; esac\n')
        cards = " ".join(f"'GPU {i}'" for i in range(len(capabilities.split())))
        script(tmp_path / "bin/nvidia-smi", "case \"$*\" in *compute_cap*) printf '%s\\n' "
               f"{capabilities};; *) printf '%s\\n' {cards};; esac\n")
        variables = environment(PATH=f"{tmp_path}/bin:/usr/bin:/bin:{Path(shutil.which('python3')).parent}")
        del variables["PYTHON"], variables["CUDA_VISIBLE_DEVICES"]
        variables |= more
        done = subprocess.run(["./run.sh", *arguments], cwd=tmp_path, env=variables, capture_output=True,
                              text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return asked.read_text(), done.stderr
    return run


@pytest.mark.parametrize(("capabilities", "installs"),
                         [("8.6", False), ("9.0 10.0", False), ("10.0 10.0", True), ("12.0 8.9", False)])
def test_fast_attention_is_installed_where_every_gpu_is_newer_than_hopper(machine, capabilities, installs):
    """That it did not install ends nothing: the program starts all the same."""
    asked, errors = machine("--preset", "cpu", capabilities=capabilities)
    assert ("flash-attn-4[cu13]==" in asked) == installs
    assert ("did not install (see above). Torch's own attention runs" in errors) == installs
    assert f"--nproc_per_node={len(capabilities.split())} train_gpt.py --preset cpu" in asked


@pytest.mark.parametrize("visible, flags, ranks", [
    ("0,1,2,3", "--steps 9", 4), ("GPU-a,MIG-b", "--steps 9", 2), ("-1", "--steps 9", 2),
    ("0, 1,2, 3", "--steps 9", 4), ("0,-1,1", "--steps 9", 1), ("", "--steps 9", 2),
    ("0,1,2,3", "--preset cpu", 2), ("0", "--preset cpu", 1),
    ("0,1,2,3", "--steps 9 --preset=cpu --seed 1", 2),
])
def test_ranks_are_the_gpus_that_may_be_seen(machine, visible, flags, ranks):
    """None behind -1, where two ranks share the CPU; the small model has work for two."""
    asked, _ = machine(*flags.split(), "--data_path", "x", capabilities="10.0 10.0 10.0 10.0",
                       CUDA_VISIBLE_DEVICES=visible)
    assert f"--nproc_per_node={ranks} train_gpt.py" in asked
    assert ("flash-attn" in asked) == (visible not in ("", "-1"))


@pytest.mark.parametrize("python, status, words", [
    ("/nowhere/python", 2, "is no Python with torch"), ("/bin/false", 2, "is no Python with torch"),
    ("/bin/true", 0, ""),
], ids=["missing", "no torch", "through a link"])
def test_another_python_and_a_link(tmp_path, python, status, words):
    (tmp_path / "link.sh").symlink_to(ROOT / "run.sh")
    done = process(str(tmp_path / "link.sh"), "--explain", cwd=tmp_path, PYTHON=python)
    assert done.returncode == status and words in done.stderr and len(done.stderr.splitlines()) == bool(words)


@pytest.mark.parametrize("kept", [True, False])
def test_bytecode_is_kept_where_torch_has_none(tmp_path, kept):
    """Beside torch or in a folder of its own, whatever the environment says about writing it."""
    script(tmp_path / "python", f'case "$*" in *cache_from_source*) exit {int(not kept)};; esac\n'
           'echo "${PYTHONPYCACHEPREFIX-none} ${PYTHONDONTWRITEBYTECODE-unset}"\n')
    done = process("./run.sh", "--explain", PYTHON=str(tmp_path / "python"), PYTHONDONTWRITEBYTECODE="1",
                   XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout.split()[-2:] == (["none", "1"] if kept else [f"{tmp_path}/python-bytecode", "unset"])


def test_ctrl_c_while_pip_installs_starts_nothing(tmp_path):
    """In a terminal of its own, where Ctrl-C reaches the script and pip, which says that it failed."""
    for name in ("run.sh", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    script(tmp_path / ".venv/bin/pip", "")
    script(tmp_path / ".venv/bin/python", f'echo "$@" >>{tmp_path}/asked\ntrap "exit 1" INT\n'
           "sleep 20 & wait\n")
    variables = environment(PATH=f"/usr/bin:/bin:{Path(shutil.which('python3')).parent}")
    del variables["PYTHON"]
    child, terminal = pty.fork()
    if not child:
        os.chdir(tmp_path)
        os.execve("./run.sh", ["./run.sh", "--preset", "cpu"], variables)
    while not (tmp_path / "asked").exists():
        time.sleep(0.05)
    os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    os.close(terminal)
    assert len((tmp_path / "asked").read_text().splitlines()) == 1 and not (tmp_path / ".venv/stamp").exists()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_environment_for_another_machine(machine, kind):
    asked, _ = machine("install", kind, capabilities="8.0")
    assert ("flash-attn" in asked) == (kind == "cuda") and ("+cpu" in asked) == (kind == "cpu")
    assert "train_gpt.py" not in asked


def test_without_a_cpu_build_of_torch_the_usual_one_is_installed(machine):
    asked, errors = machine("install", "cpu", capabilities="8.0", lacks="+cpu")
    tries = asked.splitlines()
    assert ["+cpu" in line for line in tries] == [True, True, False] and " -r " in tries[-1]
    assert "no CPU build of torch==" in errors and len(errors.splitlines()) == 1


def test_the_doctor_needs_no_data(machine):
    asked, errors = machine("doctor", capabilities="8.0")
    assert "-m records.tools.doctor" in asked and "fineweb" not in asked + errors


def test_caches_are_packed_by_one_process_without_data(machine):
    asked, errors = machine("caches", "pack", "kernels.tar.gz", capabilities="9.0 9.0")
    assert asked.splitlines()[-1] == "-m records.tools.caches pack kernels.tar.gz"
    assert "nproc_per_node" not in asked and "fineweb" not in asked + errors


@pytest.mark.parametrize("ends, said", [
    ("sys.exit('train_gpt.py: no')", "train_gpt.py: no"),
    ("os.kill(os.getpid(), signal.SIGTERM)", "run.sh: rank 1 was ended by SIGTERM"),
    ("os.kill(os.getpid(), signal.SIGKILL)", "run.sh: rank 1 was ended by SIGKILL"),
], ids=["message", "SIGTERM", "SIGKILL"])
def test_only_the_rank_that_ended_the_run_is_named(tmp_path, ends, said):
    """Rank 1 ends; the launcher then ends rank 0."""
    shutil.copy(ROOT / "run.sh", tmp_path)
    (tmp_path / "train_gpt.py").write_text("import os, signal, sys, time\n"
                                           f"if os.environ['RANK'] == '1': {ends}\ntime.sleep(60)\n")
    done = process(str(tmp_path / "run.sh"), "--preset", "cpu", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, said + "\n")


def test_a_setting_that_all_ranks_refuse_takes_one_line():
    done = process("./run.sh", "--preset", "cpu", "--width", "0")
    assert done.returncode == 2 and done.stderr.startswith("train_gpt.py: --width 0: ")
    assert len(done.stderr.splitlines()) == 1
