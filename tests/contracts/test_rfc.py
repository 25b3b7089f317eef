# SPDX-License-Identifier: Apache-2.0
"""The names of verl's RFC for diffusion models: each has the RFC's signature, and does what the RFC says.

In this process, with a tiny Qwen-Image. vLLM-Omni's names: tests/vllm_omni/test_server.py and test_contracts.py.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from ray.exceptions import RayTaskError
from tensordict import TensorDict
from verl import DataProto

import verl_digen
from tests.agent_loop.worker import make_worker
from tests.reward.samples import LATENT
from tests.rollout.test_server import make_server
from tests.tags import make_tag
from verl_digen import (
    AsyncDiffusionServerManager,
    DiffusionAgentLoopWorker,
    DiffusionAgentLoopWorkerBase,
    DiffusionRewardLoopManager,
    DiffusionRewardLoopWorker,
    DiffusionRewardManager,
    DiffusionSingleTurnAgentLoop,
    ImageOutput,
    compute_advantage,
    finished_samples,
    to_dataproto,
)
from verl_digen.agent_loop.manager import PlainAgentLoopWorker
from verl_digen.algorithms.advantages import group_advantages
from verl_digen.algorithms.sde import sde_step
from verl_digen.config import digen_config
from verl_digen.data.rows import prompt_batch as prompt_rows_batch
from verl_digen.reward.manager import RewardProcess
from verl_digen.reward.sample_rewards import SHARED, SampleRewards
from verl_digen.rollout.server import DiffusersServer
from verl_digen.sampling import outputs
from verl_digen.sampling.outputs import FinishedSample, training_rows
from verl_digen.sampling.sampler import score_rows
from verl_digen.store.samples import to_batch
from verl_digen.types import CleanRecord, PartScore, PathRecord, PromptRow, RewardCall

T, K = 4, 3
COLUMNS = {"prompts", "responses", "prompt_embeddings", "timesteps", "latent_samples", "log_probs"}
CONFIG = OmegaConf.create(
    {
        "actor_rollout_ref": {"rollout": {"full_determinism": False}},
        "reward": {
            "num_workers": 1,
            "custom_reward_function": {"path": None},
            "reward_manager": {"name": "DiffusionRewardManager"},
        },
        "digen": {
            "seed": 7,
            "sampling": {"height_px": 64, "width_px": 64, "num_steps": T, "val_num_steps": T},
            "reward": {"functions": {"jpeg_compressibility": 1.0, "jpeg_incompressibility": 0.5}},
        },
    }
)
PROMPTS = ["a red cat", "a dog that runs over a very green field"]


LOOP = asyncio.new_event_loop()
"""The loop of all tests: a server belongs to the one that it was first called in."""


def run(call: Any) -> Any:
    return LOOP.run_until_complete(call)


def handle(method: Callable[..., Any]) -> Any:
    called = SimpleNamespace(remote=lambda *args: asyncio.ensure_future(method(*args)))
    called.options = lambda **_: called
    return called


def remote(served: Any) -> Any:
    """Handle of a replica's server in this process."""
    found: Any = type("Handle", (), {})()
    found.generate_all, found.check_health = handle(served.generate_all), handle(served.check_health)
    found.abort_request = handle(str)
    return found


@pytest.fixture(scope="module")
def server(tiny_qwen_image: Path) -> Iterator[DiffusersServer]:
    yield make_server(tiny_qwen_image)
    for task in asyncio.all_tasks(LOOP):
        task.cancel()
    run(asyncio.sleep(0))


def make_manager(*servers: Any, **given: Any) -> Any:
    return AsyncDiffusionServerManager(CONFIG, [remote(served) for served in servers], **given)


def prompt_batch(**meta: Any) -> DataProto:
    """Two samples of each prompt, with the columns of verl's data sets."""
    columns = {
        "raw_prompt": [text for text in PROMPTS for _ in range(2)],
        "uid": ["u0", "u0", "u1", "u1"],
        "data_source": ["test"] * 4,
        "reward_model": [{"ground_truth": text} for text in PROMPTS for _ in range(2)],
    }
    return DataProto(
        non_tensor_batch={name: np.array(of, dtype=object) for name, of in columns.items()}, meta_info=meta
    )


