"""The coefficients of Newton–Schulz."""
import numpy as np
import pytest
import torch

from kernels.optimizer.coefficients import apply, fit, lower_end, polar_error, polar_express


def test_the_published_setting_gives_the_published_coefficients():
    expected = [(8.156555, -22.483293, 15.878770), (4.042930, -2.808917, 0.500018),
                (3.891668, -2.772484, 0.506065), (3.285754, -2.368129, 0.464490),
                (2.346541, -1.709783, 0.423236)]
    np.testing.assert_allclose(polar_express(5, lower=1e-3, cushion=0.02, safety=1.02), expected, atol=1e-5)


def test_coefficients_bring_the_interval_to_one_and_stay_bounded():
    exact = polar_express(6, lower=1e-3, cushion=0, safety=1)
    assert polar_error(exact, np.geomspace(1e-3, 1, 1000)) < 1e-3
    for steps in (4, 5):
        for lower in (1e-3, 1e-2, 1):
            image = apply(polar_express(steps, lower), np.linspace(0, 1.01, 1000))
            assert (0 <= image).all() and (image < 2).all()


def test_impossible_settings_are_refused():
    for wrong in (dict(steps=0), dict(steps=5, lower=0), dict(steps=5, cushion=2), dict(steps=5, safety=0.9)):
        with pytest.raises(ValueError, match="lower"):
            polar_express(**wrong)


def test_the_interval_begins_where_the_spectra_of_training_do():
    assert polar_express(5, lower_end("frobenius", 5)) == polar_express(5)
    ends = [lower_end("aol", steps) for steps in (1, 4, 5, 6, 9)]
    assert ends[0] == ends[1] > ends[2] > ends[3] == ends[4] > 0
    with pytest.raises(ValueError, match="one of frobenius, aol"):
        lower_end("spectral", 5)


def test_coefficients_fitted_after_aol_need_one_step_less():
    gaussian = torch.randn(192, 192, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    row_sums = (gaussian @ gaussian.T).abs().sum(-1, keepdim=True)
    after_aol = torch.linalg.svdvals(gaussian * row_sums.rsqrt()).numpy()
    plain = torch.linalg.svdvals(gaussian / (1.02 * gaussian.norm())).numpy()
    lower, error = fit([after_aol], steps=4)
    assert error == polar_error(polar_express(4, lower), after_aol)
    assert error < polar_error(polar_express(5), plain)
