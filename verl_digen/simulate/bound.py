# SPDX-License-Identifier: Apache-2.0
"""What no schedule beats: a step in which nobody waits. Pure.

train = training of the whole batch in one call + commit_s          on the trainer's ranks, at best with TSP
step >= train                                                       it cannot be shared
step >= P*G * sample_s / slots                                      where the trainer never generates
step >= t with  t / sample_s * slots  +  (t - train) / assist_s * c  =  P*G
                                                                    where it generates, c samples at a time,
                                                                    whenever it does not train
"""

from __future__ import annotations

from collections.abc import Collection

from verl_digen.simulate.costs import assist_s, sample_s, train_s
from verl_digen.simulate.devices import Pool
from verl_digen.simulate.profile import Profile


def lower_bound_s(profile: Profile, trainer: Pool, generator: Pool, techniques: Collection[str]) -> float:
    """Seconds of a step, at least, with these of `schedulers.simulation.TECHNIQUES`.

    Example: 10 samples of 2 s on 2 slots, 6 s of training and commit -> 10 s; with "tag" and a trainer that generates a
    sample in 2 s, 8.67 s: the slots make 8.67 of them, the trainer the rest in its 2.67 s of idle time.
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
    assisted_per_s = min(numbers.group_size, trainer.num_devices) / assist_s(numbers, trainer.num_devices, slowdown)
    return (num_samples + training_s * assisted_per_s) / (samples_per_s + assisted_per_s)
