# SPDX-License-Identifier: Apache-2.0
"""Rewards: `digen.reward`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from verl_digen.config.rollout import MAX_SAMPLES
from verl_digen.require import In, check_fields, require, require_value

MAX_RETRIES = 1000
MAX_WORKERS = 10_000
"""More processes than rewards of a cluster have. Catches typos."""
COMBINED = ("sum", "gdpo")
"""Built-in values of `digen.reward.combine`."""
ALWAYS, VALIDATION = "always", "validation"
"""Values of an entry's `when`."""
FUNCTIONS, RECIPE_FUNCTIONS = "digen.reward.functions", "digen.reward.recipe_functions"
"""The mappings that name rewards."""
OF_ALL = ("mean", "std", "min", "max", "zero_spread_fraction")
"""Metrics `reward/*` of the trained reward, beside those of each reward by its name."""


@dataclass(frozen=True)
class PoolSettings:
    """Processes of one reward's own pool."""

    num_workers: Annotated[int, In(f"[1, {MAX_WORKERS}]")] = 1
    """Processes. Each makes the reward once."""
    num_gpus: Annotated[float, In("[0, inf)")] = 0.0
    """Devices per process: 0 is the CPU, 0.5 half a device."""
    max_batch_size: Annotated[int, In(f"[1, {MAX_SAMPLES}]")] = 8
    """Maximum samples of one call."""
    batch_wait_s: Annotated[float, In("[0, inf]")] = 0.05
    """Seconds that a call waits for another sample until it is full."""
    timeshare: bool = False
    """True: one process on each device of the trainer and its replicas, in place of `num_workers` and `num_gpus`. It
    scores when all samples of the batch are generated, and its weights wait in host memory otherwise."""


@dataclass(frozen=True)
class RewardEntry:
    """One reward of `digen.reward.functions`, or of the recipe's."""

    name: str
    weight: float
    target: str
    """A built-in name, package.module.NAME, or FILE.py:NAME."""
    arguments: Mapping[str, Any]
    """Keyword arguments of a function, or settings of a class."""
    pool: PoolSettings | None
    """None: a function that `reward.num_workers` processes share with the other functions. A class has a pool always;
    None gives it the defaults."""
    when: Literal["always", "validation"] = ALWAYS
    """Samples that it scores: all, or only validation samples."""
    is_gold: bool = False
    """True: higher is better, it is not trained on, and the alarm for hacking compares the trained reward with it."""
    data_sources: tuple[str, ...] | None = None
    """`data_source` of the prompts whose samples it scores; None: of all."""
    section: str = FUNCTIONS
    """The mapping that names it."""

    @property
    def pool_settings(self) -> PoolSettings:
        """Settings of its pool, if it has one: those given, or the defaults."""
        return PoolSettings() if self.pool is None else self.pool

    @property
    def is_timeshared(self) -> bool:
        """True if it takes turns with the replicas on their devices."""
        return self.pool_settings.timeshare

    @property
    def key(self) -> str:
        """The entry's key as typed."""
        return f"{self.section}.{self.name}"

    def covers(self, data_source: str) -> bool:
        """True if it scores samples of prompts of this source."""
        return self.data_sources is None or data_source in self.data_sources

    def scores(self, data_source: str, *, is_validation: bool) -> bool:
        """True if it scores a sample; if not, the sample has no part of that name."""
        return self.covers(data_source) and (is_validation or self.when == ALWAYS)


@dataclass(frozen=True)
class RewardConfig:
    """Rewards of a sample. verl's `reward.custom_reward_function` is added as `custom`."""

    functions: Any = None
    """Name -> weight, or a mapping with `weight` and other keys. A weight of 0 only logs. null: `recipe_functions`."""
    recipe_functions: dict[str, Any] = field(default_factory=dict)
    """The recipe's rewards, in the same form. `functions` replaces them all; `recipe_functions.NAME=...` adds or
    changes one."""
    custom_weight: float = 1.0
    """Weight of `reward.custom_reward_function`, if there is one."""
    combine: str = "sum"
    """sum: the weighted sum. gdpo: the weighted sum of rewards normalised within their group. Or
    package.module.function or FILE.py:function of (values, weights), two mappings by name, which returns the reward."""
    max_retries: Annotated[int, In(f"[0, {MAX_RETRIES}]")] = 2
    """Retries before a sample fails, if its reward raises or its reward worker dies."""
    timeout_s: Annotated[float, In("(0, inf)")] = 300.0
    """Timeout of a call. A chunk's scores may take `timeout_s` x (2 + `max_retries`), and more if earlier ones did."""
    stop_on_hacking: bool = False
    """End the run when the trained reward rises and a gold reward falls, and keep the checkpoint of each gold reward's
    best validation."""

    def __post_init__(self) -> None:
        require(
            self.functions is None or isinstance(self.functions, Mapping),
            f"{FUNCTIONS} must be a mapping of names, or null for the recipe's",
            self.functions,
            f"set e.g. {FUNCTIONS}={{jpeg_compressibility: 1.0}}",
        )
        _ = self.entries  # raises ValueError for a broken one
        check_fields(self, "digen.reward.")

    @property
    def entries(self) -> tuple[RewardEntry, ...]:
        """The rewards of `functions`, or of the recipe where that is null."""
        section, given = FUNCTIONS, self.functions
        if given is None:
            section, given = RECIPE_FUNCTIONS, self.recipe_functions
        return tuple(reward_entry(str(name), value, section) for name, value in given.items())

    @property
    def score_s(self) -> float:
        """Minimum timeout of scoring a chunk: all tries of a sample, and the time of one more in a queue."""
        return self.timeout_s * (2 + self.max_retries)

    @property
    def limits(self) -> tuple[int, float]:
        """(retries of a call, its timeout in s)."""
        return self.max_retries, self.timeout_s

    @property
    def timeshared(self) -> tuple[RewardEntry, ...]:
        """Rewards that take turns with the replicas on their devices, in order."""
        return tuple(entry for entry in self.entries if entry.is_timeshared)

    @property
    def golds(self) -> tuple[str, ...]:
        """Names of the gold rewards."""
        return tuple(entry.name for entry in self.entries if entry.is_gold)

    def weights(self, *, has_custom: bool) -> dict[str, float]:
        """Name -> weight of every reward; `custom` is the user's own function."""
        named = {entry.name: entry.weight for entry in self.entries}
        return named | ({"custom": self.custom_weight} if has_custom else {})


