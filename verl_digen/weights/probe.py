# SPDX-License-Identifier: Apache-2.0
"""Proof that a weight update took effect: each replica's report on its weights, and the checks on it. Pure.

A replica takes a `Probe` when it switches to new weights, at the first updates and then every
`digen.rollout.probe_every` ones: a forward of its network on fixed inputs, as a few numbers (see
`rollout/fingerprint.py`, `rollout/vllm_omni/probing.py`). The driver compares the last probes (`check_probes`):

| fault | symptom |
| --- | --- |
| the replica's network does not use the weights that it received | the weights changed, the fingerprint did not |
| a replica computes with other weights than it holds | its fingerprint differs from a replica with the same weights |
| the update broke the network | the fingerprint is not finite |
| an update did not reach a replica | it has received an older version |

Invariants (tests/weights/test_probe.py): each row above raises; equal or properly changed probes never do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

MAX_SPREAD = 0.05
"""Maximum relative difference of two replicas' fingerprints under the same weights. bf16 kernels of two types of
accelerators differ by about 1 %; networks with different weights by about 100 %."""

PEFT_PREFIX = "base_model.model."
"""Prefix of tensor names in a network wrapped by peft."""


@dataclass(frozen=True)
class Probe:
    """Report of one replica on one set of weights. Written by the replica's server, read by the driver.

    Example:
        Probe(version=3, checksums=(0x5EED,), num_tensors=120, fingerprint=(0.91, -13.2))
    """

    version: int
    """Weight version that the replica had just loaded."""
    checksums: tuple[int, ...]
    """Per network of the checkpoint, in order: `verl_digen.weights.checksum` of the tensors that decide its output
    (`decides`). Equal for equal weights."""
    num_tensors: int
    """Tensors of the update that were loaded."""
    fingerprint: tuple[float, ...]
    """Two numbers per network of the checkpoint: root mean square and ±1 projection of its velocity on fixed inputs,
    the projection divided by the root of the number of elements."""

    def __post_init__(self) -> None:
        if len(self.fingerprint) != 2 * len(self.checksums):
            raise ValueError(
                f"a fingerprint must have two numbers for each of {len(self.checksums)} networks, "
                f"got {len(self.fingerprint)}"
            )

    def of_network(self, number: int) -> tuple[float, ...]:
        """The fingerprint of one network."""
        return self.fingerprint[2 * number : 2 * number + 2]


def decides(name: str) -> bool:
    """True if a change of the tensor `name` of an update must change the network's output.

    False for a LoRA adapter's A: it has no effect while B is zero, and weight decay alone changes it.
    """
    return "lora_A" not in name.split(".")


def network_of(name: str, networks: Sequence[str]) -> int:
    """Index of the checkpoint's network that the tensor `name` of an update belongs to.

    Args:
        networks: names of the networks in order (`DiffusionModel.experts`). If there are several, they prefix the
            names of their tensors.

    Raises:
        RuntimeError: no network's name is the prefix.

    Example:
        network_of("base_model.model.transformer_2.proj_out.lora_B.weight", ("transformer", "transformer_2"))   # 1
    """
    if len(networks) == 1:
        return 0
    first = name.removeprefix(PEFT_PREFIX).partition(".")[0]
    if first not in networks:
        raise RuntimeError(f"a tensor of an update must belong to one of {', '.join(networks)}, got {name!r}")
    return networks.index(first)


def is_probe_due(num_updates: int, every: int) -> bool:
    """True if a replica's update number `num_updates`, counted from 0, is probed: the first three, then every
    `every`-th; never if `every` is 0."""
    return every > 0 and (num_updates < 3 or num_updates % every == 0)


def check_probes(probes: Mapping[str, Sequence[Probe]]) -> dict[str, float]:
    """Compare every replica's newest probe with its previous one, and with the other replicas'.

    Args:
        probes: replica -> its last two probes, older first; fewer if it has taken fewer.

    Returns:
        | name | meaning |
        | --- | --- |
        | `rollout/probe_spread` | largest difference of fingerprints under equal weights, relative to their size |
        | `rollout/probe_change` | smallest relative change between a replica's two probes whose weights differ |

    Raises:
        RuntimeError: one of the first three rows of the module's table; says which replica and where to look.

    Example:
        old, new = Probe(0, (7,), 9, (1.0, 2.0)), Probe(1, (8,), 9, (1.0, 2.1))
        check_probes({"r0": [old, new]})   # {"rollout/probe_change": 0.043}
        check_probes({"r0": [old, replace(new, fingerprint=old.fingerprint)]})   # RuntimeError
    """
    newest = {name: taken[-1] for name, taken in probes.items() if taken}
    for name, probe in newest.items():
        if not all(map(math.isfinite, probe.fingerprint)):
            raise RuntimeError(
                f"replica {name} computes {probe.fingerprint} with the weights of version {probe.version}, which "
                "must be finite; look at actor/grad_norm of the last steps, lower "
                "actor_rollout_ref.actor.optim.lr and resume from an earlier checkpoint"
            )
    changes = [change for name, taken in probes.items() for pair in pairwise(taken) for change in _changes(name, *pair)]
    spread = _spread(newest)
    metrics = {} if spread is None else {"rollout/probe_spread": spread}
    return metrics | ({"rollout/probe_change": min(changes)} if changes else {})


def check_reached(received: Mapping[str, int | None], serving: Sequence[int], published: int) -> dict[str, float]:
    """Check that a published version reached every replica. It may serve an older one until it has time to switch.

    Args:
        received: replica -> newest version that it received completely; None before the first.
        serving: versions that the replicas generate with. published: newest published version.

    Returns:
        `rollout/version_lag_max_versions`, the largest number of versions that a replica is behind.

    Raises:
        RuntimeError: a replica did not receive the published version.
    """
    for name, version in received.items():
        if version != published:
            raise RuntimeError(
                f"version {published} was published and replica {name} has received {version}, so weight updates do "
                "not reach it; look in the run's log for errors of update_weights and seal_update, and for replicas "
                "that are lost"
            )
    return {"rollout/version_lag_max_versions": float(published - min(serving))}


def _changes(name: str, before: Probe, now: Probe) -> list[float]:
    """Relative fingerprint change of each network whose weights changed."""
    changes = []
    for number, (old, new) in enumerate(zip(before.checksums, now.checksums, strict=True)):
        if old == new:
            continue
        changes.append(_distance(before.of_network(number), now.of_network(number)))
        if changes[-1] == 0:
            which = f"network {number + 1} of {len(now.checksums)}" if len(now.checksums) > 1 else "its network"
            raise RuntimeError(
                f"replica {name} took version {now.version} ({now.num_tensors} tensors, checksum {new:x}, after "
                f"{old:x} of version {before.version}) and {which} computes bitwise what it did before, so it does not "
                "use these weights; check that actor_rollout_ref.model.target_modules names layers that the replica "
                "adapts, or set actor_rollout_ref.model.lora.merge=true. digen.rollout.probe_every=0 turns this check "
                "off"
            )
    return changes


def _spread(probes: Mapping[str, Probe]) -> float | None:
    """Largest relative difference between replicas with the same weights; None if no two have the same."""
    by_weights: dict[tuple[int, ...], list[tuple[str, Probe]]] = {}
    for name, probe in sorted(probes.items()):
        by_weights.setdefault(probe.checksums, []).append((name, probe))
    largest = None
    for group in by_weights.values():
        for (one, first), (other, second) in pairwise(group):
            spread = _distance(first.fingerprint, second.fingerprint)
            if spread > MAX_SPREAD:
                raise RuntimeError(
                    f"replicas {one} and {other} have the same weights (versions {first.version} and {second.version}) "
                    f"and compute different outputs on the same input: {first.fingerprint} and {second.fingerprint}, "
                    f"{spread:.1%} apart where {MAX_SPREAD:.0%} is legal; look for a replica with another dtype, "
                    "quantisation or checkpoint. digen.rollout.probe_every=0 turns this check off"
                )
            largest = max(largest or 0.0, spread)
    return largest


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Norm of the difference, divided by the larger norm."""
    size = max(math.hypot(*one), math.hypot(*other))
    return math.dist(one, other) / size if size else 0.0
