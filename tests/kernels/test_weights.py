"""A layer's weights in FP8, in two launches."""
import pytest
import torch
from checks import random, same_bits

from kernels.fp8.quantize import quantize
from kernels.fp8.weights import CONFIGS, fp8_weights, fp8_weights_reference


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("width, bad", [(16, float("nan")), (48, 0.0), (272, 1.0)])
def test_weights_have_the_bits_of_quantize_in_every_configuration(width, bad):
    """Weights of different lengths, one a slice of rows, one of them perhaps zero or NaN. Scales are near the
    reference's."""
    weights = random(140, width + 16)[:, :width], random(1, width) * bad, random(70, width) * 1e3
    firsts = fp8_weights(weights)
    expected = [quantize(weight, ours.scale) for weight, ours in zip(weights, firsts, strict=True)]
    for ours, reference in zip(firsts, fp8_weights_reference(weights), strict=True):
        numbers, wanted = torch.stack(ours[2:]), torch.stack(reference[2:])
        torch.testing.assert_close(numbers, wanted, rtol=1e-5, atol=0, equal_nan=True)
    for tuned in CONFIGS:
        for ours, first, both_ways in zip(fp8_weights(weights, tuned), firsts, expected, strict=True):
            assert ours.scale.data_ptr() % 16 == ours.norm.data_ptr() % 16 == 0 and ours.scale != 0
            assert all(x.is_contiguous() for x in ours[:2])
            for x, same in zip(ours, (*both_ways, *first[2:]), strict=True):
                assert same_bits(x.flatten(), same.flatten())


def test_weights_must_have_one_width():
    with pytest.raises(ValueError, match="x must be"):
        fp8_weights((random(4, 16), random(4, 32)))
