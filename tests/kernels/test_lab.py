"""The studies: matrices recorded in training, their distance to the polar factor, and the stress test."""
import json
from dataclasses import replace

import pytest
import torch
from checks import DEVICE, random

from kernels.lab import polar_error, stress
from kernels.optimizer import newton_schulz_reference, orthogonalize


def test_stress_finds_each_fault(monkeypatch):
    """A wrong scale, a rare NaN and changing results are found. The reference has no fault."""
    plain, calls = newton_schulz_reference, []

    def now_and_then(x, *arguments):
        calls.append(x)
        return plain(x, *arguments) * (float("nan") if len(calls) == 3 else 1)

    bases = random(3, 40, 24, dtype=stress.DTYPE)
    faults = {"nothing": plain, "too far": lambda x, *rest: 1.2 * plain(x, *rest),
              "too large": lambda x, *rest: 2 * plain(x, *rest), "not finite": now_and_then,
              "not repeated": lambda x, *rest: plain(x, *rest) + 1e-3 * torch.randn_like(x)}
    for fault, function in faults.items():
        monkeypatch.setattr(orthogonalize, "newton_schulz", function)
        found = stress.stress(bases, *stress.METHODS["AOL 4"], calls=4)
        assert found[fault] > 0 if fault in found else not any(found[name] for name in stress.FAULTS)


def test_each_kernel_is_launched_and_what_is_not_finite_is_named(monkeypatch, capsys):
    """In two runs, the second one with a kernel that gives NaN."""
    from kernels.optimizer import sparse_adam
    found = [(sparse_adam, example) for example in sparse_adam.examples("odd", DEVICE, torch.float32)][-1:]
    monkeypatch.setattr(stress, "every_example", lambda *_: found)
    assert stress.main(["--each"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("ok: kernels.optimizer.sparse_adam: Adam") == 1 + len(sparse_adam.CONFIGS)
    found[0][1].kernel, found[0][1].configs = lambda state, *_: state[0] * torch.nan, ()
    assert stress.main(["--each"]) == 1
    assert capsys.readouterr().out.startswith("NOT FINITE: kernels.optimizer.sparse_adam")


def test_matrices_from_training_are_recorded_measured_and_drawn(config, tmp_path, capsys):
    """On a tiny run; the recorded matrices are those that the optimizer orthogonalises."""
    from kernels.lab import record_momentum
    torch.use_deterministic_algorithms(False)  # Not all of training is deterministic.
    matrices, losses = record_momentum.capture(replace(config, compile=False), [1, 2])
    shapes = {tuple(x.shape) for steps in matrices.values() for x in steps.values()}
    assert len(losses) == 2 and shapes == {(64, 64), (256, 64)}
    assert len(matrices) == 8 and all(set(steps) == {1, 2} and steps[2].any() for steps in matrices.values())
    torch.save({"matrices": matrices, "losses": losses}, tmp_path / "momentum.pt")
    measure_and_draw(tmp_path, ["--real", str(tmp_path / "momentum.pt")], capsys)


def test_made_up_matrices_are_measured_and_drawn(tmp_path, capsys):
    shapes = {"MLP-in 5": (96, 24), "QK 0": (24, 24)}
    matrices = {name: {step: random(*shape) for step in (1, 50)} for name, shape in shapes.items()}
    torch.save({"matrices": matrices, "losses": []}, tmp_path / "momentum.pt")
    measure_and_draw(tmp_path, ["--real", str(tmp_path / "momentum.pt")], capsys)


def measure_and_draw(folder, arguments, capsys) -> None:
    result = folder / "polar.json"
    assert polar_error.main(["--size", "24", *arguments, "--out", str(result)]) == 0
    printed, report = capsys.readouterr().out.strip(), json.loads(result.read_text())
    of_training = [row for row in report["rows"] if row["matrix"].startswith("step ")]
    assert printed == polar_error.tables(result)
    assert report["of_training"] == sum(row["rank"] > 0 for row in of_training)
    assert sum(line.startswith("| step ") for line in printed.splitlines()) == len(of_training)
    methods = [f"{kind} {steps}" for kind in ("plain", "AOL") for steps in (4, 5, 6)]
    assert [fit["method"] for fit in report["fits"]] == methods
    pytest.importorskip("matplotlib")
    polar_error.main(["--draw", str(result), "--figure", str(folder / "polar.svg")])
    assert "interval from 0.0039, 0.0012, 0.00041" in (folder / "polar.svg").read_text()


def test_the_polar_factor_of_a_deficient_matrix_is_a_partial_isometry():
    x = random(6, 20, dtype=torch.float64)
    x[1], x[2] = x[0], 0
    factor = polar_error.polar_factor(x)
    torch.testing.assert_close(factor @ factor.T @ x, x)
    sigma = torch.tensor([0.0, 0, 1, 1, 1, 1], device=DEVICE).double()
    torch.testing.assert_close(torch.linalg.svdvals(factor).sort().values, sigma)
