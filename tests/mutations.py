# SPDX-License-Identifier: Apache-2.0
"""Check that the tests notice: wrong code, one change at a time, and the test that goes red (`make mutations`).

    python tests/mutations.py [-k WORDS] [--list]

The tree is copied, each mutation of `TABLE` is made in the copy and its tests run there. The working tree is never
touched. All tests are run on the unchanged copy first: a test that fails anyway catches nothing. Exit status 1 if a
mutation survives, if its text is not in the file exactly once, or if its tests cannot be run.

Each mutation runs in a fork of this process, which has imported the heavy libraries already.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 600
"""Timeout of a mutation's tests; a mutation whose tests hang counts as caught."""
OUTCOMES = {0: "SURVIVED", 1: "caught", -1: "caught: no end"}
"""pytest's exit status -> outcome of a mutation. Any other: the tests could not be run."""


@dataclass(frozen=True)
class Mutation:
    """One wrong line."""

    path: str
    """Path below verl_digen/."""
    wrong: str
    """The fault, in words."""
    old: str
    """Text that is in the file exactly once."""
    new: str
    tests: str
    """Files or node ids below tests/, with spaces between; then pytest's options, if any."""


LEDGER = "engine/test_ledger.py"
FITTING = "rollout/test_fitting.py -k 'not little_memory'"
TRANSACTION = "engine/test_transaction.py"
PARTS = "engine/test_parts.py"
ENGINE = "engine/test_engine.py"
RANDOM = "engine/test_properties.py::test_committed_gradient_is_that_of_the_slow_way"
SAMPLER = "sampling/test_sampler.py"
SDE = "algorithms/test_sde.py"
ADVANTAGES = "algorithms/test_advantages.py"
LOSSES = "algorithms/test_losses.py"
FORWARD = "algorithms/test_forward_losses.py"
PICTURES = "rollout/test_pictures.py"
VERL_OMNI = "simulate/test_verl_omni.py"
OFF_POLICY = "algorithms/test_off_policy.py"
RECEIVER = "weights/test_receiver.py"
PROBE = "weights/test_probe.py"
PLANNER = "schedulers/test_planner.py"
CONDUCTOR = "trainer/test_conductor.py"
ANSWERS = "trainer/test_answers.py"
STAGED = "trainer/test_staged.py"
SAVING = "chaos/test_saving.py"
SCORING = "reward/test_scoring.py"
POOL_WORKER = "reward/test_pool_worker.py"
GROUPS = "reward/test_groups.py"
PROMPTS = "data/test_prompts.py"
INPUTS = "rollout/test_inputs.py"
EDITS = "models/test_qwen_image_edit.py"
KONTEXT = "models/test_flux_kontext.py"
KLEIN = "models/test_flux2_klein.py"
IMAGE_SIZES = "models/test_image_sizes.py"
FIRST_FRAME = "models/test_first_frame.py"
CONTINUED = "models/test_image_to_video.py"
LTX2 = "models/test_ltx2.py"
VIDEO_SIZES = "models/test_video_sizes.py"
IMAGE_COLUMNS = "data/test_image_columns.py"
UPDATES = "engine/test_updates.py"
SEQUENCE = "engine/test_sequence.py"
RESHARDING = "engine/test_resharding.py -m 'long or not long'"
TREE = "algorithms/test_tree.py"
GROWN = "sampling/test_tree.py"
INVARIANTS = "engine/test_invariants.py"
EPISODES = "agent_loop/test_episodes.py"
TURNS = "engine/test_episodes.py"
ENVIRONMENTS = "environments/test_workers.py"

PLANNED_EPISODES = "plan/test_episodes.py -k 'hand or redundant'"
SIMULATED_EPISODES = "simulate/test_episodes.py"
SHAPE_EDIT = "reward/test_shape_edit.py"
SHAPE_EDITS = "environments/test_shape_edits.py"
VLM_JUDGE = "environments/test_vlm_judge.py"

