# SPDX-License-Identifier: Apache-2.0
"""Simulated steps of a run on a cluster, technique by technique, in its steady state.

Seconds to train g groups on r ranks, with K rows per sample, m rows per tile, and weights gathered while the previous
tile computes (2 gathers per tile, forward and backward; `gather_s` scaled by (r-1)/r):

    serial   ceil(g*G / r) samples per rank, row by row:      ceil(g*G / r) * K * max(row_s, 2 gather_s)
    TSP      q = ceil(g*G*K / r) rows per rank, in the        sum over the tiles of max(rows * row_s, 2 gather_s)
             fewest even tiles of at most m rows:
    assist   n samples, k = ceil(n / r) per rank:             T * max(k step_s, gather_s) + k decode_s
             the same, where r ranks can keep the weights:    max(k step_s, gather_s) + (T - 1) * k step_s + k decode_s
    slot     n samples:                                       n * (T * step_s + decode_s)

With a frozen base that is whole on every rank `gather_s` is 0. Without TSP, 8 samples on 16 ranks leave 8 ranks idle;
with it, 8 samples x 9 rows are 4 or 5 rows per rank. Left out: memory (except `min_trainer_devices`), kernels that are
less efficient on small tiles, variance.

Invariants: idle shares lie between 0 and 1; with a shipped profile, no technique makes a step longer by more than 1 %
(the search for assists looks at one batch).
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from verl_digen.hardware.devices import Pool
from verl_digen.require import require
from verl_digen.schedulers.durations import KnownDurations
from verl_digen.schedulers.rules import BatchRules, GapConfig, StalenessConfig, TagConfig
from verl_digen.schedulers.simulation import TECHNIQUES, PlannerRun
from verl_digen.schedulers.types import TRAINER
from verl_digen.tools.simulate.profile import Numbers, Profile

WARM_UP_STEPS = 2
"""Steps until a run is steady: the first has nothing begun early, the second was begun by the first."""

COLOCATED, COLOCATED_TSP, BARRIER = "colocated", "colocated+tsp", "barrier"
BASELINES = (COLOCATED, COLOCATED_TSP, BARRIER)
"""Names of runs in which generation and training do not overlap; other runs are compared with the fastest of them."""

SAME_SAMPLES = 1e-6
"""Tolerance in samples: two amounts of work closer than this are equal."""


@dataclass(frozen=True)
class Split:
    """Training pool and generating pool."""

    trainer: Pool
    generator: Pool

    @property
    def num_devices(self) -> int:
        """Devices of both pools."""
        return self.trainer.num_devices + self.generator.num_devices

    def __str__(self) -> str:
        return f"{self.trainer} + {self.generator}"


@dataclass(frozen=True)
class SteadyRun:
    """A run in its steady state."""

    name: str
    devices: str
    """The devices, in words."""
    split: Split | None
    """None: colocated."""
    num_devices: int
    """All devices, idle ones too."""
    num_samples: int
    """Samples per step."""
    step_s: float
    idle: dict[str, float]
    """Pool -> idle share of its device-seconds, 0 to 1."""
    assisted: float
    """Share of the samples that the trainer generated."""
    stale: float
    """Share of the groups that were begun one version early."""


def simulated_rules(profile: Profile, split: Split, techniques: Collection[str]) -> BatchRules:
    """The planner's rules: the config's defaults, except the techniques and the profile's numbers."""
    numbers = profile.numbers
    return BatchRules(
        num_prompts=numbers.num_prompts,
        group_size=numbers.group_size,
        rows_per_group=numbers.group_size * numbers.num_trained_steps,
        gap=GapConfig(enable="gap" in techniques),
        tag=TagConfig(policy="bts" if "tag" in techniques else "off"),
        staleness=StalenessConfig(max_versions=1 if "tcss" in techniques else 0, fraction=1.0),
        max_chunk_size=numbers.max_chunk_size,
        num_trainer_ranks=split.trainer.num_devices,
    )


def run_split(
    profile: Profile, split: Split, techniques: Collection[str], *, num_steps: int, rules: BatchRules | None = None
) -> SteadyRun:
    """Simulate a disaggregated run by the live planner (`schedulers.simulation.PlannerRun`), under `rules` or
    `simulated_rules`; with "tcss", all of a batch may be begun early. ValueError: too few steps, or a trainer that is
    too small."""
    rule = f"--steps must be > {WARM_UP_STEPS + 1}: {WARM_UP_STEPS} are left out, and with tcss the last one"
    require(num_steps > WARM_UP_STEPS + 1, rule, num_steps, "40 are enough")
    least, num_ranks = profile.numbers.min_trainer_devices, split.trainer.num_devices
    rule = f"--trainer must be >= {least} devices, which hold the training state of {profile.model}"
    require(num_ranks >= least, rule, num_ranks, "give it more")
    if rules is None:
        rules = simulated_rules(profile, split, techniques)
    rules = replace(rules, slots_per_replica=1)  # a slot is a device, which takes no time between two chunks
    width = len(str(split.generator.num_devices))  # names are in order also as text
    slots = [f"slot{index:0{width}d}" for index in range(split.generator.num_devices)]
    run = PlannerRun(
        rules,
        durations_of(profile, split, slots, rules, has_tsp="tsp" in techniques),
        slots,
        num_batches=num_steps,
        commit_s=profile.numbers.commit_s,
    )
    run.play()
    return _steady_outcome(profile, split, techniques, run)


