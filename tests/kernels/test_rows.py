"""Look-ups in a table of rows, and where their gradients go."""
import pytest
import torch
from checks import DEVICE, assert_as_exact_as_pytorch, random

from kernels.embedding import lookup, lookup_reference, sort_beside, sort_rows, take_rows, unsorted
from kernels.embedding.rows import CONFIGS
from kernels.gradients import Gradient
from kernels.ngrams.row_gradients import no_gradients


@pytest.mark.parametrize("n, rows, width", [(70, 300, 32), (130, 9, 192), (0, 3, 8), (3, 2, 300)])
def test_take_rows_takes_all_rows_bit_for_bit(n, rows, width):
    """Also from a table whose rows lie apart, by numbers of both kinds and in tiles of all sizes."""
    table = random(rows, width + 5)[:, :width]
    for dtype in (torch.int32, torch.int64):
        index = torch.randint(rows, (n,), device=DEVICE, dtype=dtype)
        for tuned in (None, *CONFIGS):
            assert torch.equal(take_rows(table, index, tuned), table[index.long()])
    with pytest.raises(ValueError, match="table must be a matrix"):
        take_rows(table.mT, index)
    with pytest.raises(ValueError, match="index must be"):
        take_rows(table, table[:, 0])


@pytest.mark.parametrize("n, count, width", [
    (1, 1, 1), (70, 5, 40), (200, 300, 70), (130, 1, 33), (20, 9, 300)])
def test_lookup_adds_only_to_the_rows_it_read(n, count, width):
    index = torch.randint(count, (n,), device=DEVICE, dtype=torch.int32)
    table, grad, old = random(count, width), random(n, width), random(count, width)
    results = []
    for function in (lookup_reference, lookup, lookup):
        leaf = table.clone().requires_grad_()
        leaf.grad = old.clone()
        out = function(leaf, sort_rows(index))
        assert torch.equal(out, table[index.long()])
        out.backward(grad)
        results.append(leaf.grad)
    exact = old.double().index_add_(0, index.long(), grad.double())
    assert_as_exact_as_pytorch(results[1], results[0], exact)
    assert torch.equal(results[1], results[2])
    untouched = torch.ones(count, dtype=torch.bool, device=DEVICE).index_fill_(0, index.long(), False)
    assert torch.equal(results[1][untouched], old[untouched])


def test_all_orders_of_an_index_give_one_gradient():
    index = torch.tensor([2, 3, 5, 11], device=DEVICE, dtype=torch.int32)
    table, grad, found = random(12, 8), random(4, 8), []
    for order in (sort_rows(index), sort_beside(index)):
        leaf = table.clone().requires_grad_()
        lookup(leaf, order).backward(grad)
        found.append(leaf.grad)
    assert torch.equal(*found)
    assert found[0][index.long()].any(1).all()


@pytest.mark.parametrize("accumulate", [True, False])
def test_the_gradient_goes_where_it_is_told(accumulate):
    """To a part of a buffer, for a table that is no leaf; the first micro-batch may write over it."""
    whole, buffer = random(10, 8).requires_grad_(), random(10, 8)
    index, grad, before = torch.tensor([0, 5, 0], device=DEVICE), random(3, 8), buffer.clone()
    lookup(whole[4:], sort_rows(index), Gradient(buffer[4:], accumulate)).backward(grad)
    expected = before[4:].float() if accumulate else torch.zeros(6, 8, device=DEVICE)
    expected.index_add_(0, index, grad.float())
    torch.testing.assert_close(buffer[4:].float(), expected, rtol=1e-2, atol=1e-2)
    assert torch.equal(buffer[:4], before[:4]) and whole.grad is None


def test_rows_are_listed_where_their_gradients_are():
    """Two micro-batches: each row has one place, with the sum of its gradients; the table has no other."""
    table, exact = random(90, 40, dtype=torch.float32).requires_grad_(), torch.zeros(90, 40, device=DEVICE)
    gradients = no_gradients(table.data, 90)
    for n in (1, 130):
        index, grad = torch.randint(90, (n,), device=DEVICE) // 2 * 2, random(n, 40, dtype=torch.float32)
        with torch.no_grad():
            lookup(table, unsorted(index), gradients)  # lists nothing
        lookup(table, sort_beside(index), gradients).backward(grad)
        exact.index_add_(0, index, grad)
        assert torch.equal(gradients.place > 0, exact.any(1)) and table.grad is None
    found = torch.where(gradients.place[:, None] > 0, gradients.grads[gradients.place.long()], 0)
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5)


def test_lookup_refuses_what_it_cannot_do():
    table, index = random(9, 8).requires_grad_(), torch.zeros(3, device=DEVICE, dtype=torch.int32)
    with pytest.raises(ValueError, match="a leaf, or `grad` must say"):
        lookup(2 * table, sort_rows(index))
    with pytest.raises(ValueError, match="not `unsorted`"):
        lookup(table, unsorted(index)).sum().backward()
    with torch.no_grad():
        assert lookup(table[1:], unsorted(index)).shape == (3, 8)


def test_gradients_that_lie_in_any_way_are_taken():
    """Those of a plain sum have no strides, and those of a transpose lie by columns."""
    table, index = random(5, 8), torch.randint(5, (3,), device=DEVICE, dtype=torch.int32)
    factor = random(8, 3)
    for total in (torch.sum, lambda x: (x.T.contiguous() * factor).sum()):
        leaves = [table.clone().requires_grad_() for _ in range(2)]
        for function, leaf in zip((lookup_reference, lookup), leaves):
            total(function(leaf, sort_rows(index))).backward()
        torch.testing.assert_close(*(leaf.grad for leaf in leaves))
