"""Sum and norm in one pass, and what the head reads: against autograd of the references in float64."""
import pytest
import torch
from checks import DEVICE, assert_as_exact_as_pytorch, error, random, refused, same_bits

from kernels.mlp.head_input import before_head, before_head_backward
from kernels.mlp.residual import before_head_reference, mlp_input_reference, norm_fork_reference
from kernels.mlp.residual_norm import CONFIGS, mlp_input, norm_fork, sum_and_norm

SLACK = 1e-6 if DEVICE.type == "cpu" else 2e-3       # of gradients of scales, sums of terms that cancel
SHAPES = [(1, 16), (13, 528), (37, 40)]


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, device=DEVICE)


def both(function, inputs, grads, double: bool = False) -> list[torch.Tensor]:
    """Results and gradients of all inputs. Twice through one graph the gradients have the same bits."""
    if double:
        inputs, grads = ([x.double() for x in tensors] for tensors in (inputs, grads))
    leaves = [x.detach().requires_grad_() for x in inputs]
    outs = function(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    found = torch.autograd.grad(outs, leaves, grads, retain_graph=True)
    assert all(map(same_bits, found, torch.autograd.grad(outs, leaves, grads)))
    return [*(out.detach() for out in outs), *found]


def compare(kernel, reference, inputs, grads) -> None:
    """Each result and gradient at most twice as far from float64 as the reference's."""
    exact = both(reference, inputs, grads, double=True)
    plain, ours = both(reference, inputs, grads), both(kernel, inputs, grads)
    for found, theirs, wanted in zip(ours, plain, exact, strict=True):
        assert_as_exact_as_pytorch(found, theirs, wanted, SLACK if wanted.numel() < 10 else 1e-6)


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("n, width", SHAPES)
def test_a_fork_and_the_gradients_of_its_readers(n, width, count, readers):
    """Of the norm's readers, and of both readers of the sum."""
    def of(fork):
        return lambda *summands: fork(summands, readers)

    summands, grads = [random(n, width) for _ in range(count)], [random(n, width) for _ in range(readers + 2)]
    compare(of(norm_fork), of(norm_fork_reference), summands, grads)


def test_each_reader_has_an_output_of_its_own_in_one_memory():
    """So that no gradients are added before the kernel reads them."""
    x = random(4, 16).requires_grad_()
    for summands in ((x,), (x, x)):
        *copies, same, again = norm_fork(summands, 3)
        assert len({copy.data_ptr() for copy in copies}) == 1 and same.data_ptr() == again.data_ptr()
        assert (same.data_ptr() == x.data_ptr()) == (len(summands) == 1)
        assert [out.output_nr for out in (same, again, *copies)] == [0, 1, 3, 4, 5]
        assert len({out.grad_fn for out in (same, again, *copies)}) == 1
    head, copy_head = before_head((x, x), None, number(0.5))
    assert head.data_ptr() == copy_head.data_ptr() and head.grad_fn is copy_head.grad_fn
    assert [head.output_nr, copy_head.output_nr] == [0, 1]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("n, width", SHAPES)
def test_what_an_mlp_reads_and_the_gradients_of_its_scales(n, width, count):
    def of(enter):
        return lambda *inputs: enter(inputs[:-1], inputs[-1])

    inputs = *(random(n, width) for _ in range(count)), torch.tensor([0.9, -1.2], device=DEVICE)
    compare(of(mlp_input), of(mlp_input_reference), inputs, [random(n, width) for _ in range(2)])


@pytest.mark.parametrize("tuned", CONFIGS)
def test_root_mean_squares_are_of_the_scaled_sum(tuned):
    x, y = random(13, 528), random(13, 528)
    x[5] = y[5] = 0
    out, normed, rms = sum_and_norm((x, y), torch.tensor([-3.0, 0.5], device=DEVICE), tuned)
    total = -3 * (x.double() + y.double())
    torch.testing.assert_close(rms.double(), (total.square().mean(1) + torch.finfo(torch.float32).eps).sqrt(),
                               rtol=1e-5, atol=0)
    assert error(out, total / 2) < torch.finfo(x.dtype).eps and normed[5].eq(0).all()
    assert sum_and_norm((x,), tuned=tuned)[0] is None


@pytest.mark.parametrize("kept", [0, 1, 3])
@pytest.mark.parametrize("last", [1, 3])
@pytest.mark.parametrize("n, width", SHAPES)
def test_what_the_head_reads_and_the_gradients_of_both_streams_and_their_share(n, width, last, kept):
    def of(function):
        return lambda *inputs: function(inputs[:last], inputs[last:-1], inputs[-1])

    def without(function):
        return lambda *inputs: function(inputs, None, number(0.7))

    inputs = *(random(n, width) for _ in range(last + kept)), number(0.7)
    grads = [random(n, width) for _ in range(2)]        # of the head and of the copy head
    if kept:
        compare(of(before_head), of(before_head_reference), inputs, grads)
    else:
        compare(without(before_head), without(before_head_reference), inputs[:-1], grads)


def test_a_share_that_subtracts_nothing_has_no_gradient():
    x, share = random(4, 16).requires_grad_(), number(0.5).requires_grad_()
    before_head((x,), None, share)[0].sum().backward()   # This gradient is expanded, not contiguous.
    assert share.grad is None and x.grad.shape == x.shape


def test_a_result_without_a_gradient_counts_as_one_with_zeros():
    x, scales, grad = random(5, 48).requires_grad_(), torch.ones(2, device=DEVICE), random(5, 48)
    for outs in (mlp_input((x,), scales), norm_fork((x, x), 1), before_head((x,), (x,), number(0.5))):
        for which in range(len(outs)):
            found, = torch.autograd.grad(outs[which], x, grad, retain_graph=True)
            grads = [grad if i == which else torch.zeros_like(grad) for i in range(len(outs))]
            assert torch.equal(found, torch.autograd.grad(outs, x, grads, retain_graph=True)[0])


def test_writing_over_what_backward_reads_is_an_error():
    x, scales = random(4, 16).requires_grad_(), torch.ones(2, device=DEVICE)
    passing, normed = mlp_input((x,), scales)
    out, twin = before_head((x,), (x,), number(0.5))
    *_, same, again = norm_fork((x, x))
    for read, result in ((passing, normed), (out, twin), (again, same)):
        read.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_they_refuse_what_they_cannot_do():
    x, rms, one, two = random(6, 8), torch.ones(6, device=DEVICE), number(1.0), torch.ones(2, device=DEVICE)
    refused(("x", lambda: norm_fork((x.double(),))), ("x", lambda: mlp_input((x.T,), two)),
            ("x", lambda: mlp_input((x[:, 0],), two)), ("x", lambda: before_head((x.T,), None, one)),
            ("scales", lambda: mlp_input((x, x), one)), ("scales", lambda: mlp_input((x,), two.double())),
            (r"summands\[1\]", lambda: norm_fork((x, x[:5]))),
            (r"summands\[2\]", lambda: mlp_input((x, x, x.double()), two)),
            (r"last\[1\]", lambda: before_head((x, x[:5]), None, one)),
            (r"kept\[0\]", lambda: before_head((x, x), (x.double(),), one)),
            (r"kept\[1\]", lambda: before_head((x, x), (x, x.T), one)),
            ("backout", lambda: before_head((x,), (x,), two[:1])),
            ("backout", lambda: before_head((x,), (x,), one.double())),
            (r"grads\[1\]", lambda: before_head_backward((x, x[:5]), x, rms, (x,), one)),
            (r"kept\[0\]", lambda: before_head_backward((x,), x, rms, (x[:5],), one)),
            ("rms", lambda: before_head_backward((x,), x, rms[:5], (x,), one)),
            ("rms", lambda: before_head_backward((x,), x, torch.stack([rms, rms], 1)[:, 0], (x,), one)))


def test_no_rows_give_no_rows():
    x, share = random(6, 8)[:0].requires_grad_(), number(1.0).requires_grad_()
    scales = torch.ones(2, device=DEVICE, requires_grad=True)
    outs = *norm_fork((x, x), 2), *mlp_input((x,), scales), *before_head((x,), (x,), share)
    assert all(out.shape == (0, 8) for out in outs)
    sum(out.sum() for out in outs).backward()
    assert x.grad.shape == (0, 8) and scales.grad.eq(0).all() and share.grad == 0
