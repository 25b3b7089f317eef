# SPDX-License-Identifier: Apache-2.0
"""Lower bound of a step's seconds in the simulator's model: a step without any waiting. Pure.

train = training of the whole batch in one call + commit_s             on the trainer's ranks; with even tiles,
                                                                       several smaller calls never take less
step >= train                                                          no other pool trains
step >= P*G * sample_s / slots                                         if the trainer never generates
step >= t with  t / sample_s * slots  +  (t - train) / assist_s * c  =  P*G
                                                                       if it generates, c samples at a time,
                                                                       whenever it does not train

It bounds the mean step of any window that generates at least as many samples as it trains, or is charged for the
missing ones (`verl_digen.simulate.cluster.run_split`), with and without staleness. c is one of the sizes that
`digen.tag.chunk_size=auto` gives. Only the costs of `verl_digen.simulate.costs` are included.

Invariants (tests/simulate/test_bound.py): no simulated run of any split and techniques is below it, up to rounding;
no partition of the batch into training calls takes less than one call.
"""

from __future__ import annotations

from collections.abc import Collection

from verl_digen.devices import Pool
from verl_digen.schedulers.rules import BatchRules
from verl_digen.simulate.costs import assist_s, sample_s, train_s
from verl_digen.simulate.profile import Profile


def lower_bound_s(profile: Profile, trainer: Pool, generator: Pool, techniques: Collection[str]) -> float:
    """Minimum seconds of a step with `techniques`, a subset of `schedulers.simulation.TECHNIQUES`.

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
