"""The list of rows that have a gradient."""
import pytest
import torch
from checks import DEVICE, random

from kernels.embedding import add_rows, sort_rows
from kernels.ngrams.row_gradients import enlist, enlist_reference, no_gradients


@pytest.mark.parametrize("list_them", [enlist, enlist_reference])
@pytest.mark.parametrize("n, count, capacity", [
    (1, 1, 1), (70, 300, 300), (3000, 900, 900), (3000, 900, 100), (0, 5, 5)])
def test_rows_are_listed_once_while_there_is_room(list_them, n, count, capacity):
    gradients = no_gradients(random(count, 3), capacity)
    seen = torch.zeros(count, dtype=torch.bool, device=DEVICE)
    for _ in range(2):
        rows = torch.randint(count, (n,), device=DEVICE, dtype=torch.int32).sort().values
        kept = gradients.place.clone()
        places = list_them(rows, gradients)
        seen[rows.long()] = True
        assert torch.equal(places, gradients.place[rows.long()])
        assert torch.equal(gradients.place[kept > 0], kept[kept > 0])
        assert gradients.count == seen.sum() if capacity == count else gradients.count >= capacity
        with_place = (gradients.place > 0).nonzero().flatten()
        assert len(with_place) == min(int(seen.sum()), capacity) and seen[with_place].all()
        assert torch.equal(gradients.rows[gradients.place[with_place].long()].long(), with_place)
    with pytest.raises(ValueError, match="rows must be"):
        enlist(rows.long(), gradients)


def test_rows_without_room_write_nowhere_else():
    guarded, table = torch.full((60, 40), torch.nan, device=DEVICE), random(90, 40, dtype=torch.float32)
    guarded[:21] = 0
    gradients = no_gradients(table, 20)._replace(grads=guarded[:21])
    rows, positions = sort_rows(torch.arange(0, 90, 3, device=DEVICE))[1:3]
    add_rows(gradients.grads, random(30, 40, dtype=torch.float32), enlist(rows, gradients), positions)
    assert (gradients.place > 0).sum() == 20 and gradients.grads[1:].any(1).all()
    assert guarded[21:].isnan().all()
