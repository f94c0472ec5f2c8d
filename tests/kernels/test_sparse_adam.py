"""Adam on the rows of a long table that have a gradient, against dense Adam and its own reference."""
from functools import partial
from typing import NamedTuple

import pytest
import torch
from checks import DEVICE, random

from kernels.ngrams.row_gradients import RowGradients, enlist, no_gradients
from kernels.optimizer import Master, Rule, adam_update_reference, row_adam, row_adam_reference
from kernels.optimizer.sparse_adam import update_rows


class State(NamedTuple):
    """What an update takes, in its order."""
    weight: torch.Tensor
    gradient: torch.Tensor | RowGradients
    second: torch.Tensor
    last: torch.Tensor
    steps: torch.Tensor

    def changed(self) -> tuple[torch.Tensor, ...]:
        return self.weight, self.second, self.last, self.steps

    def copy(self) -> "State":
        return State(*(x.clone() for x in self))


def new_state(rows: int, width: int, dtype: torch.dtype = torch.float32, block: int = 1) -> State:
    """Of a table that has seen no update; the gradient is dense."""
    weight = torch.randn(rows, width, device=DEVICE).to(dtype)
    second, last = torch.zeros(rows, width // block, device=DEVICE), torch.zeros(rows, device=DEVICE)
    return State(weight, torch.zeros_like(weight), second, last, torch.zeros((), device=DEVICE))


def new_rule(lr: float = 0.02, decay: float = 0.3, finite: bool = True) -> Rule:
    return Rule(*(torch.tensor(x, device=DEVICE) for x in (finite, lr, decay)), cautious=True)


def listed(grad: torch.Tensor, which: torch.Tensor) -> RowGradients:
    """The gradient (rows, width) of these rows (rows,) bool, listed in some order."""
    gradients, rows = no_gradients(grad, len(grad)), which.nonzero().flatten()
    k = 1 + torch.randperm(len(rows), device=DEVICE)
    gradients.grads[k], gradients.rows[k], gradients.place[rows] = grad[rows], rows.int(), k.int()
    gradients.count.fill_(len(rows))
    return gradients


def dense(gradients: RowGradients) -> torch.Tensor:
    """The gradient (rows, width) of the whole table."""
    return torch.where(gradients.place[:, None] > 0, gradients.grads[gradients.place.long()], 0)


def assert_taken(gradients: torch.Tensor | RowGradients) -> None:
    """Nothing is left of them."""
    is_dense = isinstance(gradients, torch.Tensor)
    for x in [gradients] if is_dense else [gradients.grads[1:], gradients.count, gradients.place]:
        assert not x.any()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("finite", [True, False])
def test_rows_that_are_gathered_get_the_bits_that_all_rows_get(share, finite):
    gathered = new_state(50, 24, torch.bfloat16, 8)
    whole = gathered.copy()
    for step in range(3):
        grad = random(50, 24, dtype=torch.bfloat16) * (torch.rand(50, 1, device=DEVICE) < share)
        for state, update in ((gathered, row_adam_reference), (whole, update_rows)):
            state.gradient.copy_(grad)
            update(*state, new_rule(finite=finite or step == 0), 0.9)
        assert all(map(torch.equal, gathered, whole)) and not gathered.gradient.any()


@pytest.mark.parametrize("update", [row_adam_reference, row_adam])
@pytest.mark.parametrize("rows, width", [(1, 1), (37, 24), (200, 48)])
def test_rows_touched_now_and_then_end_where_dense_adam_brings_them(update, rows, width):
    """A step that is not finite changes nothing but the gradient."""
    state, once = new_state(rows, width), torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    weight, second, _, steps = (x.clone() for x in state.changed())
    first = torch.zeros_like(second)
    for step in range(8):
        touched = torch.rand(rows, device=DEVICE) < 0.3
        grad = torch.randn(rows, width, device=DEVICE) * touched[:, None]
        before, rule = [x.clone() for x in state.changed()[:3]], new_rule(finite=step < 7)
        once |= touched & rule.finite
        if step < 7:
            adam_update_reference(Master(weight, None), grad.clone(), first, second, steps, rule, (0.0, 0.9))
        read = touched | (torch.rand(rows, device=DEVICE) < 0.3)  # The gradient of some of them is zero.
        if step == 7:
            grad[0], read[0] = torch.nan, True
        state = state._replace(gradient=listed(grad, read) if update is row_adam else grad)
        update(*state, rule, 0.9)
        still = ~touched | ~rule.finite
        assert_taken(state.gradient)
        assert all(torch.equal(x[still], old[still]) for x, old in zip(state.changed(), before))
    torch.testing.assert_close(state.weight, weight, atol=1e-5, rtol=1e-5)
    assert torch.equal(state.steps, steps) and torch.equal(state.last > 0, once)


@pytest.mark.parametrize("update", [row_adam_reference, row_adam])
@pytest.mark.parametrize("rows, width, block", [(5, 16, 16), (37, 48, 16), (80, 24, 4), (9, 192, 8)])
def test_columns_of_a_block_share_their_mean_square(update, rows, width, block):
    """As if each block's gradients had the size of their root mean square."""
    state = new_state(rows, width, block=block)
    exact, squares = state.weight.double(), torch.zeros_like(state.second).double()
    for step in range(1, 5):
        touched = torch.rand(rows, device=DEVICE) < 0.5
        grad = torch.randn(rows, width, device=DEVICE) * touched[:, None]
        squares = 0.9 * squares + 0.1 * grad.double().unflatten(1, (-1, block)).square().mean(2)
        root = (squares / (1 - 0.9**step)).sqrt().repeat_interleave(block, 1)
        exact -= torch.where(touched[:, None], 0.02 * grad / (root + 1e-10), 0)
        state = state._replace(gradient=listed(grad, touched) if update is row_adam else grad)
        update(*state, new_rule(decay=0.0), 0.9)
        torch.testing.assert_close(state.weight.double(), exact, atol=1e-5, rtol=1e-5)
        assert_taken(state.gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.4, 1.0])
