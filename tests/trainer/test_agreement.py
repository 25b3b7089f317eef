# SPDX-License-Identifier: Apache-2.0
import math

import pytest

from verl_digen.config import RolloutConfig
from verl_digen.errors import RunStopped
from verl_digen.trainer.agreement import GAP, check_log_prob_gap


@pytest.mark.parametrize("gap", [0.11, math.nan, math.inf])
def test_a_gap_above_the_bound_stops_the_run_and_says_where_to_look(gap):
    with pytest.raises(RunStopped, match=r"step 3: rollout/log_prob_gap_max must be <= .*=0.1 nats.*rollout\.dtype"):
        check_log_prob_gap({GAP: gap}, 0.1, step=3)


def test_a_gap_within_the_bound_any_gap_without_one_and_no_gap_pass():
    check_log_prob_gap({GAP: 0.1}, 0.1, step=3)
    check_log_prob_gap({GAP: 9.0}, None, step=3)
    check_log_prob_gap({}, 0.1, step=3)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_a_bound_must_be_positive(value):
    with pytest.raises(ValueError, match="max_log_prob_gap must be null or > 0"):
        RolloutConfig(max_log_prob_gap=value)