class Scoring:
    """Handle of a reward worker in this process."""

    def __init__(self, answer: Callable[..., Any]):
        worker: Any = RewardProcess()
        worker.score_one = answer
        self.score = handle(worker.score)


def reward_worker() -> Any:
    """Worker of the run's functions, made as verl's worker makes its manager."""
    worker: Any = object.__new__(DiffusionRewardLoopWorker)
    worker.config, worker.reward_router_address = CONFIG, None
    worker._init_reward_fn()
    return worker


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_digen.reward.manager.resolve_reward_manager_cls", lambda config: DiffusionRewardManager)


def run_batch(server: DiffusersServer, *, is_scored: bool, batch: DataProto | None = None) -> DataProto:
    """`generate_sequences` of a worker over two replicas."""
    worker = make_worker(digen=digen_config(CONFIG), llm_client=make_manager(server, server))
    worker.reward_loop_worker_handles = None

    async def calls() -> DataProto:
        if is_scored:
            worker.reward_loop_worker_handles = {SHARED: [Scoring(reward_worker().score_one)]}
            worker._rewards = SampleRewards.of_run(CONFIG, worker.reward_loop_worker_handles, worker.digen)
        return await worker.generate_sequences(prompt_batch() if batch is None else batch)

    return run(calls())


@pytest.fixture(scope="module")
def generated(server: DiffusersServer) -> DataProto:
    with pytest.MonkeyPatch.context() as patch:
        registered.__wrapped__(patch)  # type: ignore[attr-defined]
        return run_batch(server, is_scored=True)


def test_the_package_has_every_name():
    assert {name for name in verl_digen.RFC_NAMES if "vllm_omni" not in verl_digen.RFC_NAMES[name]} == {
        name for name in verl_digen.RFC_NAMES if "vLLM" not in name and not name.startswith("QwenImage")
    }
    for name, module in verl_digen.RFC_NAMES.items():
        if "vllm_omni" not in module:
            assert getattr(verl_digen, name).__name__ in (name, "DiffusionAgentLoopWorker")


def test_the_server_manager_generates_one_sample_of_a_text(server: DiffusersServer):
    parameters = list(inspect.signature(AsyncDiffusionServerManager).parameters.values())
    assert [one.name for one in parameters] == ["config", "server_handles", "max_cache_size"]
    assert parameters[2].default == 10000
    assert list(inspect.signature(AsyncDiffusionServerManager.generate).parameters)[1:3] == ["request_id", "prompt"]

    async def calls() -> list[Any]:
        manager = make_manager(server)
        return [await manager.generate("r0", PROMPTS[0], **given) for given in ({}, {}, {"sample_index": 1})]

    first, again, other = run(calls())
    assert isinstance(first, ImageOutput) and first.image.shape == (64, 64, 3)
    assert torch.equal(first.latent_samples, again.latent_samples)
    assert not torch.equal(first.latent_samples, other.latent_samples)


def test_settings_of_one_call_replace_those_of_the_config(server: DiffusersServer):
    found = run(make_manager(server).generate("r0", PROMPTS[0], num_steps=3))
    assert len(found.log_probs) == 2 and found.trajectory.facts.sampling.num_steps == 3
    with pytest.raises(TypeError, match="unexpected keyword argument 'steps'"):
        run(make_manager(server).generate("r0", PROMPTS[0], steps=3))


def test_a_request_id_keeps_its_replica_until_the_map_is_full_and_others_go_to_the_least_loaded():
    asked: list[tuple[str, str]] = []

    class Named:
        def __init__(self, name: str):
            self.name = name
            self.may_end = asyncio.Event()

        async def generate_all(self, requests: Any) -> Any:
            asked.extend((self.name, request.uid) for request in requests)
            await self.may_end.wait()
            raise ValueError("no picture")

        async def check_health(self) -> None: ...

    async def calls() -> list[str]:
        servers = [Named("a"), Named("b")]
        manager = make_manager(*servers, max_cache_size=1)
        order: list[str] = []
        tasks: list[Any] = []
        for index, name in enumerate(("x", "x", "y")):  # y goes where x is not; the map of one id then forgets x
            tasks.append(asyncio.create_task(manager.generate(name, "a cat", sample_index=index)))
            while len(asked) < index + 1:
                await asyncio.sleep(0)
            order.append(asked[-1][0])
            if name == "y":
                assert "x" not in manager._balancer._request_id_to_server
        for served in servers:
            served.may_end.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        return order

    first, second, third = run(calls())
    assert first == second != third


