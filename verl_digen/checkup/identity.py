# SPDX-License-Identifier: Apache-2.0
"""Every replica's server computes on the device of its worker, by the driver's UUID, in processes that Ray starts."""

from __future__ import annotations

from typing import Any

import ray
import torch
from verl.plugin.platform import get_platform

from verl_digen.checkup.checks import CheckFailed, Setting
from verl_digen.rollout.birth import (
    SeenDevice,
    assigned_device,
    birth_variables,
    require_same_devices,
    visible_device,
)

TIMEOUT_S = 110.0
"""Timeout for the processes to start."""


class Worker:
    """A trainer's rank: Ray gives it a device."""

    def device(self) -> SeenDevice:
        """Its device."""
        return assigned_device()


class Server:
    """A replica's server: it is started on the device of its worker, and Ray gives it none."""

    def device(self) -> SeenDevice:
        """The device that it computes on."""
        device = get_platform().current_device()
        torch.ones(2, device=device).sum().item()
        return visible_device(0)


def check_identity(setting: Setting) -> str:
    """Start a worker and its server per device, and compare what they see.

    Raises:
        CheckFailed: a server computes elsewhere, or two workers share a device.
    """
    owns_ray = not ray.is_initialized()
    if owns_ray:
        ray.init(num_gpus=setting.num_devices, include_dashboard=False, log_to_driver=False, address="local")
    actors: list[Any] = []
    try:
        workers = [ray.remote(Worker).options(num_gpus=1, num_cpus=0).remote() for _ in range(setting.num_devices)]
        actors += workers
        given = ray.get([worker.device.remote() for worker in workers], timeout=TIMEOUT_S)
        servers = [
            ray.remote(Server).options(num_cpus=0, runtime_env={"env_vars": birth_variables(device.name)}).remote()
            for device in given
        ]
        actors += servers
        seen = ray.get([server.device.remote() for server in servers], timeout=TIMEOUT_S)
    finally:
        for actor in actors:
            ray.kill(actor)
        if owns_ray:
            ray.shutdown()
    return compare(given, seen)


def compare(given: list[SeenDevice], seen: list[SeenDevice]) -> str:
    """Compare the devices of workers and servers -> figure.

    Raises:
        CheckFailed: see `check_identity`.
    """
    try:
        for number, (worker, server) in enumerate(zip(given, seen, strict=True)):
            require_same_devices(f"replica {number}", [worker], [server])
    except RuntimeError as error:
        cause, _, remedy = str(error).partition("; ")
        raise CheckFailed(cause, remedy) from error
    ids = [device.uuid or device.name for device in given]
    if len(set(ids)) != len(ids):
        raise CheckFailed(f"{len(ids)} workers must have a device each, got {', '.join(ids)}")
    return f"{len(ids)} server(s) on the device of their worker: {', '.join(ids)}"
