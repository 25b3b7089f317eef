# SPDX-License-Identifier: Apache-2.0
"""Forwards of one network by several processes in lockstep, each with its share of a row's tokens. No Ray.

    leader (rank 0)                                followers (other ranks)
    with leader.session(wait):                     follow(networks, device)
        network(**inputs)   -- number, inputs -->      network(**inputs)      all take part in the forward's collectives
        network(**inputs)   -- number, inputs -->      network(**inputs)
    end of the session      -- end ------------>   returns

- The leader decides everything: latents, noise, conditions, order. Followers run the forwards they are told, with
  bitwise the leader's inputs, and drop the output, which every rank has.
- Followers hear of a forward from a hook on the network, so every caller of the network works as it is.
- Every wait is a collective with the group's timeout. An error outside of a forward ends the session in order. After
  one inside a forward, or a lost rank, the ranks are out of step, and `OutOfStep` is raised: the processes must end.

Invariants (tests/rollout/test_lockstep.py): latents and log-probs equal those of one process to 1e-5; a follower that
dies or stops answering is an error of the leader, never a hang.
"""

from __future__ import annotations

import io
import pickle
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage] - public, says its doc
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl_digen.models.sequence import MESH_DIMS

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
"""Device type -> backends of the group; gloo carries what is not a tensor."""
HOST = "127.0.0.1"
LEADER = 0


class OutOfStep(RuntimeError):
    """The ranks do not run the same forwards any more; none of them can go on."""


def open_store(timeout_s: float) -> TCPStore:
    """The leader's store, on a free port (`TCPStore.port`) that no other machine reaches."""
    listener = socket.create_server((HOST, 0))
    return TCPStore(
        HOST,
        listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def find_store(port: int, timeout_s: float) -> TCPStore:
    """The leader's store, for a follower on the same node."""
    return TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def join_group(store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> DeviceMesh:
    """Make this process a rank of the default group -> mesh for `split_networks`. Collective.

    Args:
        timeout_s: bound of every collective.

    Raises:
        RuntimeError: a rank did not come in time.
    """
    dist.init_process_group(
        BACKENDS[device.type], store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    # a dimension of all ranks is the default group itself, with its timeout
    return init_device_mesh(device.type, (1, size), mesh_dim_names=MESH_DIMS)


class Leader:
    """Rank 0; see the module.

    Args:
        networks: split networks, in the same order on every rank.
        device: of their inputs.
    """

    def __init__(self, networks: Sequence[nn.Module], device: torch.device):
        self._device = device
        self._is_open = False
        self._is_running = False
        """True inside a forward, which the followers then run, too."""
        for number, network in enumerate(networks):
            network.register_forward_pre_hook(partial(self._announce, number), with_kwargs=True)
            network.register_forward_hook(self._on_output)

    def _announce(self, number: int, network: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        if not self._is_open:
            raise RuntimeError("a network that several processes share must run inside a session of its leader")
        self._is_running = True
        _send((number, args, inputs), self._device)

    def _on_output(self, network: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._is_running = False

    @contextmanager
    def session(self, wait: Callable[[], Any]) -> Iterator[None]:
        """Context in which the networks may run; the followers must be in `follow`, or enter it soon.

        Args:
            wait: returns when every follower has left `follow`; raises if one does not.

        Raises:
            OutOfStep: an error inside a forward, or a follower that was lost.
        """
        self._is_open, self._is_running = True, False
        try:
            yield
        finally:
            self._is_open = False
            try:
                if self._is_running:
                    raise RuntimeError("the leader left a forward in which the others wait for it")
                _send(None, self._device)
                wait()
            except Exception as error:
                raise OutOfStep(f"the ranks of a replica do not run the same forwards any more: {error}") from error


@torch.no_grad()
def follow(networks: Sequence[nn.Module], device: torch.device) -> int:
    """Run the leader's forwards until its session ends -> their number.

    Raises:
        Exception: of a forward, or of a collective; the ranks are then out of step.
    """
    num_forwards = 0
    while (announced := _receive(device)) is not None:
        number, args, inputs = announced
        networks[number](*args, **inputs)
        num_forwards += 1
    return num_forwards


# -- messages -----------------------------------------------------------------------------------------------------
class _Packer(pickle.Pickler):
    """Leaves the tensors on a device out of the message, and collects them."""

    def __init__(self, file: io.BytesIO, device: torch.device):
        super().__init__(file)
        self._device = device
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor) or obj.device.type != self._device.type:
            return None
        self.tensors.append(obj)
        return tuple(obj.shape), obj.dtype


class _Unpacker(pickle.Unpickler):
    """Puts empty tensors in the place of those that were left out, and collects them in the same order."""

    def __init__(self, file: io.BytesIO, device: torch.device):
        super().__init__(file)
        self._device = device
        self.tensors: list[Tensor] = []

    def persistent_load(self, pid: Any) -> Tensor:
        shape, dtype = pid
        self.tensors.append(torch.empty(shape, dtype=dtype, device=self._device))
        return self.tensors[-1]


def _send(message: Any, device: torch.device) -> None:
    file = io.BytesIO()
    packer = _Packer(file, device)
    packer.dump(message)
    dist.broadcast_object_list([file.getvalue()], src=LEADER, device=torch.device("cpu"))
    for tensor in packer.tensors:
        _broadcast(tensor.detach().contiguous())


def _receive(device: torch.device) -> Any:
    received: list[Any] = [None]
    dist.broadcast_object_list(received, src=LEADER, device=torch.device("cpu"))
    unpacker = _Unpacker(io.BytesIO(received[0]), device)
    message = unpacker.load()
    for tensor in unpacker.tensors:
        _broadcast(tensor)
    return message


def _broadcast(tensor: Tensor) -> None:
    """Broadcast a contiguous tensor as bytes, for which every backend has a type."""
    if tensor.numel() > 0:
        dist.broadcast(tensor.view(-1).view(torch.uint8), src=LEADER)