def test_an_image_output_has_the_rfcs_names(server: DiffusersServer):
    found = run(make_manager(server).generate("r0", PROMPTS[0]))
    record = found.trajectory.record
    assert found.image is found.pixels and found.image.dtype == torch.uint8
    assert found.latent_samples is record.latents and found.log_probs is record.log_probs
    assert found.latent_samples.shape[0] == K + 1 and found.prompt_embeddings.dim() == 2
    assert torch.equal(found.timesteps, record.sigmas * 1000)
    clean = replace(found, trajectory=replace(found.trajectory, record=CleanRecord(torch.zeros(4), torch.ones(2))))
    with pytest.raises(ValueError, match="latent_samples and log_probs need a recorded path"):
        _ = clean.latent_samples


def test_a_worker_returns_the_seven_outputs_and_rewards(generated: DataProto):
    assert DiffusionAgentLoopWorkerBase is DiffusionAgentLoopWorker and inspect.isclass(DiffusionAgentLoopWorkerBase)
    assert inspect.iscoroutinefunction(DiffusionAgentLoopWorkerBase.generate_sequences)
    assert list(inspect.signature(DiffusionAgentLoopWorkerBase.generate_sequences).parameters) == ["self", "batch"]
    tensors, facts = generated.batch, generated.non_tensor_batch
    assert {*tensors.keys(), *facts} >= COLUMNS | {"rm_scores"}
    assert tensors["responses"].dtype == torch.uint8 and tensors["responses"].shape == (4, 64, 64, 3)
    assert tensors["timesteps"].shape == tensors["log_probs"].shape == (4, K)
    assert tensors["latent_samples"].shape[:2] == (4, K + 1) and tensors["rm_scores"].shape == (4, 1)
    assert list(facts["prompts"]) == [text for text in PROMPTS for _ in range(2)]
    assert list(facts["sample_index"]) == [0, 1, 0, 1] and list(facts["version"]) == [0] * 4
    assert len(set(facts["seed"])) == 4 and list(facts["uid"]) == ["u0", "u0", "u1", "u1"]
    mask = tensors["prompt_embeddings_mask"]
    assert mask.shape == tensors["prompt_embeddings"].shape[:2] and not mask.all()
    assert tensors["prompt_embeddings"][~mask].abs().sum() == 0 and tensors["prompt_embeddings"][mask].any(1).all()
    assert torch.equal(tensors["prompt_embeddings"][0], tensors["prompt_embeddings"][1])
    prompts = DataProto(TensorDict({"dummy": torch.zeros(4)}, 4), prompt_batch().non_tensor_batch)
    assert len(prompts.union(generated)) == 4, "as verl's trainer joins them"


def test_a_worker_without_reward_workers_returns_no_rewards_and_the_same_samples(server, generated):
    found = run_batch(server, is_scored=False)
    assert "rm_scores" not in found.batch.keys()  # noqa: SIM118 - a TensorDict
    torch.testing.assert_close(found.batch["latent_samples"], generated.batch["latent_samples"], atol=1e-5, rtol=0)


def test_a_part_of_a_group_has_the_groups_numbers_where_they_are_given(server, generated):
    part = prompt_batch()[1:2]
    part.non_tensor_batch["sample_index"] = np.array([1], dtype=object)
    found = run_batch(server, is_scored=False, batch=part)
    torch.testing.assert_close(found.batch["latent_samples"], generated.batch["latent_samples"][1:2], atol=1e-5, rtol=0)


