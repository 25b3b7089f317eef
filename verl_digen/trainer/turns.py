# SPDX-License-Identifier: Apache-2.0
"""Turns of replicas and timeshared rewards on the trainer's devices.

    generating   replicas awake, rewards asleep    until no open group waits for a replica
    scoring      replicas asleep, rewards awake    until no open group waits for a score
    (training)   both asleep

A group that failed is replaced by a fresh prompt, whose samples wait for a replica: once the others are scored, it is
the replicas' turn again, and then the rewards'. So a batch takes one turn of each, and one more of each per round of
replacements. Waking a replica takes a weight update.

Invariants (tests/trainer/test_turns.py): replicas and rewards are never awake at the same time; the turn changes when
no open group can go on in it, and at no other time.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError
from verl.plugin.platform import get_platform

from verl_digen.errors import DeadlineMissed, RunStopped, describe
from verl_digen.processes.deadlines import DeadlinesConfig
from verl_digen.reward.scoring import DeviceMove
from verl_digen.store.samples import PromptStatus

logger = logging.getLogger(__name__)

Whose = Literal["generating", "scoring"]
Change = Literal["wake", "sleep"]

KEEP_AWAKE_S = 5.0
"""Seconds between two calls of `wake` while it is the rewards' turn: a process that was restarted is asleep."""


def next_turn(turn: Whose, prompts: Iterable[PromptStatus]) -> Whose:
    """Decide whose turn it is.

    Example:
        next_turn("generating", [PromptStatus("running")])                      # "generating"
        next_turn("generating", [PromptStatus("running", is_generated=True)])   # "scoring"
    """
    left = [prompt.is_generated for prompt in prompts if not prompt.has_ended]
    if turn == "generating":
        return "scoring" if left and all(left) else "generating"
    return "generating" if left and not any(left) else "scoring"


def num_events(prompts: Iterable[PromptStatus]) -> int:
    """Progress of a batch, for `Patience`: a group counts when it is generated, and again when it has ended."""
    return sum(2 if prompt.has_ended else int(prompt.is_generated) for prompt in prompts)


@dataclass(frozen=True)
class RewardTurn:
    """One process of a reward fell asleep or woke up."""

    reward: str
    number: int
    """Number of the process among the reward's."""
    change: Change
    turn: DeviceMove


class RewardProcesses:
    """The processes of all timeshared rewards, which wake and sleep together. `workers`: reward -> handles of its
    `RewardPoolWorker`s, asleep."""

    def __init__(self, workers: Mapping[str, Sequence[Any]], deadlines: DeadlinesConfig):
        self._workers = {(name, number): one for name, of in workers.items() for number, one in enumerate(of)}
        self._deadlines = deadlines
        self._asked: dict[Any, tuple[str, int]] = {}
        """Calls of `keep_awake` under way -> (reward, number)."""
        self._asked_s = 0.0
        self._turns: list[RewardTurn] = []

    def wake(self) -> None:
        """Bring the weights to the devices, and return once they are there. RunStopped if a reward could not be made,
        or woken, DeadlineMissed if not within `digen.deadlines.first_s`."""
        self._change("wake", self._deadlines.first_s, "digen.deadlines.first_s")

    def sleep(self) -> None:
        """Free the devices' memory. RunStopped if a reward raised, DeadlineMissed if it took more than
        `digen.deadlines.answer_s`."""
        self._asked = {}
        self._change("sleep", self._deadlines.answer_s, "digen.deadlines.answer_s")

    def keep_awake(self) -> None:
        """Wake processes that were restarted meanwhile, without a wait; called at every poll. RunStopped if a reward
        could not be made."""
        if not self._asked:
            if time.monotonic() - self._asked_s < KEEP_AWAKE_S:
                return
            self._asked = {worker.wake.remote(): place for place, worker in self._workers.items()}
            self._asked_s = time.monotonic()
        done, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        for call in done:
            self._read("wake", self._asked.pop(call), call)

    def take_turns(self) -> list[RewardTurn]:
        """Changes since the last call."""
        taken, self._turns = self._turns, []
        return taken

    def _change(self, change: Change, bound_s: float, key: str) -> None:
        calls = {getattr(worker, change).remote(): place for place, worker in self._workers.items()}
        done, late = ray.wait(list(calls), num_returns=len(calls), timeout=bound_s) if calls else ([], [])
        if late:
            names = sorted({calls[call][0] for call in late})
            raise DeadlineMissed(f"the {change} of timeshared rewards ({', '.join(names)})", bound_s, key)
        for call in done:
            self._read(change, calls[call], call)
        self._asked_s = time.monotonic()

    def _read(self, change: Change, place: tuple[str, int], call: Any) -> None:
        """Note the answer of one process."""
        name, number = place
        try:
            turn: Any = ray.get(call)
        except RayActorError as error:  # its samples get the error from their own calls
            logger.warning("a process of reward %s is lost, or restarts: %s", name, describe(error))
            if isinstance(error, ActorDiedError):
                self._workers.pop(place, None)
            return
        except RayTaskError as error:
            raise RunStopped(
                f"digen.reward.functions.{name} could not {change} on the trainer's devices: {describe(error)}; for "
                f"lack of memory give it devices of its own (num_gpus in place of timeshare), or the trainer less "
                "(actor_rollout_ref.actor.fsdp_config.param_offload=true)"
            ) from error
        if turn is not None:
            self._turns.append(RewardTurn(name, number, change, turn))


