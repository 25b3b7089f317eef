# SPDX-License-Identifier: Apache-2.0
"""A custom agent loop, in this process: separate pools use it as colocated ones do."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from verl.experimental.agent_loop import agent_loop as verls

from tests.agent_loop.worker import make_worker
from verl_digen.agent_loop.server_manager import ReplicaClient
from verl_digen.agent_loop.single_turn import DiffusionSingleTurnAgentLoop, make_agent_loop
from verl_digen.preflight.agent_loop import check_agent_loop
from verl_digen.preflight.start_config import StartConfig
from verl_digen.types import PromptRow, SampleRequest

ROW = PromptRow("a cat", "test", None, uid="g0")
AGENT = "actor_rollout_ref.rollout.agent"


class InCapitals(DiffusionSingleTurnAgentLoop):
    """Agent loop that requests the prompt in capitals."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        return await super().run(sampling_params, **row | {"raw_prompt": row["raw_prompt"].upper()})


class Server:
    """A replica's handle that answers with the names and prompts of the requests."""

    def __init__(self) -> None:
        self.generate_all = SimpleNamespace(remote=self._generate_all)

    async def _generate_all(self, requests: Sequence[SampleRequest]) -> list[tuple[str, int, str]]:
        return [(one.uid, one.sample_index, one.inputs.text) for one in requests]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = OmegaConf.create({"name": "in_capitals", "_target_": f"{__name__}.InCapitals"})
    monkeypatch.setitem(verls._agent_loop_registry, "in_capitals", entry)  # as verl's worker does from the user's file


@pytest.mark.parametrize(("name", "prompt"), [("diffusion_single_turn", "a cat"), ("in_capitals", "A CAT")])
def test_a_chunks_sample_is_made_by_the_runs_agent_loop_on_the_chosen_replica(registered, name, prompt):
    worker = make_worker(name, config=OmegaConf.create({"data": {}}))
    found = asyncio.run(worker._generate(ReplicaClient(Server(), worker.digen), ROW, 2, 1, validate=False))
    assert found == ("g0", 2, prompt)


def test_a_loop_that_exits_fails_its_sample_and_not_the_process(registered, monkeypatch):
    async def leave(*arguments: Any, **columns: Any) -> None:
        raise SystemExit("no key")

    monkeypatch.setattr(InCapitals, "run", leave)
    worker = make_worker("in_capitals", config=OmegaConf.create({"data": {}}))
    with pytest.raises(RuntimeError, match="it raised SystemExit: no key"):
        asyncio.run(worker._generate(ReplicaClient(Server(), worker.digen), ROW, 2, 1, validate=False))


def test_a_custom_loop_has_what_verls_worker_gives_every_loop(registered):
    given = {"tokenizer": "t", "processor": "p", "dataset_cls": Server, "hf_model_type": "m", "tools": ["a tool"]}
    config = OmegaConf.create({"data": {"seed": 7}})
    worker = make_worker(config=config, **given)
    loop = make_agent_loop("in_capitals", worker, ReplicaClient(Server(), worker.digen))
    assert given.items() <= vars(loop).items()
    assert loop.config is config and loop.data_config == config.data


def test_a_loop_that_is_not_registered_is_told_with_the_known_ones():
    with pytest.raises(ValueError, match=r"default_agent_loop must be one of .*diffusion_single_turn.*got 'nonesuch'"):
        make_agent_loop("nonesuch", make_worker("nonesuch"), None)


@pytest.fixture(scope="module")
def composed() -> DictConfig:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=["recipe=digen_quickstart+disaggregated"])


def checked(config: DictConfig, **changes: Any) -> str:
    """Error message for these changes of the agent section; empty if they pass."""
    changed = config.copy()
    for key, value in changes.items():
        OmegaConf.update(changed, "digen.tag.policy" if key == "tag" else f"{AGENT}.{key}", value)
    try:
        check_agent_loop(StartConfig(changed))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        (None, {}, ""),
        ("- {name: mine, _target_: tests.agent_loop.test_custom.InCapitals}", {"default_agent_loop": "mine"}, ""),
        ("- {name: mine, _target_: no_such.Loop}", {}, ""),
        (
            "- {name: mine, _target_: tests.agent_loop.test_custom.InCapitals}",
            {"default_agent_loop": "mine", "tag": "bts"},
            f"digen.tag.policy must be off with {AGENT}.default_agent_loop=mine, because trainer ranks",
        ),
        (None, {"default_agent_loop": "mine"}, "default_agent_loop must be one of diffusion_single_turn, got 'mine';"),
        (
            "- {name: mine, _target_: no_such.Loop}",
            {"default_agent_loop": "mine"},
            "the agent loop 'mine' must be a class that can be imported, got 'no_such.Loop' (",
        ),
        (
            "- {name: mine, _target_: collections.Counter}",
            {"default_agent_loop": "mine"},
            "the agent loop 'mine' must be a subclass of verl_digen.agent_loop.single_turn.",
        ),
        ("name: mine", {}, "must list agent loops with a name and a _target_ each, got {'name': 'mine'};"),
        ("- {name: mine", {}, "agent_loop_config_path must be a YAML file, got "),
    ],
)
def test_the_agent_loop_of_a_run_is_checked_before_it_starts(composed, tmp_path, text, changes, message):
    if text is not None:
        (tmp_path / "loops.yaml").write_text(text)
        changes = changes | {"agent_loop_config_path": str(tmp_path / "loops.yaml")}
    found = checked(composed, **changes)
    assert message in found and bool(message) == bool(found)


def test_a_missing_file_of_agent_loops_is_refused(composed):
    found = checked(composed, agent_loop_config_path="missing.yaml")
    assert f"{AGENT}.agent_loop_config_path must be an existing file, got 'missing.yaml';" in found
