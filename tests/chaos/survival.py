# SPDX-License-Identifier: Apache-2.0
"""Faults that a run must survive, by what the project promises, and faults for which it may end with `RunStopped`.

| fault | promise |
| --- | --- |
| slow, done twice | the run goes on |
| a generation or a scoring raises | the run goes on: the sample is retried |
| something else raises, e.g. a replica refuses weights | the run may end: it would do so again |
| a replica, its checkpoint worker or a reward worker fails otherwise | the run goes on while another one is left |
| a rank, an agent loop worker or TransferQueue fails | the run may end |
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.chaos.faults import AGENT, ENGINE, QUEUE, RANK, REWARD, SERVER, Fault, Kind
from tests.chaos.world import World


def may_end(world: World, struck: Sequence[Fault]) -> bool:
    """True if a run in which these faults struck may stop before its last batch."""
    harmful = [fault for fault in struck if not _is_harmless(fault)]
    replicas = {fault.process.split()[1] for fault in harmful if fault.process_kind in (SERVER, ENGINE)}
    rewards = {fault.process for fault in harmful if fault.process_kind == REWARD}
    return (
        len(replicas) == world.num_replicas
        or len(rewards) == world.num_rewards
        or any(fault.kind is Kind.RAISES or fault.process_kind in (RANK, AGENT, QUEUE) for fault in harmful)
    )


def _is_harmless(fault: Fault) -> bool:
    if fault.kind is Kind.RAISES:
        return fault.method in ("generate", "compute_score")
    return fault.kind in (Kind.SLOW, Kind.TWICE)
