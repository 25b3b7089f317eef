# SPDX-License-Identifier: Apache-2.0
"""Simulated batches in which a ready fragment interrupts the trainer's assist between two denoise steps.

    python examples/preempted_assists.py            # print the table of docs/baselines.md: four minutes on one core
    python examples/preempted_assists.py --write    # write it there
    python examples/preempted_assists.py --devices 32 --more_generators 4
    python examples/preempted_assists.py --devices 32 --tcss

The live planner on the four shipped profiles, at the best split. Seconds of each chunk of a slot are random, and the
planner knows their mean. Ways, all with the same random seconds:

- whole: an assist runs to its end, as live;
- paused: at the next boundary between two denoise steps the ready fragment trains, then the assist goes on;
- given back: at that boundary the assist ends and its samples go back to the queue, where the model of the search for
  assists (`verl_digen.schedulers.play`) predicts an earlier end of the batch for that;
- hindsight: at each of these moments the best of going on, pausing and giving back, found by playing the rest of the
  batch with each of them. It knows the random seconds.

Pausing is free here; live, resuming gathers the weights once more. Nothing is measured.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from heapq import heapify
from math import exp, log
from random import Random
from statistics import fmean
from typing import Any, Literal

from baselines import PAGE, filled, lines_of

from verl_digen.devices import Pool
from verl_digen.schedulers.bubbles import bubble_at
from verl_digen.schedulers.generation import ChunkSlots, Work
from verl_digen.schedulers.planner import BatchPlanner
from verl_digen.schedulers.play import EPSILON_S, Play
from verl_digen.schedulers.simulation import PlannerRun
from verl_digen.schedulers.types import TRAINER, Assist, Chunk, TrainerDecision, Wait
from verl_digen.simulate.cluster import Split, durations_of, simulated_rules
from verl_digen.simulate.profile import Profile, load_profile, profile_names
from verl_digen.simulate.splits import best_split

Action = Literal["go_on", "pause", "give_back"]
ACTIONS: tuple[Action, ...] = ("go_on", "pause", "give_back")
TECHNIQUES = ("gap", "tsp", "tag")
SEARCH_STEPS = 6
"""Simulated steps of each split tried; they have no noise."""
DEVICES = (16, 32, 256)
NUM_BATCHES = 20
"""Simulated batches of a case, each with seconds of its own."""
NOISES = ((0.1, 0.0), (0.3, 0.0), (0.3, 0.5))
"""(standard deviation of a chunk's seconds over their mean, share of the variance that a batch's chunks have in
common)."""
TCSS_STEPS, TCSS_WARM_UP = 12, 3
"""Steps of a run with tcss, and those left out at its start; the last one is left out, too."""
NAME = "interrupted assists"


class NoisySlots(ChunkSlots):
    """Slots whose seconds per chunk are lognormal with mean 1 times what is expected.

    Args:
        noise: standard deviation, relative to the mean.
        shared: share of the variance that all chunks of a batch have in common.
    """

    def __init__(self, sample_s: dict[str, float], *, seed: int, noise: float, shared: float):
        super().__init__(sample_s)
        self._seed, self._shared, self._variance = seed, shared, log(1 + noise**2)

    def start(self, now_s: float) -> list[Work]:
        return [
            work._replace(end_s=now_s + (work.end_s - now_s) * self._factor(work.subject))
            for work in super().start(now_s)
        ]

    def _factor(self, chunk: Chunk) -> float:
        """A function of the seed and the chunk's first sample alone, so that all ways meet the same seconds."""
        own = Random(f"{self._seed}/{chunk.batch}/{chunk.uid}/{chunk.samples[0]}").gauss(0, 1)
        of_batch = Random(f"{self._seed}/{chunk.batch}").gauss(0, 1)
        value = (1 - self._shared) ** 0.5 * own + self._shared**0.5 * of_batch
        return exp(self._variance**0.5 * value - self._variance / 2)


