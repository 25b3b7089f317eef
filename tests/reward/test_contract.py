# SPDX-License-Identifier: Apache-2.0
"""Built-in rewards without weights keep the contract of `contract.py`, which sees a reward that does not."""

import pytest
import torch

from tests.reward.contract import check_contract
from verl_digen.config.reward import reward_entry
from verl_digen.reward.named import make


@pytest.mark.parametrize("name", ["jpeg_compressibility", "jpeg_incompressibility"])
def test_a_batch_is_its_samples_one_by_one(name):
    check_contract(make(reward_entry(name, 1.0), torch.device("cpu")))
