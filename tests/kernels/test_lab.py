"""The study: matrices recorded in training, and their distance to the polar factor."""
import json
from dataclasses import replace

import torch
from checks import DEVICE, random

from kernels.lab import polar_error, record_momentum


def test_matrices_from_training_are_recorded_and_measured(config, tmp_path, capsys):
    """On a tiny run; the recorded matrices are those that the optimizer orthogonalises."""
    torch.use_deterministic_algorithms(False)  # Not all of training is deterministic.
    matrices, losses = record_momentum.capture(replace(config, compile=False), [1, 2])
    shapes = {tuple(x.shape) for steps in matrices.values() for x in steps.values()}
    assert len(losses) == 2 and shapes == {(64, 64), (256, 64)}
    assert len(matrices) == 12 and all(set(steps) == {1, 2} and steps[2].any() for steps in matrices.values())
    torch.save({"matrices": matrices, "losses": losses}, tmp_path / "momentum.pt")
    result = tmp_path / "polar.json"
    given = ["--real", str(tmp_path / "momentum.pt"), "--out", str(result)]
    assert polar_error.main(["--size", "24", *given]) == 0
    printed, report = capsys.readouterr().out.strip(), json.loads(result.read_text())
    of_training = [row for row in report["rows"] if row["matrix"].startswith("step ")]
    assert printed == polar_error.tables(result)
    assert report["of_training"] == sum(row["rank"] > 0 for row in of_training)
    assert sum(line.startswith("| step ") for line in printed.splitlines()) == len(of_training)
    methods = [f"{kind} {steps}" for kind in ("plain", "AOL") for steps in (4, 5, 6)]
    assert [fit["method"] for fit in report["fits"]] == methods


def test_the_polar_factor_of_a_deficient_matrix_is_a_partial_isometry():
    x = random(6, 20, dtype=torch.float64)
    x[1], x[2] = x[0], 0
    factor = polar_error.polar_factor(x)
    torch.testing.assert_close(factor @ factor.T @ x, x)
    sigma = torch.tensor([0.0, 0, 1, 1, 1, 1], device=DEVICE).double()
    torch.testing.assert_close(torch.linalg.svdvals(factor).sort().values, sigma)