class PreemptingPlanner(BatchPlanner):
    """The planner, with an assist that can be paused, resumed or given back."""

    paused: Assist | None = None

    @property
    def assist(self) -> Assist | None:
        """The assist that runs."""
        return self._trainer if isinstance(self._trainer, Assist) else None

    @property
    def num_ready(self) -> int:
        """Ready groups of the trainer's batch."""
        return len(self._book.batches[self.batch].ready) if self.batch in self._book.batches else 0

    def pause(self) -> None:
        self.paused, self._trainer = self.assist, None

    def resume(self) -> None:
        self._trainer, self.paused = self.paused, None

    def predicted_ends_s(self, now_s: float, left_s: float) -> tuple[float, float]:
        """Seconds until the batch ends, by the search's model: if the assist goes on, which has `left_s` left, and if
        it is given back now."""
        goes_on, gives_back = deepcopy(self), deepcopy(self)
        gives_back.give_back()
        return goes_on._end_s(now_s, left_s), gives_back._end_s(now_s, 0.0)

    def _end_s(self, now_s: float, left_s: float) -> float:
        for chunk in self.assist.chunks if self.assist else ():
            if (live := self._book.live.get(chunk.id)) is not None:
                live.generated_s = now_s + left_s
        state = (self._book.batches[self.batch], self._slots.ids, self._requests.values(), self._book.live)
        bubble = bubble_at(now_s, *state, self._durations, self.rules)
        assert bubble is not None
        play = Play(bubble)
        return play.leaf(play._settle(play._advance((left_s, *play.root()[1:]), left_s)))[0]

    def give_back(self) -> None:
        """End the running assist; its samples are issued again."""
        batch, assist = self._book.batches[self.batch], self.assist
        assert assist is not None
        for chunk in assist.chunks:
            self._end_request(chunk.id)
            if (live := self._book.live.get(chunk.id)) is not None:
                batch.num_assisted -= len(live.left)
                self._book.give_back(chunk.id, set(live.left))
        self._assisting, self._trainer = set(), None
        self._search.forget()
        self._disturb()

    def _at_bubble(self, batch: Any, now_s: float) -> Assist | Wait:
        return Wait("no_fragment_ready") if self.paused else super()._at_bubble(batch, now_s)

    def next_for_trainer(self, now_s: float) -> TrainerDecision:
        decision = super().next_for_trainer(now_s)
        assert not (self.paused and isinstance(decision, Assist))
        return decision


@dataclass
class PreemptedRun(PlannerRun):
    """A run that asks `choose` whenever a group becomes ready during an assist."""

    choose: Callable[[PreemptedRun, float], Action] = lambda run, now_s: "go_on"
    """Answers the question number `run.num_questions`, asked at `now_s`."""
    step_s: Callable[[int, float], tuple[float, float]] = lambda _, seconds: (seconds, 0.0)
    """(rounds of an assist, its seconds) -> seconds of a denoise step of it, and of its decoding."""
    num_questions: int = 0
    _left_s: float = 0.0
    """Seconds that the assist in progress, or paused, had left at `_since_s`."""
    _since_s: float = 0.0
    _seen: int = field(default=0)
    """Ready groups for which the running assist was considered."""

    def make_planner(self) -> PreemptingPlanner:
        return PreemptingPlanner(self.rules, self.durations, first_batch=0, num_batches=self.num_batches)

    def _assign(self, now_s: float) -> None:
        super()._assign(now_s)
        assist, num_ready = self._planner.assist, self._planner.num_ready
        if assist is None or num_ready <= self._seen:
            return
        self._seen = num_ready
        if (boundary_s := self._boundary_s(assist, now_s)) is not None:
            answer = self.choose(self, now_s)
            self.num_questions += 1
            if answer != "go_on":
                self._expect(boundary_s, answer, assist)  # pyright: ignore[reportArgumentType]

    @property
    def planner(self) -> PreemptingPlanner:
        return self._planner

    def left_s(self, now_s: float) -> float:
        """Seconds that the running assist has left."""
        return self._left_s - (now_s - self._since_s)

    def _boundary_s(self, assist: Assist, now_s: float) -> float | None:
        """The next boundary between denoise steps of the running assist; None: it decodes, or is about to."""
        rounds = self.rules.assist_rounds(assist.num_samples)
        step_s, decode_s = self.step_s(rounds, self.durations.assisted_s[rounds - 1])
        left_s = self.left_s(now_s) - decode_s
        steps_left = int(left_s / step_s + EPSILON_S)
        return now_s + max(0.0, left_s - steps_left * step_s) if steps_left >= 1 else None

    def _work(self, now_s: float) -> bool:
        planner = self._planner
        self._seen = 0
        if super()._work(now_s):
            if (assist := planner.assist) is not None:
                rounds = self.rules.assist_rounds(assist.num_samples)
                self._left_s, self._since_s = self.durations.assisted_s[rounds - 1], now_s
            return True
        if planner.paused is None:
            return False
        planner.resume()
        self._since_s = now_s
        self._expect(now_s + self._left_s, "assist", planner.assist)
        return True

    def _tell(self, now_s: float, what: Any, subject: Any) -> bool:
        if what not in ("pause", "give_back"):
            return super()._tell(now_s, what, subject)
        if subject is not self._planner.assist:  # it ended at this moment
            return False
        self._due = [entry for entry in self._due if entry[3] is not subject]
        heapify(self._due)
        self._left_s -= now_s - self._since_s
        if what == "pause":
            self._planner.pause()
        else:
            self._planner.give_back()
            self.busy_s[TRAINER] -= self._left_s
        return True


