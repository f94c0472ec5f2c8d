"""Attention's backends against dense attention in float64, and what is asked of the libraries behind them."""
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from checks import DEVICE, refused

from kernels.attention.bounded import LARGEST, bounded_attention
from kernels.attention.flash import ATTENTION, choose_attention, fit_tiles, why_not
from kernels.sequence import Sequences

HERE = ["plain", "bounded"]
if DEVICE.type == "cuda":
    HERE = sorted({*HERE, "varlen", choose_attention("auto", DEVICE)[0]})


def dense_attention(q, k, v, gate, cu_seqlens, window, scale):
    """All pairs of tokens, in float64."""
    n = len(q)
    sequence = torch.tensor([sum(int(b) <= i for b in cu_seqlens) for i in range(n)])
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    allowed = (j <= i) & (i - j <= window) & (sequence[i] == sequence[j])
    scores = torch.einsum("ihd,jhd->hij", q.double(), k.double()) * scale
    out = torch.einsum("hij,jhd->ihd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v.double())
    return out * (2 * torch.einsum("ihd,hd->ih", q[..., -gate.shape[1]:].double(), gate).sigmoid())[..., None]


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("window", [1, 16, 100, 5000])
@pytest.mark.parametrize("dims", [(64, 64), (32, 64)], ids=str)
def test_attention_backends_against_dense_attention(backend, window, dims):
    n, dtype = 700, torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
    cu_seqlens = torch.tensor([0, 3, 560, 561, 650, n, n, n], dtype=torch.int32)
    q, k, v = (F.rms_norm(torch.randn(n, 2, dim), (dim,)).to(dtype).requires_grad_()
               for dim in (dims[0], *dims))
    gate = torch.randn(2, 24).requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, gate)]
    expected = dense_attention(*exact, cu_seqlens[:6], window, 0.1)
    weight = torch.randn_like(expected)
    expected.backward(weight)
    on_device = [x.detach().to(DEVICE).requires_grad_() for x in (q, k, v, gate)]
    sequences = Sequences.of(cu_seqlens.to(DEVICE), 557, n)
    out = ATTENTION[backend](*on_device[:3], sequences, window, 0.1, on_device[3])
    out.backward(weight.to(out))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.cpu().double(), expected, atol=tolerance, rtol=tolerance)
    for x, x64 in zip(on_device, exact):
        size = x64.grad.abs().max().item() if x64.ndim == 2 else 1.0       # The gate's gradient sums n terms.
        torch.testing.assert_close(x.grad.cpu().double(), x64.grad, atol=2 * tolerance * size, rtol=tolerance)


