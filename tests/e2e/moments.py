# SPDX-License-Identifier: Apache-2.0
"""Signals that a run's processes send themselves at exact moments, and replicas that are slow.

Python imports `sitecustomize` at the start of every process of a run, and that one calls `interfere`: whatever the
machine's speed, a process is stopped or killed in the middle of what a test names.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_digen.plugin import after_import

if TYPE_CHECKING:  # a run's processes import this too
    import pytest

ROOT = Path(__file__).resolve().parents[2]

SITECUSTOMIZE = """
import os
import sys
from pathlib import Path
from signal import Signals


def customize():
    from tests.e2e.moments import Moments, interfere

    interfere(Moments(Path({run_dir!r}), Signals({signal!r}), {moments!r}, {sample_s!r}))


if sys.orig_argv[1:2] == ["-c"]:  # the server of forks, which must not import Ray yet
    os.register_at_fork(after_in_child=customize)
else:
    customize()
"""


def step_of(run_dir: Path) -> int:
    """The step under way in a run that saves after each."""
    pointer = run_dir / "latest_checkpointed_iteration.txt"
    return int(pointer.read_text()) + 1 if pointer.exists() else 1


@dataclass(frozen=True)
class Moments:
    """Moments of a run that saves after each step, and what happens then."""

    run_dir: Path
    by: signal.Signals
    """Signal that a process sends itself, once per moment of the run."""
    from_step: Mapping[str, int]
    """generation, load and validation of a replica, training of a trainer's rank -> the first step in which it is
    sent."""
    sample_s: float = 0.0
    """Seconds by which a replica takes longer for each sample."""

    def happen(self, moment: str) -> None:
        """Send this process the signal, if this is the moment for the first time."""
        if moment not in self.from_step or step_of(self.run_dir) < self.from_step[moment]:
            return
        try:
            (self.run_dir / f"signalled_in_{moment}").touch(exist_ok=False)
        except FileExistsError:
            return
        self.own_weights.unlink(missing_ok=True)
        os.kill(os.getpid(), self.by)

    def happen_beside_another(self, moment: str) -> None:
        """Let it happen, unless this replica is the last one that has weights: without it the run would end."""
        if set(self.run_dir.glob("weights_of_*")) - {self.own_weights}:
            self.happen(moment)

    @property
    def own_weights(self) -> Path:
        """File that exists while this process is a replica that has weights and got no signal."""
        return self.run_dir / f"weights_of_{os.getpid()}"


def interfere(moments: Moments) -> None:
    """Change the classes of replicas and ranks as soon as this process has imported them."""
    after_import("verl_digen.rollout.server", lambda: _interfere_with_replicas(moments))
    after_import("verl_digen.engine.worker", lambda: _interfere_with_ranks(moments))


def _interfere_with_replicas(moments: Moments) -> None:
    from verl_digen.rollout.server import DiffusersServer

    devices = DiffusersServer.visible_devices
    generate, activate = DiffusersServer._generate, DiffusersServer.activate_weights

    async def note_start(self: Any) -> Any:
        (moments.run_dir / f"started_{os.getpid()}").touch()
        return await devices(self)

    def signal_and_generate(self: Any, requests: Sequence[Any], should_stop: Callable[[], bool]) -> Any:
        moments.happen_beside_another("validation" if requests[0].uid.startswith("val") else "generation")
        time.sleep(moments.sample_s * len(requests))
        return generate(self, requests, should_stop)

    async def signal_and_activate(self: Any) -> Any:
        moments.happen_beside_another("load")
        activated = await activate(self)
        moments.own_weights.touch()
        return activated

    DiffusersServer.visible_devices = note_start
    DiffusersServer._generate, DiffusersServer.activate_weights = signal_and_generate, signal_and_activate


def _interfere_with_ranks(moments: Moments) -> None:
    from verl_digen.engine.worker import DiffusionWorker

    accumulate: Any = DiffusionWorker.accumulate

    def signal_and_accumulate(self: Any, *args: Any, **kwargs: Any) -> Any:
        moments.happen("training")
        return accumulate(self, *args, **kwargs)

    signal_and_accumulate.__dict__.update(accumulate.__dict__)  # how verl dispatches it
    DiffusionWorker.accumulate = signal_and_accumulate


def interfere_with_runs(
    patch: pytest.MonkeyPatch, folder: Path, run_dir: Path, by: signal.Signals, sample_s: float = 0.0, **moments: int
) -> None:
    """Have runs that start from now on interfere with themselves, see `Moments`; `folder` takes the code."""
    code = SITECUSTOMIZE.format(run_dir=str(run_dir), signal=int(by), moments=moments, sample_s=sample_s)
    (folder / "sitecustomize.py").write_text(code)
    patch.setenv("PYTHONPATH", f"{folder}:{ROOT}", prepend=":")