def test_a_batch_of_validation_has_no_trained_step(server):
    found = run_batch(server, is_scored=False, batch=prompt_batch(validate=True))
    assert found.batch["log_probs"].shape == (4, 0) and found.batch["responses"].shape == (4, 64, 64, 3)


@pytest.mark.parametrize("lost", ["raw_prompt", "uid", "data_source", "reward_model"])
def test_a_batch_that_lacks_a_column_is_refused(server, lost):
    batch = prompt_batch()
    del batch.non_tensor_batch[lost]
    with pytest.raises(ValueError, match="a prompt must have the columns prompts"):
        run_batch(server, is_scored=False, batch=batch)


class Failing:
    """Server that fails one sample."""

    def __init__(self, server: DiffusersServer):
        self.server, self.check_health = server, server.check_health

    async def generate_all(self, requests: Any) -> Any:
        found = await self.server.generate_all(requests)
        error = OSError("the replica is ill")
        failed = RayTaskError("generate_all", f"{error}", error)  # type: ignore[arg-type]
        return [
            failed if (one.uid, one.sample_index) == ("u1", 0) else made
            for one, made in zip(requests, found, strict=True)
        ]


def comparing(seen: list[Any]) -> Callable[..., Any]:
    """A reward of groups that notes what it compares."""

    async def compare(names: Any, group: Any) -> Any:
        seen.append([(one.row.uid, one.sample_index) for one in group])
        call = RewardCall("diversity", 0.0, 1.0, 2, 0)
        return {"diversity": [PartScore(float(len(group)), {}, call) for _ in group]}

    return compare


def compared(server: Any, seen: list[Any]) -> DataProto:
    """Samples that a reward of groups scores while they are generated."""
    config = CONFIG.copy()
    config.digen.reward.functions = {"diversity": 1.5}

    async def calls() -> DataProto:
        worker = make_worker(digen=digen_config(config), llm_client=make_manager(server))
        worker.reward_loop_worker_handles = {"diversity": [Scoring(comparing(seen))]}
        worker._rewards = SampleRewards.of_run(config, worker.reward_loop_worker_handles, worker.digen)
        return await asyncio.wait_for(worker.generate_sequences(prompt_batch()), 60)

    return run(calls())


def test_a_reward_of_groups_scores_the_rows_of_a_uid_while_they_are_generated(server: DiffusersServer):
    seen: list[Any] = []
    assert compared(server, seen).batch["rm_scores"].tolist() == [[3.0]] * 4
    assert sorted(seen) == [[("u0", 0), ("u0", 1)], [("u1", 0), ("u1", 1)]]


def test_samples_do_not_wait_for_one_of_their_group_that_failed(server: DiffusersServer):
    with pytest.raises(OSError, match="the replica is ill"):
        compared(Failing(server), [])


def test_a_batch_of_prompts_takes_verls_way(monkeypatch: pytest.MonkeyPatch):
    begun = []

    async def begin(worker: Any, batch: TensorDict) -> None:
        begun.append(batch)

    monkeypatch.setattr(PlainAgentLoopWorker, "generate_sequences", begin)
    batch = prompt_rows_batch([PromptRow("a cat", "test", None, uid="u0")])
    assert run(make_worker().generate_sequences(batch)) is None and begun == [batch]


def test_an_agent_loop_is_made_as_verl_makes_it(server: DiffusersServer):
    parameters = list(inspect.signature(DiffusionSingleTurnAgentLoop).parameters)
    assert (
        parameters[:4] == ["trainer_config", "server_manager", "tokenizer", "processor"] and parameters[-1] == "kwargs"
    )
    given = {"tokenizer": "t", "processor": "p", "dataset_cls": dict, "hf_model_type": "m", "name": "mine"}
    config = SimpleNamespace(config=CONFIG)
    loop = DiffusionSingleTurnAgentLoop(config, make_manager(server), data_config=config, **given)
    assert loop.config is CONFIG and loop.data_config is CONFIG and loop.settings == {"name": "mine"}
    assert (loop.tokenizer, loop.processor, loop.dataset_cls, loop.hf_model_type) == ("t", "p", dict, "m")
    columns = {"raw_prompt": PROMPTS[0], "uid": "u0", "data_source": "", "ground_truth": None}
    found = run(loop.run({"validate": False}, **columns, session_id=0, global_steps=1))
    assert found.pixels.shape == (64, 64, 3) and found.trajectory.facts.uid == "u0"