def go_on(run: PreemptedRun, now_s: float) -> Action:
    return "go_on"


def pause(run: PreemptedRun, now_s: float) -> Action:
    return "pause"


def give_back_if_earlier(run: PreemptedRun, now_s: float) -> Action:
    """Give the samples back where the search's model then predicts an earlier end."""
    goes_on_s, gives_back_s = run.planner.predicted_ends_s(now_s, run.left_s(now_s))
    return "give_back" if gives_back_s < goes_on_s - EPSILON_S else "go_on"


@dataclass(frozen=True)
class Case:
    """A profile on a split, with noise."""

    profile: Profile
    split: Split
    noise: float
    shared: float = 0.0
    num_batches: int = 1
    techniques: tuple[str, ...] = TECHNIQUES

    def play(
        self, seed: int, choose: Callable[[PreemptedRun, float], Action], kind: type[PreemptedRun] = PreemptedRun
    ) -> PreemptedRun:
        """Play batches; `commits_s` of the run has their ends."""
        profile, split = self.profile, self.split
        rules = simulated_rules(profile, split, self.techniques)
        slots = [f"slot{index:05d}" for index in range(split.generator.num_devices)]
        durations = durations_of(profile, split, slots, rules, has_tsp=True)
        run = kind(
            rules,
            durations,
            slots,
            num_batches=self.num_batches,
            commit_s=profile.numbers.commit_s,
            keeps_events=False,
            generator=NoisySlots(dict(durations.sample_s), seed=seed, noise=self.noise, shared=self.shared),
            choose=choose,
            step_s=self._step_s,
        )
        run.play()
        return run

    def _step_s(self, rounds: int, seconds: float) -> tuple[float, float]:
        numbers = self.profile.numbers
        decode_s = rounds * numbers.decode_s * self.split.trainer.slowdown(self.profile.device)
        return (seconds - decode_s) / numbers.num_steps, decode_s


def hindsight_s(case: Case, seed: int) -> float:
    """End of the batch if each question has the answer that ends it first, found one after the other."""
    answers: list[Action] = []

    def choose(run: PreemptedRun, now_s: float) -> Action:
        return answers[run.num_questions] if run.num_questions < len(answers) else "go_on"

    run = case.play(seed, go_on)
    best_s, num_questions = run.commits_s[-1], run.num_questions
    while len(answers) < num_questions:
        found: Action = "go_on"
        answers.append(found)
        for answers[-1] in ("pause", "give_back"):
            run = case.play(seed, choose)
            if run.commits_s[-1] < best_s - EPSILON_S:
                best_s, num_questions, found = run.commits_s[-1], run.num_questions, answers[-1]
        answers[-1] = found
    return best_s


