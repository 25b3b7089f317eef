# SPDX-License-Identifier: Apache-2.0
"""Intervals, which the timeline consists of: one lane did, or waited for, one thing from one moment to another.

- A lane is a unit that works as one: a replica, a reward worker, the trainer's ranks (which step together). It stands
  for `num_devices` devices, 0 where it has none of its own. A replacement takes the index of the replaced one.
- An interval serves one step: the logical batch it generates, scores, trains or publishes, even where it lies in the
  time of the step before. A step's own extent is its `step` interval, written by the driver when the step is over.
- Moments are unix seconds of the driver's clock.

One JSON object per line of `timeline.jsonl`; keys with the default value are left out:

| key | type | meaning |
| --- | --- | --- |
| `kind` | see `Kind` | what was done |
| `step` | int | the step that it served |
| `lane` | `POOL/INDEX` | who did it, e.g. `generator/0` |
| `host` | str | where |
| `num_devices` | int | devices that the lane stands for |
| `start_s`, `end_s` | float | unix seconds of the driver's clock |
| `version` | int | weight version that generated, was trained (before the commit), or was published |
| `chunk_id` | int or str | generate: which chunk; assist: the first of its chunks |
| `fragment_id` | int or str | train: which fragment; ranks that share it write the same id |
| `group_ids` | [str] | uids of the groups it worked on |
| `num_samples` | int | samples of the whole chunk, assist or fragment |
| `reason` | see `schedulers.types.WaitReason` | wait: for what |
| `is_cut` | bool | true: it went on after `end_s`; the next part starts there |
| `detail` | object | further facts, e.g. `{"predicted_gain_s": 0.4}`; numbers that are not finite as text |

*Invariants:* an interval survives its line unchanged; parts of a cut interval join into one of the whole length, and
two runs of the same chunk never do.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf, isfinite
from typing import Any, Literal, get_args

from verl_digen.schedulers.types import WaitReason

Pool = Literal["generator", "reward", "trainer", "driver"]
"""Owner of a lane."""

Kind = Literal[
    "train", "assist", "generate", "commit", "score", "wake", "sleep", "publish", "validate", "save", "wait", "step"
]
"""Activity of a lane:

| kind | meaning |
| --- | --- |
| `generate` | a generator denoises a chunk |
| `score` | a reward worker scores |
| `wake` | the weights of a reward that shares the replicas' devices come to its device |
| `sleep` | they leave it |
| `train` | the trainer accumulates the gradient of a fragment |
| `assist` | the trainer denoises chunks, one of each group |
| `commit` | the optimizer step of a logical batch |
| `publish` | weights move: sent by the trainer, taken by a replica |
| `validate` | fixed prompts are generated, between two steps: on the driver's lane |
| `save` | the trainer writes a checkpoint |
| `wait` | nothing, for a `WaitReason` |
| `step` | nothing by itself: the extent of a step, on the driver's lane |
"""

POOLS: tuple[Pool, ...] = get_args(Pool)
"""All pools, in the order in which a sample meets them, which is their order in pictures."""
KINDS: tuple[Kind, ...] = get_args(Kind)
WAIT_REASONS: tuple[WaitReason, ...] = get_args(WaitReason)
BUSY_KINDS: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind not in ("wait", "step"))
"""Kinds that are work. Where one lane does several at once, the first in this order gets the time."""
UNATTRIBUTED = "unattributed"
"""The cause of idle time that no interval covers. Never written, always reported."""

JOIN_GAP_S = 0.01
"""Largest gap between the parts of a cut interval. They touch, except for rounding."""


@dataclass(frozen=True)
class Lane:
    """One row of the timeline."""

    pool: Pool
    index: int
    host: str
    num_devices: int

    def __post_init__(self) -> None:
        if self.pool not in POOLS:
            raise ValueError(f"the pool of a lane must be one of {', '.join(POOLS)}, got {self.pool!r}")
        if self.index < 0 or self.num_devices < 0:
            raise ValueError(f"a lane's index and num_devices must be >= 0, got {self.index} and {self.num_devices}")

    @property
    def name(self) -> str:
        """`POOL/INDEX`: the lane's identity, whatever host it is on."""
        return f"{self.pool}/{self.index}"


