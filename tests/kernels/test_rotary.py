"""Rotary positions: dot products depend on distances alone, and YaRN slows the slow channels."""
import math

import numpy as np
import pytest
import torch

from kernels.attention.rotary import rotary_tables, rotate, yarn


def test_rotary_keeps_dot_products_relative_and_yarn_slows_slow_channels():
    tables = rotary_tables([128, 512], 300, 16, 1024.0, 0.1, True, torch.device("cpu"))
    for cos, sin, _ in tables.values():
        q, k = torch.randn(1, 1, 32).expand(300, 1, 32), torch.randn(1, 1, 32).expand(300, 1, 32)
        dots = torch.einsum("ihd,jhd->ij", rotate(q, cos, sin), rotate(k, cos, sin))
        torch.testing.assert_close(dots[10, 3], dots[210, 203], atol=1e-4, rtol=1e-4)
    fast, slow = (torch.atan2(sin[1], cos[1]) for cos, sin, _ in (tables[128], tables[512]))
    assert slow[-1] == pytest.approx(fast[-1].item() / 4) and slow[0] <= fast[0]
    assert tables[512][2] > tables[128][2] == 0.1


def test_yarn_and_the_frequencies_against_their_formulas():
    frequency = 2 * np.pi / 100 * np.array([40.0, 16.5, 0.5])        # so many turns in a window of 100 tokens
    slowed, growth = yarn(frequency, 100, 300)
    np.testing.assert_allclose(slowed / frequency, [1.0, 1 / 3 + 0.5 * 2 / 3, 1 / 3])
    assert growth == pytest.approx(1 + 0.2 * math.log(3))
    cos, sin, _ = rotary_tables([128], 3, 16, 1024.0, 0.1, True, torch.device("cpu"))[128]
    expected = torch.tensor([1024.0 ** (-i / 7) for i in range(8)])
    torch.testing.assert_close(torch.atan2(sin[1], cos[1]), expected)
