# SPDX-License-Identifier: Apache-2.0
import numpy as np
import torch
from verl.utils import tensordict_utils as tu

from verl_digen.data.rows import prompt_batch, prompt_rows

BATCH = {
    "uid": np.array(["p0", "p1", "p2"], dtype=object),
    "raw_prompt": [[{"role": "user", "content": text}] for text in ("a", "b", "c")],
    "reward_model": np.array([{"ground_truth": None}, {"ground_truth": "x"}, {}], dtype=object),
    "index": np.array([0, 1, 2], dtype=object),
    "numbers": torch.arange(6.0).reshape(3, 2),
}


def test_rows_and_batches_are_each_other_s_inverse():
    rows = prompt_rows(tu.get_tensordict(BATCH))
    assert [row["uid"] for row in rows] == ["p0", "p1", "p2"]
    assert rows[1]["raw_prompt"] == [{"role": "user", "content": "b"}]
    assert rows[2]["reward_model"] == {} and rows[2]["numbers"].tolist() == [4.0, 5.0]
    again = prompt_rows(prompt_batch(rows))
    assert [row | {"numbers": None} for row in again] == [row | {"numbers": None} for row in rows]
    assert all(one["numbers"].equal(other["numbers"]) for one, other in zip(again, rows, strict=True))


def test_rows_of_several_batches_make_one():
    rows = prompt_rows(tu.get_tensordict(BATCH))
    batch = prompt_batch([rows[2], *rows[:1]])
    assert len(batch) == 2 and list(batch["uid"]) == ["p2", "p0"]
