# SPDX-License-Identifier: Apache-2.0
"""Records of samples through a real TransferQueue."""

import asyncio

import pytest
import torch

from tests.tags import SAMPLING, make_tag
from verl_digen.store.partitions import TRAIN
from verl_digen.store.prompts import list_partition
from verl_digen.store.samples import clear, fetch_columns, put_samples
from verl_digen.types import CleanRecord, PathRecord, Trajectory


def path_record(num_steps: int, dtype: torch.dtype) -> PathRecord:
    """A record of `num_steps` consecutive steps."""
    sigmas = torch.linspace(0.9, 0.1, num_steps + 1)
    return PathRecord(
        latents=torch.randn(num_steps + 1, 4, 8).to(dtype),
        positions=torch.arange(num_steps),
        sigmas=sigmas[:-1],
        next_sigmas=sigmas[1:],
        sigma_max=torch.tensor(0.9),
        log_probs=torch.randn(num_steps),
    )


def clean_record(num_points: int, dtype: torch.dtype) -> CleanRecord:
    return CleanRecord(torch.randn(4, 8).to(dtype), torch.linspace(1.0, 0.1, num_points))


def trajectory(index: int, record: PathRecord | CleanRecord) -> Trajectory:
    return Trajectory("g0", index, record, 7, 3, 3, SAMPLING, "a cat")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(3, 3), (2, 4)], ids=["equal", "different"])
@pytest.mark.parametrize("make", [path_record, clean_record])
def test_records_come_back_bit_for_bit_in_the_order_asked_for(queue, make, counts, dtype):
    records = {f"g0_{index}_3": make(count, dtype) for index, count in enumerate(counts)}
    tags = {key: make_tag(0.5, version=3, num_steps=len(record.sigmas)) for key, record in records.items()}
    stored = {key: (trajectory(index, record), tags[key]) for index, (key, record) in enumerate(records.items())}
    asyncio.run(put_samples(stored, step=4))
    try:
        assert list_partition(TRAIN).samples == tags
        for keys in (list(records), list(reversed(records))):
            columns = fetch_columns(TRAIN, keys, type(records[keys[0]]).COLUMNS)
            assert columns.keys() == set(type(records[keys[0]]).COLUMNS)
            for position, key in enumerate(keys):
                for name, expected in records[key].columns().items():
                    got = columns[name][position]
                    assert got.dtype == expected.dtype and torch.equal(got, expected), name
        with pytest.raises(RuntimeError, match="3 samples are to be trained, but TransferQueue has"):
            fetch_columns(TRAIN, [*records, "unknown"], CleanRecord.COLUMNS)
    finally:
        clear(TRAIN, list(records))
