# SPDX-License-Identifier: Apache-2.0
from verl_digen.data.rows import loop_columns, loop_row, prompt_batch, prompt_rows
from verl_digen.types import PromptRow

ROWS = [
    PromptRow("a", "s", None, uid="p0", index=0),
    PromptRow(
        *("b", "s", {"shape": ["circle"]}, "ugly", {"tags": ["x", "y"], "n": 2}),
        uid="p1",
        index=1,
        images=("/b.png",),
        pair=("/c.png", "/r.png"),
    ),
    PromptRow("c", "t", "x", "", uid="p2", index=2),
]


def test_rows_and_batches_are_each_other_s_inverse():
    batch = prompt_batch(ROWS)
    assert prompt_rows(batch) == ROWS
    assert list(batch["uid"]) == ["p0", "p1", "p2"] and list(batch["raw_prompt"]) == ["a", "b", "c"]


def test_rows_of_a_part_of_a_batch_and_of_one_prompt_are_found():
    assert [row for part in prompt_batch(ROWS).chunk(2) for row in prompt_rows(part)] == ROWS
    assert prompt_rows(prompt_batch(ROWS[1:2])) == ROWS[1:2]


def test_a_custom_agent_loop_gets_verls_columns_and_they_make_the_row_again():
    columns = loop_columns(ROWS[1])
    assert columns == {
        "raw_prompt": "b",
        "negative_prompt": "ugly",
        "data_source": "s",
        "reward_model": {"ground_truth": {"shape": ["circle"]}},
        "extra_info": {"tags": ["x", "y"], "n": 2},
        "images": ("/b.png",),
        "pair": ("/c.png", "/r.png"),
        "index": 1,
        "uid": "p1",
    }
    assert loop_row({**columns, "session_id": 3}) == ROWS[1]
