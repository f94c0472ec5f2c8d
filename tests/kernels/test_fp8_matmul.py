"""FP8 matmuls by torch, and the FP8 head's linear layer."""
import pytest
import torch
import torch.nn.functional as F
from checks import DEVICE, error, random, same_bits

from kernels.fp8.formats import E4M3, E5M2
from kernels.fp8.matmul import fp8_linear, fp8_matmul


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_result_is_written_over_what_out_held(dtype):
    a, b = random(32, 48).to(E5M2), random(64, 48).to(E4M3).T
    made = fp8_matmul(a, b, 0.5, torch.tensor(0.25, device=DEVICE), fast=False)
    out = torch.full((32, 64), 7.0, dtype=dtype, device=DEVICE)
    assert fp8_matmul(a, b, 0.5, 0.25, fast=False, out=out) is out and same_bits(out, made.to(dtype))
    assert error(out, a.double() @ b.double() / 8) < 5e-3


def test_the_fp8_linear_layer_is_near_the_plain_one_and_its_gradients_scale_with_the_losss():
    x = F.rms_norm(random(64, 128), (128,)).bfloat16().requires_grad_()
    weight = (random(96, 128) * 0.05).bfloat16().requires_grad_()
    grad = random(64, 96).bfloat16() * 0.1
    results = []
    for linear in (F.linear, fp8_linear):
        out = linear(x, weight)
        results.append([out, *torch.autograd.grad(out, (x, weight), grad)])
    for plain, fp8, limit in zip(*results, (0.05, 0.15, 0.15), strict=True):
        assert error(fp8, plain.double()) < limit
    twice = torch.autograd.grad(fp8_linear(x, weight), (x, weight), 2 * grad)
    for once, double in zip(results[1][1:], twice, strict=True):
        torch.testing.assert_close(2 * once, double)
