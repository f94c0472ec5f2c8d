"""Sum and norm in one pass that writes FP8, and its gradient with the MLP behind it."""
import pytest
import torch
from checks import DEVICE, assert_as_exact_as_pytorch, error, random, refused, same_bits

from kernels.fp8.formats import paired
from kernels.fp8.quantize import quantize, quantize_reference
from kernels.mlp.feed_forward import feed_forward_fp8, feed_forward_reference
from kernels.mlp.residual import add_up, mlp_input_reference, norm_fork_reference
from kernels.mlp.residual_fp8 import (
    CONFIGS,
    mlp_input_fp8,
    norm_fork_fp8,
    sum_and_norm_fp8,
    sum_and_norm_fp8_reference,
)

MANY = 1040 if DEVICE.type == "cuda" else 80    # tokens, of several tiles; the interpreter takes its time


def double(tensors) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.double() for tensor in tensors)


def ordered(codes: torch.Tensor) -> torch.Tensor:
    """FP8 numbers as integers in their order: neighbours differ by 1, and both zeros are 0."""
    bits = codes.view(torch.int8).int()
    return torch.where(bits < 0, -(bits & 127), bits)


@pytest.mark.parametrize("with_scales", [False, True])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("n, width", [(16, 40), (48, 768), (MANY, 272)])
def test_norms_have_the_bits_of_their_float32_numbers_rounded_to_fp8(n, width, count, with_scales):
    """On a GPU, where sums and products are fused, all but one code in 1,000, and those differ by one."""
    summands, scale = tuple(random(n, width) for _ in range(count)), width ** 0.5 / 448
    scales = torch.tensor([0.9, -1.2], device=DEVICE) if with_scales else None
    summands[0][5] = 0
    summands[0][7, 3] = 1e4                     # This element is nearly the norm of its row.
    exact = sum_and_norm_fp8_reference(double(summands), scales.double() if with_scales else None)
    a, c = scales if with_scales else (1, 1)
    y = a * sum((x.float() for x in summands), torch.zeros((), device=DEVICE))
    for tuned in CONFIGS if width == 272 and with_scales else (None,):
        x, q, transposed, rms = found = sum_and_norm_fp8(summands, scales, tuned)
        normed, one = y * (1 / scale / rms)[:, None], torch.ones((), device=DEVICE)
        wanted = (quantize if DEVICE.type == "cpu" else quantize_reference)(normed, one)[0]
        if count == 1 and not with_scales:
            assert x is None
        else:
            assert x.is_contiguous() and x.dtype == summands[0].dtype
            assert error(x, exact[0]) < torch.finfo(x.dtype).eps
            assert DEVICE.type == "cuda" or torch.equal(x, (c * y).type_as(x))
        assert q.is_contiguous() and transposed.is_contiguous()
        assert q.dtype == transposed.dtype == torch.float8_e4m3fn
        assert same_bits(transposed, paired(q.T)) and q[7].float().abs().max() == 448
        apart = (ordered(q) - ordered(wanted)).abs()
        assert apart.max() <= 1 and apart.count_nonzero() <= 1e-3 * q.numel()
        limit = 0.01 if DEVICE.type == "cuda" else 0.15      # The interpreter's rounding is poor.
        assert error(q, exact[1].double()) < limit
        exact_rms = (y.double().square().mean(1) + torch.finfo(torch.float32).eps).sqrt()
        assert (rms.double() - exact_rms).abs().max() < 1e-3
        if DEVICE.type == "cuda":                           # The interpreter has one order anyway.
            again = sum_and_norm_fp8(summands, scales, tuned)
            assert all(x is y or same_bits(x, y) for x, y in zip(found, again))


def test_it_refuses_what_it_cannot_do():
    x, one, two = random(32, 48), torch.ones((), device=DEVICE), torch.ones(2, device=DEVICE)
    refused(("x", lambda: sum_and_norm_fp8((x[:24],), two)), ("x", lambda: mlp_input_fp8((x.T,), two)),
            ("x", lambda: norm_fork_fp8((x.double(),))), ("x", lambda: mlp_input_fp8((x[:, 0],), two)),
            ("scales", lambda: sum_and_norm_fp8((x,), two[:1])),
            ("scales", lambda: mlp_input_fp8((x, x), one)),
            ("scales", lambda: mlp_input_fp8((x, x), two.double())),
            (r"summands\[1\]", lambda: sum_and_norm_fp8((x, x[:16]), two)),
            (r"summands\[2\]", lambda: norm_fork_fp8((x, x, x.double()))))
    assert [len(out) for out in sum_and_norm_fp8((x[:0],), two)] == [0, 0, 48, 0]


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("n, width", [(16, 20), (48, 72)])
def test_the_gradients_of_a_forks_readers_meet_in_its_summands(n, width, count, readers):
    """Those of the sum's two readers, too. Twice through one graph the same bits; and as near to float64 as
    the reference."""
    summands, grads = [random(n, width) for _ in range(count)], [random(n, width) for _ in range(readers + 2)]

    def both(fork, summands, grads):
        leaves = [x.detach().requires_grad_() for x in summands]
        outs = [getattr(out, "stand_in", out) for out in fork(tuple(leaves), readers)]
        found = torch.autograd.grad(outs, leaves, grads, retain_graph=True)
        again = torch.autograd.grad(outs, leaves, grads)
        assert all(map(same_bits, found, again))
        return found

    exact = both(norm_fork_reference, double(summands), double(grads))
    plain, ours = (both(fork, summands, grads) for fork in (norm_fork_reference, norm_fork_fp8))
    for fused, theirs, wanted in zip(ours, plain, exact, strict=True):
        assert_as_exact_as_pytorch(fused, theirs, wanted, slack=1e-6)


