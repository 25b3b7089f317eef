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

With a frozen base that is whole on every rank `gather_s` is 0.

Without TSP, 8 samples on 16 ranks leave 8 ranks idle; with it, 8 samples x 9 rows are 4 or 5 rows per rank.
"""

from __future__ import annotations

from verl_digen.tools.simulate.profile import Numbers


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