class Turns:
    """The turn of replicas or rewards, the replicas' at first. `sleep_replicas` and `wake_replicas` return once all
    have changed."""

    def __init__(self, rewards: Any, *, sleep_replicas: Callable[[], None], wake_replicas: Callable[[], None]):
        self._rewards, self._sleep_replicas, self._wake_replicas = rewards, sleep_replicas, wake_replicas
        self._turn: Whose = "generating"

    def observe(self, prompts: Iterable[PromptStatus]) -> None:
        """Change the turn if it is time. Called at every poll, with all prompts of the batch."""
        turn = next_turn(self._turn, prompts)
        if turn == "generating":
            self.generate()
        elif self._turn == "scoring":
            self._rewards.keep_awake()
        else:
            self._sleep_replicas()
            self._rewards.wake()
            self._turn = "scoring"

    def generate(self) -> None:
        """Make it the replicas' turn, if it is not yet."""
        if self._turn == "scoring":
            self.end()
            self._wake_replicas()

    def end(self) -> None:
        """Let the rewards sleep. The replicas stay asleep until the next weight update wakes them for their turn."""
        if self._turn == "scoring":
            self._rewards.sleep()
            self._turn = "generating"


def require_same_places(name: str, workers: Sequence[Any], ranks: Sequence[Any]) -> None:
    """Raise RuntimeError unless a reward has a process on each rank's device."""
    places = [sorted(ray.get([one.__ray_call__.remote(_place) for one in of])) for of in (workers, ranks)]
    if places[0] != places[1]:
        raise RuntimeError(
            f"the processes of the timeshared reward {name} must be on the trainer's devices (node, device) "
            f"{places[1]}, got {places[0]}; give it devices of its own (num_gpus in place of timeshare)"
        )


def _place(actor: Any) -> tuple[str, str]:
    """Node and device that Ray gave to this process."""
    context = ray.get_runtime_context()
    (device, *_) = context.get_accelerator_ids()[get_platform().ray_resource_name()]
    return context.get_node_id(), device


def turn_metrics(turns: Sequence[RewardTurn]) -> dict[str, float]:
    """`reward_calls/NAME_wake_s`, `_sleep_s` and `_asleep_gb` of a step, see `verl_digen.observe.metrics`."""
    found: dict[str, float] = {}
    for name in sorted({turn.reward for turn in turns}):
        own = [turn for turn in turns if turn.reward == name]
        num_processes = len({turn.number for turn in own})
        for change in ("wake", "sleep"):
            spent = [one.turn.end_s - one.turn.start_s for one in own if one.change == change]
            found[f"reward_calls/{name}_{change}_s"] = sum(spent) / num_processes
        held = [one.turn.held_bytes for one in own if one.change == "sleep"]
        if held:
            found[f"reward_calls/{name}_asleep_gb"] = max(held) / 1e9
    return found
