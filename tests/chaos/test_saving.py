# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on separate pools: the weights are published before, replicas generate meanwhile, a resume is exact."""

from dataclasses import replace

import pytest

from tests.chaos.simulation import Simulation, Verdict, simulate
from tests.chaos.world import World

WORLD = World(seed=3, num_prompts=3, group_size=3, num_batches=4, chunk_size=1, saves=(1, 2), save_s=30.0)
STALE = replace(WORLD, max_versions=1, fraction=0.5)
SAVED = 2


class Watched:
    """A run with its simulation, and the work of its replicas."""

    def __init__(self, world: World, resumes=None):
        self.simulation: Simulation
        self.verdict: Verdict = simulate(world, self._watch, resumes)
        trainer = self.simulation.trainer
        self.saved = trainer.saved
        self.intervals = trainer._recorder.drain()

    def _watch(self, simulation: Simulation) -> None:
        self.simulation = simulation

    def of(self, kind: str, step: int) -> list:
        return [one for one in self.intervals if (one.kind, one.step) == (kind, step)]

    def trained(self, first: int) -> dict[int, list[str]]:
        """Batch -> its groups."""
        settled = self.simulation.checks.settled
        return {
            batch: sorted(uid for uid, found in settled.items() if found == batch)
            for batch in range(first, self.simulation.trainer.total_training_steps)
        }


@pytest.mark.parametrize("world", [WORLD, STALE], ids=["strict", "stale"])
def test_a_step_publishes_before_it_saves_and_its_replicas_generate_the_next_batch_meanwhile(world):
    run = Watched(world)
    assert not run.verdict.problems and run.verdict.end == "whole"
    for step in world.saves:
        (publish,) = [one for one in run.of("publish", step) if one.lane.pool == "trainer"]
        (save,) = run.of("save", step)
        assert publish.end_s <= save.start_s and save.end_s - save.start_s == pytest.approx(world.save_s)
        during = [one for one in run.of("generate", step + 1) if save.start_s <= one.start_s < save.end_s]
        assert {group for one in during for group in one.group_ids} >= {f"p{3 * step + 2:04d}"}
        assert not [one for one in run.of("train", step + 1) if one.start_s < save.end_s]
        if world.max_versions == 0:
            done = {group for one in during for group in one.group_ids}
            assert done == {f"p{3 * step + number:04d}" for number in range(3)}, "the next batch, and no further one"
            assert {one.version for one in during} == {step}, "under the version that is saved"


REPLACED = replace(WORLD, group_size=2, drop_zero_spread=True)
"""Groups of the next batch are dropped during a checkpoint; those in their place are drawn after it."""


@pytest.mark.parametrize("world", [WORLD, REPLACED, STALE], ids=["strict", "replaced", "stale"])
def test_a_checkpoint_is_the_same_however_far_the_next_batch_has_come_in_the_meantime(world):
    """Compare a checkpoint before any chunk of the batch with one after all of them."""
    at_once, late = Watched(replace(world, save_s=0.0)), Watched(world)
    for one, other in zip(at_once.saved, late.saved, strict=True):
        assert (one.step, one.num_drawn) == (other.step, other.num_drawn)
        assert one.open_prompts == other.open_prompts
        if world is not REPLACED:
            numbers = [int(row.uid.removeprefix("p")) for row in one.open_prompts]
            assert numbers == list(range(3 * one.step, one.num_drawn)), "all that is drawn and not trained"


@pytest.mark.parametrize("world", [WORLD, REPLACED, STALE], ids=["strict", "replaced", "stale"])
def test_a_resumed_run_trains_the_batches_of_one_that_went_on(world):
    whole = Watched(world)
    saved = whole.saved[SAVED - 1]
    resumed = Watched(world, resumes=saved)
    assert not whole.verdict.problems and not resumed.verdict.problems
    assert resumed.trained(SAVED) == whole.trained(SAVED) and all(resumed.trained(SAVED).values())


def test_a_run_that_ends_between_publishing_and_saving_resumes_from_the_checkpoint_before():
    """The full disk is met in the second checkpoint, after replicas have begun the third batch."""
    run = Watched(WORLD)

    def fill_disk(simulation: Simulation) -> None:
        simulation.trainer.saved = Full()

    failed = simulate(WORLD, fill_disk)
    assert failed.end.startswith("stopped: step 2 failed: OSError: no space left")
    again = Watched(WORLD, resumes=run.saved[0])
    assert again.trained(1) == run.trained(1) and not again.verdict.problems
    assert again.saved[0].open_prompts == run.saved[1].open_prompts


class Full(list):
    """A disk that holds one checkpoint."""

    def append(self, saved) -> None:
        if self:
            raise OSError("no space left on device")
        super().append(saved)
