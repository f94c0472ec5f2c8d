"""What run.sh installs and starts, on machines made up of an `nvidia-smi` and a Python that takes notes."""
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, environment


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path):
    """Runs run.sh in a checkout of nothing else; returns what it asked of Python, and its errors."""
    def run(*arguments: str, capabilities: str) -> tuple[str, str]:
        for name in ("run.sh", "requirements.txt"):
            shutil.copy(ROOT / name, tmp_path)
        asked = tmp_path / "asked"
        script(tmp_path / ".venv/bin/pip", "")
        script(tmp_path / ".venv/bin/python", f'echo "$@" >>{asked}\n'
               'case "$*" in *pip*flash-attn*) echo "no such wheel" >&2; exit 1;; esac\n')
        cards = " ".join(f"'GPU {i}'" for i in range(len(capabilities.split())))
        script(tmp_path / "bin/nvidia-smi", "case \"$*\" in *compute_cap*) printf '%s\\n' "
               f"{capabilities};; *) printf '%s\\n' {cards};; esac\n")
        variables = environment(PATH=f"{tmp_path}/bin:/usr/bin:/bin:{Path(shutil.which('python3')).parent}")
        del variables["PYTHON"], variables["CUDA_VISIBLE_DEVICES"]
        done = subprocess.run(["./run.sh", *arguments], cwd=tmp_path, env=variables, capture_output=True,
                              text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return asked.read_text(), done.stderr
    return run


@pytest.mark.parametrize(("capabilities", "installs"),
                         [("8.6", False), ("9.0 9.0", True), ("12.0 8.9", False)])
def test_fast_attention_is_installed_where_every_gpu_is_hopper_or_newer(machine, capabilities, installs):
    """That it did not install ends nothing: the program starts all the same."""
    asked, errors = machine("--preset", "cpu", capabilities=capabilities)
    assert ("flash-attn-4[cu13]==" in asked) == installs
    assert ("did not install (see above). Torch's own attention runs" in errors) == installs
    assert f"--nproc_per_node={len(capabilities.split())} train_gpt.py --preset cpu" in asked


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_environment_for_another_machine(machine, kind):
    asked, _ = machine("install", kind, capabilities="8.0")
    assert ("flash-attn" in asked) == (kind == "cuda") and ("+cpu" in asked) == (kind == "cpu")
    assert "train_gpt.py" not in asked


def test_the_doctor_needs_no_data(machine):
    asked, errors = machine("doctor", capabilities="8.0")
    assert "-m records.tools.doctor" in asked and "fineweb" not in asked + errors