def test_a_reward_manager_takes_the_rfcs_arguments_and_columns(generated: DataProto):
    names = list(inspect.signature(DiffusionRewardManager).parameters)
    assert names[:3] == ["config", "compute_score", "reward_router_address"]

    def compute_score(data_source: str, solution_image: Any, ground_truth: str, extra_info: Any) -> float:
        assert solution_image.shape == (64, 64, 3) and extra_info["prompt"] == ground_truth == PROMPTS[1]
        return 100.0

    own = [DiffusionRewardManager(CONFIG, compute_score)]
    own += [DiffusionRewardManager(config=CONFIG, tokenizer=None, compute_score=compute_score)]
    ours, columns = generated[2:3], {"prompts", "uid", "data_source", "ground_truth"}
    rfcs = DataProto(
        TensorDict({"responses": ours.batch["responses"]}, 1), {name: ours.non_tensor_batch[name] for name in columns}
    )
    for manager in own:
        for data in (ours, rfcs):
            found = run(manager.run_single(data))
            assert found["reward_score"] == pytest.approx(100.0 + ours.batch["rm_scores"].item())
            assert found["reward_extra_info"].keys() == {"custom", "jpeg_compressibility", "jpeg_incompressibility"}
    with pytest.raises(ValueError, match="got a function as the address; give tokenizer= and compute_score= by key"):
        DiffusionRewardManager(CONFIG, None, compute_score)  # type: ignore[arg-type]


def test_compute_rm_score_gives_the_scores_of_the_run(registered, generated: DataProto):
    manager: Any = object.__new__(DiffusionRewardLoopManager)
    manager.config, manager._pools = CONFIG, {}
    manager.reward_loop_workers = [Scoring(reward_worker().score_one)]
    found = manager.compute_rm_score(generated)
    assert found.batch["rm_scores"].shape == (4, 1)
    assert torch.equal(found.batch["rm_scores"], generated.batch["rm_scores"]) and found.batch["rm_scores"].any()
    assert found.meta_info["reward_extra_keys"] == ["jpeg_compressibility", "jpeg_incompressibility"]
    parts = found.non_tensor_batch
    total = parts["jpeg_compressibility"] + 0.5 * parts["jpeg_incompressibility"]
    np.testing.assert_allclose(found.batch["rm_scores"][:, 0].numpy(), total, rtol=1e-6)


def make_reward_manager(functions: dict[str, Any], **pools: Any) -> Any:
    config = CONFIG.copy()
    config.digen.reward.functions = functions
    manager: Any = object.__new__(DiffusionRewardLoopManager)
    manager.config, manager.reward_loop_workers = config, []
    manager._pools = {name: [Scoring(answer)] for name, answer in pools.items()}
    return manager


def test_a_reward_of_groups_compares_the_rows_of_a_uid(generated: DataProto):
    seen: list[Any] = []
    found = make_reward_manager({"diversity": 1.5}, diversity=comparing(seen)).compute_rm_score(generated)
    assert found.batch["rm_scores"].tolist() == [[3.0]] * 4
    assert sorted(seen) == [[("u0", 0), ("u0", 1)], [("u1", 0), ("u1", 1)]]


def test_a_reward_that_does_not_score_a_row_is_nan_and_one_of_latents_is_refused(generated: DataProto):
    async def never(names: Any, samples: Any) -> Any:
        raise AssertionError

    pool = {"weight": 1.0, "reward": "jpeg_compressibility", "num_workers": 1, "data_sources": ["other"]}
    found = make_reward_manager({"jpeg": pool}, jpeg=never).compute_rm_score(generated)
    assert not found.batch["rm_scores"].any() and found.meta_info["reward_extra_keys"] == []
    with pytest.raises(ValueError, match="rewards of pixels with processes of their own, got mine;"):
        make_reward_manager({"mine": {"weight": 1.0, "reward": LATENT}}).compute_rm_score(generated)


