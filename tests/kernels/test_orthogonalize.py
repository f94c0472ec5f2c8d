"""Newton–Schulz by the symmetric kernels against the plain form and the polar factor."""
import inspect

import pytest
import torch
from checks import DEVICE, DTYPES, assert_as_exact_as_pytorch, error, random, refused

from kernels.optimizer.coefficients import lower_end, polar_express
from kernels.optimizer.orthogonalize import newton_schulz, newton_schulz_reference

SHAPES = [(1, 9), (9, 1), (5, 7), (96, 96), (130, 70), (2, 9, 150)]
METHODS = [("frobenius", polar_express(5)), ("aol", polar_express(4, lower_end("aol", 4)))]


@pytest.mark.parametrize("function", [newton_schulz, newton_schulz_reference])
def test_the_default_is_the_published_form(function):
    defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    assert defaults["triples"] == polar_express(5) and defaults["normalisation"] == "frobenius"


@pytest.mark.parametrize("dtype", DTYPES[-1:])
@pytest.mark.parametrize("normalisation,triples", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_is_as_exact_as_its_reference(shape, normalisation, triples, dtype):
    x = random(2, *shape, dtype=dtype)
    x = x.mT if x.shape[-1] > 100 else x  # Its strides may be any.
    # All steps but the first run the same kernels, and the interpreter is slow.
    triples = triples[:2] if DEVICE.type == "cpu" else triples
    exact = newton_schulz_reference(x.double(), triples, normalisation)
    out = newton_schulz(x, triples, normalisation)
    # A single singular value is 1, where the terms of the first polynomial cancel: its rounding is left to
    # chance.
    slack = 100 * torch.finfo(dtype).eps if min(shape[-2:]) == 1 else 1e-6
    assert_as_exact_as_pytorch(out, newton_schulz_reference(x, triples, normalisation), exact, slack)
    assert torch.equal(out, newton_schulz(x, triples, normalisation))


@pytest.mark.parametrize("normalisation,triples", METHODS)
def test_newton_schulz_reaches_the_polar_factor(normalisation, triples):
    """Of singular values from 0.01 to 1, in matrices scaled by 1e-8, 1 and 1e8."""
    u, _, v = torch.linalg.svd(random(3, 48, 130).double(), full_matrices=False)
    scales = torch.tensor([1e-8, 1, 1e8], device=DEVICE)[:, None, None]
    x = u * torch.logspace(-2, 0, 48, device=DEVICE) @ v * scales
    out = newton_schulz(x.to(DTYPES[0]), triples, normalisation)
    assert error(out, u @ v) < 0.6  # AOL turns the direction a little.
    assert torch.linalg.svdvals(out.double()).sub(1).abs().max() < 0.3


@pytest.mark.parametrize("larger", [100, 1000])
def test_a_matrix_that_one_direction_dominates(larger):
    """As gradients often are. Training fails if rounding loses P's difference between it and the others."""
    noise = random(2, 48, 160).double() / 160**0.5
    noisy = torch.randn(48, device=DEVICE).double() / 48**0.5
    rows = torch.stack([torch.full_like(noisy, 48**-0.5), noisy])
    direction = torch.nn.functional.normalize(torch.randn(2, 1, 160, device=DEVICE).double(), dim=2)
    x = (noise + larger * rows[:, :, None] * direction).to(DTYPES[-1])
    for normalisation, triples in METHODS:
        exact = newton_schulz_reference(x.double(), triples, normalisation)
        assert error(newton_schulz(x, triples, normalisation), exact) < 0.13


@pytest.mark.parametrize("function", [newton_schulz, newton_schulz_reference])
def test_degenerate_matrices_stay_finite(function):
    x = random(4, 48, 70)
    x[0] = 0
    x[1, 5:9] = 0
    x[2, 7] = x[2, 8]
    x[3] *= torch.logspace(-8, 8, 48, device=DEVICE).to(x.dtype)[:, None]
    for normalisation, triples in METHODS:
        out = function(x, triples, normalisation)
        assert out.isfinite().all() and out[0].eq(0).all() and out[1, 5:9].eq(0).all()
        assert torch.linalg.svdvals(out.double()).max() < 1.3


def test_wrong_arguments_are_refused():
    x = random(2, 8, 6)
    refused(("", lambda: newton_schulz(x, normalisation="spectral")),
            ("", lambda: newton_schulz(x, triples=())), ("", lambda: newton_schulz(x[0, 0])))
    assert newton_schulz(x[:0]).shape == (0, 8, 6)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs tens of GB and a GPU")
@pytest.mark.parametrize("normalisation,triples", METHODS)
def test_newton_schulz_of_more_than_2_to_the_31_elements(normalisation, triples):
    x = random(3650, 768, 768)  # 2**31 elements and 5 million more
    last = x[-2:]
    out = newton_schulz(x, triples, normalisation)
    exact = newton_schulz_reference(last.double(), triples, normalisation)
    assert_as_exact_as_pytorch(out[-2:], newton_schulz_reference(last, triples, normalisation), exact)
    assert out[:-2].isfinite().all()
