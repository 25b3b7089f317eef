# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step's parts on a pool, from a profile's numbers. Pure.

Seconds to train g groups on r ranks, with K rows per sample, m rows per tile, and weights gathered while the previous
tile computes (2 gathers per tile, forward and backward; `gather_s` scaled by (r-1)/r):

    serial   ceil(g*G / r) samples per rank, row by row:      ceil(g*G / r) * K * max(row_s, 2 gather_s)
    TSP      q = ceil(g*G*K / r) rows per rank, in the        sum over the tiles of max(rows * row_s, 2 gather_s)
             fewest even tiles of at most m rows:
    assist   n samples, k = ceil(n / r) per rank:             T * max(k step_s, gather_s) + k decode_s
             the same, where r ranks can keep the weights:    max(k step_s, gather_s) + (T - 1) * k step_s + k decode_s
    slot     n samples:                                       n * (T * step_s + decode_s)

With a frozen base that is whole on every rank `gather_s` is 0 (`digen simulate --whole-base`).

Without TSP, 8 samples on 16 ranks leave 8 ranks idle; with it, 8 samples x 9 rows are 4 or 5 rows per rank.
"""

from __future__ import annotations

from collections.abc import Collection

from verl_digen.hardware.devices import Pool
from verl_digen.schedulers.rules import BatchRules
from verl_digen.tools.simulate.profile import Numbers, Profile


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
    """Seconds of an assist; each rank denoises its samples together. Where memory allows, only the first step gathers
    weights."""
    gather_s = numbers.gather_s * (num_ranks - 1) / num_ranks
    on_a_rank = -(-num_samples // num_ranks)
    step_s = on_a_rank * numbers.step_s * slowdown
    if num_ranks >= numbers.min_gathering_devices:
        denoise_s = max(step_s, gather_s) + (numbers.num_steps - 1) * step_s
    else:
        denoise_s = numbers.num_steps * max(step_s, gather_s)
    return denoise_s + on_a_rank * numbers.decode_s * slowdown


def lower_bound_s(profile: Profile, trainer: Pool, generator: Pool, techniques: Collection[str]) -> float:
    """Lower bound of a step's seconds with `techniques`, a subset of `schedulers.simulation.TECHNIQUES`: nobody waits.

        train = training of the whole batch in one call + commit_s        on the trainer's ranks; with even tiles,
                                                                          several smaller calls never take less
        step >= train                                                     no other pool trains
        step >= P*G * sample_s / slots                                    if the trainer never generates
        step >= t with  t / sample_s * slots  +  (t - train) / assist_s * c  =  P*G
                                                                          if it generates, c samples at a time,
                                                                          whenever it does not train

    It bounds the mean step of any window that generates at least as many samples as it trains, or is charged for the
    missing ones (`verl_digen.tools.simulate.cluster.run_split`). c is a size that `digen.tag.chunk_size=auto` gives.

    Invariants (tests/simulate/test_bound.py): no simulated run is below it, up to rounding; no partition of the batch
    into training calls takes less than one call.

    Example: 10 samples of 2 s on 2 slots, 6 s of training and commit -> 10 s; with "tag" and a trainer that generates a
    sample in 2 s, 8.67 s: the slots generate 8.67 of them, the trainer the rest in its 2.67 s of idle time.
    """
    numbers = profile.numbers
    slowdown = trainer.slowdown(profile.device)
    training_s = numbers.commit_s + train_s(
        numbers, numbers.num_prompts, trainer.num_devices, slowdown=slowdown, has_tsp="tsp" in techniques
    )
    num_samples = numbers.num_prompts * numbers.group_size
    samples_per_s = generator.num_devices / sample_s(numbers, generator.slowdown(profile.device))
    if "tag" not in techniques or num_samples / samples_per_s <= training_s:
        return max(training_s, num_samples / samples_per_s)
    rules = BatchRules(
        numbers.num_prompts,
        numbers.group_size,
        max_chunk_size=numbers.max_chunk_size,
        num_trainer_ranks=trainer.num_devices,
    )
    assisted_per_s = max(
        count / assist_s(numbers, count, trainer.num_devices, slowdown)
        for count in rules.assist_sizes(generator.num_devices)
    )
    return (num_samples + training_s * assisted_per_s) / (samples_per_s + assisted_per_s)