def durations_of(
    profile: Profile, split: Split, slots: Sequence[str], rules: BatchRules, *, has_tsp: bool
) -> KnownDurations:
    """Durations of every chunk, assist and fragment that the rules allow."""
    numbers, num_ranks = profile.numbers, split.trainer.num_devices
    slowdown = split.trainer.slowdown(profile.device)
    most_rounds = rules.assist_rounds(rules.assist_sizes(len(slots))[-1])
    max_groups = rules.largest_fragment if rules.gap.enable else numbers.num_prompts
    return KnownDurations(
        sample_s=dict.fromkeys(slots, sample_s(numbers, split.generator.slowdown(profile.device))),
        assisted_s=[assist_s(numbers, count * num_ranks, num_ranks, slowdown) for count in range(1, most_rounds + 1)],
        scoring_s=numbers.score_s,
        fragment_s=[
            train_s(numbers, count, num_ranks, slowdown=slowdown, has_tsp=has_tsp) for count in range(1, max_groups + 1)
        ],
    )


def _steady_outcome(profile: Profile, split: Split, techniques: Collection[str], run: PlannerRun) -> SteadyRun:
    """Outcome of a run that was played, over its steady steps."""
    num_prompts, num_slots = profile.numbers.num_prompts, split.generator.num_devices
    num_samples = num_prompts * profile.numbers.group_size
    slot_sample_s = sample_s(profile.numbers, split.generator.slowdown(profile.device))
    ahead = _generated_ahead(run, slot_sample_s, num_samples)
    if "tcss" in techniques:
        ahead.pop()  # nothing is begun early in the last step, because no step follows
    first, last = steady_window(ahead)
    # samples that the window consumed but did not regenerate are charged the time all slots take to generate them
    charged_s = max(0.0, ahead[first] - ahead[last]) * slot_sample_s / num_slots
    window_s = run.commits_s[last] - run.commits_s[first]
    busy_s = {pool: seconds - run.busy_at_commit_s[first][pool] for pool, seconds in run.busy_at_commit_s[last].items()}
    num_steady, reports = last - first, run.reports[first + 1 : last + 1]
    return SteadyRun(
        name="+".join(technique for technique in TECHNIQUES if technique in techniques) or BARRIER,
        devices=str(split),
        split=split,
        num_devices=split.num_devices,
        num_samples=num_samples,
        step_s=(window_s + charged_s) / num_steady,
        idle={
            "trainer": max(0.0, 1 - busy_s[TRAINER] / window_s),  # not -0.0 by rounding
            "generator": max(0.0, 1 - busy_s["generator"] / window_s / num_slots),
        },
        assisted=sum(report.num_assisted for report in reports) / num_steady / num_samples,
        stale=sum(report.stale_groups.get(1, 0) for report in reports) / num_steady / num_prompts,
    )


def steady_window(ahead: Sequence[float]) -> tuple[int, int]:
    """(first, last) commit of the steady steps, the first `WARM_UP_STEPS` left out: whole periods of the run.

    The window with the smallest change per step of `ahead`, the samples generated and not trained at each commit (at
    least `WARM_UP_STEPS` + 1 of them); ties: the longest, then the earliest. O(steps^2).

    Example:
        steady_window([9.0, 4.0, 5.0, 6.0, 4.0, 5.0])   # (1, 4): three steps, a period
    """

    def change_per_step(window: tuple[int, int]) -> int:
        first, last = window
        return round(abs(ahead[last] - ahead[first]) / (last - first) / SAME_SAMPLES)

    windows = combinations(range(WARM_UP_STEPS - 1, len(ahead)), 2)
    return min(windows, key=lambda window: (change_per_step(window), window[0] - window[1], window[0]))


def _generated_ahead(run: PlannerRun, slot_sample_s: float, num_samples: int) -> list[float]:
    """[commits] samples that slots have generated for later steps at each commit; a half-done one counts as half."""
    ahead, needed = [], 0
    for report, busy_s in zip(run.reports, run.busy_at_commit_s, strict=True):
        needed += num_samples - report.num_assisted
        ahead.append(busy_s["generator"] / slot_sample_s - needed)
    return ahead


