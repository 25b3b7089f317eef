# SPDX-License-Identifier: Apache-2.0
"""Built-in rewards without weights keep the contract of `contract.py`, which sees a reward that does not."""

import numpy as np
import pytest
import torch

from tests.reward.contract import check_contract
from verl_digen.config.reward import reward_entry
from verl_digen.reward.base import Reward
from verl_digen.reward.named import make


@pytest.mark.parametrize("name", ["jpeg_compressibility", "jpeg_incompressibility"])
def test_a_batch_is_its_samples_one_by_one(name):
    check_contract(make(reward_entry(name, 1.0), torch.device("cpu")))


def test_a_reward_that_depends_on_its_batch_is_seen():
    class OfBatch(Reward):
        def score(self, batch):
            return [float(np.mean([sample.pixels.mean() for sample in batch]))] * len(batch)

    with pytest.raises(AssertionError):
        check_contract(OfBatch(None, torch.device("cpu")))