TABLE: tuple[Mutation, ...] = (
    # -- splits of the devices ---------------------------------------------------------------------------------------
    Mutation(
        "simulate/splits.py",
        "a split is searched whose ranks are no whole groups that share rows",
        "return shards and num_ranks % self.sequence_parallel == 0",
        "return shards",
        "simulate/test_splits.py",
    ),
    Mutation(
        "simulate/layout.py",
        "pools share devices of a node",
        "        free[fitting] -= size\n    return True",
        "    return True",
        "simulate/test_layout.py",
    ),
    Mutation(
        "plan/split.py",
        "a split that does not fit is proposed",
        "        if memory.fits is False:\n            return math.inf\n",
        "",
        "plan/test_split.py -k not_fit",
    ),
    Mutation(
        "trainer/split_advice.py",
        "the noise of the steps does not count",
        "NOISES * noise(seconds), error)",
        "error)",
        "trainer/test_split_advice.py -k noise",
    ),
    Mutation(
        "trainer/split_advice.py",
        "time that the simulation does not know is gained, too",
        " + max(0.0, measured_s - given_s)",
        "",
        "trainer/test_split_advice.py -k does_not_know",
    ),
    Mutation(
        "trainer/split_watch.py",
        "advice is told again and again",
        "(self._told is not None and advice.placed == self._told.placed)",
        "False",
        "trainer/test_split_watch.py -k once",
    ),
    Mutation(
        "observe/step_costs.py",
        "a fragment's rows are dealt in fractions",
        "-(-number * num_rows // num_ranks)",
        "(number * num_rows / num_ranks)",
        "trainer/test_split_watch.py -k timeline",
    ),
    Mutation(
        "schedulers/play.py",
        "a bundle of slots takes the chunk of one",
        "largest = bubble.chunk_size * bundle",
        "largest = bubble.chunk_size",
        "schedulers/test_search.py -k bundles",
    ),
    Mutation(
        "schedulers/play.py",
        "an assist keeps to one group in the search",
        "end = self._stream_end if bubble.spans_groups else",
        "end =",
        "schedulers/test_search.py -k as_many_groups",
    ),
    Mutation(
        "schedulers/planner.py",
        "the trainer is free with the first chunk of an assist",
        "if not self._assisting:",
        "if True:",
        "schedulers/test_planner.py -k free_with_the_last",
    ),
    Mutation(
        "schedulers/group_book.py",
        "an assist takes more samples than the ranks are given",
        "size -= len(chunks[-1].samples)",
        "size -= 1",
        "schedulers/test_planner.py -k free_with_the_last",
    ),
    Mutation(
        "trainer/batch_rules.py",
        "an assist spans groups that take different numbers of forwards",
        "or not (digen.sampling.shared_initial_noise or",
        "or not (",
        "trainer/test_batch_rules.py",
    ),
    Mutation(
        "trainer/pools.py",
        "every chunk of an assist gets the samples of all its groups",
        "if uid == chunk.uid]",
        "]",
        "trainer/test_pools.py",
    ),
    Mutation(
        "engine/gathered.py",
        "an assist gathers the weights at every step, whatever memory there is",
        "for group, _ in meshes if keeps else ():",
        "for group, _ in ():",
        "engine/test_assistant.py -k gathers",
    ),
    Mutation(
        "engine/gathered.py",
        "training keeps gathered weights after an assist",
        "            group.post_forward_mesh_info = mesh\n",
        "            group.post_forward_mesh_info = None\n",
        "engine/test_assistant.py -k gathers",
    ),
    Mutation(
        "engine/assistant.py",
        "a rank with fewer batches of samples leaves the others alone in their forwards",
        "share + [[]] * (most - len(share))",
        "share",
        "engine/test_assistant.py -k as_many_batches",
    ),
    # -- planned and simulated episodes ------------------------------------------------------------------------------
    Mutation(
        "plan/time.py",
        "the plan generates the first turn of an episode alone",
        "settings.num_begun * settings.episodes.num_turns",
        "settings.num_begun",
        PLANNED_EPISODES,
    ),
    Mutation(
        "plan/run.py",
        "the plan trains the rows of one turn",
        "settings.episodes.num_turns * self.measured.rows_per_group / settings.group_size",
        "self.measured.rows_per_group / settings.group_size",
        PLANNED_EPISODES,
    ),
    Mutation(
        "plan/run.py",
        "the plan has a group share the conditions of later turns",
        "later = self.num_published * (self.episodes.num_turns - 1)",
        "later = self.num_prompts * (self.episodes.num_turns - 1)",
        PLANNED_EPISODES,
    ),
    Mutation(
        "plan/memory.py",
        "the plan stores the trajectory of one turn",
        "settings.num_published * settings.episodes.num_turns * measured.trajectory_bytes",
        "settings.num_published * measured.trajectory_bytes",
        PLANNED_EPISODES,
    ),
    Mutation(
        "simulate/episodes.py",
        "the turn that has waited least goes first",
        "ready.popleft() for _ in range",
        "ready.pop() for _ in range",
        SIMULATED_EPISODES,
    ),
    Mutation(
        "simulate/episodes.py",
        "further episodes of a complete group go on",
        "                        replicas.cancel(other)",
        "                        pass",
        SIMULATED_EPISODES,
    ),
    Mutation(
        "simulate/episodes.py",
        "in lock-step every turn waits as the first one does",
        "turn=turn: latency_of(episode, turn)",
        "turn=turn: latency_of(episode, 0)",
        SIMULATED_EPISODES,
    ),
    Mutation(
        "simulate/episode_runs.py",
        "a simulated episode trains the rows of one turn",
        "num_trained_steps=numbers.num_trained_steps * self.num_turns",
        "num_trained_steps=numbers.num_trained_steps",
        SIMULATED_EPISODES,
    ),
    Mutation(
        "schedulers/simulation.py",
        "a simulated replica loads weights while one of its episodes goes on",
        "if unloaded == self._slots_of[replica]:",
        "if unloaded:",
        SIMULATED_EPISODES,
    ),
    # -- conditions of a group alone -------------------------------------------------------------------------------
    Mutation(
        "trainer/disaggregated.py",
        "conditions of turns stay if the scoring of their chunk timed out",
        " | own_condition_keys(outcome.doubtful_groups)",
        "",
        "store/test_conditions.py",
    ),
    Mutation(
        "store/conditions.py",
        "conditions of another group go, whose uid begins alike",
        'tuple(own_condition_key(uid, "") for uid in uids)',
        "tuple(uids)",
        "store/test_conditions.py",
    ),
    # -- edits of the drawn world ----------------------------------------------------------------------------------
    Mutation(
        "reward/scorers/shape_edit.py",
        "the attribute that the instruction names counts as kept",
        "for name in WEIGHTS if name != changed",
        "for name in WEIGHTS",
        SHAPE_EDIT,
    ),
    Mutation(
        "reward/scorers/shapes/edits.py",
        "an edit may give the shape its background's colour",
        "and not _hides(scene, edit)",
        "",
        SHAPE_EDIT,
    ),
    # -- environments that ship ------------------------------------------------------------------------------------
    Mutation(
        "environments/built_in/shape_edits.py",
        "the scene that is asked for stays the first one",
        "        self._scene = apply(self._scene, self._edit)\n        return",
        "        return",
        SHAPE_EDITS,
    ),
    Mutation(
        "environments/built_in/shape_edits.py",
        "the simulated time is larger than its mean",
        "math.log(mean) - spread**2 / 2",
        "math.log(mean) + spread**2 / 2",
        SHAPE_EDITS,
    ),
    Mutation(
        "environments/built_in/vlm_judge.py",
        "an episode that ends early loses the turns left",
        "verdict.score * (1 + left)",
        "verdict.score",
        VLM_JUDGE,
    ),
    Mutation(
        "environments/built_in/vlm_judge.py",
        "true is a score",
        "isinstance(score, bool) or ",
        "",
        VLM_JUDGE,
    ),
    Mutation(
        "reward/judges/chat.py",
        "answers that could not be read are not counted",
        '                unusable["asked_again"] += 1\n',
        "",
        VLM_JUDGE,
    ),
    # -- episodes -----------------------------------------------------------------------------------------
    Mutation(
        "engine/rows.py",
        "rows of later turns read the first turn's condition",
        "return self.turn_conditions[sample.condition_key_of(point)] if sample.turns else self.conditions[index]",
        "return self.conditions[index]",
        TURNS,
    ),
    Mutation(
        "agent_loop/episode.py",
        "points of later turns begin at the first turn's latents",
        "path.positions + start for",
        "path.positions for",
        f"{EPISODES} -k bitwise",
    ),
    Mutation(
        "engine/points.py",
        "every turn ends in the first turn's latents",
        "end = ends[sample.turn_of(point)]",
        "end = ends[0]",
        f"{EPISODES} -k bitwise",
    ),
    Mutation(
        "sampling/recording.py",
        "turns of an episode start from one noise",
        "request.uid, index, request.turn)",
        "request.uid, index)",
        f"{EPISODES} -k noise_differs",
    ),
    Mutation(
        "agent_loop/episode.py",
        "turns of several weight versions pass for an episode",
        "if len(versions) != 1:",
        "if False:",
        f"{EPISODES} -k two_versions",
    ),
    Mutation(
        "agent_loop/environment.py",
        "a turn edits no picture",
        'found.append(generated_image(f"a turn\'s picture of group {row.uid}", previous))',
        "pass",
        f"{EPISODES} -k edits_the_picture",
    ),
    Mutation(
        "agent_loop/episode.py",
        "an episode's reward is its last turn's",
        "total = sum(turn.result.reward for turn in self.played)",
        "total = self.played[-1].result.reward",
        f"{EPISODES} -k sum_of_theirs",
    ),
    Mutation(
        "environments/workers.py",
        "an environment that is made again sees none of its pictures",
        "for picture in self._pictures:",
        "for picture in ():",
        f"{ENVIRONMENTS} -k restarted_worker",
    ),
    Mutation(
        "environments/workers.py",
        "an environment that asks for something else goes on",
        "elif not _are_equal(asked, self._asked):",
        "elif False:",
        f"{ENVIRONMENTS} -k starts_afresh",
    ),
    Mutation(
        "agent_loop/first_complete.py",
        "a group has more samples than it should, where redundant episodes end together",
        "if _is_complete(task)][:count]",
        "if _is_complete(task)]",
        f"{EPISODES} -k first_complete",
    ),
    # -- trees --------------------------------------------------------------------------------------------
    Mutation(
        "algorithms/tree.py",
        "leaves of a tree split one step late",
        "sum(split > step for split in self.splits)",
        "sum(split >= step for split in self.splits)",
        f"{TREE} -k leaves_share",
    ),
    Mutation(
        "algorithms/tree.py",
        "nodes of a tree are compared with the mean over its leaves",
        "centred = (level - level.mean())",
        "centred = (level - own.mean())",
        f"{TREE} -k missing_leaf",
    ),
    Mutation(
        "sampling/recording.py",
        "samples below one node of a tree take noise of their own",
        "request.uid, request.noise_index(step), request.turn)",
        "request.uid, request.sample_index, request.turn)",
        f"{GROWN} -k parts_of_a_tree",
    ),
    Mutation(
        "sampling/prefix.py",
        "samples of a tree share no stochastic step",
        "else self._requests[row].noise_index(step)",
        "else self._requests[row].sample_index",
        f"{GROWN} -k leaves_are_equal",
    ),
    Mutation(
        "algorithms/step_cache.py",
        "a recorded step may take an old velocity",
        "not sde and row in self._known",
        "row in self._known",
        "algorithms/test_step_cache.py sampling/test_outside.py",
    ),
    Mutation(
        "algorithms/step_cache.py",
        "a velocity from before the noise of a window is taken again",
        "if known.is_disturbed or known.expert",
        "if known.expert",
        "algorithms/test_step_cache.py",
    ),
    Mutation(
        "algorithms/step_cache.py",
        "another expert's velocity is taken again",
        "known.expert != expert or known.num_skips",
        "known.num_skips",
        "algorithms/test_step_cache.py",
    ),
    Mutation(
        "algorithms/step_cache.py",
        "a leaf knows what it evaluated itself alone",
        "                self._known[row] = _Known(now, sigma, expert, rate)\n",
        "                self._known[members[0]] = _Known(now, sigma, expert, rate)\n",
        "algorithms/test_step_cache.py",
    ),
    Mutation(
        "store/client.py",
        "a second thread calls TransferQueue before its client is made",
        "        with self._making:\n",
        "        if True:\n",
        "store/test_client.py",
    ),
    Mutation(
        "sampling/sampler.py",
        "steps of the window multiply in fp8, too",
        "for exact, copies in ((True, nullcontext()), (False, self.fp8.active())):",
        "for exact, copies in ((True, self.fp8.active()), (False, self.fp8.active())):",
        "sampling/test_fp8.py",
    ),
    Mutation(
        "sampling/fp8.py",
        "a token's scale is that of all tokens of its batch",
        "exact.abs().amax(dim=1, keepdim=True)",
        "exact.abs().amax().expand(len(exact), 1)",
        "sampling/test_fp8.py",
    ),
    Mutation(
        "sampling/fp8.py",
        "layers stay in fp8 after the step",
        'vars(layer).pop("forward", None)',
        'vars(layer).get("forward")',
        "sampling/test_fp8.py",
    ),
    Mutation(
        "rollout/server.py",
        "copies in fp8 are of the weights before the update",
        "        self._network.fp8.clear()\n",
        "",
        "rollout/test_server.py -k fp8",
    ),
    Mutation(
        "algorithms/outside.py",
        "steps of the window are passed over",
        "(after, num_steps, outside.solver_after)",
        "(after - 1, num_steps, outside.solver_after)",
        "algorithms/test_outside.py",
    ),
    Mutation(
        "sampling/sampler.py",
        "a row that passes over a step forgets what it predicted",
        "before = none if previous is None else vars(previous)",
        "before = none",
        "sampling/test_outside.py -k loop_over_one",
    ),
    Mutation(
        "sampling/sampler.py",
        "a taken step ends where the next one of the schedule begins",
        "ends = [batch.schedule[end] for row in edges.rows if (end := batch.prefix.ends[row][step]) is not None]",
        "ends = [batch.schedule[step + 1]] * len(edges.rows)",
        "sampling/test_outside.py -k loop_over_one",
    ),
    Mutation(
        "sampling/sampler.py",
        "noise does not disturb the cache",
        "memory.cache.disturb([row for rows, sde in zip(edges.members, is_sde, strict=True) if sde for row in rows])",
        "pass",
        "sampling/test_outside.py -k loop_over_one",
    ),
    Mutation(
        "sampling/sampler.py",
        "steps passed over before a window are not counted",
        "                    batch.num_skipped[row] += 1\n",
        "",
        "sampling/test_outside.py -k chunk",
    ),
    Mutation(
        "preflight/outside.py",
        "ranks that share a forward's collectives skip each on its own",
        'outside.cache == 0 or digen.tag.policy == "off"',
        "True",
        "plugin/test_outside.py",
    ),
    Mutation(
        "trainer/step_result.py",
        "skipped steps count as forwards of the generators",
        "sum(tag.num_shared_steps + tag.num_skipped_steps for tag in result.tags)",
        "sum(tag.num_shared_steps for tag in result.tags)",
        "trainer/test_utilisation.py",
    ),
    Mutation(
        "sampling/sampler.py",
        "a child in a tree takes its step from another node's velocity",
        "velocity = velocity[[lanes.lane_of[row] for row in edges.rows]]",
        "velocity = velocity[[0 for row in edges.rows]]",
        f"{GROWN} -k parts_of_a_tree",
    ),
    Mutation(
        "engine/rows.py",
        "every row of a sample in a tree has the advantage of its first node",
        "else advantages[samples, points]",
        "else advantages[samples, [0] * len(points)]",
        f"{RANDOM}[11]",
    ),
    Mutation(
        "engine/ledger.py",
        "a sample of a tree is held for its first node alone",
        "max(map(abs, self._early[index])) > largest",
        "abs(self._early[index][0]) > largest",
        f"{LEDGER} -k any_of_its_nodes",
    ),
    Mutation(
        "trainer/updates.py",
        "every sample of a tree trains the steps that it shares",
        "if sharing[0] != position or (",
        "if (",
        f"{UPDATES} -k trains_once",
    ),
    Mutation(
        "trainer/updates.py",
        "pruning a tree by width takes shared steps too",
        "(len(sharing) == 1 and not is_chosen)",
        "(not is_chosen)",
        f"{UPDATES} -k trains_once",
    ),
    Mutation(
        "store/tags.py",
        "the nodes of a sample in a tree do not reach the driver",
        '"nodes": tuple(facts["nodes"])',
        '"nodes": ()',
        "store/test_tags.py -k survives",
    ),
    # -- engine -------------------------------------------------------------------------------------------
    Mutation(
        "engine/copies.py",
        "the average of the weights moves one step early",
        "(k + 1) % self._ema.every_steps == 0",
        "k % self._ema.every_steps == 0",
        f"{ENGINE} -k ema_follows",
    ),
    Mutation(
        "engine/sharded.py",
        "an optimizer step is not counted",
        "self.state.num_updates += 1",
        "self.state.num_updates += 0",
        f"{ENGINE} -k ema_follows",
    ),
    Mutation(
        "engine/engine.py",
        "the learning rate does not move at a commit",
        "_number(self.learning_rate() if more else self.lr_scheduler_step())",
        "_number(self.learning_rate())",
        f"{TRANSACTION} -k commit_is_one_update",
    ),
    Mutation(
        "engine/engine.py",
        "the learning rate moves with every mini-batch",
        "_number(self.learning_rate() if more else self.lr_scheduler_step())",
        "_number(self.lr_scheduler_step())",
        f"{UPDATES} -k several_updates",
    ),
    Mutation(
        "engine/ledger.py",
        "a mini-batch has a scale of its own",
        "self.scale = scale if config.scale in BATCH_SCALES else None",
        "self.scale = None",
        f"{UPDATES} -k share_the_advantage_scale",
    ),
    Mutation(
        "engine/points.py",
        "old log-probs of several updates are not used",
        "old_log_probs=torch.tensor(old) if old else None",
        "old_log_probs=None",
        f"{UPDATES} -k several_updates",
    ),
    Mutation(
        "engine/sharded.py",
        "a gradient that is not finite counts as a step",
        "is_finite = math.isfinite(grad_norm)",
        "is_finite = True",
        f"{TRANSACTION} -k not_finite",
    ),
    Mutation(
        "engine/engine.py",
        "the gradient's projection is that of another gradient",
        "gradients.projection(self.module).item()",
        "-gradients.projection(self.module).item()",
        f"{TRANSACTION} -k 'serial_loop and one_fragment'",
    ),
    Mutation(
        "engine/transaction.py",
        "the gradient of fp16 stays scaled",
        "gradients.scale_(gradient, 1 / self.loss_scale)",
        "gradients.scale_(gradient, 1.0)",
        "engine/test_loss_scale.py -k clipping",
    ),
    Mutation(
        "engine/sharded.py",
        "an overflow in fp16 leaves the loss scale",
        "scale.update(is_finite=is_finite)",
        "scale.update(is_finite=True)",
        "engine/test_loss_scale.py -k halves_the_scale",
    ),
    Mutation(
        "engine/shadow.py",
        "weights stay swapped after a validation",
        "_write(module, kept)",
        "_write(module, self.shards)",
        "engine/test_shadow.py",
    ),
    Mutation(
        "engine/loss.py",
        "the KL term is subtracted",
        "return self.scaled if self.fixed is None else self.scaled + self.fixed",
        "return self.scaled if self.fixed is None else self.scaled - self.fixed",
        "engine/test_loss.py",
    ),
    Mutation(
        "engine/loss.py",
        "advantages that are still to be divided are clamped",
        "inputs, clamped if clamps else unclamped",
        "inputs, clamped",
        "engine/test_loss.py",
    ),
    # -- ledger -------------------------------------------------------------------------------------------
    Mutation(
        "engine/ledger.py",
        "samples that might be clamped train, the others wait",
        "if max(map(abs, self._early[index])) > largest",
        "if max(map(abs, self._early[index])) <= largest",
        LEDGER,
    ),
    Mutation(
        "engine/ledger.py",
        "samples held back are forgotten",
        "self._waiting = [index for index in self._waiting if index not in given]",
        "self._waiting = []",
        LEDGER,
    ),
    Mutation(
        "engine/ledger.py",
        "the scale's bound divides by the samples so far",
        "squares / max(self.num_samples - self.config.ddof, 1)",
        "squares / max(len(self.rewards) - self.config.ddof, 1)",
        LEDGER,
    ),
    Mutation(
        "engine/ledger.py",
        "the clip's bound is twice as wide",
        "return self.clip * least_scale * (1 - ROUNDING)",
        "return 2 * self.clip * least_scale * (1 - ROUNDING)",
        LEDGER,
    ),
    Mutation(
        "engine/ledger.py",
        "groups that were dropped leave the batch open for ever",
        "if self.is_scale_late and (is_last or self.is_complete):",
        "if self.is_scale_late and self.is_complete:",
        LEDGER,
    ),
    Mutation(
        "engine/ledger.py",
        "the group that came last sets what may train",
        "self._largest_scale = max(self._largest_scale, self._scale(rewards, groups))",
        "self._largest_scale = self._scale(rewards, groups)",
        LEDGER,
    ),
    # -- parts of a group that is not complete ----------------------------------------------------------------
    Mutation(
        "engine/parts.py",
        "the group's mean is added, not subtracted",
        "self.plain, self.baseline - mean)",
        "self.plain, mean - self.baseline)",
        RANDOM,
    ),
    Mutation(
        "engine/parts.py",
        "rewards far from zero round the gradient away",
        "return cls(uid, sum(sample.reward for sample in samples) / len(samples))",
        "return cls(uid, 0.0)",
        f"{PARTS}::test_rewards_far_from_zero_do_not_round_the_gradient_away",
    ),
    Mutation(
        "engine/logical_batch.py",
        "an advantage that is clamped after its sample trained stays unclamped",
        "if is_final and self._early:",
        "if False and self._early:",
        f"{PARTS}::test_committed_gradient_is_that_of_the_serial_loop",
    ),
    Mutation(
        "engine/logical_batch.py",
        "a group that was dropped stays in the gradient",
        """            self.transaction.discard(self._partial)
            self._partial = None""",
        """            advantages = dict.fromkeys(self._partial.samples, 1.0)
            self.transaction.join(self._partial, advantages, 0.0, 1.0)
            self._partial = None""",
        f"{PARTS}::test_nothing_of_a_dropped_group_is_in_the_gradient",
    ),
    Mutation(
        "engine/transaction.py",
        "KL of samples that trained early is divided by the late advantage scale",
        "gradients.add_(self._fixed_gradient if divisor is None else gradient, group.fixed)",
        "gradients.add_(gradient, group.fixed)",
        RANDOM,
    ),
    Mutation(
        "engine/planning.py",
        "tiles of a part mix samples",
        "num_samples = 1 if are_apart else num_samples",
        "num_samples = num_samples",
        f"{PARTS}::test_committed_gradient_is_that_of_the_serial_loop",
    ),
    Mutation(
        "schedulers/parts.py",
        "samples train before the conditions of their prompt are published",
        'if group.state == "open" and CARRIER in group.rewards]',
        'if group.state == "open" and group.rewards]',
        "schedulers/test_parts.py",
    ),
    Mutation(
        "schedulers/batch.py",
        "a sample trains in two parts of its group",
        "group.trained.update(samples)",
        "group.trained.add(samples[0])",
        f"{PLANNER} schedulers/test_parts.py",
    ),
    # -- transaction and gradients --------------------------------------------------------------------------
    Mutation(
        "engine/transaction.py",
        "centred rewards are multiplied by their scale",
        "gradients.scale_(gradient, 1 / divisor)",
        "gradients.scale_(gradient, divisor)",
        f"{TRANSACTION} -k 'serial_loop and max_group'",
    ),
    Mutation(
        "engine/transaction.py",
        "the KL term's gradient is lost",
        "gradients.add_(gradient, self._fixed_gradient)",
        "gradients.add_(gradient, {})",
        f"{TRANSACTION} -k 'serial_loop and lora_kl_velocity'",
    ),
    Mutation(
        "engine/transaction.py",
        "groups that were dropped count as trained",
        "correction = self.num_rows / self.num_trained_rows",
        "correction = 1.0",
        f"{TRANSACTION} -k dropped_do_not_count",
    ),
    Mutation(
        "engine/transaction.py",
        "a failed batch may be trained on",
        "        self.is_poisoned = True\n        yield",
        "        yield",
        f"{TRANSACTION} -k only_abort_is_legal",
    ),
    Mutation(
        "engine/transaction.py",
        "the gradient of an aborted batch stays",
        "            recover(self.module)\n        gradients.drop(self.module)",
        "            recover(self.module)",
        f"{TRANSACTION} -k only_abort_is_legal",
    ),
    Mutation(
        "engine/transaction.py",
        "FSDP's mean over the ranks is taken for their sum",
        "self.backward(terms.total * self.loss_factor, False)",
        "self.backward(terms.total, False)",
        f"{RANDOM}[3]",
    ),
    Mutation(
        "engine/transaction.py",
        "the gradient's parts of ranks that share a row are averaged",
        "num_ranks * ranks_per_row",
        "num_ranks",
        SEQUENCE,
    ),
    Mutation(
        "engine/engine.py",
        "every rank that shares a row returns its log-probs",
        "found if self.is_mp_src_rank_with_outputs() else {}",
        "found",
        SEQUENCE,
    ),
    Mutation(
        "models/sequence.py",
        "padding of a shared prompt takes part in the attention",
        "F.pad(mask, (0, missing))",
        "F.pad(mask, (0, missing), value=1)",
        SEQUENCE,
    ),
    Mutation(
        "models/hunyuan_video_forward.py",
        "every rank that shares a row takes the positions of the first tokens",
        '    "rope": {0: POSITIONS, 1: POSITIONS},\n',
        '    "rope": {1: POSITIONS},\n',
        SEQUENCE,
    ),
    Mutation(
        "engine/transaction.py",
        "the KL term that is kept apart pushes away",
        "self._backward_into(self._fixed_gradient, terms.fixed * self.loss_factor, False)",
        "self._backward_into(self._fixed_gradient, -terms.fixed * self.loss_factor, False)",
        f"{RANDOM}[3]",
    ),
    Mutation(
        "engine/transaction.py",
        "the KL term's gradient is divided by the scale of the rewards",
        "        gradients.scale_(gradient, 1 / divisor)\n        gradients.add_(gradient, self._fixed_gradient)\n",
        "        gradients.add_(gradient, self._fixed_gradient)\n        gradients.scale_(gradient, 1 / divisor)\n",
        f"{RANDOM}[3]",
    ),
    Mutation(
        "engine/transaction.py",
        "what is pending when a batch closes is not reduced over the ranks",
        "            gradients.put(self.module, gradient)\n        gradients.reduce_pending(self.module)\n",
        "            gradients.put(self.module, gradient)\n",
        f"{RANDOM}[12]",
    ),
    Mutation(
        "engine/transaction.py",
        "centred rewards are clamped before they are divided",
        "clamps=is_final",
        "clamps=True",
        f"{RANDOM}[0]",
    ),
    Mutation(
        "engine/joint.py",
        "numbers of a tile's rows end in the wrong places",
        "found[place.to(found.device)] = values",
        "found[place.to(found.device)] = values.flip(0)",
        "engine/test_joint.py",
    ),
    Mutation(
        "engine/transaction.py",
        "recorded log-probs are not what the ratio is against",
        'if denominator == "rollout":',
        "if False:",
        f"{RANDOM}[2]",
    ),
    Mutation(
        "engine/logical_batch.py",
        "samples that are held back never train",
        "        self._train(is_last=True)\n",
        "",
        f"{RANDOM}[41]",
    ),
    Mutation(
        "engine/logical_batch.py",
        "a fragment that is refused leaves its id",
        "        samples = fragment.samples\n",
        "        samples = fragment.samples\n        self.fragment_ids.add(fragment.fragment_id)\n",
        f"{RANDOM}[4]",
    ),
    Mutation(
        "engine/planning.py",
        "a rank takes the advantages of the fragment's first samples",
        "advantages=advantages[needed])",
        "advantages=advantages[: len(needed)])",
        f"{RANDOM}[3]",
    ),
    Mutation(
        "engine/planning.py",
        "trajectories are cut without time-step parallelism",
        "whole_samples=not self.tsp.enable",
        "whole_samples=False",
        "engine/test_planning.py",
    ),
    Mutation(
        "engine/planning.py",
        "a tile leaves no room for the optimizer's state",
        "later_bytes=self.later_bytes(),",
        "later_bytes=0,",
        "engine/test_tight_device.py",
    ),
    Mutation(
        "engine/memory.py",
        "two rows are rehearsed where they cannot fit",
        "if not any(most([one + row > room])):",
        "if True:",
        "engine/test_tight_device.py",
    ),
    Mutation(
        "sampling/branches.py",
        "both branches of guidance are thought to take what one takes",
        "kept + 2 * taken",
        "kept + taken",
        "sampling/test_branches.py",
    ),
    Mutation(
        "engine/planning.py",
        "a tile is rehearsed with a short prompt",
        "longest = max(picks, ",
        "longest = min(picks, ",
        "engine/test_planning.py",
    ),
    Mutation(
        "engine/fragment.py",
        "pictures of two sizes share a tile",
        "experts[point] * len(kinds) + kind",
        "experts[point] * len(kinds)",
        "engine/test_rows.py",
    ),
    # -- forward points and policies --------------------------------------------------------------------------
    Mutation(
        "algorithms/objectives/awm.py",
        "the error's power is not divided by",
        "- FLOOR**power) * sigma / power",
        "- FLOOR**power) * sigma",
        FORWARD,
    ),
    Mutation(
        "algorithms/objectives/dgpo.py",
        "groups in the right order weigh more",
        "(config.beta * sums / counts).sigmoid()",
        "(-config.beta * sums / counts).sigmoid()",
        FORWARD,
    ),
    Mutation(
        "algorithms/objectives/dgpo.py",
        "rows that have moved too far train",
        "torch.where(is_clipped, error.detach(), error)",
        "error",
        FORWARD,
    ),
    Mutation(
        "engine/logical_batch.py",
        "a loss without advantages is divided by their scale",
        "ready.divisor is not None or not self.reads_advantages",
        "ready.divisor is not None",
        f"{TRANSACTION} -k alone",
    ),
    Mutation(
        "engine/teachers.py",
        "the student's adapter stays on in a teacher's forward",
        "with self.weights.swapped_in(module), without_adapter(module):",
        "with self.weights.swapped_in(module):",
        f"{TRANSACTION} -k 'serial_loop and taught_lora'",
    ),
    Mutation(
        "engine/teachers.py",
        "a teacher's adapter replaces the weight it is added to",
        "own.to(given.device).float() + given if files.adds else given",
        "given",
        "engine/test_teachers.py",
    ),
    Mutation(
        "engine/fragment.py",
        "rows of two teachers share a tile",
        "kind = kinds[sample.sampling_of(point), sample.teacher]",
        "kind = 0",
        f"{TRANSACTION} -k 'serial_loop and taught'",
    ),
    Mutation(
        "engine/teachers.py",
        "a resumed run takes another teacher",
        "    if unlike:",
        "    if False:",
        "engine/test_teachers.py",
    ),
    Mutation(
        "algorithms/sde.py",
        "the noise rate of law cps is divided by a step's length",
        'return std if law == "cps" else',
        "return",
        f"{LOSSES} -k distillation",
    ),
    Mutation(
        "types.py",
        "the negative prompt of a guided teacher is not encoded",
        "needs_negative = self.sampling.is_guided or self.wants_negative",
        "needs_negative = self.sampling.is_guided",
        "sampling/test_requests.py",
    ),
    Mutation(
        "algorithms/objectives/preference.py",
        "a pair has half its gradient",
        "config.beta * half.sigmoid()",
        "0.5 * config.beta * half.sigmoid()",
        FORWARD,
    ),
    Mutation(
        "sampling/requests.py",
        "both samples of a pair are the chosen picture",
        "source_image(row.pair[sample_index])",
        "source_image(row.pair[0])",
        PICTURES,
    ),
    Mutation(
        "rollout/batcher.py",
        "a picture is generated, with the samples of its batch",
        "return entry[0].sampling, entry[0].picture is None, entry[0].batch_group",
        "return entry[0].sampling, True, entry[0].batch_group",
        PICTURES,
    ),
    Mutation(
        "rollout/batcher.py",
        "a chunk that is complete waits for further requests",
        "or self._bursts.are_complete(one.burst for one in waiting)",
        "or not waiting",
        "rollout/test_batcher.py",
    ),
    Mutation(
        "rollout/batcher.py",
        "an update begins while answers are on their way",
        """            await self._until_answered()
            yield""",
        "            yield",
        "rollout/test_batcher.py",
    ),
    Mutation(
        "rollout/samples.py",
        "answers are made before the numbers have come",
        "            copies.wait()\n",
        "",
        "rollout/test_samples.py",
    ),
    Mutation(
        "rollout/samples.py",
        "the thread that computes waits for the pictures",
        "in_batches(self.decoder.decode, latents",
        "in_batches(self.decoder, latents",
        "rollout/test_samples.py",
    ),
    Mutation(
        "rollout/samples.py",
        "every answer is sent with the pictures of its batch",
        "made.pixels[row].clone()",
        "made.pixels[row]",
        "rollout/test_samples.py",
    ),
    Mutation(
        "rollout/batcher.py",
        "groups share batches though their chunks say otherwise",
        "entry[0].picture is None, entry[0].batch_group",
        "entry[0].picture is None, None",
        "rollout/test_batcher.py",
    ),
    Mutation(
        "schedulers/rules.py",
        "a fragment has eight groups on any number of ranks",
        "max(found, self.min_groups_per_fragment)",
        "max(GROUPS_PER_FRAGMENT, self.min_groups_per_fragment)",
        "schedulers/test_rules.py trainer/test_batch_rules.py",
    ),
    Mutation(
        "schedulers/rules.py",
        "a few ranks train a second sample of a fragment",
        "min(num_ranks // group_size, num_prompts",
        "min(-(-num_ranks // group_size), num_prompts",
        "schedulers/test_rules.py -k eight_groups",
    ),
    Mutation(
        "trainer/batch_rules.py",
        "fragments are cut as if a sample had one row",
        "rows_per_group=rows_per_group(digen, group_size)",
        "rows_per_group=None",
        "trainer/test_batch_rules.py",
    ),
    Mutation(
        "schedulers/rules.py",
        "two slots halve the chunks of a replica",
        "-(-num_slots // self.slots_per_replica)",
        "num_slots",
        "schedulers/test_planner.py",
    ),
    Mutation(
        "algorithms/sde.py",
        "whoever changes a step changes all later ones",
        "to_device(known.values.clone(), sample.device)",
        "to_device(known.values, sample.device)",
        SDE,
    ),
    Mutation(
        "rollout/bursts.py",
        "a request without a burst starts at once",
        "burst is not None and burst.name not in self._missing for",
        "burst is None or burst.name not in self._missing for",
        "rollout/test_bursts.py rollout/test_batcher.py",
    ),
    Mutation(
        "agent_loop/manager.py",
        "the turns of an episode are announced as one burst",
        "== SINGLE_TURN and self._environments is None",
        "== SINGLE_TURN",
        "agent_loop/test_finish.py",
    ),
    Mutation(
        "rollout/pictures.py",
        "a picture is recorded under another version",
        "versions=(version, version)",
        "versions=(version, version + 1)",
        PICTURES,
    ),
    Mutation(
        "rollout/pictures.py",
        "a picture that cannot be read fails its whole batch",
        "except ValueError as error:",
        "except KeyError as error:",
        PICTURES,
    ),
    Mutation(
        "agent_loop/manager.py",
        "the rejected picture is preferred",
        "1.0 if sample_index == CHOSEN else 0.0",
        "0.0 if sample_index == CHOSEN else 1.0",
        "agent_loop/test_finish.py",
    ),
    Mutation(
        "models/qwen_image.py",
        "encoded latents are not divided by their std",
        "(encode_each(vae, pixels, device, dtype) - mean) * inverse_std",
        "(encode_each(vae, pixels, device, dtype) - mean) / inverse_std",
        "models/test_encoding.py -k qwen_image",
    ),
    Mutation(
        "models/pixels.py",
        "encoded pictures keep the shift of the VAE",
        "(latents - vae.config.shift_factor) * vae.config.scaling_factor",
        "latents * vae.config.scaling_factor",
        "models/test_encoding.py -k sd3",
    ),
    Mutation(
        "models/pixels.py",
        "a picture of another shape is stretched",
        'resize_mode="crop"',
        'resize_mode="default"',
        "models/test_encoding.py -k another_size",
    ),
    Mutation(
        "config/load.py",
        "each rule reads a bad section anew",
        "            read.digen = error\n",
        "            raise error\n",
        "plugin/test_malformed_starts.py -k read_once",
    ),
    Mutation(
        "preflight/pairs.py",
        "a file of which some rows have no pair starts",
        "    if bare:",
        "    if len(bare) == len(prompts):",
        "plugin/test_pairs.py -k lacks",
    ),
    Mutation(
        "algorithms/objectives/matching.py",
        "rows of different noise levels are compared",
        "torch.stack([rows.groups, rows.points], 1)",
        "torch.stack([rows.groups, rows.groups], 1)",
        FORWARD,
    ),
    Mutation(
        "algorithms/forward.py",
        "a stratum begins where the one before begins",
        "steps.start + len(steps) * part // count",
        "steps.start + len(steps) * (part // 2) // count + part % 2",
        "algorithms/test_forward.py",
    ),
    Mutation(
        "engine/logical_batch.py",
        "a batch without rows ends the run",
        "if not self.transaction.num_trained_rows:",
        "if not self.transaction:",
        f"{INVARIANTS} -k ties",
    ),
    Mutation(
        "engine/points.py",
        "all points of a sample have the same noise",
        "sample.uid, source, point, end.shape",
        "sample.uid, source, 0, end.shape",
        "engine/test_rows.py",
    ),
    Mutation(
        "engine/points.py",
        "noise and picture change places",
        "(1 - scale) * made.clean + scale * made.noise",
        "scale * made.clean + (1 - scale) * made.noise",
        "engine/test_rows.py",
    ),
    Mutation(
        "engine/engine.py",
        "trainers that assist generate with the weights that train",
        "nullcontext() if policy == CURRENT else",
        "nullcontext() if True else",
        f"{INVARIANTS} -k 'assists and diffusion_nft'",
    ),
    Mutation(
        "engine/sharded.py",
        "replicas get the weights that train where they should get another policy's",
        "self.exports: str = self.objective.behaviour",
        'self.exports: str = "current"',
        f"{INVARIANTS} -k 'assists and diffusion_nft'",
    ),
    Mutation(
        "engine/points.py",
        "the noise of a row depends on the rank that trains it",
        "source = 0 if self.shares_noise else sample.sample_index",
        "source = 0 if self.shares_noise else index",
        f"{INVARIANTS} -k 'two_ranks and awm'",
    ),
    Mutation(
        "engine/transaction.py",
        "each rank's share of the joint column counts alone",
        "lambda rows: joint.combine(rows, self.loss.config), self.exchange)",
        "lambda rows: joint.combine(rows, self.loss.config), lambda part: part)",
        f"{INVARIANTS} -k 'two_ranks and gspo'",
    ),
    Mutation(
        "engine/copies.py",
        "policies that follow are not in checkpoints",
        "return {policy: self._weights[policy].state_dict() for policy in self._saved}",
        "return {}",
        f"{INVARIANTS} -k 'resumed and dgpo'",
    ),
    Mutation(
        "engine/copies.py",
        "the decay of a policy is that of the step before",
        "self._update(policy, decay.at(k))",
        "self._update(policy, decay.at(k - 1))",
        f"{INVARIANTS} -k 'schedule and diffusion_nft'",
    ),
    Mutation(
        "engine/transaction.py",
        "the loss is a mean over the rows of one rank",
        "self.loss_factor = num_ranks * ranks_per_row",
        "self.loss_factor = ranks_per_row",
        f"{INVARIANTS} -k 'two_ranks and cispo_masked'",
    ),
    Mutation(
        "engine/transaction.py",
        "stale samples train as if the weights had not moved",
        'if denominator == "rollout":',
        'if denominator == "never":',
        f"{INVARIANTS} -k 'earlier_version and flow_grpo'",
    ),
    Mutation(
        "engine/copies.py",
        "a policy follows a batch that changed nothing",
        "if k > self._followed:",
        "if True:",
        "engine/test_copies.py",
    ),
    Mutation(
        "engine/copies.py",
        "policies that follow batches are not saved",
        "self._saved = (*decays,",
        "self._saved = (*{},",
        "engine/test_copies.py",
    ),
    Mutation(
        "algorithms/objectives/diffusion_nft.py",
        "both implicit policies move towards the new one",
        "negative = _weighted_error(rows, old - towards)",
        "negative = _weighted_error(rows, old + towards)",
        "algorithms/test_diffusion_nft.py",
    ),
    Mutation(
        "algorithms/objectives/diffusion_nft.py",
        "the reference is read and left out",
        "per_row + config.kl_coef * divergence",
        "per_row + 0 * divergence",
        "algorithms/test_diffusion_nft.py",
    ),
    Mutation(
        "engine/ledger.py",
        "a group is cut where its rows are needed together",
        "for index in late} if self.whole_groups else set()",
        "for index in late} if False else set()",
        "engine/test_joint.py -k held",
    ),
    Mutation(
        "trainer/updates.py",
        "samples that were not selected train",
        "num_steps=tag.num_steps if position in chosen or tag.nodes else 0",
        "num_steps=tag.num_steps",
        f"{UPDATES} -k not_select",
    ),
    Mutation(
        "engine/rows.py",
        "rows have the advantages of other samples",
        "return advantages[samples] if",
        "return advantages.flip(0)[samples] if",
        f"{RANDOM}[3]",
    ),
    Mutation(
        "engine/rows.py",
        "all rows of a tile have the first one's prompt",
        "conditions=[positive for positive, _ in pairs]",
        "conditions=[pairs[0][0] for _ in pairs]",
        f"{RANDOM}[3]",
    ),
    Mutation(
        "engine/adapter.py",
        "LoRA's reference is the policy itself",
        "layer._disable_adapters = True",
        "layer._disable_adapters = False",
        f"{RANDOM}[5]",
    ),
    Mutation(
        "engine/shadow.py",
        "the reference's weights stay after a forward that failed",
        "            recover(module)\n            raise\n",
        "            raise\n",
        "engine/test_shadow.py",
    ),
    Mutation(
        "engine/gradients.py",
        "the newer of two gradients replaces the older",
        "gradient[key].add_(piece)",
        "gradient[key] = piece",
        "engine/test_gradients.py",
    ),
    Mutation(
        "engine/gradients.py",
        "a gradient that was moved aside does not come back",
        "        gradient.update(take(module))\n        put(module, own)",
        "        gradient.update(take(module))",
        "engine/test_gradients.py",
    ),
    Mutation(
        "engine/gradients.py",
        "what no backward reduced is never reduced",
        "module._get_fsdp_state()._root_post_backward_final_callback()",
        "pass",
        "engine/test_gradients.py",
    ),
    Mutation(
        "engine/whole_groups.py",
        "a whole base is gathered again at every tile",
        "        if not self.is_whole:\n            super().unshard(async_op)",
        "        self.is_whole = False\n        super().unshard(async_op)",
        "engine/test_whole_base.py -m 'long or not long'",
    ),
    Mutation(
        "engine/shadow.py",
        "a whole base keeps the values of before where frozen weights are exchanged",
        "whole_groups.release(module)",
        "pass",
        "engine/test_whole_base.py -m 'long or not long'",
    ),
    Mutation(
        "engine/whole_base.py",
        "rows that do not fit beside a whole base train there",
        "        elif not fits:",
        "        elif False:",
        "engine/test_whole_base.py -m 'long or not long'",
    ),
    Mutation(
        "engine/optimizer.py",
        "a run keeps the optimizer implementation of the checkpoint that it continues",
        "        group.update(choice)",
        "        choice = {}",
        "engine/test_optimizer.py",
    ),
    Mutation(
        "engine/arrival.py",
        "a fetch outlives its batch",
        "        if thread is not None:\n            thread.join()",
        "        del thread",
        "engine/test_arrival.py",
    ),
    Mutation(
        "engine/arrival.py",
        "the first tile waits for all samples of a training call",
        "if number & (number + 1) == 0:",
        "if number < 0:",
        "engine/test_arrival.py",
    ),
    Mutation(
        "engine/arrival.py",
        "samples of a call are given to the wrong places",
        "for place, index in enumerate(() if self._is_closed else call):",
        "for place, index in enumerate(sorted(call, reverse=True)):",
        "engine/test_arrival.py",
    ),
    Mutation(
        "engine/ahead.py",
        "samples that were announced for another moment are fetched ahead",
        " and upcoming.after == after",
        "",
        "engine/test_ahead.py",
    ),
    Mutation(
        "engine/ahead.py",
        "samples of another group train, because they were fetched ahead",
        "if [sample.key for sample in found.described] != [sample.key for sample in samples] or",
        "if",
        "engine/test_ahead.py",
    ),
    Mutation(
        "engine/ahead.py",
        "ranks read announcements while the trainer waits",
        "        self._ends_looking.set()\n\n    def __call__",
        "\n    def __call__",
        "engine/test_ahead.py",
    ),
    Mutation(
        "engine/ahead.py",
        "a fetch ahead outlives its batch",
        "        for samples in self._dropped:\n            samples.close()\n",
        "",
        "engine/test_ahead.py",
    ),
    Mutation(
        "engine/arrival.py",
        "samples that were fetched in vain keep their memory",
        "            self._found.clear()\n",
        "",
        "engine/test_ahead.py",
    ),
    Mutation(
        "trainer/announcements.py",
        "what trains next is announced once per fragment, however many groups complete after that",
        "if (fragment.id, uids) == self._told:",
        "if self._told is not None and fragment.id == self._told[0]:",
        "trainer/test_announcements.py",
    ),
    Mutation(
        "rollout/fitting.py",
        "samples count as smaller, by what the first one allocated and left",
        "max(peak - found.peak, taken - found.one, 1)",
        "max(taken - found.one, 1)",
        FITTING,
    ),
    Mutation(
        "rollout/fitting.py",
        "the samples of a batch that ran out of memory are lost",
        "            if shortage:  #",
        "            left = left[size:] if shortage else left\n            if shortage:  #",
        FITTING,
    ),
    Mutation(
        "rollout/fitting.py",
        "a batch takes the room that staged weights have taken since",
        "int(device_memory.limit_bytes() * (1 - MARGIN)) - device_memory.allocated_bytes()",
        "int(device_memory.limit_bytes() * (1 - MARGIN)) - found.peak + found.one",
        FITTING,
    ),
    Mutation(
        "rollout/fitting.py",
        "a batch that ran out of memory runs again with one sample less, until it fits",
        "self._kinds[kind].most = size // 2",
        "self._kinds[kind].most = size - 1",
        FITTING,
    ),
    Mutation(
        "trainer/relays.py",
        "every process is given the arguments of the first ones",
        "calls += callee.send(work.share(first, callee.num_processes), keep)",
        "calls += callee.send(work, keep)",
        STAGED,
    ),
    Mutation(
        "trainer/answers.py",
        "a rank fails, and the call waits for the others, which wait for that rank",
        "            self._wake(self.all.set_exception, error)\n            return\n",
        "            self._answers[number] = [error]\n",
        ANSWERS,
    ),
    Mutation(
        "trainer/answers.py",
        "a call ends at its first answer",
        "is_last = self._num_left == 0",
        "is_last = True",
        ANSWERS,
    ),
    Mutation(
        "trainer/answers.py",
        "a loop that was closed is woken",
        "if not self._loop.is_closed():",
        "if True:",
        ANSWERS,
    ),
    Mutation(
        "trainer/answers.py",
        "what comes after the first failure breaks the loop",
        "if not self.all.done():",
        "if True:",
        ANSWERS,
    ),
    Mutation(
        "trainer/relays.py",
        "a relay calls ranks of another node",
        "key=lambda number: nodes[number]",
        "key=lambda number: number // fan_out",
        "trainer/test_relays.py -k 'tree'",
    ),
    Mutation(
        "trainer/relays.py",
        "a replica that joins is sent no weights",
        "if [*actors] != self._actors:",
        "if not self._actors:",
        STAGED,
    ),
    Mutation(
        "schedulers/headstart.py",
        "slots begin one group after the other early, each of which takes longer than a batch",
        "return takes_s <= min(time_s, batch_s)",
        "return takes_s <= time_s",
        "schedulers/test_headstart.py",
    ),
    Mutation(
        "schedulers/headstart.py",
        "the trainer waits for groups that it would have generated sooner",
        "return takes_s <= min(time_s, batch_s)",
        "return takes_s <= batch_s",
        "schedulers/test_headstart.py",
    ),
    Mutation(
        "schedulers/headstart.py",
        "slots wait although the trainer never assists",
        "self._train_s is None or not (self._assists or self._last_assists)",
        "self._train_s is None",
        "schedulers/test_headstart.py",
    ),
    Mutation(
        "trainer/collector.py",
        "the collector looks through the driver's modules again and again",
        "    _keep()\n    ray",
        "    ray",
        "trainer/test_collector.py -m 'long or not long'",
    ),
    Mutation(
        "trainer/replicas.py",
        "of many replicas only the servers are asked for a sign of life",
        "ways = (self._servers, servers), (self._workers, workers)",
        "ways = (self._servers, servers),",
        "trainer/test_replicas.py -k many_replicas",
    ),
    Mutation(
        "trainer/replicas.py",
        "after a relay died, every call goes to it first",
        "                route.end()",
        "                pass",
        "trainer/test_replicas.py -k relay_died",
    ),
    Mutation(
        "trainer/replicas.py",
        "many replicas are asked one by one",
        "if sum(len(actors) for _, actors in ways) <= FAN_OUT:",
        "if ways:",
        "trainer/test_replicas.py -k many_replicas",
    ),
    Mutation(
        "trainer/staged.py",
        "ranks send before all have joined",
        '        await everyone.call(join, "first")\n',
        '        joined = asyncio.ensure_future(everyone.call(join, "first"))\n',
        STAGED,
    ),
    Mutation(
        "schedulers/foresight.py",
        "a batch that ends sooner than predicted keeps the trainer from assisting",
        "max(against, min(-against, INEXACT))",
        "abs(against)",
        "schedulers/test_foresight.py",
    ),
    Mutation(
        "engine/export.py",
        "a rank that only takes part gathers all tensors at once",
        "if number and number % LOOKAHEAD == 0:",
        "if number > 1 << 20:",
        "engine/test_export.py",
    ),
    Mutation(
        "engine/saved_ranks.py",
        "shards are loaded on the device that they were saved from",
        'torch.load(path, map_location="cpu", mmap=mapped',
        "torch.load(path, map_location=None, mmap=mapped",
        "engine/test_checkpoint.py",
    ),
    Mutation(
        "engine/checkpoint.py",
        "an adapter is resumed on any base",
        'saved["frozen"] != frozen:',
        'saved["frozen"] != saved["frozen"]:',
        "engine/test_checkpoint.py",
    ),
    Mutation(
        "engine/resharding.py",
        "ranks of another number read the first rows of a saved shard",
        "narrowed(shard, item.storage_offsets, item.lengths)",
        "shard[: item.lengths[0]]",
        f"{RESHARDING} -k 'saved_and_trains and four and full'",
    ),
    Mutation(
        "engine/resharding.py",
        "all moments are read from the first rank's file",
        'self._files.open("optim", rank)["state"]',
        'self._files.open("optim", 0)["state"]',
        f"{RESHARDING} -k 'saved_and_trains and one and full'",
    ),
    Mutation(
        "engine/resharding.py",
        "all copies are read from the first rank's file",
        'self._files.open("digen_state", rank)["copies"]',
        'self._files.open("digen_state", 0)["copies"]',
        f"{RESHARDING} -k 'objective_keeps and one'",
    ),
    Mutation(
        "engine/resharding.py",
        "shards and replicas of them are taken for each other",
        "return saved.placements == ours.placements and",
        "return True or",
        f"{RESHARDING} -k 'replicas_and_shards and two_ranks'",
    ),
    Mutation(
        "engine/resharding.py",
        "a rank takes the random state of one that was another's",
        "is_known = self._files.num_ranks == dist.get_world_size()",
        "is_known = True",
        f"{RESHARDING} -k random_state",
    ),
    Mutation(
        "engine/resharding.py",
        "another number of ranks takes other teachers",
        "return _summed(ours), _summed(theirs)",
        "return {}, {}",
        f"{RESHARDING} -k teachers",
    ),
    Mutation(
        "engine/fingerprint.py",
        "another number of ranks puts an adapter on any base",
        "return _hash([bits.view(torch.float32)])",
        'return ""',
        f"{RESHARDING} -k another_base",
    ),
    Mutation(
        "engine/saved_ranks.py",
        "shards are cut by rounding down",
        "rows_each = -(-rows // len(mesh))",
        "rows_each = max(1, rows // len(mesh))",
        f"{RESHARDING} -k torch_chunk",
    ),
    Mutation(
        "engine/checkpoint.py",
        "files of two saves are loaded together",
        "if len(set(steps.values())) > 1:",
        "if False:",
        f"{RESHARDING} -k mix_saves",
    ),
    Mutation(
        "export/shards.py",
        "an export joins the first rank's shard with itself",
        "copy_(part(rank))",
        "copy_(part(0))",
        "export/test_export.py -k two_ranks",
    ),
    Mutation(
        "export/shards.py",
        "every policy of a checkpoint is exported as the trained one",
        "if policy != CURRENT and name",
        "if policy is None and name",
        "export/test_export.py",
    ),
    Mutation(
        "export/policy.py",
        "a merged export takes the adapter of another dtype's base",
        "self._base.dtype(name) if dtype is None else dtype",
        "torch.bfloat16",
        "export/test_export.py -k merged",
    ),
    Mutation(
        "export/pictures.py",
        "digen sample draws with the settings of training",
        "step=self._step, validate=True)",
        "step=self._step, validate=False)",
        "export/test_sample.py",
    ),
    Mutation(
        "export/pictures.py",
        "a picture of `digen sample` stands without the images it was made of",
        "save_pixels(pixels, path, row.images, audio)",
        "save_pixels(pixels, path, (), audio)",
        "export/test_sample.py -k edits_and",
    ),
    Mutation(
        "export/pictures.py",
        "all prompts of `digen sample` have the noise of the first",
        "uid=validation_uid(index)) for index, row",
        "uid=validation_uid(0)) for index, row",
        "export/test_sample.py -k edits_and",
    ),
    Mutation(
        "__init__.py",
        "the version is a text in the code",
        'return version("verl-digen")',
        'return "0.1.0"',
        "packaging/test_version.py -k one_version",
    ),
    Mutation(
        "export/comfyui.py",
        "ComfyUI scales an exported adapter by 1",
        "torch.tensor(scales[layer] * len(down))",
        "torch.tensor(float(len(down)))",
        "export/test_comfyui.py",
    ),
    Mutation(
        "export/partial.py",
        "a failed export leaves its files",
        "shutil.rmtree(partial, ignore_errors=True)",
        "pass",
        "export/test_export.py -k disk",
    ),
    Mutation(
        "algorithms/projection.py",
        "every shard is projected as if it were the first",
        "+ starts[0] + done) * strides[0]",
        "+ done) * strides[0]",
        "algorithms/test_projection.py",
    ),
    # -- sampler and noise ------------------------------------------------------------------------------------
    Mutation(
        "sampling/sampler.py",
        "the next step starts from the mean, without noise",
        "latents = edges.place(taken.next_sample, latents)",
        "latents = edges.place(taken.mean.to(self.latents_dtype), latents)",
        SAMPLER,
    ),
    Mutation(
        "sampling/sampler.py",
        "the wrong steps are stochastic",
        "is_sde = [step in request.window.sde_steps for request, _ in rows]",
        "is_sde = [step in request.window.train_steps for request, _ in rows]",
        SAMPLER,
    ),
    Mutation(
        "sampling/sampler.py",
        "all samples of a group have the same noise",
        "noise_seed(self.run_seed, batch.requests[row], step)",
        "noise_seed(self.run_seed, batch.requests[0], step)",
        SAMPLER,
    ),
    Mutation(
        "sampling/sampler.py",
        "the noise of the first step has no end",
        "sigma_max=schedule[1],",
        "sigma_max=schedule[2],",
        SAMPLER,
    ),
    Mutation(
        "sampling/sampler.py",
        "replay scores the step with its sigmas of the step before",
        "        point.next_sigmas,\n",
        "        point.next_sigmas * 0.999,\n",
        SAMPLER,
    ),
    Mutation(
        "sampling/recording.py",
        "forward points have the noise levels of the steps after theirs",
        "sigmas=levels.sigmas(sigmas)",
        "sigmas=levels.sigmas(sigmas.roll(-1))",
        SAMPLER,
    ),
    Mutation(
        "sampling/requests.py",
        "validation samples of a prompt are one picture",
        "shared_initial_noise=config.shared_initial_noise and not validate",
        "shared_initial_noise=config.shared_initial_noise",
        "sampling/test_requests.py",
    ),
    Mutation(
        "sampling/requests.py",
        "samples of a group have noise levels of their own",
        "draw_noise_levels(digen.forward, run_seed=digen.seed, uid=row.uid, num_steps=num_steps)",
        "draw_noise_levels(digen.forward, run_seed=sample_index, uid=row.uid, num_steps=num_steps)",
        "sampling/test_requests.py",
    ),
    Mutation(
        "algorithms/noise.py",
        "every step has the same noise",
        'keyed_seed("noise", int(seed), int(step))',
        'keyed_seed("noise", int(seed), 0)',
        "algorithms/test_noise.py",
    ),
    Mutation(
        "sampling/prefix.py",
        "samples wait for one step too many",
        "row in self.waiting and step < begins",
        "row in self.waiting and step <= begins",
        "sampling/test_prefix.py",
    ),
    Mutation(
        "sampling/prefix_cache.py",
        "samples with rewritten prompts begin at the same latents",
        "return Prefix(request.uid, initial_seed, request.condition_key,",
        "return Prefix(request.uid, initial_seed, request.uid,",
        "sampling/test_prefix.py sampling/test_prefix_cache.py",
    ),
    Mutation(
        "sampling/prefix_cache.py",
        "latents made with other weights are found",
        "if weights != self._weights or prefix not in self._entries:",
        "if prefix not in self._entries:",
        "sampling/test_prefix_cache.py",
    ),
    Mutation(
        "sampling/prefix_cache.py",
        "an update leaves the latents of the old weights",
        "        self._entries.clear()\n        self._num_bytes = 0",
        "        self._num_bytes = 0",
        "sampling/test_prefix_cache.py",
    ),
    Mutation(
        "rollout/server.py",
        "latents before a window outlive an update of the same version",
        "        self._prefixes.clear()\n",
        "",
        "rollout/test_server.py::test_later_batches_of_a_group_begin_at_its_window_under_the_weights_that_serve",
    ),
    Mutation(
        "sampling/sampler.py",
        "steps that another sample ran are not counted",
        "                prefix.count(row)\n",
        "",
        "sampling/test_prefix.py",
    ),
    Mutation(
        "sampling/sampler.py",
        "latents are kept from before the last step",
        "rows[row] = taken.next_sample\n            cache.keep(steps, version, rows[row][0])",
        "cache.keep(steps, version, rows[row][0])\n                rows[row] = taken.next_sample",
        "sampling/test_prefix.py",
    ),
    Mutation(
        "algorithms/solvers/__init__.py",
        "a run of ODE steps reads what a stochastic step predicted",
        "torch.where(stochastic, 0, known.count + 1)",
        "known.count + 1",
        "algorithms/test_solvers.py",
    ),
    Mutation(
        "algorithms/solvers/dpm2.py",
        "the multistep term has the step before in place of this one",
        "ratio = (then - now) / torch.where(has_order, now - last, 1.0)",
        "ratio = (now - last) / torch.where(has_order, then - now, 1.0)",
        "algorithms/test_solvers.py",
    ),
    Mutation(
        "algorithms/solvers/unipc.py",
        "the corrector's share is not scaled to the step that follows",
        "scale = schedule.end / schedule.start",
        "scale = torch.ones_like(schedule.end)",
        "algorithms/test_solvers.py -k unipc",
    ),
    Mutation(
        "algorithms/solvers/unipc.py",
        "the corrector reads what was predicted before a window",
        "schedule.count >= 1, schedule.count >= 2",
        "schedule.count >= 0, schedule.count >= 1",
        "algorithms/test_solvers.py -k unipc",
    ),
    Mutation(
        "algorithms/solvers/sa.py",
        "the second step is corrected",
        "corrects = schedule.count >= 2",
        "corrects = schedule.count >= 1",
        "algorithms/test_solvers.py -k sa",
    ),
    Mutation(
        "algorithms/solvers/sa.py",
        "a step's noise is that of the sigma where it begins",
        "tau_squared = schedule.noise.at(end).square()",
        "tau_squared = schedule.noise.at(start).square()",
        "algorithms/test_solvers.py -k sa",
    ),
    Mutation(
        "sampling/sampler.py",
        "a solver with noise gets none",
        "if sde or sampling.solver in NOISY",
        "if sde",
        "sampling/test_sampler.py -k solver_with_noise",
    ),
    Mutation(
        "trainer/colocated.py",
        "a colocated step trains all samples",
        "fragment_samples(groups, self.digen.select,",
        "fragment_samples(groups, lambda rewards: range(len(rewards)),",
        "trainer/test_selection.py",
    ),
    Mutation(
        "trainer/disaggregated.py",
        "separate pools train all samples",
        "select=self.digen.select,",
        "select=lambda rewards: range(len(rewards)),",
        "trainer/test_selection.py",
    ),
    Mutation(
        "plan/run.py",
        "samples that are not selected train",
        "return self.settings.num_trained_samples * self.rows_per_sample",
        "return self.settings.num_samples * self.rows_per_sample",
        "plan/test_time.py",
    ),
    Mutation(
        "engine/copies.py",
        "a reference is renewed after every batch",
        "if decay.is_due(before, k):",
        "if k > before:",
        "engine/test_copies.py",
    ),
    Mutation(
        "algorithms/ema.py",
        "a policy is an average where it should be a copy",
        "if k <= self.copied_until",
        "if k <= self.start",
        "algorithms/test_ema.py",
    ),
    Mutation(
        "algorithms/objectives/longcat.py",
        "every step weighs the same",
        "rows.mean(weight * per_row)",
        "rows.mean(per_row)",
        "algorithms/test_losses.py -k longcat",
    ),
    # -- sde --------------------------------------------------------------------------------------------------
    Mutation(
        "algorithms/sde.py",
        "the log-prob of a deterministic step is infinite",
        "term.masked_fill(deterministic, 0.0) for term",
        "term for term",
        SDE,
    ),
    Mutation(
        "algorithms/sde.py",
        "a deterministic step that overflows has no log-prob of 0",
        "if known.deterministic_rows:  #",
        "if False:  #",
        SDE,
    ),
    Mutation(
        "algorithms/solvers/__init__.py",
        "every row is stochastic",
        "tuple(level if sde else 0.0 for",
        "tuple(level for",
        "algorithms/test_solvers.py",
    ),
    Mutation("algorithms/sde.py", "the drift has the wrong sign", "return 1 + drift,", "return 1 - drift,", SDE),
    Mutation(
        "algorithms/sde.py",
        "noise grows with the step, not with its root",
        "s * (-dt).sqrt()",
        "s * (-dt)",
        SDE,
    ),
    Mutation(
        "algorithms/sde.py",
        "the log-density's normalisation has the wrong sign",
        "return -std.log() - 0.5",
        "return std.log() - 0.5",
        SDE,
    ),
    Mutation(
        "algorithms/sde.py",
        "x is rounded after its log-prob is taken",
        ".to(storage_dtype or torch.float32)",
        ".to(torch.float32)",
        SDE,
    ),
    Mutation(
        "algorithms/sde.py",
        "cps mixes in new noise where it should keep the old",
        "sigma_next * angle.cos()",
        "sigma_next * angle.sin()",
        SDE,
    ),
    Mutation(
        "algorithms/window.py",
        "a moving window stands still",
        "lo, hi = lo + moved, hi + moved",
        "lo, hi = lo, hi",
        "algorithms/test_window.py",
    ),
    Mutation(
        "algorithms/objectives/grpo_guard.py",
        "the drift of the ratio is not made up for",
        "rows[OLD] + drift)",
        "rows[OLD])",
        "algorithms/test_losses.py -k guard",
    ),
    Mutation(
        "algorithms/objectives/flow_dppo.py",
        "rows that move back are left out, too",
        "(divergence >= config.kl_threshold) & moves_away",
        "divergence >= config.kl_threshold",
        "algorithms/test_losses.py -k dppo",
    ),
    Mutation(
        "engine/engine.py",
        "the weights before the update are those of the last step",
        'self.copies.drop("old")',
        "pass",
        f"{UPDATES} -k reads_the_old_mean",
    ),
    Mutation(
        "engine/policies.py",
        "the policy before the update is the one that trains",
        'policy in self.copies or policy != "old"',
        'policy != "old"',
        f"{UPDATES} -k reads_the_old_mean",
    ),
    # -- advantages and losses --------------------------------------------------------------------------------
    Mutation(
        "algorithms/advantages.py",
        "rewards are centred on the batch's mean",
        "values[samples] - values[samples].mean()",
        "values[samples] - values.mean()",
        ADVANTAGES,
    ),
    Mutation(
        "algorithms/advantages.py",
        "the smallest group's spread is taken for the largest",
        "divisor.max().item()",
        "divisor.min().item()",
        ADVANTAGES,
    ),
    Mutation(
        "algorithms/advantages.py",
        "the population's spread in place of the sample's",
        "values.std(correction=ddof)",
        "values.std(correction=0)",
        ADVANTAGES,
    ),
    Mutation(
        "algorithms/objectives/ratio.py",
        "the clip takes the better of two, not the worse",
        "return torch.maximum(-advantage * ratio",
        "return torch.minimum(-advantage * ratio",
        LOSSES,
    ),
    Mutation(
        "algorithms/objectives/flow_grpo.py",
        "the ratio is upside down",
        'rows["log_prob"] - rows[OLD]',
        'rows[OLD] - rows["log_prob"]',
        LOSSES,
    ),
    Mutation(
        "algorithms/objectives/ratio.py",
        "advantages are not clamped",
        'return rows["advantage"].clamp(-config.advantage_clip, config.advantage_clip)',
        'return rows["advantage"]',
        LOSSES,
    ),
    Mutation(
        "algorithms/objectives/decoupled_ppo.py",
        "the weight of stale samples has no cap",
        "behaviour_ratio.clamp(max=config.cap)",
        "behaviour_ratio",
        OFF_POLICY,
    ),
    Mutation(
        "algorithms/objectives/kimi.py",
        "the pull back to the generating policy pushes away",
        '* rows["log_prob"] + config.tau * half_square',
        '* rows["log_prob"] - config.tau * half_square',
        OFF_POLICY,
    ),
    Mutation(
        "algorithms/objectives/gspo.py",
        "a trajectory's ratio is the sum over its rows",
        "return (sums / counts)[places]",
        "return sums[places]",
        OFF_POLICY,
    ),
    Mutation(
        "algorithms/ema.py",
        "the average forgets what it should keep",
        "ema.lerp_(tensor.to(ema.device, ema.dtype), 1 - decay)",
        "ema.lerp_(tensor.to(ema.device, ema.dtype), decay)",
        "algorithms/test_ema.py",
    ),
    # -- weights ----------------------------------------------------------------------------------------------
    Mutation(
        "weights/receiver.py",
        "an update is checked and not loaded",
        "current[name].copy_(tensor)",
        "pass",
        RECEIVER,
    ),
    Mutation(
        "weights/receiver.py",
        "a tensor that is missing from an update is no error",
        "sorted(shapes.keys() - staged.keys())",
        "[]",
        RECEIVER,
    ),
    Mutation(
        "weights/receiver.py",
        "an update goes into copies without a word",
        "if current[name].data_ptr() not in live]",
        "if False]",
        RECEIVER,
    ),
    Mutation(
        "weights/probe.py",
        "weights that do not take effect are no error",
        "        if changes[-1] == 0:\n",
        "        if changes[-1] < 0:\n",
        PROBE,
    ),
    Mutation(
        "weights/probe.py",
        "of two networks one that does not change is no error",
        "        if old == new:\n",
        "        if old == new or number:\n",
        PROBE,
    ),
    Mutation(
        "weights/probe.py",
        "replicas that compute different outputs with the same weights are no error",
        "if spread > MAX_SPREAD:",
        "if spread > 1:",
        PROBE,
    ),
    Mutation(
        "weights/probe.py",
        "a version that reaches nobody is no error",
        "if version != published:",
        "if version is not None and version < published - 1:",
        PROBE,
    ),
    Mutation(
        "weights/checksum.py",
        "a lost tensor leaves the checksum as it is",
        "bits if self._sum is None else self._sum + bits.to(self._sum.device)",
        "bits",
        "weights/test_checksum.py",
    ),
    Mutation(
        "weights/buckets.py",
        "tensors of a bucket lie over each other",
        "num_bytes = _aligned(num_bytes + part.chunk_size)",
        "num_bytes = _aligned(num_bytes)",
        "weights/test_traffic.py",
    ),
    Mutation(
        "weights/receiver.py",
        "a live update that misses a tensor counts as whole",
        "            update.finish()\n",
        "            pass\n",
        RECEIVER,
    ),
    Mutation(
        "weights/sending.py",
        "a sender waits for a receiver that died",
        "        if has_died():\n",
        "        if False:\n",
        "weights/test_transfer.py",
    ),
    Mutation(
        "weights/receiving.py",
        "an update with other numbers than were sent is taken",
        "(self.num_tensors, self.checksum) != (manifest.num_tensors, manifest.checksum)",
        "self.num_tensors != manifest.num_tensors",
        "weights/test_transfer.py",
    ),
    Mutation(
        "reward/queue.py",
        "a reward scores while it is asleep",
        "while not self._is_open.is_set():",
        "while False:",
        "reward/test_timeshared.py",
    ),
    Mutation(
        "reward/held.py",
        "a reward that sleeps keeps its device memory",
        "        self._memory.release()\n",
        "        pass\n",
        "reward/test_timeshared.py",
    ),
    Mutation(
        "trainer/turns.py",
        "rewards are awake while replicas generate",
        "            self._rewards.sleep()\n",
        "            pass\n",
        "trainer/test_turns.py",
    ),
    Mutation(
        "platforms/module_memory.py",
        "a sleep copies to the host what an update replaces",
        "_key(each[1]) not in undefined and ",
        "",
        "platforms/test_module_memory.py",
    ),
    Mutation(
        "rollout/server.py",
        "half of an update is served",
        "        self._require_whole()\n",
        "        pass\n",
        "rollout/test_server.py",
    ),
    Mutation(
        "rollout/server.py",
        "samples carry the version that was sealed, not the one that generated them",
        "self._is_loading, self._version = False, sealed.version",
        "self._is_loading = False",
        "rollout/test_server.py -k 'weight_update or probe'",
    ),
    Mutation(
        "rollout/network.py",
        "a rank's last update counts as its new one",
        "        self._new.clear()\n",
        "        pass\n",
        "rollout/test_peers.py -k 'sealed_it or sent_twice'",
    ),
    Mutation(
        "rollout/network.py",
        "ranks of a replica load different weights",
        "if self.is_complete and self.agreed() is None:",
        "if False:",
        "rollout/test_peers.py -k other_tensors",
    ),
    Mutation(
        "rollout/lockstep.py",
        "an error inside a forward ends a session as if all ranks had run it",
        "                if self._is_running:\n",
        "                if False:\n",
        "rollout/test_lockstep.py -k inside_a_forward",
    ),
    # -- conductor and planner ----------------------------------------------------------------------------------
    Mutation(
        "schedulers/group_book.py",
        "a group more than allowed is begun under old weights",
        "self.batches[group.batch].num_begun(age) < self._rules.stale_allowance(age)",
        "self.batches[group.batch].num_begun(age) <= self._rules.stale_allowance(age)",
        PLANNER,
    ),
    Mutation(
        "schedulers/planner.py",
        "samples of another version count",
        "        if version != chunk.version:\n",
        "        if False:\n",
        PLANNER,
    ),
    Mutation(
        "schedulers/planner.py",
        "samples of a lost slot are forgotten",
        "self._book.give_back(chunk_id, live.left)",
        "pass",
        PLANNER,
    ),
    Mutation(
        "schedulers/group_book.py",
        "a sample that failed is generated once more than allowed",
        "batch.num_sample_refills + len(samples) > self._rules.max_sample_refills",
        "batch.num_sample_refills + len(samples) > self._rules.max_sample_refills + 1",
        PLANNER,
    ),
    Mutation(
        "schedulers/group_book.py",
        "a group that starts over keeps its old rewards",
        "            group.rewards.clear()\n",
        "",
        PLANNER,
    ),
    Mutation(
        "schedulers/group_book.py",
        "a chunk's samples are issued a second time",
        "        del group.unissued[:size]\n",
        "        del group.unissued[:size - 1]\n",
        PLANNER,
    ),
    Mutation(
        "trainer/conductor.py",
        "the open gradient of a failed batch stays",
        "            if self._is_open:\n                await to_the_end(",
        "            if False:\n                await to_the_end(",
        CONDUCTOR,
    ),
    Mutation(
        "trainer/conductor.py",
        "replicas are never told of new weights",
        "        self.planner.on_published(version)\n",
        "",
        CONDUCTOR,
    ),
    Mutation(
        "trainer/disaggregated.py",
        "replicas wait for a checkpoint before they get the weights that it holds",
        "        self._publish()  # verl's loop writes the checkpoint next, and no replica shall wait for it\n"
        "        return batch\n",
        "        return batch\n",
        SAVING,
    ),
    Mutation(
        "trainer/conductor.py",
        "the next batch begins after the checkpoint",
        "        self._feed()\n        self._feeding",
        "        self._feed(draws=False)\n        self._feeding",
        SAVING,
    ),
    Mutation(
        "trainer/conductor.py",
        "prompts are drawn while a checkpoint is written",
        "        while True:\n            self._feed(draws=False)",
        "        while True:\n            self._feed()",
        SAVING,
    ),
    Mutation(
        "schedulers/merging.py",
        "a late group is waited for again and again",
        "        if self._until_s is None or num_ready != self._num_ready:\n",
        "        if True:\n",
        "schedulers/test_merging.py",
    ),
    Mutation(
        "schedulers/merging.py",
        "the fixed part of later training calls is forgotten",
        "max(end_s, ready_s[count - 1]) + call_s + size * group_s",
        "max(end_s, ready_s[count - 1]) + size * group_s",
        "schedulers/test_merging.py",
    ),
    Mutation(
        "trainer/conductor.py",
        "a cancelled chunk is generated to its end",
        "cancelling = self.generator.cancel(self._chunks[chunk_id])",
        "cancelling = asyncio.sleep(0)",
        CONDUCTOR,
    ),
    Mutation(
        "schedulers/deal.py",
        "ranks with a row more are always the first",
        "turn = (turn + rest) % num_ranks",
        "turn = 0",
        "schedulers/test_deal.py",
    ),
    Mutation(
        "schedulers/tiles.py",
        "the last tile of a rank has no weight",
        "tiles += [Tile(rows) for rows in own]",
        "tiles += [Tile(rows, is_filler=rows is own[-1]) for rows in own]",
        f"{RANDOM}[3]",
    ),
    Mutation(
        "schedulers/tiles.py",
        "a rank without rows has no tile, and the others wait for it",
        "* (most - len(own))",
        "* 0",
        "schedulers/test_tiles.py",
    ),
    Mutation(
        "trainer/heartbeats.py",
        "work goes on after an agent loop worker is lost",
        "        for task in self._guarded:\n            task.cancel()\n",
        "",
        "trainer/test_heartbeats.py",
    ),
    Mutation(
        "trainer/heartbeats.py",
        "a process that hangs counts as alive",
        "            if is_starting(process):\n",
        "            if what:\n",
        "trainer/test_heartbeats.py",
    ),
    Mutation(
        "trainer/watchdog.py",
        "a second replica that hangs in one publication ends the run",
        "        while self._missed is None:\n",
        "        for _ in range(2 if self._missed is None else 0):\n",
        "trainer/test_watchdog.py",
    ),
    Mutation(
        "trainer/restarts.py",
        "a replica that is starting is started again",
        " - num_living - len(self._starting)",
        " - num_living",
        "trainer/test_restarts.py",
    ),
    Mutation(
        "trainer/patience.py",
        "a wait without progress is begun anew at every look",
        "        if num_ended != self._last:\n",
        "        if num_ended != self._last or now_s > self._since_s:\n",
        "trainer/test_heartbeats.py",
    ),
    Mutation(
        "trainer/loop_thread.py",
        "a setup that is overdue ends as if it were done",
        "        raise DeadlineMissed(what, bound.seconds, bound.key) from error\n",
        "        return None\n",
        "trainer/test_heartbeats.py",
    ),
    Mutation(
        "trainer/watchdog.py",
        "a dead replica is ended again and again, and the rank that hangs never",
        " - ended:",
        ":",
        "trainer/test_watchdog.py",
    ),
    Mutation(
        "trainer/calls.py",
        "an event goes through all calls in flight",
        "if now_s < self._earliest_s:",
        "if not self._calls:",
        "trainer/test_calls.py",
    ),
    Mutation(
        "trainer/calls.py",
        "the call started last hides an earlier deadline",
        "min(self._earliest_s, call.deadline_s)",
        "call.deadline_s",
        "trainer/test_calls.py",
    ),
    Mutation(
        "trainer/calls.py",
        "a call that ended beside one whose handler raises is forgotten",
        "while self._ended:  # a handler may raise: the others are left\n            task = self._ended.pop(0)\n",
        "ended, self._ended = self._ended, []\n        for task in ended:\n",
        "trainer/test_calls.py",
    ),
    Mutation(
        "trainer/calls.py",
        "a call in flight wakes a loop that is closed",
        " and not task.get_loop().is_closed():",
        ":",
        "trainer/test_calls.py",
    ),
    Mutation(
        "trainer/calls.py",
        "an abort that is interrupted is not waited for",
        "        await running\n        raise\n",
        "        raise\n",
        "chaos",
    ),
    Mutation(
        "trainer/replicas.py",
        "a replica that was out of reach stays, without the new weights",
        "            end_processes(replica)\n            return True\n",
        "            return True\n",
        "chaos",
    ),
    Mutation(
        "reward/workers.py",
        "a reward worker that hangs is waited for for ever",
        "            ray.kill(worker, no_restart=False)\n",
        "            pass\n",
        "chaos",
    ),
    Mutation(
        "rollout/lost.py",
        "a replica out of reach for a moment gets no more weights",
        "through_blips(lambda: getattr(actor, method).remote(*args), self._blip_s)",
        "getattr(actor, method).remote(*args)",
        "rollout/test_lost.py",
    ),
    Mutation(
        "trainer/agreement.py",
        "a gap that is not a number passes the gate",
        "if not gap <= max_gap:",
        "if gap > max_gap:",
        "trainer/test_agreement.py",
    ),
    # -- rewards, data, bench -------------------------------------------------------------------------------------
    Mutation(
        "reward/scoring.py",
        "rewards are not weighted",
        "total += reward.weight * value",
        "total += value",
        SCORING,
    ),
    Mutation(
        "reward/scoring.py",
        "a scorer that fails is not asked again",
        "for attempt in range(1 + self.max_retries):",
        "for attempt in range(1):",
        SCORING,
    ),
    Mutation(
        "reward/scoring.py",
        "a score that is not finite passes",
        "if not math.isfinite(value):",
        "if False:",
        SCORING,
    ),
    Mutation(
        "reward/queue.py",
        "a queue of samples is scored one by one",
        "waiting[: self._max_batch_size], waiting[self._max_batch_size :]",
        "waiting[:1], waiting[1:]",
        POOL_WORKER,
    ),
    Mutation(
        "reward/pool_worker.py",
        "one bad picture fails its whole batch",
        "return [await self._attempts(samples, num_queued, max(1, self._max_retries)) for samples in batch]",
        "return [error] * len(batch)",
        POOL_WORKER,
    ),
    Mutation(
        "reward/pool_worker.py",
        "a call that hangs holds up all others",
        "            self._thread = ThreadPoolExecutor(1)\n            raise",
        "            raise",
        POOL_WORKER,
    ),
    Mutation(
        "reward/groups.py",
        "samples of two weight versions are compared",
        "key, index = (sample.row.uid, version), sample.sample_index",
        "key, index = (sample.row.uid, 0), sample.sample_index",
        GROUPS,
    ),
    Mutation(
        "reward/groups.py",
        "a sample that comes late waits for one that failed",
        "if sample.row.uid in self._failed:",
        "if False:",
        GROUPS,
    ),
    Mutation(
        "reward/workers.py",
        "every worker gets a few samples of a batch",
        "self._num_left = self._run",
        "self._num_left = 1",
        "reward/test_workers.py -k runs_of",
    ),
    Mutation(
        "reward/sample_rewards.py",
        "a reward with a pool is not weighted",
        "base += self._weights[name] * score.value",
        "base += score.value",
        "reward/test_sample_rewards.py",
    ),
    Mutation(
        "algorithms/advantages.py",
        "GDPO does not normalise its rewards",
        "total = weight * centred / divisor if total is None else total + weight * centred / divisor",
        "total = weight * centred if total is None else total + weight * centred",
        ADVANTAGES,
    ),
    Mutation(
        "data/prompts.py",
        "a chat's first message is taken for its last",
        "content = contents[-1] if contents else None",
        "content = contents[0] if contents else None",
        PROMPTS,
    ),
    Mutation(
        "data/prompts.py",
        "columns of the user's own are lost",
        "extra=extra_info | _mapping(",
        "extra=_mapping(",
        PROMPTS,
    ),
    Mutation(
        "data/prompts.py",
        "the truth of an OCR prompt is the whole prompt",
        "return text if quoted is None else quoted[1]",
        "return text",
        PROMPTS,
    ),
    Mutation(
        "bench/summary.py",
        "gradients are compared by their norm alone",
        "for name in (GRADIENT_NORM, GRADIENT_PROJECTION)",
        "for name in (GRADIENT_NORM,)",
        "bench/test_summary.py",
    ),
    Mutation(
        "bench/runs.py",
        "a validation before the first step counts as a step",
        'if "perf/step_s" in row)',
        "if row)",
        "bench/test_runs.py",
    ),
    Mutation(
        "bench/summary.py",
        "gradients of verl-omni's two updates are compared with those of one",
        "max_gradient_gap=None if name == NAME else",
        "max_gradient_gap=",
        "bench/test_summary.py",
    ),
    Mutation(
        "bench/command.py",
        "devices of rewards are left out of images/s per device",
        "return self.split.num_devices + self.num_reward_devices",
        "return self.split.num_devices",
        "bench/test_peer.py",
    ),
    Mutation(
        "bench/peer.py",
        "verl-omni's way takes one optimizer step on a batch",
        "ppo_mini_batch_size={num_prompts // VERL_OMNI.num_updates}",
        "ppo_mini_batch_size={num_prompts}",
        "bench/test_peer.py",
    ),
    Mutation(
        "simulate/verl_omni.py",
        "verl-omni's way has no log-prob pass",
        "if way.log_prob_samples:",
        "if way.log_prob_samples < 0:",
        VERL_OMNI,
    ),
    Mutation(
        "simulate/verl_omni.py",
        "both updates of verl-omni's way fill their micro-batches together",
        "even_parts(numbers.num_prompts, way.num_updates)",
        "even_parts(numbers.num_prompts, 1)",
        VERL_OMNI,
    ),
    Mutation(
        "simulate/verl_omni.py",
        "a micro-batch that is not full takes no time",
        "if rest else 0.0)",
        "if rest < 0 else 0.0)",
        VERL_OMNI,
    ),
    Mutation("simulate/verl_omni.py", "the fit is another", "replay_factor=1.40,", "replay_factor=1.55,", VERL_OMNI),
    Mutation(
        "simulate/cluster.py",
        "devices of two types together run at the faster one's speed",
        "slowest = max(pools, key",
        "slowest = min(pools, key",
        "simulate/test_comparison.py -k two_types",
    ),
    Mutation(
        "simulate/comparison.py",
        "a reward model on the devices takes no time",
        "decode_s=profile.numbers.decode_s + reward_s",
        "decode_s=profile.numbers.decode_s",
        "simulate/test_comparison.py -k takes_every_sample_longer",
    ),
    # -- variance -----------------------------------------------------------------------------------------
    Mutation(
        "simulate/variance.py",
        "a call takes one of its ranks, not the slowest",
        "min(ALMOST_ONE, quantile ** (1 / number))",
        "min(ALMOST_ONE, quantile)",
        "simulate/test_variance.py -k slowest_rank",
    ),
    Mutation(
        "simulate/variance.py",
        "jitter makes work longer on average",
        "NORMAL.inv_cdf(quantile) - variance / 2)",
        "NORMAL.inv_cdf(quantile))",
        "simulate/test_variance.py -k mean_one",
    ),
    Mutation(
        "simulate/variance.py",
        "a share of slow devices is rounded down",
        "-(-num_devices * self.count // self.of)",
        "num_devices * self.count // self.of",
        "simulate/test_variance.py -k rounded_up",
    ),
    Mutation(
        "simulate/variance.py",
        "a restart takes no time",
        "(1 / rate + self.restart_s + refill_s)",
        "(1 / rate + refill_s)",
        "simulate/test_variance.py -k stop",
    ),
    Mutation(
        "simulate/varied_run.py",
        "the work that a dead replica would have done counts as busy",
        'self.busy_s["generator"] -= work.end_s - now_s',
        "pass",
        "simulate/test_varied_run.py -k death_costs",
    ),
    Mutation(
        "simulate/varied_run.py",
        "a replacement joins before it is ready",
        "            if ready_s <= now_s:\n",
        "            if True:\n",
        "simulate/test_varied_run.py -k not_ready",
    ),
    Mutation(
        "simulate/varied_run.py",
        "a replacement lives for ever",
        "                self._live(slot, now_s)\n",
        "",
        "simulate/test_varied_run.py -k dies_too",
    ),
    Mutation(
        "simulate/varied.py",
        "the slow devices of separate pools all generate",
        "factors[: split.trainer.num_devices], factors[split.trainer.num_devices :]",
        "sorted(factors)[: split.trainer.num_devices], sorted(factors)[split.trainer.num_devices :]",
        "simulate/test_varied.py -k one_that_trains",
    ),
    Mutation(
        "simulate/varied.py",
        "colocated runs have the stops of a smaller pool",
        "return with_stops(outcome, phases.variance, pool.num_devices)",
        "return with_stops(outcome, phases.variance, pool.num_devices // 2)",
        "simulate/test_varied.py -k stops_take",
    ),
    Mutation(
        "simulate/phases.py",
        "dealt samples wait for no slow device",
        "device = queue[0][1] if has_queue else index % self.num_devices",
        "device = free_s.index(min(free_s))",
        "simulate/test_variance.py -k dealt",
    ),
    Mutation(
        "simulate/cluster.py",
        "a type of devices alone has the slow ones of another",
        "first_device += pool.num_devices",
        "first_device += 0",
        "simulate/test_cluster.py -k each_alone",
    ),
    Mutation(
        "simulate/cluster.py",
        "a colocated round that is not full takes a part of one",
        "num_rounds = -(-num_samples // num_devices)",
        "num_rounds = num_samples / num_devices",
        "simulate/test_cluster.py -k rounded_away",
    ),
    # -- inputs -------------------------------------------------------------------------------------------
    Mutation(
        "inputs.py",
        "images are no part of what a condition is stored under",
        "*(image.digest for image in inputs.images),",
        "",
        f"{INPUTS} -k part_of_what",
    ),
    Mutation(
        "inputs.py",
        "an image that changed is read as it is now",
        "if sha256(content).hexdigest() != self.digest:",
        "if False:",
        f"{INPUTS} -k changes_during",
    ),
    Mutation(
        "sampling/requests.py",
        "the negative branch is encoded without the images",
        "negative_inputs=inputs_of(negative, images, geometry, config.image_px)",
        "negative_inputs=inputs_of(negative, (), geometry, config.image_px)",
        f"{INPUTS} -k negative_branch",
    ),
    Mutation(
        "inputs.py",
        "the size at which images are read is no part of what a condition is stored under",
        "*([inputs.image_px, inputs.size] if inputs.images else [])",
        "*()",
        f"{EDITS} -k keys_of_their_own",
    ),
    Mutation(
        "image_sizes.py",
        "a picture has the shape of the first image",
        "picture=_fitted, shaped_by=-1",
        "picture=_fitted, shaped_by=0",
        f"{EDITS} -k different_shapes",
    ),
    Mutation(
        "models/sources.py",
        "the velocity is that of the images",
        "[:, : latents.shape[1]]",
        "[:, -latents.shape[1] :]",
        f"{EDITS} -k different_shapes",
    ),
    Mutation(
        "models/sequence.py",
        "devices may share rows whose images' tokens they do not divide",
        "least % size == 0,",
        "True,",
        "models/test_sequence.py -k any_image",
    ),
    Mutation(
        "models/qwen_image_edit_single.py",
        "the language model of the first Qwen-Image-Edit reads an image at its own size",
        "resize(image, *fitted_size(*image.size, image_px))",
        "resize(image, image.height, image.width)",
        f"{EDITS} -k reads_an_image_at_one_size",
    ),
    Mutation(
        "models/qwen_image_edit.py",
        "images have the places of the picture",
        "return [*super()._image_shapes(geometry), *sources]",
        "return [*sources, *super()._image_shapes(geometry)]",
        f"{EDITS} -k different_shapes",
    ),
    Mutation(
        "models/flux_kontext.py",
        "an image has the places of the picture",
        "ids[:, 0] = 1",
        "ids[:, 0] = 0",
        f"{KONTEXT} -k images_shape",
    ),
    Mutation(
        "models/flux_kontext.py",
        "an image is stretched to a size of the picture's rule",
        "size = preferred_size(*image.size, image_px**2)",
        "size = image.height // 16 * 16, image.width // 16 * 16",
        f"{KONTEXT} -k encoded_as_in_the_pipeline",
    ),
    Mutation(
        "models/flux2_klein.py",
        "all images are at one time",
        "IMAGE_TIME * number",
        "IMAGE_TIME",
        f"{KLEIN} -k different_shapes",
    ),
    Mutation(
        "models/flux2_klein.py",
        "latents are decoded without the statistics of the batch norm",
        "_unpatchify_latents(grid * std + mean)",
        "_unpatchify_latents(grid)",
        "models/test_parity.py -k 'without_sde and flux2'",
    ),
    Mutation(
        "models/flux2_klein.py",
        "an image of more than image_px squared pixels is cropped, not made smaller",
        "fitting = processor._resize_if_exceeds_area(image, area_px)",
        "fitting = image",
        f"{KLEIN} -k encoded_as_in_the_pipeline",
    ),
    Mutation(
        "models/flops.py",
        "attention of fused layers is not counted",
        'name.endswith("to_q") or is_fused',
        'name.endswith("to_q")',
        "plan/test_flops.py -k 'counted_within and flux2'",
    ),
    Mutation(
        "image_sizes.py",
        "an image is read at the nearest size in area, not in shape",
        "shape = _whole(width_px) / _whole(height_px)",
        "shape = width_px * height_px / KONTEXT_AREA",
        f"{IMAGE_SIZES} -k kontext_reads",
    ),
    Mutation(
        "inputs.py",
        "the size of a video is no part of what its image's condition is stored under",
        "[inputs.image_px, inputs.size]",
        "[inputs.image_px]",
        f"{CONTINUED} -k stored_under",
    ),
    Mutation(
        "models/wan_image.py",
        "the image's channels stand before the video's",
        "torch.cat([latents, source], dim=1)",
        "torch.cat([source, latents], dim=1)",
        f"{CONTINUED} -k images_shape",
    ),
    Mutation(
        "models/wan_image.py",
        "CLIP's tokens are not read",
        'condition["image"] if self._has_clip else None',
        'condition["image"] * 0 if self._has_clip else None',
        f"{CONTINUED} -k images_shape",
    ),
    Mutation(
        "models/hunyuan_video15_image.py",
        "the mask of the first frame is empty",
        "torch.ones_like(latents[:, :1, 0])",
        "torch.zeros_like(latents[:, :1, 0])",
        f"{CONTINUED} -k images_shape",
    ),
    Mutation(
        "models/hunyuan_video15_image.py",
        "the image is stretched to the video's size",
        'resize_mode="crop"',
        'resize_mode="default"',
        f"{CONTINUED} -k images_shape",
    ),
    Mutation(
        "models/hunyuan_video15_forward.py",
        "an image's tokens have the type of glyphs",
        "PROMPT_TYPE, GLYPH_TYPE, IMAGE_TYPE = 0, 1, 2",
        "PROMPT_TYPE, GLYPH_TYPE, IMAGE_TYPE = 0, 1, 1",
        f"{CONTINUED} -k images_shape",
    ),
    Mutation(
        "models/ltx2.py",
        "ltx2: the sound reads the video's text",
        'audio_encoder_hidden_states=condition["audio"].to(dtype)',
        'audio_encoder_hidden_states=condition["embeds"].to(dtype)',
        f"{LTX2} -k sound_is_the_pipelines",
    ),
    Mutation(
        "models/ltx2.py",
        "ltx2: the sound's length follows the latent frames",
        "geometry.num_frames / FRAMES_PER_S",
        "(geometry.num_frames - 1) / FRAMES_PER_S",
        f"{LTX2} -k as_long",
    ),
    Mutation(
        "models/ltx2_latents.py",
        "ltx2: the sound's VAE gets normalised latents",
        "raw = LTX2Pipeline._denormalize_audio_latents(audio, audio_vae.latents_mean, audio_vae.latents_std)",
        "raw = audio",
        f"{LTX2} -k sound_is_the_pipelines",
    ),
    Mutation(
        "rollout/samples.py",
        "ltx2: all samples of a replica's batch have the sound of the first",
        "audio=made.audio[row],",
        "audio=made.audio[0],",
        "rollout/test_server.py -k sound",
    ),
    Mutation(
        "engine/assistant.py",
        "ltx2: all samples of the trainer's batch have the sound of the first",
        "audio=audio[index],",
        "audio=audio[0],",
        "engine/test_assistant.py -k sound",
    ),
    Mutation(
        "agent_loop/manager.py",
        "ltx2: rewards get no sound",
        "latents=latents, audio=generation.audio)",
        "latents=latents)",
        "agent_loop/test_finish.py -k sound",
    ),
    Mutation(
        "reward/sample_rewards.py",
        "ltx2: reward functions get no sound",
        "AUDIO: _column(sample.audio)",
        "AUDIO: _column(None)",
        "reward/test_sound.py",
    ),
    Mutation(
        "observe/group_pictures.py",
        "ltx2: the sound of a video that is neither best nor worst stays",
        "(video_path(path), audio_path(path))",
        "(video_path(path),)",
        "observe/test_group_pictures.py -k neither_best_nor_worst",
    ),
    Mutation(
        "models/wan_first_frame.py",
        "the first frame's tokens have the others' timestep",
        "own.new_zeros(len(own), counts[0])",
        "own.expand(-1, counts[0])",
        f"{FIRST_FRAME} -k both_kinds",
    ),
    Mutation(
        "models/wan_first_frame.py",
        "the given frame is sampled and scored",
        "return (channels, num_frames - 1, *size)",
        "return (channels, num_frames, *size)",
        f"{FIRST_FRAME} -k log_probs",
    ),
    Mutation(
        "models/wan_first_frame.py",
        "the velocity is that of the given frame, too",
        "timesteps, sigmas, condition)[:, :, 1:]",
        "timesteps, sigmas, condition)[:, :, :-1]",
        f"{FIRST_FRAME} -k log_probs",
    ),
    Mutation(
        "rollout/samples.py",
        "a video is decoded without its given frame",
        "        latents = self._model.completed(denoised.latents, positive)\n",
        "        latents = denoised.latents\n",
        f"{FIRST_FRAME} -k replica",
    ),
    Mutation(
        "models/wan_first_frame.py",
        "FLOPs count one timestep for a row with one per token",
        "+ self.num_source_tokens(geometry) if geometry.sources else 1",
        "* 0 + 1",
        "plan/test_flops.py -k ti2v_5b_i2v -m 'long or not long'",
    ),
    Mutation(
        "models/__init__.py",
        "the index's flag does not choose the model file",
        "bool(variant and index and index.get(key))",
        "False",
        f"{FIRST_FRAME} -k index",
    ),
    Mutation(
        "preflight/images.py",
        "a first frame may be split over devices",
        "layout is None or layout.takes_images",
        "True",
        "plugin/test_preflight.py -k first_frame",
    ),
    Mutation(
        "preflight/images.py",
        "an image that a pipeline refuses is found out by its sample",
        "    _check_limits(model, prompts)\n",
        "",
        "plugin/test_preflight.py -k does_not_take",
    ),
    Mutation(
        "sampling/requests.py",
        "an image of a table that a pipeline refuses goes to the encoder",
        "    if limits is not None:",
        "    if False:",
        f"{IMAGE_SIZES} -k that_it_refuses",
    ),
    Mutation(
        "image_sizes.py",
        "long images pass that FLUX.2 refuses",
        "most_ratio=8.0",
        "most_ratio=9.0",
        f"{IMAGE_SIZES} -k refuses_are_those",
    ),
    Mutation(
        "image_sizes.py",
        "small images pass that FLUX.2 refuses",
        "least_px=64",
        "least_px=63",
        f"{IMAGE_SIZES} -k refuses_are_those",
    ),
    Mutation(
        "models/flux2_klein.py",
        "a distilled checkpoint is guided",
        'not self.index.get("is_distilled")',
        "True",
        "plugin/test_preflight.py -k distilled",
    ),
    Mutation(
        "preflight/environment.py",
        "an episode is cut off before its last turn",
        "num_turns is None or num_turns <= most",
        "True",
        "plugin/test_environment.py -k more_turns",
    ),
    Mutation(
        "models/qwen_image_edit.py",
        "the processor's bounds of an image are not counted with",
        "self._vision.get_number_of_image_patches(height, width, {})",
        "Qwen2VLImageProcessorPil().get_number_of_image_patches(height, width, {})",
        "models/test_qwen_image_edit.py -k bounds_of_its_processor",
    ),
    Mutation(
        "image_sizes.py",
        "a list's size is the nearest on the wrong side",
        "pair[0] <= ratio if ratio >= 1 else pair[0] >= ratio",
        "pair[0] >= ratio if ratio >= 1 else pair[0] <= ratio",
        f"{VIDEO_SIZES} -k hunyuan",
    ),
    Mutation(
        "sampling/requests.py",
        "an image that a video continues is read at a size of its own",
        "(height, width) if read is None else read(",
        "(64, 64) if read is None else read(",
        f"{VIDEO_SIZES} -k size_of_the_video",
    ),
    Mutation(
        "image_tables.py",
        "an image is that of another row",
        "[image.row - bounds[group]]",
        "[0]",
        f"{IMAGE_COLUMNS} -k parquet",
    ),
    Mutation(
        "data/image_columns.py",
        "bytes of images are read with their paths",
        'if leaf.rpartition(".")[2] == "path"',
        'if leaf.rpartition(".")[2] == "bytes"',
        f"{IMAGE_COLUMNS} -k only_paths",
    ),
    Mutation(
        "observe/images.py",
        "a picture is shown without the images of its prompt",
        "_beside(read_images(images), ",
        "_beside((), ",
        "observe/test_images.py -k beside_the_images",
    ),
    Mutation(
        "report/page.py",
        "a prompt may end the script that holds the page's data",
        r'.replace("<", "\\u003c")',
        "",
        "report/test_page.py -k markup",
    ),
    Mutation(
        "report/curves.py",
        "curves lose validations where they are thinned out",
        "kept = [rows[number] for number in sorted({*validated, *thinned(others, MAX_ROWS - len(validated))})]",
        "kept = thinned(rows, MAX_ROWS)",
        "report/test_page.py -k columns_are",
    ),
    Mutation(
        "report/pictures.py",
        "pictures are shown that do not fit",
        "while len(chosen) > 2 and ",
        "while len(chosen) > 200 and ",
        "report/test_page.py -k fit_however",
    ),
    Mutation(
        "report/pictures.py",
        "pictures of an earlier, longer run are shown",
        "found = [step for step in pictured_steps(run_dir, VALIDATION) if step <= last_step]",
        "found = pictured_steps(run_dir, VALIDATION)",
        "report/test_page.py -k earlier_run",
    ),
    Mutation(
        "report/timelines.py",
        "a step is shown whose first part was not read",
        "sorted(lasted)[1:]",
        "sorted(lasted)",
        "report/test_page.py -k long_timeline",
    ),
    Mutation(
        "trainer/run_report.py",
        "a second report is begun while one is written",
        "            if not self._running.is_done():\n                return",
        "            if not self._running.is_done():\n                pass",
        "trainer/test_run_report.py -k never_waits",
    ),
    Mutation(
        "trainer/run_report.py",
        "a report that takes long takes its share of a core all the same",
        "max(self._due_s, self._began_s + spent_s / MAX_SHARE)",
        "self._due_s",
        "trainer/test_run_report.py -k less_often",
    ),
    Mutation(
        "observe/warnings_file.py",
        "a new run keeps the warnings of the one before it",
        "(step > 0 and line",
        "(step >= 0 and line",
        "observe/test_warnings_file.py -k does_not_repeat",
    ),
    Mutation(
        "preflight/start.py",
        "the config is compared with itself",
        "if GROUP_WORD.match(word)]",
        "]",
        "plugin/test_start.py -k command_line",
    ),
    Mutation(
        "trainer/colocated_timeline.py",
        "devices count as idle while they generate",
        "self._file.append([*generated, *self._on_devices(generated, step), ",
        "self._file.append([*generated, ",
        "trainer/test_turns.py -k in_order",
    ),
    Mutation(
        "observe/images.py",
        "a long prompt is cut off",
        "longest = max(len(textwrap.wrap(entry.caption(2), width // LETTER_PX)) for entry in shown)",
        "longest = 3",
        "observe/test_images.py -k shown_whole",
    ),
)


