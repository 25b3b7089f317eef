# SPDX-License-Identifier: Apache-2.0
"""Planned episodes, by hand, and against episodes that a replica and the environment `shape_edits` play."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from drawn_edits import apply, parse_instruction
from drawn_scenes import caption, draw
from PIL import Image

from tests.environments.local import connect
from tests.examples.test_drawn_world import SCENE, SHAPE_EDITS
from tests.plan.runs import make_run
from tests.tiny_models import build_tiny
from verl_digen.agent_loop.episode import EnvironmentAgentLoop, Episode
from verl_digen.config import EnvironmentConfig
from verl_digen.data.rows import loop_columns
from verl_digen.models import load_model
from verl_digen.rollout.server import DiffusersServer
from verl_digen.schedulers.rules import QueueConfig
from verl_digen.store.conditions import to_columns
from verl_digen.tools.plan.compose import MFU
from verl_digen.tools.plan.host import step_traffic
from verl_digen.tools.plan.output import make_plan
from verl_digen.tools.plan.run import turn_geometry
from verl_digen.tools.plan.split import plan_time
from verl_digen.types import PromptRow, SampleRequest

pytestmark = pytest.mark.slow

NUM_PROMPTS, GROUP_SIZE, NUM_TURNS, NUM_STEPS = 2, 2, 3, 3
WORDS = (
    "recipe=digen_edit_episodes",
    "actor_rollout_ref.rollout.dtype=float32",
    f"actor_rollout_ref.rollout.n={GROUP_SIZE}",
    f"data.train_batch_size={NUM_PROMPTS}",
    f"digen.sampling.num_steps={NUM_STEPS}",
)
TEXTS = ("make it yellow", "make the background green")
EXAMPLE = {"environment": EnvironmentConfig(path=SHAPE_EDITS, max_turns=3)}


class Client:
    """Client of a replica in this process; keeps the requests."""

    def __init__(self, checkpoint: Path, digen: Any):
        config = SimpleNamespace(
            local_path=checkpoint, digen=digen, adapter_config=lambda: None, lora_rank=0, int8_base=False
        )
        self.server = DiffusersServer(SimpleNamespace(dtype="float32"), config, num_threads=1)  # type: ignore[arg-type]
        self.digen = digen
        self.requests: list[SampleRequest] = []

    async def generate_sample(self, request: SampleRequest) -> Any:
        self.requests.append(request)
        return await self.server._batcher.submit(request)


def play(client: Client, folder: Path) -> list[Episode]:
    """Play the episodes of a step."""
    path = folder / "scene.png"
    Image.fromarray(draw(SCENE, 64, np.random.default_rng(0))).save(path)
    workers, _ = connect(client.digen.environment)
    loop = EnvironmentAgentLoop(client, workers, edits=True)  # type: ignore[arg-type]
    rows = []
    for text in TEXTS:
        edit = parse_instruction(text)
        truth = {"target": caption(apply(SCENE, edit)), "changed": edit.attribute}
        rows.append(PromptRow(text, "tiny_edit", truth, uid=f"p{len(rows):08d}", images=(str(path),)))

    async def run() -> list[Episode]:
        return await asyncio.gather(
            *(
                loop.run({"validate": False}, session_id=index, global_steps=1, **loop_columns(row))
                for row in rows
                for index in range(GROUP_SIZE)
            )
        )

    return asyncio.run(run())


def test_a_step_moves_and_computes_what_real_episodes_do(tmp_path):
    checkpoint = build_tiny("qwen_image_edit_plus", tmp_path / "checkpoint")
    words = [*WORDS, f"actor_rollout_ref.model.path={checkpoint}"]
    settings = make_plan(words).run.settings
    client = Client(checkpoint, settings.digen)
    episodes = play(client, tmp_path)
    records = [episode.generation.trajectory.record for episode in episodes]
    conditions = {key: pair for episode in episodes for key, pair in episode.conditions.items()}
    embeds = [positive["embeds"] for positive, _ in conditions.values()]
    longest = max(len(one) for one in embeds)

    model = load_model(checkpoint)
    of_images = model.num_image_text_tokens(turn_geometry(settings.digen, model))
    plan = make_plan([*words, f"prompt_tokens={longest - of_images}"])
    assert plan.run.num_trained_rows == sum(len(record.sigmas) for record in records) > NUM_PROMPTS * NUM_TURNS
    assert plan.time.generating_flops == len(client.requests) * NUM_STEPS * plan.run.measured.flops.forward
    stored = sum(column.nbytes for record in records for column in record.columns().values())
    assert step_traffic(plan.run)["trajectories"] == stored
    assert settings.num_conditions == len(conditions) == NUM_PROMPTS * (1 + GROUP_SIZE * (NUM_TURNS - 1))
    stored = sum(part.nbytes for pair in conditions.values() for part in to_columns(*pair).values())
    shorter = sum((longest - len(one)) * one[0].nbytes for one in embeds)
    assert step_traffic(plan.run)["conditions"] == stored + shorter > stored, "of the longest text"


def test_by_hand():
    """Four groups of eight; a sample of one turn has 9 rows, and 10 MB."""
    plain, episodes = make_run(), make_run(digen=EXAMPLE)
    assert episodes.num_trained_rows == 3 * plain.num_trained_rows == 4 * 8 * 27
    assert step_traffic(episodes)["trajectories"] == 3 * 4 * 8 * 10**7
    assert step_traffic(episodes)["conditions"] == (4 + 4 * 8 * 2) * 10**6
    assert step_traffic(plain)["conditions"] == 4 * 10**6
    long, short = plan_time(episodes, "H100", MFU, 1.0), plan_time(plain, "H100", MFU, 1.0)
    assert (long.generating_flops, long.training_flops) == (3 * short.generating_flops, 3 * short.training_flops)


def test_redundant_groups_of_separate_pools_may_publish():
    run = make_run(digen=EXAMPLE | {"queue": QueueConfig(extra_prompts=1)}, is_split=True)
    assert run.settings.num_begun == 5 * 8
    assert run.settings.num_conditions == 5 + 5 * 8 * 2
    assert run.num_trained_rows == 4 * 8 * 27
    assert replace(run.settings, is_split=False).num_begun == 4 * 8, "none where the pools take turns"