def test_a_worker_of_functions_scores_a_batch(registered, generated: DataProto):
    scored = run(reward_worker().compute_score_batch(generated))
    assert [one["reward_score"] for one in scored] == pytest.approx(generated.batch["rm_scores"][:, 0].tolist())


def test_compute_advantage_takes_scores_in_both_shapes(generated: DataProto):
    assert list(inspect.signature(compute_advantage).parameters)[:2] == ["scores", "uids"]
    scores, uids = generated.batch["rm_scores"], generated.non_tensor_batch["uid"]
    expected = group_advantages(scores[:, 0], list(uids), scale="group")
    assert torch.equal(compute_advantage(scores, uids, scale="group"), expected[:, None]) and expected.any()
    assert torch.equal(compute_advantage(scores[:, 0], uids, scale="group"), expected)
    with pytest.raises(ValueError, match=r"reward must have shape \[B\]"):
        compute_advantage(scores.expand(4, 2), uids)


def samples_of(server: DiffusersServer, **sampling: Any) -> list[FinishedSample]:
    """A sample of each prompt."""

    async def calls() -> list[Any]:
        manager = make_manager(server)
        return [await manager.generate(f"u{index}", text, **sampling) for index, text in enumerate(PROMPTS)]

    rows = [PromptRow(text, "test", None, uid=f"u{index}") for index, text in enumerate(PROMPTS)]
    return [FinishedSample.of(one, row, 0.5) for one, row in zip(run(calls()), rows, strict=True)]


