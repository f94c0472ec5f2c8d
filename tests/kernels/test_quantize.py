"""Quantisation and its transpose in one pass."""
import pytest
import torch
from checks import DEVICE, random, refused, same_bits

from kernels.fp8.formats import E4M3, E5M2, paired
from kernels.fp8.quantize import quantize, quantize_reference

SCALE = torch.tensor(0.25, device=DEVICE)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (70, 130), (16, 3), (112, 130)])
def test_quantize_saturates_and_has_the_bits_of_its_reference(shape, dtype):
    x = random(*shape) * 50
    if DEVICE.type == "cpu":  # The interpreter rounds wrongly where rounding changes the exponent.
        x = x.to(dtype).to(x.dtype) * 0.25
    x[-1, -1] = -(2**20)
    x = torch.nn.functional.pad(x, (2, 3))[:, 2:-3]
    q, transposed = quantize(x, SCALE, dtype)
    expected, _ = quantize_reference(x, SCALE, dtype)
    assert torch.equal(q.float(), expected.float()) and torch.equal(transposed.float(), q.float().T)
    assert q.float()[-1, -1].item() == -torch.finfo(dtype).max
    alone, nothing = quantize(x, SCALE, dtype, both=False)
    assert same_bits(alone, q) and nothing is None
    if len(x) % 16 == 0:
        q, transposed = quantize(x, SCALE, dtype, in_pairs=True)
        assert torch.equal(q.float(), expected.float()) and same_bits(transposed, paired(q.T))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter has no NaN in FP8")
def test_nan_stays_where_it_is():
    x = random(6, 8)
    x[2, 3] = float("nan")
    assert quantize(x, SCALE)[0].float().isnan().nonzero().tolist() == [[2, 3]]


def test_quantize_refuses_what_it_cannot_do():
    x, w = random(6, 8), random(16, 8)
    refused(("x", lambda: quantize(x, SCALE, in_pairs=True)), ("x", lambda: quantize(x.T, SCALE)),
            ("x", lambda: quantize(w, SCALE, both=False, in_pairs=True)),
            ("scale", lambda: quantize(x, w)), ("scale", lambda: quantize(x, SCALE.double())))
    assert quantize(x[:0], SCALE)[1].shape == (8, 0)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="ptxas is at fault, and the interpreter does not use it")
def test_quantize_refuses_what_ptxas_gets_wrong():
    x = random(16, 40).float()
    with pytest.raises(ValueError, match="multiple of 16 columns"):
        quantize(x, SCALE)
    assert same_bits(quantize(x, SCALE, both=False)[0], quantize_reference(x, SCALE)[0])


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs tens of GB and a GPU")
def test_quantize_more_than_2_to_the_31_elements():
    x, last = random(700_000, 3072), slice(-64, None)
    scale = torch.tensor(0.01, device=DEVICE)
    assert x.numel() > 2**31
    q, transposed = quantize(x, scale)
    expected, _ = quantize_reference(x[last], scale)
    assert torch.equal(q[last].float(), expected.float())
    assert torch.equal(transposed[:, last].float(), expected.float().T)
