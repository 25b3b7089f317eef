# SPDX-License-Identifier: Apache-2.0
"""Options of `digen simulate` for variance."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from typing import get_args

from verl_digen.require import require
from verl_digen.simulate.options import require_absent
from verl_digen.simulate.variance import Failures, Place, SlowDevices, Variance

OF_FAILURES = ("replace_s", "restart_s", "save_freq")
"""Options that need `--failures`."""
SLOW = re.compile(r"(\d+)(?:/(\d+))?(?::(\d+(?:\.\d*)?))?")


def add_variance_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("variance, none by default")
    group.add_argument(
        "--jitter", type=float, help="standard deviation over mean of each generation, score and call, e.g. 0.1"
    )
    group.add_argument(
        "--rank-skew", type=float, help="the same of each rank of a call, which takes its slowest rank, e.g. 0.05"
    )
    group.add_argument(
        "--slow-devices", metavar="COUNT[/OF][:FACTOR]", help="e.g. 1/32:2, one in 32 that takes twice as long"
    )
    group.add_argument("--slow-place", choices=get_args(Place), help="where they are (default: anywhere)")
    group.add_argument("--failures", type=float, metavar="RATE", help="per device and hour, e.g. 2e-5")
    group.add_argument(
        "--replace-s",
        type=float,
        help=f"seconds to start a replica in place of a dead one (default: {Failures(0).replace_s:g})",
    )
    group.add_argument(
        "--restart-s", type=float, help=f"seconds to start the run again (default: {Failures(0).restart_s:g})"
    )
    group.add_argument(
        "--save-freq", type=int, help=f"steps between two checkpoints (default: {Failures(0).save_freq})"
    )
    group.add_argument("--seed", type=int, help="of the draws (default: 0)")


def variance_of(args: Namespace) -> Variance | None:
    """Read the options of variance; None without any.

    Raises:
        ValueError: a value that is out of range, or an option without the one that it belongs to.
    """
    slow = None
    if args.slow_devices is not None:
        slow = parse_slow(args.slow_devices, args.slow_place)
    else:
        require_absent(args, "slow_place", "--slow-devices")
    failures = None
    if args.failures is not None:
        given = {name: value for name in OF_FAILURES if (value := vars(args)[name]) is not None}
        failures = Failures(args.failures, **given)
    else:
        for name in OF_FAILURES:
            require_absent(args, name, "--failures")
    if args.jitter is None and args.rank_skew is None and slow is None and failures is None:
        require_absent(args, "seed", "--jitter, --rank-skew, --slow-devices or --failures")
        return None
    require(
        args.turns is None,
        "--turns must be left out with --jitter, --rank-skew, --slow-devices and --failures: episodes have variance of "
        "their own",
        args.turns,
        "give --environment-latency MEAN:STD, or no turns",
    )
    return Variance(args.jitter or 0.0, args.rank_skew or 0.0, slow, failures, args.seed or 0)


def parse_slow(text: str, place: Place | None = None) -> SlowDevices:
    """Read `COUNT`, `COUNT/OF` and `:FACTOR` after them.

    Example:
        parse_slow("1/32:2")   # SlowDevices(count=1, of=32, factor=2.0)
    """
    match = SLOW.fullmatch(text)
    if match is None:
        raise ValueError(f"--slow-devices must be COUNT, COUNT/OF or COUNT/OF:FACTOR, got {text!r}; e.g. 1/32:2")
    count, of, factor = match.groups()
    defaults = SlowDevices(1)
    return SlowDevices(
        int(count), None if of is None else int(of), float(factor or defaults.factor), place or defaults.place
    )


def in_words(variance: Variance, num_devices: int) -> str:
    """The variance of a run on so many devices, in words."""
    parts = []
    if variance.jitter:
        parts.append(f"jitter {variance.jitter:.3g}")
    if variance.rank_skew:
        parts.append(f"ranks skewed by {variance.rank_skew:.3g}")
    if (slow := variance.slow) is not None:
        where = "" if slow.place == "anywhere" else ", which generate on separate pools"
        parts.append(f"{slow.number(num_devices)} of {num_devices} devices take {slow.factor:g} times as long{where}")
    if (failures := variance.failures) is not None:
        parts.append(
            f"{failures.rate_per_h:g} failures per device and hour (a replica is back after {failures.replace_s:g} s, "
            f"a run after {failures.restart_s:g} s and with the checkpoint of up to {failures.save_freq} steps ago)"
        )
    return f"variance, seed {variance.seed}: {'; '.join(parts) or 'none'}"
