# SPDX-License-Identifier: Apache-2.0
"""Largest fragments, from 8 groups up, on up to 1,024 devices: seconds of a step, all simulated.

    python examples/research/fragment_sizes.py                              # the table of docs/control_plane.md
    python examples/research/fragment_sizes.py --window 2 --devices 128,256

Strict runs with assists, as `control_plane.py` plays them: two prompts for every four devices that train.
"auto" is the default of `digen.gap.max_groups_per_fragment`.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace

from verl_digen.hardware.devices import Pool
from verl_digen.tools.simulate.cluster import Split, run_split, simulated_rules
from verl_digen.tools.simulate.profile import load_profile, profile_names, windowed

TECHNIQUES = ("gap", "tsp", "tag")
SIZES = (8, 16, 32, 64, 128)


def line(name: str, num_trainer: int, num_devices: int, window: int | None, num_steps: int) -> Sequence[str]:
    """Cells of one profile on one split: the step with each size, and with the default."""
    profile = load_profile(name) if window is None else windowed(load_profile(name), window)
    profile = replace(profile, numbers=replace(profile.numbers, num_prompts=max(1, num_trainer // 2)))
    split = Split(Pool(num_trainer, profile.device), Pool(num_devices - num_trainer, profile.device))
    rules = simulated_rules(profile, split, TECHNIQUES)

    def step_s(most: int | None) -> float:
        changed = replace(rules, gap=replace(rules.gap, max_groups_per_fragment=most or "auto"))
        return run_split(profile, split, TECHNIQUES, num_steps=num_steps, rules=changed).step_s

    auto = f"{step_s(None):.1f} ({rules.largest_fragment} groups)"
    return [f"`{name}`", str(split), *(f"{step_s(size):.1f}" for size in SIZES), auto]


def main() -> None:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", default="256,512,1024")
    parser.add_argument("--window", type=int, help="trained steps; without it the profile's own")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    print("| " + " | ".join(["profile", "split", *map(str, SIZES), "auto"]) + " |")
    print("| " + " | ".join(["---"] * (len(SIZES) + 3)) + " |")
    for num_devices in map(int, args.devices.split(",")):
        for share in (5 / 8, 11 / 16, 7 / 8):
            for name in profile_names():
                cells = line(name, int(num_devices * share), num_devices, args.window, args.steps)
                print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