def main(arguments: Sequence[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", metavar="WORDS", help="only mutations whose path or description has WORDS")
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    options = parser.parse_args(arguments)
    chosen = [mutation for mutation in TABLE if options.k in f"{mutation.path} {mutation.wrong}"]
    with tempfile.TemporaryDirectory(prefix="digen_mutations_") as folder:
        copy = Path(folder) / "tree"
        copy_tree(copy)
        misplaced = [mutation for mutation in chosen if count_in(copy, mutation) != 1]
        for mutation in misplaced:
            print(f"verl_digen/{mutation.path} has {count_in(copy, mutation)} times, not once: {mutation.old!r}")
        if options.list:
            for mutation in chosen:
                print(f"{mutation.path:<36} {mutation.wrong}")
        if misplaced or options.list:
            return int(bool(misplaced))
        import_heavy_libraries()
        return run(copy, Path(folder) / "log", chosen)


def run(copy: Path, log: Path, chosen: Sequence[Mutation]) -> int:
    """Run all tests on the unchanged copy, then every mutation; print the table. Returns the exit status."""
    for tests in dict.fromkeys(mutation.tests for mutation in chosen):
        status = run_tests(copy, tests, log)
        if status != 0:
            print(f"{log.read_text()}\ntests/{tests} must pass on the unchanged tree, and pytest ended with {status}")
            return 1
    num_bad = 0
    for number, mutation in enumerate(chosen, start=1):
        file = copy / "verl_digen" / mutation.path
        sound = file.read_text()
        file.write_text(sound.replace(mutation.old, mutation.new))
        began_s = time.monotonic()
        try:
            status = run_tests(copy, mutation.tests, log)
        finally:
            file.write_text(sound)
        failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", log.read_text(), re.MULTILINE)
        outcome = OUTCOMES.get(status, f"NOT RUN (pytest ended with {status})")
        is_caught = outcome.startswith("caught")
        num_bad += not is_caught
        where = failed.group(1) if failed is not None and is_caught else ""
        seconds = time.monotonic() - began_s
        print(f"{number:>3} {outcome:<9}{seconds:>5.0f} s  {mutation.path:<34}{mutation.wrong:<66} {where}", flush=True)
    print(f"{len(chosen) - num_bad} of {len(chosen)} mutations are caught")
    return int(num_bad > 0)


def copy_tree(copy: Path) -> None:
    """Copy the files that git knows, as they are in the working tree."""
    words = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        source, target = ROOT / name, copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        elif source.exists():  # deleted and not committed
            shutil.copy2(source, target)


def count_in(copy: Path, mutation: Mutation) -> int:
    """Count the occurrences of the text to be replaced in its file."""
    return (copy / "verl_digen" / mutation.path).read_text().count(mutation.old)


def import_heavy_libraries() -> None:
    """Import modules that every child needs; none of this project, whose code is the copy's there."""
    import datasets  # noqa: F401
    import diffusers  # noqa: F401
    import peft  # noqa: F401
    import pytest  # noqa: F401
    import ray  # noqa: F401
    import tensordict  # noqa: F401
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    assert "verl_digen" not in sys.modules


def run_tests(copy: Path, tests: str, log: Path) -> int:
    """Run pytest in a fork of this process, in the copy; returns its exit status, or -1 at the timeout."""
    import pytest

    words = shlex.split(tests)
    options = words[next((at for at, word in enumerate(words) if word.startswith("-")), len(words)) :]
    paths = [f"tests/{word}" for word in words[: len(words) - len(options)]]
    child = os.fork()
    if child == 0:
        os.setsid()
        with open(log, "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.chdir(copy)
            sys.path.insert(0, str(copy))
            # seconds apart and of one size, two mutations of a file would share its bytecode
            sys.dont_write_bytecode = True
            os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
            status = int(pytest.main(["-x", "-q", "--no-header", "-p", "no:cacheprovider", *options, *paths]))
            sys.stdout.flush()
            os._exit(status)
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
