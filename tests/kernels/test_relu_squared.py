"""The MLP's matmuls whose epilogue is relu² or its gradient, from FP8 to FP8 and its transpose."""
import pytest
import torch
from checks import DEVICE, error, random, refused, same_bits

from kernels.fp8.formats import E4M3, E5M2, paired
from kernels.mlp.relu_squared import (
    BACKWARD_CONFIGS,
    CONFIGS,
    exact_backward,
    relu_squared_backward_fp8,
    relu_squared_backward_fp8_reference,
    relu_squared_fp8,
    relu_squared_fp8_reference,
)

SCALES = tuple(torch.tensor(number, device=DEVICE) for number in (0.25, 1.0, 0.02))


@pytest.mark.parametrize("tokens, width, hidden", [(16, 16, 16), (144, 48, 272), (304, 80, 64)])
def test_rows_and_transpose_hold_the_same_bits(tokens, width, hidden):
    """And are near the reference's, every one of them written; in every configuration."""
    x, grad, w = (random(n, width).to(E4M3) for n in (tokens, tokens, hidden))
    scale, act_scale, pre_scale = SCALES
    plain = relu_squared_fp8_reference(x, w, scale, act_scale)[0]
    plain_pre = relu_squared_backward_fp8_reference(grad, w, plain, scale, act_scale, pre_scale)[0]
    for tuned in CONFIGS if tokens == 144 else CONFIGS[:1]:
        act, transposed = relu_squared_fp8(x, w, scale, act_scale, tuned)
        assert same_bits(transposed, paired(act.T)) and act.dtype == E4M3
        assert error(act.float(), plain.double()) < 0.1          # the interpreter's rounding is poor
    for tuned in BACKWARD_CONFIGS if tokens == 144 else BACKWARD_CONFIGS[:1]:
        pre, transposed = relu_squared_backward_fp8(grad, w, plain, scale, act_scale, pre_scale, tuned)
        assert same_bits(transposed, paired(pre.T)) and pre.dtype == E5M2
        assert error(pre.float(), plain_pre.double()) < 0.15 and pre.float().lt(0).any()


def test_what_is_too_large_saturates():
    x, w = random(32, 64).to(E4M3), random(144, 64).to(E4M3)
    tiny = torch.tensor(1e-3, device=DEVICE)
    act, _ = relu_squared_fp8(x, w, SCALES[0], tiny)
    wanted, _ = relu_squared_fp8_reference(x, w, SCALES[0], tiny)
    assert act.float().max() == 448 and error(act.float(), wanted.double()) < 0.1


def test_backward_is_the_gradient():
    x, w_in, w_out, grad = (random(n, 8).double() for n in (5, 16, 16, 5))
    pre = (x @ w_in.T).requires_grad_()
    act = torch.relu(pre).square()
    expected, = torch.autograd.grad(act @ w_out, pre, grad)
    torch.testing.assert_close(exact_backward(grad, w_out, act.detach(), 1.0, 1.0, 1.0), expected)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter has no NaN in FP8")
def test_nan_reaches_its_whole_row():
    x, w = random(16, 16), random(16, 16).to(E4M3)
    x[2, 3] = float("nan")
    act, _ = relu_squared_fp8(x.to(E4M3), w, *SCALES[:2])
    assert act.float().isnan().all(1).nonzero().tolist() == [[2]]


def test_kernels_refuse_what_they_cannot_do():
    x, w, one = random(32, 16), random(48, 16), torch.ones(1, device=DEVICE)
    x8, w8, act8 = x.to(E4M3), w.to(E4M3), torch.zeros(32, 48, device=DEVICE).to(E4M3)
    refused(("x", lambda: relu_squared_fp8(x8[:24], w8, one, one)),
            ("x", lambda: relu_squared_fp8(x, w, one, one)),
            ("x", lambda: relu_squared_fp8(x8.T[:16], w8, one, one)),
            ("w", lambda: relu_squared_fp8(x8, w8[:, :8], one, one)),
            ("w", lambda: relu_squared_fp8(x8, w, one, one)),
            ("w", lambda: relu_squared_fp8(x8, w8[:40], one, one)),
            ("scale", lambda: relu_squared_fp8(x8, w8, one, one.double())),
            ("scale", lambda: relu_squared_fp8(x8, w8, w, one)),
            ("act", lambda: relu_squared_backward_fp8(x8, w8, act8[:16], one, one, one)),
            ("act", lambda: relu_squared_backward_fp8(x8, w8, act8.bfloat16(), one, one, one)),
            ("scale", lambda: relu_squared_backward_fp8(x8, w8, act8, one, w, one)))
    assert [q.shape for q in relu_squared_fp8(x8[:0], w8, one, one)] == [(0, 48), (48, 0)]


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs tens of GB and a GPU")
def test_more_than_2_to_the_31_hidden_activations():
    x, grad, w = (random(n, 64).to(E4M3) for n in (700_000, 700_000, 3072))
    scale, act_scale, pre_scale = SCALES
    last = slice(-64, None)
    act, transposed = relu_squared_fp8(x, w, scale, act_scale)
    few = relu_squared_fp8(x[last], w, scale, act_scale)
    assert act.numel() > 2**31 and same_bits(act[last], few[0]) and same_bits(transposed[:, last], few[1])
    del transposed
    pre, transposed = relu_squared_backward_fp8(grad, w, act, scale, act_scale, pre_scale)
    few = relu_squared_backward_fp8(grad[last], w, act[last], scale, act_scale, pre_scale)
    assert same_bits(pre[last], few[0]) and same_bits(transposed[:, last], few[1])
