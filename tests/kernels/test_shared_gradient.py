"""The gradient of n-gram rows, summed over the layers that add them to their values."""
import pytest
import torch
from checks import DEVICE, DTYPE, assert_as_exact_as_pytorch, random, refused

from kernels.attention.example_inputs import HeadInputs
from kernels.attention.qkv import qkv_heads
from kernels.ngrams.shared_gradient import CONFIGS, share_values, sum_over_layers, sum_over_layers_reference


@pytest.mark.parametrize("tuned", CONFIGS)
@pytest.mark.parametrize("layers", [1, 3, 11])
@pytest.mark.parametrize("n, k, heads, head_dim", [
    (50, 1, 1, 96), (50, 2, 3, 96), (37, 3, 6, 128), (1, 1, 2, 16)])
def test_sum_over_layers_reads_the_first_heads_alone(n, k, heads, head_dim, layers, tuned):
    """The other heads' gradients are NaN."""
    rows, scales = random(n, k, head_dim), torch.randn(layers, k, device=DEVICE)
    grads = [random(n, heads, head_dim) for _ in range(layers)]
    for grad in grads:
        grad[:, k:] = float("nan")
    grads = [grad[:, :k] for grad in grads]
    exact = sum_over_layers_reference([g.double() for g in grads], rows.double(), scales.double())
    plain, ours = sum_over_layers_reference(grads, rows, scales), sum_over_layers(grads, rows, scales, tuned)
    for out, theirs, wanted, slack in zip(ours, plain, exact, (1e-7, 1e-5)):
        assert_as_exact_as_pytorch(out, theirs, wanted, slack)
    assert all(torch.equal(a, b) for a, b in zip(ours, sum_over_layers(grads, rows, scales, tuned)))


def test_sum_over_layers_reference_is_the_gradient():
    rows, scales = random(9, 2, 8).double().requires_grad_(), random(3, 2).double().requires_grad_()
    grads = [random(9, 2, 8).double() for _ in scales]
    expected = torch.autograd.grad([scale[:, None] * rows for scale in scales], (rows, scales), grads)
    for found, wanted in zip(sum_over_layers_reference(grads, rows.detach(), scales.detach()), expected):
        torch.testing.assert_close(found, wanted)


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
    scales = two[:, None]
    refused(("scales", lambda: sum_over_layers([rows], rows, scales)),
            ("rows", lambda: sum_over_layers([x], x, scales[:1])),
            (r"grads\[1\]", lambda: sum_over_layers([rows, rows[:2]], rows, scales)),
            (r"grads\[1\]", lambda: sum_over_layers([random(6, 2, 8)[:, 1:], rows], rows, scales)),
            (r"grads\[0\]", lambda: sum_over_layers([random(6, 1, 16)[..., ::2]], rows, scales[:1])))
    assert sum_over_layers([rows[:0]], rows[:0], scales[:1])[1].eq(0).all()