def reward_entry(name: str, value: Any, section: str = FUNCTIONS) -> RewardEntry:
    """Read one entry of the mapping `section`. Raises ValueError for a broken rule."""
    key = f"{section}.{name}"
    rule = f"{section} must not name a reward {', '.join(OF_ALL)}: its metric would hide that of the trained reward"
    require(name not in OF_ALL, rule, name, "choose another name: NAME: {weight: 1, reward: FILE.py:FUNCTION}")
    if not isinstance(value, Mapping):
        return RewardEntry(name, _number(key, value), name, {}, None, section=section)
    given = dict(value)
    require("weight" in given, f"{key} must have a weight", given, f"set e.g. {key}.weight=1.0; 0 only logs")
    weight, target = _number(f"{key}.weight", given.pop("weight")), given.pop("reward", name)
    is_gold, sources = given.pop("gold", False), given.pop("data_sources", None)
    when = given.pop("when", VALIDATION if is_gold else ALWAYS)
    for word, holds, rule, found, remedy in (
        ("reward", isinstance(target, str), "be a name", target, "name a built-in reward, or its import path"),
        ("gold", isinstance(is_gold, bool), "be true or false", is_gold, "leave it out for false"),
        ("when", when in (ALWAYS, VALIDATION), f"be {ALWAYS} or {VALIDATION}", when, f"leave it out for {ALWAYS}"),
        ("data_sources", _are_names(sources), "be a list of different names", sources, "leave it out for all prompts"),
    ):
        require(holds, f"{key}.{word} must {rule}", found, remedy)
    if is_gold:
        why, remedy = f"with {key}.gold=true: a gold reward is not trained on", f"leave {key}.gold out"
        require_value(f"{key}.weight", weight, 0, why, f"set {key}.weight=0, or {remedy}")
    if weight != 0:
        why = f"where {key}.weight={weight:g} is not 0: what is trained on scores every sample"
        require_value(f"{key}.when", when, ALWAYS, why, f"set {key}.weight=0, or leave {key}.when out")
    own = {known: given.pop(known) for known in PoolSettings.__dataclass_fields__ if known in given}
    pool = _pool(key, own) if own else None
    return RewardEntry(name, weight, target, given, pool, when, is_gold, sources and tuple(sources), section)


def _are_names(given: Any) -> bool:
    """True for a list of different names, or None."""
    if given is None:
        return True
    is_list = isinstance(given, list | tuple) and bool(given) and all(isinstance(one, str) for one in given)
    return is_list and len({*given}) == len(given)


def _pool(key: str, given: Mapping[str, Any]) -> PoolSettings:
    """Check the settings of a pool."""
    pool, remedy = PoolSettings(**given), "leave it out for the default"
    require(isinstance(pool.timeshare, bool), f"{key}.timeshare must be true or false", pool.timeshare, remedy)
    for name in ("num_workers", "num_gpus"):
        require(
            not pool.timeshare or name not in given,
            f"{key}.{name} must be left out with {key}.timeshare=true, which has one process on each of the trainer's "
            "devices",
            given.get(name),
            f"leave it out, or {key}.timeshare for devices of the reward's own",
        )
    check_fields(pool, f"{key}.")
    require_devices(f"{key}.num_gpus", pool.num_gpus)
    return pool


def require_devices(key: str, num_gpus: float) -> None:
    """Require a number of devices that Ray gives a process."""
    rule = f"{key} must be a fraction of one device, or a whole number"
    require(num_gpus < 1 or num_gpus == int(num_gpus), rule, num_gpus, "0 computes on the CPU")


def _number(key: str, value: Any) -> float:
    holds = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    require(holds, f"{key} must be a number", value, "1.0 is usual; a function is {weight: 1, reward: FILE.py:NAME}")
    return float(value)