def two_layers(function, x, updates: list, scales, weights: list, grad) -> list[torch.Tensor]:
    """From the first layer's attention on: the stream after the second, and all gradients.

    The first layer has two summands. The second has the two of the first one's result, and its update.
    """
    leaves = [t.detach().clone().requires_grad_() for t in (x, *updates, *weights, scales)]
    x, first, second, *weights, scales = leaves
    summands = function((x, first), scales[0], *weights[:2])
    out = add_up(function((*summands, second), scales[1], *weights[2:]))
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def layer(enter, feed_forward):
    def run(summands, scales, w_in, w_out):
        passing, normed = enter(summands, scales)
        return passing, feed_forward(normed, w_in, w_out, None, None)
    return run


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("n", [16, MANY])
def test_an_mlp_whose_input_is_normed_into_fp8(n):
    """At most twice as far from float64 as by way of a norm in bfloat16; on a CPU near that; bit-equal when
    repeated."""
    width, hidden = 80, 96
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    x, first, second, grad = (random(n, width, dtype=dtype) for _ in range(4))
    weights = [random(hidden, width, dtype=dtype) * size for size in (0.05, 0.1) * 2]
    grad *= torch.logspace(-6, 0, n, 2, device=DEVICE)[:, None]
    scales = torch.tensor([[0.9, 1.2], [1.1, -0.8]], device=DEVICE)
    in_float64 = (x.double(), double((first, second)), scales.double(), double(weights), grad.double())
    exact = two_layers(layer(mlp_input_reference, feed_forward_reference), *in_float64)
    two, one, again = (two_layers(layer(enter, feed_forward_fp8), x, [first, second], scales, weights, grad)
                       for enter in (mlp_input_reference, mlp_input_fp8, mlp_input_fp8))
    for ours, theirs, wanted in zip(one, two, exact, strict=True):
        slack = 0.1 if wanted.numel() < 10 else 1e-7     # The scales' gradients are right by luck.
        assert_as_exact_as_pytorch(ours, theirs, wanted, slack)
        assert DEVICE.type == "cuda" or error(ours, theirs.double()) < 1e-3
    assert all(map(torch.equal, one, again))


def test_a_result_without_a_gradient_counts_as_one_with_zeros():
    x = random(32, 48).requires_grad_()
    scales = torch.tensor([0.9, 1.2], device=DEVICE, requires_grad=True)
    grad, found = random(32, 48), []
    for which in range(2):
        passing, normed = mlp_input_fp8((x,), scales)
        outs = passing, normed.stand_in
        found.append(torch.autograd.grad(outs[which], (x, scales), grad, retain_graph=True))
        grads = [grad if i == which else torch.zeros_like(grad) for i in range(2)]
        assert all(map(torch.equal, found[-1], torch.autograd.grad(outs, (x, scales), grads)))
    assert not torch.equal(found[0][0], found[1][0])


def test_writing_over_what_backward_reads_is_an_error():
    x, weight, scales = random(16, 32).requires_grad_(), random(48, 32), torch.ones(2, device=DEVICE)
    passing, normed = mlp_input_fp8((x,), scales)
    out = feed_forward_fp8(normed, weight, weight, None, None)
    passing.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_residual_scale_of_zero_stays_finite():
    x = random(16, 48).requires_grad_()
    scales = torch.tensor([0.0, 1.0], device=DEVICE, requires_grad=True)
    passing, normed = mlp_input_fp8((x,), scales)
    (passing.sum() + normed.stand_in.sum()).backward()       # These gradients are expanded, not contiguous.
    assert passing.eq(0).all() and normed.q.float().eq(0).all()
    assert x.grad.eq(0).all() and scales.grad.eq(0).all()
