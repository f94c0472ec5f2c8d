"""Sums of gradients that belong to the same row."""
import pytest
import torch
from checks import DEVICE, DTYPES, assert_as_exact_as_pytorch, random

from kernels.embedding import add_rows, add_rows_reference, sort_rows

RUNS = {  # how often each row of a table occurs, in blocks of 16 positions
    "nothing": [0, 0, 0], "one position": [0, 1, 0], "all distinct": [1] * 50, "one run": [0, 101],
    "a run over several blocks, and short ones": [3, 0, 150, 1, 9, 2, 40, 5],
    "to the edges of blocks": [16, 32, 0, 48, 4, 12, 7, 9], "across each edge": [15, 2, 14, 2, 15, 2, 30],
    "into a second block": [13, 4], "many in one block": [2, 0, 3, 1, 4, 5],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_add_rows_wherever_a_run_starts_and_ends(runs, dtype):
    """Only the rows read change, in some columns of a wider table; repeated sums have the same bits."""
    count, width = len(runs), 21
    index = torch.arange(count, device=DEVICE).repeat_interleave(torch.tensor(runs, device=DEVICE))
    index = index[torch.randperm(len(index), device=DEVICE)]
    order, grad = sort_rows(index)[1:3], random(len(index), 40, dtype=dtype)[:, 3:3 + width]
    for out_dtype in {dtype, torch.float32}:
        old, results = random(count, 48, dtype=out_dtype), []
        for function in (add_rows, add_rows, add_rows_reference):
            new, tuned = old.clone(), {"tuned": (16, 16, 2, 1, 2)} if function is add_rows else {}
            function(new[:, 16:16 + width], grad, *order, **tuned)
            results.append(new)
        exact = old.double()
        exact[:, 16:16 + width].index_add_(0, index, grad.double())
        assert_as_exact_as_pytorch(results[0], results[2], exact)
        assert torch.equal(results[0], results[1])
        other_columns = (torch.arange(48, device=DEVICE) - 16 - width // 2).abs().gt(width // 2)
        unread = (torch.tensor(runs, device=DEVICE) == 0)[:, None] | other_columns
        assert torch.equal(results[0][unread], old[unread])


def test_add_rows_refuses_what_it_cannot_do():
    out, grad = random(9, 32), random(100, 32)
    rows, positions = sort_rows(torch.randint(9, (100,), device=DEVICE))[1:3]
    for name, arguments in (
            ("grad", (out, grad[:5], rows, positions)), ("grad", (out, grad.double(), rows, positions)),
            ("out", (out.mT, grad, rows, positions)), ("rows", (out, grad, rows, positions[:5])),
            ("out", (out[:1].expand(2 ** 30 + 1, 32), grad, rows, positions))):
        with pytest.raises(ValueError, match=f"{name} must be"):
            add_rows(*arguments)
    with pytest.raises(ValueError, match="grad must be"):
        add_rows(out, grad[:, :5], rows, positions, once=False)
