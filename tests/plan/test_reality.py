# SPDX-License-Identifier: Apache-2.0
"""Plans against the real memory of an engine and a sampler.

The model is Wan, all of whose weights get a gradient. In Qwen-Image the last block's text half gets none, which is
10 % of the tiny network's two blocks and 0.4 % of the real one's sixty; the plan counts it.
"""

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.engine.harness import NUM_STEPS, SIZE_PX, gradients, make_batch, make_engine, process_group, train
from tests.tiny_models import build_tiny
from verl_digen.tools.plan.compose import Words, compose_run
from verl_digen.tools.plan.host import step_traffic
from verl_digen.tools.plan.memory import plan_memory
from verl_digen.tools.plan.run import Job, read_run

WITHIN = 0.05
LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["to_q", "to_out.0"]}


def plan(path, *overrides: str) -> Job:
    """Plan of a run on one rank of this machine's platform."""
    words = (
        "recipe=digen_flowgrpo",
        "actor_rollout_ref.rollout.name=diffusers",
        f"actor_rollout_ref.model.path={path}",
        *("trainer.n_gpus_per_node=1", "data.train_batch_size=2", "actor_rollout_ref.rollout.n=3"),
        *(f"digen.sampling.height_px={SIZE_PX}", f"digen.sampling.width_px={SIZE_PX}"),
        f"digen.sampling.num_steps={NUM_STEPS}",
        *(
            f"actor_rollout_ref.actor.fsdp_config.{key}"
            for key in ("model_dtype=fp32", "+mixed_precision.param_dtype=fp32", "+mixed_precision.reduce_dtype=fp32")
        ),
        *overrides,
    )
    return read_run(compose_run([word for word in words if not _is_there(word)], Words()), prompt_tokens=3)


def _is_there(word: str) -> bool:
    """True if the CPU's recipe already sets `word`, the precision."""
    from verl.plugin.platform import get_platform

    return get_platform().device_name == "cpu" and word.startswith("actor_rollout_ref.actor.fsdp_config.+")


def num_bytes(tensors) -> int:
    return sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in tensors)


def parameter_bytes(engine) -> int:
    return num_bytes([*engine.module.parameters(), *engine.module.buffers()])


def optimizer_bytes(engine) -> int:
    moments = (value for state in engine.optimizer.state.values() for value in state.values())
    return num_bytes(filter(torch.is_tensor, moments))


def adapter_words(options) -> list[str]:
    """Overrides for an engine's model options; none without an adapter."""
    if not options:
        return []
    return [
        f"actor_rollout_ref.model.lora_rank={options['lora_rank']}",
        f"actor_rollout_ref.model.target_modules=[{','.join(options['target_modules'])}]",
    ]


@pytest.fixture(scope="module", params=["full", "lora"])
def reality(request, tiny_wan, tmp_path_factory):
    """(an engine's bytes, the plan of the same run)."""
    options = LORA if request.param == "lora" else {}
    planned = plan(tiny_wan, *adapter_words(options))
    with process_group(0, 1, str(tmp_path_factory.mktemp("rendezvous") / "store")):
        engine = make_engine(tiny_wan, model=dict(options), digen={"ema": {"enable": True}})
        batch = make_batch(tiny_wan)
        grads, _ = gradients(engine, batch)
        train(engine, batch)
        found = {
            "parameters": parameter_bytes(engine),
            "gradients": num_bytes(grads.values()),
            "optimizer": optimizer_bytes(engine),
            "EMA": num_bytes(engine.copies["average"].shards.values()),
        }
    return found, planned


def test_parameters_gradients_and_optimizer_are_a_real_engines(reality):
    found, planned = reality
    items = plan_memory(planned, 10**9).training.items
    for name in ("parameters", "gradients", "optimizer"):
        assert items[name] == pytest.approx(found[name], rel=WITHIN), name
    assert items["gradients"] == pytest.approx(found["EMA"], rel=WITHIN)  # the EMA is a copy of the trained parameters


def test_a_weight_update_is_what_the_engine_exports(reality, tiny_wan, tmp_path):
    _, planned = reality
    is_lora = planned.settings.is_lora
    with process_group(0, 1, str(tmp_path / "store")):
        engine = make_engine(tiny_wan, model=dict(LORA) if is_lora else {})
        exported = sum(value.nbytes for _, value in engine.get_per_tensor_param()[0])
    step = step_traffic(planned)
    assert step["weights to all replicas"] == pytest.approx(exported * planned.settings.num_replicas, rel=WITHIN)


@pytest.mark.parametrize(
    ("name", "rollout", "decodes_together"),
    [("qwen_image", "vllm_omni", True), ("sd3", "vllm_omni", False), ("sd3", "diffusers", True)],
)
def test_pictures_that_a_replica_decodes_one_by_one_are_planned_so(tmp_path, name, rollout, decodes_together):
    planned = plan(build_tiny(name, tmp_path), f"actor_rollout_ref.rollout.name={rollout}")
    assert planned.measured.decodes_together is decodes_together