@dataclass(frozen=True)
class Interval:
    """One line of the timeline, see the module's table.

    Example:
        >>> lane = Lane("generator", 0, host="node-1", num_devices=1)
        >>> chunk = Interval("generate", lane, 3, start_s=10.0, end_s=12.5, version=2, chunk_id="p7/0", num_samples=4)
        >>> chunk.duration_s
        2.5
    """

    kind: Kind
    lane: Lane
    step: int
    start_s: float
    end_s: float
    version: int | None = None
    chunk_id: int | str | None = None
    fragment_id: int | str | None = None
    group_ids: tuple[str, ...] = ()
    num_samples: int = 0
    reason: WaitReason | None = None
    is_cut: bool = False
    detail: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"the kind of an interval must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if not 0 <= self.end_s - self.start_s < inf:
            raise ValueError(
                f"{self.name} must end at a moment not before its start, got {self.start_s} s to {self.end_s} s"
            )
        if self.kind == "wait" and self.reason not in WAIT_REASONS:
            raise ValueError(f"{self.name} needs a reason, one of {', '.join(WAIT_REASONS)}, got {self.reason!r}")
        if self.kind != "wait" and self.reason is not None:
            raise ValueError(f"only a wait has a reason; {self.name} got {self.reason!r}")
        if self.kind in ("generate", "assist") and self.chunk_id is None:
            raise ValueError(f"{self.name} needs the chunk_id it generates")
        if self.kind == "train" and self.fragment_id is None:
            raise ValueError(f"{self.name} needs the fragment_id it trains")

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def name(self) -> str:
        """Kind, lane and step, for messages."""
        return f"interval {self.kind} of {self.lane.name} in step {self.step}"


# Fields of `Interval` that a line holds only where they differ from the default, and these defaults.
_OPTIONAL: dict[str, Any] = {
    entry.name: {} if entry.name == "detail" else entry.default
    for entry in fields(Interval)
    if entry.name not in ("kind", "lane", "step", "start_s", "end_s")
}


def to_line(interval: Interval) -> dict[str, Any]:
    """The JSON object of an interval."""
    lane = interval.lane
    values = {name: getattr(interval, name) for name in _OPTIONAL}
    values["detail"] = {  # JSON knows no infinity
        name: str(value) if isinstance(value, float) and not isfinite(value) else value
        for name, value in interval.detail.items()
    }
    return {
        "kind": interval.kind,
        "step": interval.step,
        "lane": lane.name,
        "host": lane.host,
        "num_devices": lane.num_devices,
        "start_s": interval.start_s,
        "end_s": interval.end_s,
        **{name: value for name, value in values.items() if value != _OPTIONAL[name]},
    }


def from_line(line: Mapping[str, Any]) -> Interval:
    """The interval of a JSON object. Raises KeyError, TypeError, ValueError: the object is not an interval."""
    values = dict(line)
    pool, _, index = values.pop("lane").partition("/")
    lane = Lane(pool, int(index), values.pop("host"), values.pop("num_devices"))
    if "group_ids" in values:
        values["group_ids"] = tuple(values["group_ids"])
    return Interval(lane=lane, **values)


def join_parts(intervals: Iterable[Interval]) -> list[Interval]:
    """Join the parts of cut intervals; sorted by start. A part without a next one (the run ended) stays as it is."""
    joined: list[Interval] = []
    open_at: dict[tuple[Any, ...], int] = {}
    for interval in sorted(intervals, key=lambda one: (one.start_s, one.end_s, one.lane.name)):
        identity = (
            *(interval.kind, interval.lane, interval.step, interval.chunk_id, interval.fragment_id),
            *(interval.group_ids, interval.reason),
        )
        position = open_at.pop(identity, None)
        if position is not None and abs(interval.start_s - joined[position].end_s) <= JOIN_GAP_S:
            joined[position] = replace(interval, start_s=joined[position].start_s)
        else:
            position = len(joined)
            joined.append(interval)
        if interval.is_cut:
            open_at[identity] = position
    return joined
