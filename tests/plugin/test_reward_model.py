# SPDX-License-Identifier: Apache-2.0
"""verl's reward model: what a run that serves one, or asks one, must have."""

import pytest
from omegaconf import OmegaConf, open_dict

from tests.reward.samples import LATENT
from verl_digen.config import digen_config
from verl_digen.config.pool_sizes import asked_devices, num_function_devices, num_reward_devices
from verl_digen.preflight import rewards
from verl_digen.preflight.rewards import check_latents, check_reward_devices, check_reward_model, check_rewards
from verl_digen.preflight.start_config import StartConfig

SERVED = [
    "reward.reward_model.enable=true",
    "reward.reward_model.enable_resource_pool=true",
    "reward.reward_model.nnodes=1",
    "reward.reward_model.n_gpus_per_node=4",
    "reward.reward_model.model_path=Qwen/Qwen2.5-VL-7B-Instruct",
    "reward.reward_model.rollout.name=vllm",
    "digen.reward.functions={yes_no: 1.0}",
]
ROUTED = "def compute_score(data_source, solution_image, ground_truth, extra_info=None, *, reward_router_address): ..."


@pytest.fixture
def served(start, monkeypatch):
    """A run that serves a model on four devices, for a judge."""
    monkeypatch.setattr(rewards, "find_spec", lambda name: object())
    return start("recipe=digen_flowgrpo", *SERVED)


def changed(config, changes):
    config = config.copy()
    with open_dict(config):
        for key, value in changes.items():
            OmegaConf.update(config, key, value, merge=False, force_add=True)
    return config


def test_a_judge_without_url_and_a_served_model_go_together(served):
    for check in (check_reward_model, check_rewards, check_reward_devices):
        check(StartConfig(served))
    digen = digen_config(served)
    assert (num_function_devices(served), num_reward_devices(served, digen.reward)) == (0, 4)
    assert asked_devices(served, digen, has_own_replicas=False)["reward.reward_model"] == 4


def test_devices_of_a_pool_without_a_model_are_the_functions(served):
    config = changed(
        served, {"reward.reward_model.enable": False, "digen.reward.functions": {"jpeg_compressibility": 1.0}}
    )
    check_reward_devices(StartConfig(config))
    assert num_function_devices(config) == num_reward_devices(config, digen_config(config).reward) == 4


M = "reward.reward_model."


@pytest.mark.parametrize(
    "changes, rule",
    [
        (
            {"digen.reward.functions": {"jpeg_compressibility": 1.0}},
            "reward.reward_model.enable must be false where no reward asks",
        ),
        (
            {"digen.reward.functions": {"yes_no": {"weight": 1.0, "url": "http://host:1"}}},
            "reward.reward_model.enable must be false where no reward asks",
        ),
        ({M + "enable_resource_pool": False}, "must be true with reward.reward_model.enable: its servers need devices"),
        ({M + "model_path": None}, "model_path must name the model to serve, got None"),
        ({M + "rollout.name": "???"}, "rollout.name must be a server of language models, got None; vllm or sglang"),
        ({M + "rollout.name": "diffusers"}, "rollout.name must be a server of language models, got 'diffusers'"),
        ({M + "rollout.tensor_model_parallel_size": 3}, r"must divide the 4 devices .* got 3"),
        ({"digen.placement.reward_accelerator": "H100"}, "digen.placement.reward_accelerator must be null"),
    ],
)
def test_a_reward_model_that_cannot_serve_is_refused(served, changes, rule):
    with pytest.raises(ValueError, match=rule):
        check_reward_model(StartConfig(changed(served, changes)))


def test_a_server_that_is_not_installed_is_named(served, monkeypatch):
    monkeypatch.setattr(rewards, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"rollout.name=vllm needs the package vllm, .* start a server elsewhere"):
        check_reward_model(StartConfig(served))


@pytest.mark.parametrize("functions", [{}, {"mine": {"weight": 1.0}}])
def test_a_function_that_takes_the_router_asks_the_model(served, functions, tmp_path):
    (tmp_path / "routed.py").write_text(ROUTED)
    target = f"{tmp_path / 'routed.py'}:compute_score"
    named = {name: {**entry, "reward": target} for name, entry in functions.items()}
    path = None if functions else str(tmp_path / "routed.py")
    config = changed(served, {"digen.reward.functions": named, "reward.custom_reward_function.path": path})
    check_rewards(StartConfig(config))
    check_reward_model(StartConfig(config))
    without = changed(config, {M + "enable": False})
    with pytest.raises(ValueError, match="reward_router_address"):
        check_rewards(StartConfig(without))


def test_a_judge_without_a_server_is_refused_where_no_model_is_served(served):
    without = changed(served, {M + "enable": False})
    with pytest.raises(ValueError, match=r"functions.yes_no.url must name a server .*vllm serve MODEL.*enable=true"):
        check_reward_model(StartConfig(without))
    check_reward_model(
        StartConfig(changed(without, {"digen.reward.functions": {"yes_no": {"weight": 1.0, "url": "http://h:1"}}}))
    )


# -- rewards of latents: samples that carry none are refused before the start --------------------------------
READS = f"digen.reward.functions={{mine: {{weight: 1, reward: {LATENT}}}}}"
SEES = "digen.reward.functions={jpeg_compressibility: 1.0}"


def test_latents_need_replicas_that_make_every_sample(start):
    check_latents(StartConfig(start("recipe=digen_flowgrpo+disaggregated", READS, "digen.tag.policy=off")))
    check_latents(StartConfig(start("recipe=digen_flowgrpo+disaggregated", SEES, "digen.tag.policy=always")))
    with pytest.raises(ValueError, match=r"digen.tag.policy must be off with digen.reward.functions.mine, .*got 'bts'"):
        check_latents(StartConfig(start("recipe=digen_flowgrpo+disaggregated", READS, "digen.tag.policy=bts")))
    with pytest.raises(ValueError, match=r"class method reads_latents\(arguments\), got 'Attribute'"):
        check_latents(StartConfig(start("recipe=digen_flowgrpo", READS.replace("MeanLatent", "Attribute"))))
