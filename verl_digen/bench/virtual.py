# SPDX-License-Identifier: Apache-2.0
"""Virtual devices for a bench: the overrides that a profile needs, and the simulator's predictions. Pure.

*Invariant (tests/bench/test_bench_virtual.py):* the run is given the batch of the profile, and the prediction is
that of `digen simulate` for the same split, times `time_scale`.
"""

from __future__ import annotations

from verl_digen.algorithms.window import WindowConfig, draw_window
from verl_digen.bench.modes import Mode
from verl_digen.bench.summary import Baseline, Prediction
from verl_digen.devices import Pool
from verl_digen.require import require
from verl_digen.simulate.cluster import WARM_UP_STEPS, Split, baselines, run_split, together
from verl_digen.simulate.profile import Numbers, Profile
from verl_digen.simulate.verl_omni import run_verl_omni

NUM_PREDICTED_STEPS = WARM_UP_STEPS + 3
"""Number of steps to simulate; all are alike once the run is steady."""


def virtual_overrides(profile: Profile, source: str, split: Split, time_scale: float) -> tuple[str, ...]:
    """Overrides that give a run the profile's batch on a virtual cluster.

    Args:
        source: the profile's name or file, as the user typed it.
    """
    numbers = profile.numbers
    return (
        f"digen.virtual.profile={source}",
        f"digen.virtual.time_scale={time_scale}",
        f"digen.virtual.trainer_ranks={split.trainer.num_devices}",
        f"digen.virtual.trainer_device={split.trainer.device}",
        f"digen.virtual.generator_device={split.generator.device}",
        f"actor_rollout_ref.rollout.n_gpus_per_node={split.generator.num_devices}",
        f"data.train_batch_size={numbers.num_prompts}",
        f"actor_rollout_ref.rollout.n={numbers.group_size}",
        f"digen.sampling.num_steps={numbers.num_steps}",
        f"digen.rollout.max_batch_size={numbers.max_chunk_size}",
        "digen.gap.slots_per_replica=1",  # as simulated
        *_window_overrides(numbers),
    )


def _window_overrides(numbers: Numbers) -> tuple[str, ...]:
    """Overrides for a window that trains as many steps as the profile does."""
    if numbers.num_trained_steps == numbers.num_steps - 1:
        return ("digen.window.kind=all",)
    share = numbers.num_trained_steps / (numbers.num_steps - 1)
    for fraction in (round(share, 3), share + 1e-9, share):
        config = WindowConfig(kind="fraction", fraction=fraction)
        window = draw_window(config, run_seed=0, uid="", num_steps=numbers.num_steps, step=0)
        if len(window.train_steps) == numbers.num_trained_steps:
            return "digen.window.kind=fraction", f"digen.window.fraction={fraction}"
    raise RuntimeError(f"no window trains {numbers.num_trained_steps} of {numbers.num_steps} steps")


def predict(profile: Profile, split: Split, mode: Mode, time_scale: float) -> Prediction:
    """Predict a mode's step time, simulated, and its lower bound."""
    outcome = run_split(profile, split, mode.techniques, num_steps=NUM_PREDICTED_STEPS)
    assert outcome.bound_s is not None
    return Prediction(step_s=outcome.step_s * time_scale, bound_s=outcome.bound_s * time_scale)


def simulated_baselines(profile: Profile, split: Split, time_scale: float) -> list[Baseline]:
    """Simulate the baselines: the barrier, and runs in turns on the same devices, which virtual devices do not run."""
    barrier = run_split(profile, split, (), num_steps=NUM_PREDICTED_STEPS)
    return [
        Baseline(f"{run.name}, {run.devices}", run.step_s * time_scale)
        for run in (*baselines(profile, [split.trainer, split.generator]), barrier)
    ]


def simulated_peer_s(profile: Profile, split: Split, time_scale: float) -> float:
    """Simulate verl-omni's way on all devices of the split, with the profile's window; seconds of a step."""
    return run_verl_omni(profile, together(profile, [split.trainer, split.generator])).step_s * time_scale


def virtual_split(profile: Profile, trainer: Pool, generator: Pool) -> Split:
    """Split of the devices into two pools.

    Raises:
        ValueError: the trainer is too small for the model.
    """
    require(
        trainer.num_devices >= profile.numbers.min_trainer_devices,
        f"--trainer must be >= {profile.numbers.min_trainer_devices} devices, which hold the training state of "
        f"{profile.model}",
        trainer.num_devices,
        "give it more",
    )
    return Split(trainer, generator)
