# SPDX-License-Identifier: Apache-2.0
"""verl's reward model in a run of verl's main: verl starts vLLM with a vision-language model, and rewards ask it.

vLLM is the real one, from its server down to the model runner; the operators that its wheel lacks for a CPU are those
of `tests/vllm_omni/cpu_kernels.py`.
"""

from statistics import fmean, pstdev

import numpy as np
import pytest

from tests.e2e.conftest import assert_succeeded, run_main, steps_of
from tests.vllm_omni.cpu_kernels import install
from tests.vllm_omni.tiny_judge import build_tiny_judge, probability_of_yes
from verl_digen.reward.scorers.yes_no import QUESTION

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.grid]

ASKS_THE_ROUTER = '''
from uuid import uuid4

import aiohttp
import numpy as np


async def compute_score(data_source, solution_image, ground_truth, extra_info=None, *, reward_router_address):
    """Number of models that verl's router tells; keeps the picture."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://{{reward_router_address}}/v1/models") as answer:
            models = [one["id"] for one in (await answer.json())["data"]]
    np.savez("{folder}/" + uuid4().hex, picture=solution_image, prompt=extra_info["prompt"])
    return float(models == ["{model}"])
'''


def test_a_judge_and_a_function_ask_the_model_that_verl_serves(tmp_path, monkeypatch):
    model = build_tiny_judge(tmp_path / "judge")
    monkeypatch.setenv("PYTHONPATH", str(install(tmp_path / "kernels")), prepend=":")
    monkeypatch.setenv("VLLM_PLUGINS", "digen_cpu,digen_cpu_kernels")
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (tmp_path / "asks.py").write_text(ASKS_THE_ROUTER.format(folder=pictures, model=model))
    served = {
        "enable": "true",
        "enable_resource_pool": "true",
        "nnodes": 1,
        "n_gpus_per_node": 1,
        "model_path": model,
        "rollout.name": "vllm",
        "rollout.tensor_model_parallel_size": 1,
        "rollout.dtype": "float32",
        "rollout.max_model_len": 256,
        "rollout.max_num_batched_tokens": 512,
        "rollout.max_num_seqs": 8,
        "rollout.free_cache_engine": "false",
    }
    run = run_main(
        tmp_path / "run",
        *(f"reward.reward_model.{key}={value}" for key, value in served.items()),
        "+reward.reward_model.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=16000000",
        "+reward.reward_model.rollout.enable_sleep_mode=false",  # it frees a device's memory, which a CPU has not
        f"reward.custom_reward_function.path={tmp_path / 'asks.py'}",
        "digen.reward.custom_weight=0.0",
        "digen.reward.functions={yes_no: {weight: 1.0, max_batch_size: 16}}",
        "trainer.total_training_steps=2",
        timeout_s=1200,
    )
    assert_succeeded(run)
    steps = steps_of(run)
    assert [row["step"] for row in steps] == [1, 2]
    assert run.output.count("Initializing a V1 LLM engine") <= 1, "one server, started once"
    for row in steps:
        assert row["reward/custom"] == 1.0 and row["actor/grad_norm"] > 0
        assert row["reward_calls/yes_no_retries"] == 0
    kept = [np.load(file) for file in sorted(pictures.iterdir())]
    assert len(kept) == 2 * 16
    questions = [QUESTION.format(prompt=one["prompt"]) for one in kept]
    expected = probability_of_yes(model, [one["picture"] for one in kept], questions)
    assert pstdev(expected) > 0.01, "the judge sees what it is shown"
    assert fmean(row["reward/yes_no"] for row in steps) == pytest.approx(fmean(expected), abs=1e-4)
    spreads = [row["reward/std"] for row in steps]
    assert min(spreads) > 0