@pytest.mark.parametrize("scale", [1.0, 3.0], ids=["plain", "guided"])
def test_means_on_demand_are_those_that_the_sampler_stepped_from(server, scale):
    """x' = mean + std noise, so that the mean gives the recorded log-prob again, bitwise."""
    model, network = server._network.model, server._weights.module

    with torch.no_grad():
        samples = samples_of(server, true_cfg_scale=scale)
        data = to_dataproto(samples, means=lambda rows: score_rows(model, network, rows)[0].mean)
    means = data.batch["latent_sample_means"]
    assert means.shape == data.batch["latent_samples"][:, :-1].shape
    assert ("negative_prompt_embeddings" in data.batch.keys()) == (scale > 1)  # noqa: SIM118
    for number in range(2):
        path = samples[number].trajectory.record
        velocity = torch.zeros_like(path.latents[:-1])  # the std does not depend on it
        steps = path.latents[:-1], path.sigmas, path.next_sigmas
        settings = {"law": "flow", "noise_level": samples[number].trajectory.facts.sampling.noise_level}
        std = sde_step(velocity, *steps, sigma_max=path.sigma_max.expand(K), noise=velocity, **settings).std
        error = (path.latents[1:] - means[number]).square().flatten(1).mean(1)
        log_probs = -error / (2 * std.square()) - std.log() - 0.5 * np.log(2 * np.pi)
        torch.testing.assert_close(log_probs.float(), path.log_probs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("law", ["flow", "flow_clipped", "dance", "cps"])
def test_a_step_without_noise_is_bitwise_the_mean_of_the_step(law):
    torch.manual_seed(0)
    velocity, sample, noise = (torch.randn(K, 4, 8).bfloat16() for _ in range(3))
    sigmas = torch.tensor([1.0, 0.8, 0.5, 0.2])
    settings = {"law": law, "noise_level": 0.7, "sigma_max": 0.8}
    taken = sde_step(velocity, sample, sigmas[:-1], sigmas[1:], noise=noise, **settings)
    without = sde_step(velocity, sample, sigmas[:-1], sigmas[1:], noise=torch.zeros_like(noise), **settings)
    assert torch.equal(without.mean, taken.mean) and torch.equal(without.next_sample, taken.mean)


def test_pictures_of_two_sizes_are_refused_and_named(server):
    small = samples_of(server, height_px=32)
    with pytest.raises(ValueError, match=r"one shape of latent_samples, got \[16, 16\], \[8, 16\]; convert them apart"):
        to_dataproto([samples_of(server)[0], small[0]])
    with pytest.raises(ValueError, match="got no sample"):
        to_dataproto([])


def test_trained_steps_that_are_not_consecutive_have_positions(server):
    sample = samples_of(server)[0]
    path = sample.trajectory.record
    assert isinstance(path, PathRecord)

    def of_steps(*steps: int) -> FinishedSample:
        chosen, latents = torch.tensor(steps), path.latents[: steps[-1] + 2]
        numbers = (path.sigmas[chosen], path.next_sigmas[chosen], path.sigma_max, path.log_probs[chosen])
        return replace(sample, trajectory=replace(sample.trajectory, record=PathRecord(latents, chosen, *numbers)))

    found = to_dataproto([of_steps(0, 2), of_steps(0, 1)])
    assert found.batch["positions"].tolist() == [[0, 2], [0, 1]] and found.batch["latent_samples"].shape[:2] == (2, 4)
    assert not found.batch["latent_samples"][1, 3].any() and found.batch["latent_samples"][0, 3].any()
    found.batch["rm_scores"], found.batch["sigma_max"] = torch.tensor([[0.5], [2.0]]), torch.tensor([[0.9], [0.8]])
    rows = training_rows(found)
    assert torch.equal(rows.latents, path.latents[[0, 2, 0, 1]])
    assert torch.equal(rows.point.next_latents, path.latents[[1, 3, 1, 2]])
    assert rows.rewards.tolist() == [0.5, 0.5, 2.0, 2.0]
    torch.testing.assert_close(rows.point.sigma_max, torch.tensor([0.9, 0.9, 0.8, 0.8]))


@pytest.mark.parametrize("scale", [1.0, 3.0], ids=["plain", "guided"])
def test_rows_of_a_batch_have_the_log_probs_that_it_has(server, scale):
    """Two lengths of prompts: a row has the conditions of its own sample, without the padding."""
    samples = samples_of(server, true_cfg_scale=scale)
    data = to_dataproto(samples)
    data.batch["advantages"] = torch.tensor([[1.0], [-2.0]])
    data.batch["selected"] = torch.tensor([[True], [False]])
    rows = training_rows(data)
    assert rows.mask.tolist() == [1.0] * K + [0.0] * K
    assert rows.advantages.tolist() == [1.0] * K + [-2.0] * K and rows.rewards.tolist() == [0.5] * 2 * K
    with torch.no_grad():
        scored = score_rows(server._network.model, server._weights.module, rows)[0]
    torch.testing.assert_close(scored.log_prob, data.batch["log_probs"].flatten(), rtol=0, atol=1e-5)
    data.non_tensor_batch["sampling"][1] = replace(samples[1].trajectory.facts.sampling, noise_level=0.1)
    with pytest.raises(ValueError, match="samples that train together must have one sampling"):
        training_rows(data)


def test_a_finished_batch_in_the_store_gives_the_same_columns(monkeypatch, server):
    samples = samples_of(server)
    tags = {}
    for index, one in enumerate(samples):
        facts = replace(one.trajectory.facts, uid=f"u{index}", sample_index=0, version=0)
        tags[f"u{index}_0_0"] = replace(make_tag(0.5, prompt=one.prompt), facts=facts)
    monkeypatch.setattr(
        outputs,
        "fetch_columns",
        lambda partition, keys, names: {
            name: [one.trajectory.record.columns()[name] for one in samples] for name in names
        },
    )
    pairs = {one.trajectory.facts.condition_key: one.conditions for one in samples}
    monkeypatch.setattr(outputs, "fetch_conditions", lambda keys: {key: pairs[key] for key in keys})
    found, expected = to_dataproto(finished_samples(to_batch("train", tags, 1))), to_dataproto(samples)
    assert set(expected.batch.keys()) - set(found.batch.keys()) == {"responses"}
    for name, tensor in found.batch.items():
        assert torch.equal(tensor, expected.batch[name]), name
    for name, column in found.non_tensor_batch.items():
        assert list(column) == list(expected.non_tensor_batch[name]), name
    assert set(expected.non_tensor_batch) - set(found.non_tensor_batch) == {"row", "ground_truth"}
