"""The gradient of n-gram rows, summed over the layers that add them to their values."""
import pytest
import torch
from checks import DEVICE, DTYPE, assert_as_exact_as_pytorch, random, refused

from kernels.attention.example_inputs import HeadInputs
from kernels.attention.qkv import qkv_heads
from kernels.ngrams.shared_gradient import CONFIGS, sum_over_layers, sum_over_layers_reference
from kernels.ngrams.values import share_values


@pytest.mark.parametrize("tuned", CONFIGS)
@pytest.mark.parametrize("layers, gated", [(1, False), (3, True), (11, False)])
@pytest.mark.parametrize("n, k, heads, head_dim", [
    (50, 1, 1, 64), (50, 2, 3, 32), (37, 3, 6, 128), (1, 1, 2, 16)])
def test_sum_over_layers_reads_the_first_heads_alone(n, k, heads, head_dim, layers, gated, tuned):
    """The other heads' gradients are NaN."""
    rows, scales = random(n, k, head_dim), torch.randn(layers, k, device=DEVICE)
    grads = [random(n, heads, head_dim) for _ in range(layers)]
    for grad in grads:
        grad[:, k:] = float("nan")
    given = [[grad[:, :k] for grad in grads], rows, scales]
    if gated:
        given += torch.randn(layers, k, 10, device=DEVICE), [random(n, 5) for _ in range(layers)]
    plain, ours = sum_over_layers_reference(*given), sum_over_layers(*given, tuned=tuned)
    exact = sum_over_layers_reference(
        *([x.double() for x in one] if isinstance(one, list) else one.double() for one in given))
    assert [x is None for x in ours] == [x is None for x in plain] == [False, False, not gated]
    for out, theirs, wanted, slack in zip(ours[:2 + gated], plain, exact, (1e-7, 1e-5, 1e-5)):
        assert_as_exact_as_pytorch(out, theirs, wanted, slack)
    again = sum_over_layers(*given, tuned=tuned)
    assert all(torch.equal(a, b) for a, b in zip(ours[:2 + gated], again))


def test_sum_over_layers_reference_by_hand():
    """Two layers, of which one token's gate is far open and another one's shut."""
    rows = torch.tensor([[[3.0, 1.0]], [[-3.0, 1.0]]], dtype=torch.float64)
    scales, gates = torch.tensor([[2.0], [5.0]]).double(), torch.zeros(2, 1, 2).double()
    gates[1, 0, 1] = 20     # It looks at the row's first channel alone.
    grads, seen = [torch.ones(2, 1, 2).double()] * 2, [torch.ones(2, 1).double()] * 2
    of_rows, of_scales, of_gates = sum_over_layers_reference(grads, rows, scales, gates, seen)
    torch.testing.assert_close(of_rows, torch.tensor([[[12.0, 12]], [[2, 2]]]).double())
    torch.testing.assert_close(of_scales, torch.tensor([[2.0], [8]]).double())  # 3 + 1 − 3 + 1 and 2 (3 + 1)
    # Where σ = 1/2 the derivative of 2σ is 1/2: of tokens 2 (4 − 2) / 2, of rows 2 (4 · 3 + 2 · 3) / 2.
    torch.testing.assert_close(of_gates, torch.tensor([[[2.0, 18]], [[0, 0]]]).double())


def test_rows_get_their_gradient_once_and_after_all_layers():
    """With two graphs at a time, with a layer that nothing reads, and where nobody wants a gradient."""
    size = HeadInputs(6, 2, 16, 32, DEVICE, DTYPE)
    qkv, positions, *_ = size.from_qkv()
    rows, scales = random(6, 1, 32).requires_grad_(), torch.ones(3, 1, device=DEVICE)
    graphs, seen = [], []

    def value(ngrams):
        return qkv_heads(qkv, positions, None, None, ngrams, size.shape)[2]

    for used in (3, 2):
        shared = 1 * rows
        shared.register_hook(lambda grad, used=used: seen.append((used, grad)))
        values = [value(ngrams) for ngrams in share_values(shared, scales.requires_grad_())]
        graphs.append(sum(values[:used]))
    (2 * graphs[0] + graphs[1]).backward(torch.ones_like(graphs[0]))
    assert sorted(used for used, _ in seen) == [2, 3]
    for used, grad in seen:
        torch.testing.assert_close(grad, torch.full_like(rows, 6.0 if used == 3 else 2.0))
    torch.testing.assert_close(rows.grad, torch.full_like(rows, 8.0))
    uses = torch.tensor([[3.0], [3.0], [2.0]], device=DEVICE)
    torch.testing.assert_close(scales.grad, rows.detach().float().sum() * uses, atol=1e-2, rtol=1e-2)
    with torch.no_grad():
        assert not value(share_values(rows, scales)[0]).requires_grad


def test_sum_over_layers_refuses_what_it_cannot_do():
    x, two, rows = random(6, 8), torch.ones(2, device=DEVICE), random(6, 1, 8)
    scales, gates = two[:, None], two[None, None]
    refused(("scales", lambda: sum_over_layers([rows], rows, scales)),
            ("rows", lambda: sum_over_layers([x], x, scales[:1])),
            (r"grads\[1\]", lambda: sum_over_layers([rows, rows[:2]], rows, scales)),
            (r"grads\[1\]", lambda: sum_over_layers([random(6, 2, 8)[:, 1:], rows], rows, scales)),
            (r"grads\[0\]", lambda: sum_over_layers([random(6, 1, 16)[..., ::2]], rows, scales[:1])),
            ("rows", lambda: sum_over_layers([random(6, 1, 12)], random(6, 1, 12), scales[:1])),
            ("gates", lambda: sum_over_layers([rows], rows, scales[:1], gates.double(), [x[:, :1]])),
            (r"seen\[0\]", lambda: sum_over_layers([rows], rows, scales[:1], gates, [x])))
    assert sum_over_layers([rows[:0]], rows[:0], scales[:1])[1].eq(0).all()