def run_colocated(profile: Profile, pool: Pool, *, has_tsp: bool, devices: str | None = None) -> SteadyRun:
    """Simulate a baseline: all devices generate, the last samples are scored, all devices train, and so on.

        replicas   ceil(P*G / N) * (T step_s + decode_s) + switch_s: weights move to the host and back in every step
        ranks      `assist_s` of P*G samples: the trainer's ranks generate, and nothing moves
        step = the faster of the two + score_s + training of P groups on N ranks + commit_s

    Without TSP, replicas generate: what others do. `devices`: the devices in words, in place of `pool`, "together".
    """
    numbers, num_devices = profile.numbers, pool.num_devices
    slowdown = pool.slowdown(profile.device)
    num_samples = numbers.num_prompts * numbers.group_size
    training_s = numbers.commit_s + train_s(
        numbers, numbers.num_prompts, num_devices, slowdown=slowdown, has_tsp=has_tsp
    )
    generating_s = -(-num_samples // num_devices) * sample_s(numbers, slowdown) + numbers.switch_s
    if has_tsp:
        generating_s = min(generating_s, assist_s(numbers, num_samples, num_devices, slowdown))
    step_s = generating_s + numbers.score_s + training_s
    busy_s = num_samples / num_devices * sample_s(numbers, slowdown) + training_s
    name = COLOCATED_TSP if has_tsp else COLOCATED
    return turns_outcome(profile, pool, name, step_s=step_s, busy_s=busy_s, devices=devices)


def turns_outcome(
    profile: Profile, pool: Pool, name: str, *, step_s: float, busy_s: float, devices: str | None = None
) -> SteadyRun:
    """Outcome of a run in which all devices of `pool` do one part of a step after the other. `busy_s`: seconds of a
    step in which a device works, mean over the devices."""
    return SteadyRun(
        name=name,
        devices=f"{pool} together" if devices is None else devices,
        split=None,
        num_devices=pool.num_devices,
        num_samples=profile.numbers.num_prompts * profile.numbers.group_size,
        step_s=step_s,
        idle={"all": 1 - busy_s / step_s},
        assisted=0.0,
        stale=0.0,
    )


def baselines(profile: Profile, pools: Sequence[Pool]) -> list[SteadyRun]:
    """Colocated runs: all devices of `pools` together, without and with TSP. Devices of two types together run at the
    slower type's speed; each type alone is a baseline too, if it holds the training state."""
    everything = together(profile, pools)
    found: list[tuple[Pool, str | None]] = [(everything, None)]
    if len({pool.device for pool in pools}) > 1:
        found = [(everything, f"{everything.num_devices} together, as {everything.device}")]
        found += [(pool, f"{pool} alone") for pool in pools if pool.num_devices >= profile.numbers.min_trainer_devices]
    return [
        run_colocated(profile, pool, has_tsp=has_tsp, devices=devices)
        for pool, devices in found
        for has_tsp in (False, True)
    ]


def together(profile: Profile, pools: Sequence[Pool]) -> Pool:
    """All devices as one pool, at the speed of the slowest type."""
    slowest = max(pools, key=lambda pool: pool.slowdown(profile.device)).device
    return Pool(sum(pool.num_devices for pool in pools), slowest)


def best_baseline(runs: Iterable[SteadyRun]) -> SteadyRun:
    """The fastest run without overlap: one of `baselines`, or the barrier."""
    return min((run for run in runs if run.name in BASELINES), key=lambda run: run.step_s)


def ladder(techniques: Iterable[str]) -> list[tuple[str, ...]]:
    """Cumulative sets of techniques: none, then one more at a time, in the order of `TECHNIQUES`."""
    chosen = [technique for technique in TECHNIQUES if technique in set(techniques)]
    return [tuple(chosen[:count]) for count in range(len(chosen) + 1)]


def train_s(numbers: Numbers, num_groups: int, num_ranks: int, *, slowdown: float, has_tsp: bool) -> float:
    """Seconds to train a fragment; the formulas are in the module's docstring."""
    num_samples = num_groups * numbers.group_size
    gathers_s = 2 * numbers.gather_s * (num_ranks - 1) / num_ranks
    row_s = numbers.row_s * slowdown
    if not has_tsp:
        return -(-num_samples // num_ranks) * numbers.num_trained_steps * max(row_s, gathers_s)
    num_rows = -(-num_samples * numbers.num_trained_steps // num_ranks)
    num_tiles = -(-num_rows // numbers.rows_per_tile)
    smaller, num_larger = divmod(num_rows, num_tiles)  # even parts, as `verl_digen.schedulers.tiles` makes them
    smaller_s, larger_s = (max(rows * row_s, gathers_s) for rows in (smaller, smaller + 1))
    return (num_tiles - num_larger) * smaller_s + num_larger * larger_s


def sample_s(numbers: Numbers, slowdown: float) -> float:
    """Seconds a slot takes for one sample."""
    return (numbers.num_steps * numbers.step_s + numbers.decode_s) * slowdown


def assist_s(numbers: Numbers, num_samples: int, num_ranks: int, slowdown: float) -> float:
    """Seconds of an assist. Each rank denoises its samples together, and gathers weights once where memory allows."""
    gather_s = numbers.gather_s * (num_ranks - 1) / num_ranks
    on_a_rank = -(-num_samples // num_ranks)
    step_s = on_a_rank * numbers.step_s * slowdown
    if num_ranks >= numbers.min_gathering_devices:
        denoise_s = max(step_s, gather_s) + (numbers.num_steps - 1) * step_s
    else:
        denoise_s = numbers.num_steps * max(step_s, gather_s)
    return denoise_s + on_a_rank * numbers.decode_s * slowdown