def same_as_plain(q, k, v, window, scale, tolerance=1e-5):
    """Of two sequences, the first a third as long as the second; with a gate."""
    bounds = torch.tensor([0, len(q) // 4, len(q)], dtype=torch.int32, device=DEVICE)
    sequences = Sequences.of(bounds, len(q), len(q))
    results, gate = [], torch.linspace(-0.3, 0.4, 14, device=DEVICE).view(2, 7)
    # On a GPU torch's own attention fails on values that are misaligned, so it gets a copy.
    for backend, values in ((ATTENTION["plain"], v.clone()), (bounded_attention, v)):
        leaves = [x.detach().requires_grad_() for x in (q, k, values, gate)]
        out = backend(*leaves[:3], sequences, window, scale, leaves[3])
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    for plain, bounded in zip(*results):
        torch.testing.assert_close(bounded, plain, atol=tolerance, rtol=tolerance)


def test_bounded_attention_behind_a_gate_that_shuts_is_nothing_with_finite_gradients():
    """The queries' last channels are 1, and the logit is far below where e^logit is 0 in float32."""
    q = torch.ones(70, 2, 16, device=DEVICE)
    gate = torch.full((2, 8), -20.0, device=DEVICE)
    leaves = [x.requires_grad_() for x in (q, torch.randn_like(q), torch.randn_like(q))]
    bounds = torch.tensor([0, 70], dtype=torch.int32, device=DEVICE)
    out = bounded_attention(*leaves, Sequences.of(bounds, 70, 70), 9, 0.2, gate.requires_grad_())
    assert out.abs().max() < 1e-12
    for x in torch.autograd.grad(out.sum(), [*leaves, gate]):
        assert x.isfinite().all() and x.abs().max() < 1e-9


def test_a_gate_whose_weights_are_zero_changes_nothing():
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    leaves = [x.to(dtype) for x in (normed(40), normed(40), torch.randn(40, 2, 32, device=DEVICE))]
    bounds = torch.tensor([0, 40], dtype=torch.int32, device=DEVICE)
    given = *leaves, Sequences.of(bounds, 40, 40), 9, 0.2
    for backend in HERE:
        out = ATTENTION[backend](*given, torch.zeros(2, 5, device=DEVICE))
        torch.testing.assert_close(out, ATTENTION[backend](*given), atol=1e-6, rtol=1e-6)


def test_gates_that_bounded_attention_refuses():
    sequences = Sequences.of(torch.tensor([0, 9], device=DEVICE), 9, 9)

    def call(gate: torch.Tensor) -> Callable:
        return lambda: bounded_attention(normed(9), normed(9), normed(9), sequences, 4, 0.2, gate.to(DEVICE))

    wrong_shapes = (torch.zeros(*shape) for shape in ((3, 5), (2, 0), (2, 17), (2,)))
    refused(*(("gate", call(gate)) for gate in (
        *wrong_shapes, torch.zeros(2, 5).double(), torch.zeros(5, 2).T)))


def normed(n: int, channels: int = 16) -> torch.Tensor:
    return F.rms_norm(torch.randn(n, 2, channels, device=DEVICE), (channels,))


@pytest.mark.parametrize("n", [0, 1, 63, 66, 131])
@pytest.mark.parametrize("window", [0, 20, 2 ** 31 - 1])
def test_bounded_attention_of_any_length_and_window(n, window):
    same_as_plain(normed(n), normed(n), torch.randn(n, 2, 32, device=DEVICE), window, 0.2)


def test_bounded_attention_of_the_largest_scores_and_of_misaligned_values():
    """Queries and keys are one vector or its opposite: all scores of a row may be as low as possible."""
    sign = torch.tensor([1.0, -1.0], device=DEVICE)[torch.randint(2, (70, 2, 1), device=DEVICE)]
    values = torch.randn(1 + 70 * 2 * 16, device=DEVICE)[1:].view(70, 2, 16)
    assert values.data_ptr() % 16
    queries = torch.ones(70, 2, 16, device=DEVICE)
    same_as_plain(queries, 2 ** 0.5 * sign * queries, values, 8, 1.2 * LARGEST / 16, 1e-4)


@pytest.mark.parametrize(("capability", "dims", "scale", "chosen"), [
    ((9, 0), (64, 128), 0.15, "bounded"), ((9, 0), (96, 96), 0.15, "varlen"),
    ((9, 0), (64, 128), 0.6, "varlen"), ((10, 0), (64, 128), 0.15, "varlen"),
    ((8, 6), (64, 128), 0.15, "varlen"), ((7, 5), (64, 128), 0.15, "plain")])
def test_the_backend_is_one_that_runs(monkeypatch, capability, dims, scale, chosen):
    """On a machine without FlashAttention-4. What is not the fastest says why."""
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    gpu = torch.device("cuda", 0)
    name, note = choose_attention("auto", gpu, dims, scale)
    assert name == chosen and bool(note) == (chosen != "bounded")
    assert ("channels" in note) == (capability == (9, 0) and chosen == "varlen")    # the fastest one's reason
    assert not why_not(name, gpu, dims, scale)
    assert bool(why_not("bounded", gpu, dims, scale)) == (dims[0] == 96 or scale > 0.5 or capability < (8, 0))


def test_where_sequences_lie():
    """Also with empty ones at the end."""
    found = Sequences.of(torch.tensor([0, 2, 3, 6, 6, 6], dtype=torch.int32), 3, 6)
    assert found.first.tolist() == [0, 0, 2, 3, 3, 3] and found.end.tolist() == [2, 2, 3, 6, 6, 6]


def test_flash4_chooses_its_tiles_by_the_wider_heads():
    def tiles(head_dim, head_dim_v, causal, sparse_block_size_q=None):
        return head_dim, head_dim_v, causal, sparse_block_size_q

    interface = SimpleNamespace(_tile_size_bwd_sm90=tiles)  # of a version without the other
    for _ in range(2):
        fit_tiles(interface)
        assert interface._tile_size_bwd_sm90(64, 128, True, sparse_block_size_q=3) == (128, 128, True, 3)
        assert interface._tile_size_bwd_sm90(192, 128, True) == (192, 128, True, None)
    assert interface._tile_size_bwd_sm90.__wrapped__ is tiles
    assert not hasattr(interface, "_tile_size_fwd_sm90")


def test_torchs_attention_gets_queries_keys_and_values_of_one_width(monkeypatch):
    """They are padded with zeros, which change no result: the gradients too are those of the narrow ones.

    The gate sees the query without its zeros.
    """
    def equal_widths(q, k, v, *_, scale, window_size):
        assert q.shape == k.shape == v.shape
        return ATTENTION["plain"](q, k, v, sequences, window_size[0], scale)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", equal_widths)
    sequences = Sequences.of(torch.tensor([0, 40, 60], dtype=torch.int32), 60, 60)
    for qk_dim, head_dim in ((8, 16), (16, 8), (16, 16)):
        leaves = [torch.randn(60, 2, dim, requires_grad=True) for dim in (qk_dim, qk_dim, head_dim)]
        leaves.append(torch.randn(2, 5, requires_grad=True))
        results = []
        for backend in ("plain", "varlen"):
            out = ATTENTION[backend](*leaves[:3], sequences, 9, 0.1, leaves[3])
            results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
        for plain, varlen in zip(*results):
            torch.testing.assert_close(varlen, plain)