@dataclass(frozen=True)
class Found:
    """Means over the simulated batches of a case."""

    num_assists: float
    """Assists per batch that ran to their end."""
    num_questions: float
    """Times per batch that a group became ready during the denoise steps of an assist."""
    change: dict[str, float]
    """Way -> seconds per step over those of whole assists, less 1."""


def strict(case: Case, seeds: Sequence[int]) -> Found:
    """Single batches: in strict mode each begins with all slots and the trainer free."""
    whole = [case.play(seed, go_on) for seed in seeds]
    whole_s = fmean(run.commits_s[-1] for run in whole)
    ends_s = {
        "paused": [case.play(seed, pause).commits_s[-1] for seed in seeds],
        "given back": [case.play(seed, give_back_if_earlier).commits_s[-1] for seed in seeds],
        "hindsight": [hindsight_s(case, seed) for seed in seeds],
    }
    return Found(
        num_assists=fmean(run.reports[0].num_assists for run in whole),
        num_questions=fmean(run.num_questions for run in whole),
        change={way: fmean(found) / whole_s - 1 for way, found in ends_s.items()},
    )


def stale(case: Case, seeds: Sequence[int]) -> Found:
    """Runs in which the next batch begins one version early."""
    case = replace(case, num_batches=TCSS_STEPS, techniques=(*TECHNIQUES, "tcss"))

    def steady_s(runs: Sequence[PreemptedRun]) -> float:
        return fmean(run.commits_s[-2] - run.commits_s[TCSS_WARM_UP - 1] for run in runs)

    whole = [case.play(seed, go_on) for seed in seeds]
    ways = {"paused": pause, "given back": give_back_if_earlier}
    runs = {way: [case.play(seed, choose) for seed in seeds] for way, choose in ways.items()}
    return Found(
        num_assists=fmean(report.num_assists for run in whole for report in run.reports),
        num_questions=fmean(run.num_questions for run in whole) / TCSS_STEPS,
        change={way: steady_s(found) / steady_s(whole) - 1 for way, found in runs.items()},
    )


def split_of(profile: Profile, num_devices: int, more_generators: int, *, tcss: bool) -> Split:
    """The best split without noise, and this many devices moved from the trainer to the generator."""
    techniques = (*TECHNIQUES, "tcss") if tcss else TECHNIQUES
    best = best_split(profile, Pool(num_devices, profile.device), techniques, num_steps=SEARCH_STEPS)
    num_trainer = max(profile.numbers.min_trainer_devices, best.trainer.num_devices - more_generators)
    return Split(
        replace(best.trainer, num_devices=num_trainer), replace(best.generator, num_devices=num_devices - num_trainer)
    )


def row(profile: Profile, split: Split, measure: Callable[[Case, Sequence[int]], Found], num_batches: int) -> list[str]:
    """Cells of a table row: a number for each of `NOISES`."""
    found = [measure(Case(profile, split, *noise), range(num_batches)) for noise in NOISES]
    return [
        f"`{profile.name}`",
        str(split),
        f"{found[0].num_assists:.1f}",
        " / ".join(f"{one.num_questions:.1f}" for one in found),
        *(" / ".join(f"{one.change[way]:+.1%}" for one in found) for way in found[0].change),
    ]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of the table, in Markdown."""
    head = ["simulated", "split", "assists a batch", "fragments ready meanwhile", "paused", "given back", "hindsight"]
    return lines_of(head[: len(rows[0])], rows)


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    parser.add_argument("--more_generators", type=int, default=0, help="devices moved from the best split's trainer")
    parser.add_argument("--tcss", action="store_true", help="runs in which the next batch begins early; no hindsight")
    parser.add_argument("--batches", type=int, default=NUM_BATCHES, help="per case; with --tcss runs")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    args = parser.parse_args()
    rows = []
    for profile in map(load_profile, profile_names()):
        for num_devices in args.devices:
            split = split_of(profile, num_devices, args.more_generators, tcss=args.tcss)
            rows.append(row(profile, split, stale if args.tcss else strict, args.batches))
            print(" | ".join(rows[-1]), flush=True)
    if args.write:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), {NAME: table(rows)}), encoding="utf-8")


if __name__ == "__main__":
    main()
