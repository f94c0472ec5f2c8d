"""How much of its n-gram rows each token takes."""
import pytest
import torch
from checks import DEVICE, DTYPE, random, refused

from kernels.fp8.formats import E4M3, Quantized, normed_scale
from kernels.ngrams.row_gate import first_channels, row_scale, row_scale_reference
from kernels.ngrams.values import share_values


def test_a_new_gate_leaves_the_scale_as_it_is():
    scale = torch.tensor([0.05, -3.0], device=DEVICE)
    given = random(7, 3), random(7, 2, 16), scale, torch.zeros(2, 6, device=DEVICE)
    for found in (row_scale_reference(*given), row_scale(*given)[0]):
        assert torch.equal(found, scale.expand(7, 2))


def test_a_gate_sees_the_token_and_the_row_of_its_own_head():
    seen, rows = torch.zeros(4, 1, device=DEVICE), torch.zeros(4, 2, 16, device=DEVICE)
    seen[1], rows[2, 0, 0], rows[3, 1, 0], rows[:, :, 1:] = 1, 1, 1, 100
    gate = torch.tensor([[50.0, -50.0], [0.0, 50.0]], device=DEVICE)
    found, _ = row_scale(seen.to(DTYPE), rows.to(DTYPE), torch.ones(2, device=DEVICE), gate)
    wanted = torch.tensor([[1.0, 1], [2, 1], [0, 1], [1, 2]], device=DEVICE)
    torch.testing.assert_close(found, wanted)


def test_what_was_quantised_is_seen_with_its_scale_and_kept():
    """Both are the same numbers where FP8 holds them exactly."""
    scale = normed_scale(32)
    q = torch.randint(-8, 8, (20, 32), device=DEVICE).float().to(E4M3)
    x = (q.float() * scale).requires_grad_()
    rows, gate = random(20, 2, 16, dtype=torch.float32), random(1, 2, 6, dtype=torch.float32)
    found = []
    for given in (Quantized(x, q, q.mT), x):
        shared = share_values(rows, torch.ones(1, 2, device=DEVICE), gate)[0]
        found.append((shared.gated(given).scale, shared.seen[0]))
    (of_fp8, kept), (of_x, kept_x) = found
    torch.testing.assert_close(of_fp8, of_x)
    assert kept.dtype == rows.dtype and not kept_x.requires_grad
    torch.testing.assert_close(kept, kept_x)
    torch.testing.assert_close(kept, x.detach()[:, :3])
    assert first_channels(x, 3)[1] == 1.0


def test_row_scale_refuses_what_it_cannot_do():
    seen, rows, scale, gate = random(5, 3), random(5, 2, 16), torch.ones(2), torch.ones(2, 6)
    scale, gate = scale.to(DEVICE), gate.to(DEVICE)
    refused(("seen", lambda: row_scale(seen[:4], rows, scale, gate)),
            ("seen", lambda: row_scale(random(3, 5).mT, rows, scale, gate)),
            ("seen", lambda: row_scale(random(5, 17), rows, scale, gate)),
            ("rows", lambda: row_scale(seen, rows.mT, scale, gate)),
            ("scale", lambda: row_scale(seen, rows, scale[:1], gate)),
            ("gate", lambda: row_scale(seen, rows, scale, gate[:, :5])),
            ("gate", lambda: row_scale(seen, rows, scale, gate.double())))
    empty, kept = row_scale(seen[:0], rows[:0], scale, gate)
    assert empty.shape == (0, 2) and kept.shape == (0, 3)


@pytest.mark.parametrize("gated", [False, True])
def test_without_gates_all_tokens_have_one_scale(gated):
    gates = torch.zeros(3, 2, 6, device=DEVICE) if gated else None
    layer = share_values(random(5, 2, 16), torch.ones(3, 2, device=DEVICE), gates)[1]
    assert (layer.gated(random(5, 32)) is layer) != gated
