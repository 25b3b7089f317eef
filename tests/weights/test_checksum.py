# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from verl_digen.weights.checksum import checksum

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


def tensors(dtype):
    generator = torch.Generator().manual_seed(0)
    return [(100 * torch.rand(shape, generator=generator)).to(dtype) for shape in ((3, 4), (5,), (2, 2, 2))]


def test_it_is_the_sum_of_the_bit_patterns():
    assert checksum([torch.tensor([1.0])]) == 0x3F800000
    assert checksum([torch.tensor([1.0]), torch.tensor([1.0, 1.0])]) == 3 * 0x3F800000
    assert checksum([]) == 0
    assert checksum([torch.tensor([-1])]) == 2**64 - 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_how_numbers_are_cut_into_tensors_and_their_order_does_not_matter(dtype):
    first, second, third = tensors(dtype)
    expected = checksum([first, second, third])
    assert checksum([third, first.t(), second]) == expected
    assert checksum([torch.cat([tensor.reshape(-1) for tensor in (first, second, third)])]) == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_lost_a_doubled_and_a_changed_tensor_change_it(dtype):
    first, second, third = tensors(dtype)
    expected = checksum([first, second, third])
    lowest, sign = second.clone(), second.clone()
    lowest.view(torch.uint8)[0] ^= 1
    sign.view(torch.uint8)[-1] ^= 128
    for other in ([second, third], [first, second, third, third], [first, lowest, third], [first, sign, third]):
        assert checksum(other) != expected
