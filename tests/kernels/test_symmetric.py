"""Symmetric matmuls: one triangle computed, the other mirrored."""
import pytest
import torch
from checks import DEVICE, DTYPES, assert_as_exact_as_pytorch, random, refused

from kernels.optimizer.symmetric import (
    CONFIGS,
    commuting_product,
    commuting_product_reference,
    gram,
    gram_reference,
    gram_with_row_sums,
    polynomial,
    polynomial_reference,
)

SHAPES = [(1, 9), (9, 1), (5, 7), (96, 96), (130, 70)]


def assert_gram(x: torch.Tensor, tuned: tuple | None = None) -> None:
    exact = x.double() @ x.double().mT
    out, sums = gram_with_row_sums(x, tuned=tuned)
    assert_as_exact_as_pytorch(out, gram_reference(x), exact)
    assert torch.equal(out, out.mT) and torch.equal(out, gram(x, tuned=tuned))
    torch.testing.assert_close(sums.sum(1), exact.abs().sum(-1).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gram_is_symmetric_whatever_the_strides(shape, dtype):
    contiguous = random(2, *shape, dtype=dtype)
    padded = random(2, shape[0] + 3, 2 * shape[1] + 1, dtype=dtype)[:, 3:, 1::2]
    for x in (contiguous, contiguous.mT, padded, contiguous[:1]):
        assert_gram(x)


@pytest.mark.parametrize("tuned", CONFIGS)
def test_gram_and_its_row_sums_in_every_configuration(tuned):
    """With more than one tile a row, and one that is not full."""
    assert_gram(random(2, 130, 70), tuned)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 5, 130])
def test_polynomial_is_symmetric_until_its_columns_are_scaled(m, dtype):
    a_matrix = gram(random(2, m, 40, dtype=dtype)) / 10
    exact = polynomial_reference(a_matrix.double(), 3.5, -2.5, 0.5)
    plain = polynomial_reference(a_matrix, 3.5, -2.5, 0.5)
    out = polynomial(a_matrix, 3.5, -2.5, 0.5)
    assert_as_exact_as_pytorch(out, plain, exact)
    assert torch.equal(out, out.mT)
    scale = torch.rand(2, m, device=DEVICE)
    scaled = polynomial(a_matrix, 3.5, -2.5, 0.5, column_scale=scale)
    assert_as_exact_as_pytorch(scaled, (plain * scale[:, None]).to(dtype), exact * scale[:, None])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [5, 130])
def test_product_of_two_polynomials_of_one_matrix(m, dtype):
    """As exact as the rounded polynomials allow, by rows of the lower triangle, in either dtype."""
    a_matrix = gram(random(2, m, 40, dtype=dtype)) / 50
    p, q = polynomial(a_matrix, 0.0, -2.5, 0.5), polynomial(a_matrix, 0.0, 1.0, 0.2)
    scale = torch.rand(2, m, device=DEVICE)
    for numbers in ((0.0, 0.0, 0.0), (3.5, 2.5, -1.5)):
        plain = commuting_product_reference(p, q, *numbers)
        exact = commuting_product_reference(p.double(), q.double(), *numbers)
        out = commuting_product(p, q, *numbers)
        assert_as_exact_as_pytorch(out.tril(), plain.tril(), exact.tril())
        assert torch.equal(out, out.mT) and torch.equal(out, commuting_product(p, q, *numbers))
        exact = (exact + exact.mT) / 2 * scale[:, None]
        scaled = commuting_product(p, q, *numbers, column_scale=scale)
        assert (scaled - exact).norm() <= (4 * torch.finfo(dtype).eps) * exact.norm()
        assert commuting_product(p, q, *numbers, dtype=torch.float32).dtype == torch.float32


def test_wrong_shapes_and_dtypes_are_refused():
    x = random(2, 8, 6)
    square = x[:, :6]
    refused(("", lambda: gram(x[0])), ("", lambda: gram(x.double())), ("", lambda: polynomial(x, 1, 1, 1)),
            ("", lambda: polynomial(square, 1, 1, 1, column_scale=x[0])),
            ("", lambda: commuting_product(x, x)), ("", lambda: commuting_product(square, square)),
            ("", lambda: commuting_product(gram(x), gram(x)[:1])))
    assert gram(x[:0]).shape == (0, 8, 8) and gram(x[:, :, :0]).eq(0).all()


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs tens of GB and a GPU")
def test_products_of_more_than_2_to_the_31_elements():
    x = random(3650, 768, 768)  # 2**31 elements and 5 million more
    out = gram(x)
    assert out.numel() > 2**31
    last = x[-2:]
    assert_as_exact_as_pytorch(out[-2:], gram_reference(last), last.double() @ last.double().mT)
    p = polynomial(out, 3.5, -2.5e-3, 5e-7)
    assert torch.equal(p[-2:], polynomial(out[-2:], 3.5, -2.5e-3, 5e-7))


def test_a_product_too_large_for_its_indices_is_refused():
    """Of a small x: the kernel's places in m by m are 32 bits long."""
    with pytest.raises(ValueError, match="m \\* m less than that"):
        gram(torch.empty(1, 50_000, 16, dtype=torch.bfloat16, device="meta"))