def test_the_order_of_the_list_and_the_tiles_change_no_bit(share, dtype):
    """One program or many, few rows a tile or all: as with every row listed, and as the reference."""
    rows, width = 150, 24
    start, touched = new_state(rows, width, dtype), torch.rand(rows, device=DEVICE) < share
    start.gradient[touched] = random(int(touched.sum()), width).to(dtype)
    start.second.uniform_()
    results = []
    for tuned in ((64, 1), (2048, 4), (128, 2), "all listed", "reference"):
        state, update = start.copy(), row_adam
        if tuned == "reference":
            update = row_adam_reference
        elif tuned == "all listed":
            state = state._replace(gradient=listed(state.gradient, torch.ones_like(touched)))
        else:
            state = state._replace(gradient=listed(state.gradient, touched))
            update = partial(row_adam, tuned=tuned)
        update(*state, new_rule(), 0.9)
        assert_taken(state.gradient)
        results.append(state.changed())
    kernel, *others, reference = results
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(kernel, other, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(kernel[2:], reference[2:], strict=True))
    bits = 17 if dtype == torch.float32 else 7, 17  # The interpreter cuts bfloat16 off.
    for ours, plain, exact_bits in zip(kernel, reference, bits):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=2**-exact_bits)


def test_micro_batches_add_to_the_listed_rows_before_an_update():
    """As if they had added to a gradient of all rows."""
    state = new_state(90, 40)
    plain, gradients = state.copy(), no_gradients(state.weight, 90)
    state = state._replace(gradient=gradients)
    for step in range(3):
        seen = torch.zeros(90, dtype=torch.bool, device=DEVICE)
        for n in (1, 130):
            index = (torch.randint(90, (n,), device=DEVICE) // 2 * 2).sort().values
            grad = random(n, 40, dtype=torch.float32)
            gradients.grads.index_add_(0, enlist(index.int(), gradients).long(), grad)
            plain.gradient.index_add_(0, index, grad)
            seen[index] = True
            assert torch.equal(gradients.place > 0, seen)
        torch.testing.assert_close(dense(gradients), plain.gradient, atol=1e-5, rtol=1e-5)
        row_adam(*state, new_rule(), 0.9)
        row_adam_reference(*plain, new_rule(), 0.9)
        assert_taken(gradients)
        for ours, exact in zip(state.changed(), plain.changed()):
            torch.testing.assert_close(ours, exact, atol=1e-4, rtol=1e-4)


def test_rows_without_room_in_the_list_stay_as_they_are():
    """Nothing is written where it does not belong, and the next update takes them again."""
    state = new_state(90, 40)
    guarded = torch.full((60, 40), torch.nan, device=DEVICE)
    guarded[:21] = 0
    gradients = no_gradients(state.weight, 20)._replace(grads=guarded[:21])
    state, index = state._replace(gradient=gradients), torch.arange(0, 90, 3, device=DEVICE)
    for seen in (index, index[5:10]):
        before = state.weight.clone()
        places, grad = enlist(seen.int(), gradients).long(), random(len(seen), 40, dtype=torch.float32)
        with_place = places > 0
        gradients.grads.index_add_(0, places[with_place], grad[with_place])
        has_place = gradients.place > 0
        assert has_place.sum() == min(len(seen), 20)
        row_adam(*state, new_rule(decay=0.0), 0.9)
        assert torch.equal((state.weight != before).any(1), has_place) and guarded[21:].isnan().all()
        assert_taken(gradients)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a table of 86 GB needs a GPU")
def test_the_longest_table_is_updated_to_its_end():
    """2³⁰ rows have more numbers than 32 bits count: the update reaches a few rows and no others."""
    if torch.cuda.mem_get_info()[0] < 90e9:
        pytest.skip("a table of 86 GB has no room")
    count = 2**30
    table = torch.zeros(count, 32, device=DEVICE, dtype=torch.bfloat16)
    second, last, steps = (torch.zeros(shape, device=DEVICE) for shape in ((count, 2), (count,), ()))
    rows = torch.tensor([0, 2**26, 2**29 + 3, count - 2, count - 1], device=DEVICE)
    grad, gradients = random(5, 32, dtype=torch.bfloat16), no_gradients(table, 100)
    table[rows] = -3.0
    gradients.grads.index_copy_(0, enlist(rows.int(), gradients).long(), grad)
    row_adam(table, gradients, second, last, steps, new_rule(lr=0.5, decay=0.0), 0.9)
    root = grad.float().unflatten(1, (2, 16)).square().mean(2).sqrt().repeat_interleave(16, 1)
    torch.testing.assert_close(table[rows].float(), -3 - 0.5 * grad.float() / root, atol=0.05, rtol=0.01)
    assert last.sum() == len(rows) == last[rows].sum() and second.any(1).sum() == len(rows)
    assert not gradients.place.any()
    assert sum(int(part.any(1).sum()) for part in table.split(2**26)) == len(rows)


def test_wrong_shapes_and_dtypes_are_refused():
    state = new_state(6, 8)
    state = state._replace(gradient=no_gradients(state.weight, 6))
    for name, wrong in (("weight", {"weight": state.weight.half()}), ("weight", {"weight": random(8, 6).mT}),
                        ("last", {"last": state.last[:5]}),
                        ("place", {"gradient": no_gradients(state.weight[:5], 6)}),
                        ("grads", {"gradient": no_gradients(state.weight[:, :7], 6)}),
                        ("second", {"second": state.second[:5]}),
                        ("second", {"second": state.second[:, :3].contiguous()})):
        with pytest.raises(ValueError, match=f"{name} must be"):
            row_adam(*state._replace(**wrong), new_rule(), 0.9)
