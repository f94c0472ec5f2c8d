"""Attention's backends against dense attention in float64, and what is asked of the libraries behind them."""
from types import SimpleNamespace

import pytest
import torch
from checks import DEVICE

from kernels.attention.flash import ATTENTION, choose_attention, fit_tiles
from kernels.sequence import Sequences

HERE = ["plain", "bounded"]
if DEVICE.type == "cuda":
    HERE = sorted({*HERE, "varlen", choose_attention("auto", DEVICE)[0]})


def dense_attention(q, k, v, cu_seqlens, window, scale):
    """All pairs of tokens, in float64."""
    n = len(q)
    sequence = torch.tensor([sum(int(b) <= i for b in cu_seqlens) for i in range(n)])
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    allowed = (j <= i) & (i - j <= window) & (sequence[i] == sequence[j])
    scores = torch.einsum("ihd,jhd->hij", q.double(), k.double()) * scale
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v.double())


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("window", [1, 16, 100, 5000])
@pytest.mark.parametrize("dims", [(64, 64), (32, 64)], ids=str)
def test_attention_backends_against_dense_attention(backend, window, dims):
    n, dtype = 1100, torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
    cu_seqlens = torch.tensor([0, 3, 700, 701, 1000, n, n, n], dtype=torch.int32)
    q, k, v = (torch.randn(n, 2, dim, dtype=dtype).requires_grad_() for dim in (dims[0], *dims))
    q64, k64, v64 = (x.detach().double().requires_grad_() for x in (q, k, v))
    expected = dense_attention(q64, k64, v64, cu_seqlens[:6], window, 0.1)
    weight = torch.randn_like(expected)
    expected.backward(weight)
    on_device = [x.detach().to(DEVICE).requires_grad_() for x in (q, k, v)]
    out = ATTENTION[backend](*on_device, Sequences.of(cu_seqlens.to(DEVICE), 697, n), window, 0.1)
    out.backward(weight.to(out))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.cpu().double(), expected, atol=tolerance, rtol=tolerance)
    for x, x64 in zip(on_device, (q64, k64, v64)):
        torch.testing.assert_close(x.grad.cpu().double(), x64.grad, atol=2 * tolerance, rtol=tolerance)


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
    """They are padded with zeros, which change no result: the gradients too are those of the narrow ones."""
    def equal_widths(q, k, v, *_, scale, window_size):
        assert q.shape == k.shape == v.shape
        return ATTENTION["plain"](q, k, v, sequences, window_size[0], scale)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", equal_widths)
    sequences = Sequences.of(torch.tensor([0, 40, 60], dtype=torch.int32), 60, 60)
    for qk_dim, head_dim in ((8, 16), (16, 8), (16, 16)):
        leaves = [torch.randn(60, 2, dim, requires_grad=True) for dim in (qk_dim, qk_dim, head_dim)]
        results = []
        for backend in ("plain", "varlen"):
            out = ATTENTION[backend](*leaves, sequences, 9, 0.1)
            results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
        for plain, varlen in zip(*results):
            torch.testing.assert_close(varlen, plain)
