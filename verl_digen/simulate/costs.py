# SPDX-License-Identifier: Apache-2.0
"""What the parts of a step take on a pool, from a profile's numbers. Pure; the simulator and virtual devices share it.

Time of training g groups on r ranks, with K rows per sample, m rows per tile, and weights gathered while the tile
before computes (2 gathers per tile, forward and backward; `gather_s` scaled by (r-1)/r):

    serial   ceil(g*G / r) samples per rank, row by row:      ceil(g*G / r) * K * max(row_s, 2 gather_s)
    TSP      q = ceil(g*G*K / r) rows per rank, in tiles:     floor(q / m) * max(m row_s, 2 gather_s)
                                                              + max((q mod m) row_s, 2 gather_s) if q mod m
    assist   a chunk of at most r samples, one per rank:      T * max(step_s, gather_s) + decode_s
    slot     n samples:                                       n * (T * step_s + decode_s)

Without TSP, 8 samples on 16 ranks leave 8 ranks idle; with it, 8 samples x 9 rows are 4 or 5 rows per rank.
"""

from __future__ import annotations

from verl_digen.simulate.profile import Numbers


def train_s(numbers: Numbers, num_groups: int, num_ranks: int, *, slowdown: float, has_tsp: bool) -> float:
    """Seconds to train a fragment; the formulas are in the module's docstring."""
    gathers_s = 2 * numbers.gather_s * (num_ranks - 1) / num_ranks
    row_s = numbers.row_s * slowdown
    num_samples = num_groups * numbers.group_size
    if not has_tsp:
        return -(-num_samples // num_ranks) * numbers.num_trained_steps * max(row_s, gathers_s)
    num_rows = -(-num_samples * numbers.num_trained_steps // num_ranks)
    num_tiles, rest = divmod(num_rows, numbers.rows_per_tile)
    tiles_s = num_tiles * max(numbers.rows_per_tile * row_s, gathers_s)
    return tiles_s + (max(rest * row_s, gathers_s) if rest else 0.0)


def sample_s(numbers: Numbers, slowdown: float) -> float:
    """Seconds a slot takes for one sample."""
    return (numbers.num_steps * numbers.step_s + numbers.decode_s) * slowdown


def assist_s(numbers: Numbers, num_ranks: int, slowdown: float) -> float:
    """Seconds the trainer takes for a chunk of at most one sample per rank."""
    gather_s = numbers.gather_s * (num_ranks - 1) / num_ranks
    return numbers.num_steps * max(numbers.step_s * slowdown, gather_s) + numbers.decode_s * slowdown
