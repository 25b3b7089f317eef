# SPDX-License-Identifier: Apache-2.0
"""FSDP2's private state, under the names of each PyTorch that can work (`verl_digen.hardware.versions`), and its
gathered parameters: kept from forward to forward, and dropped, also after an exception.

| PyTorch | parameter groups of a unit | reset after an exception |
| --- | --- | --- |
| 2.11 | at most one, `_fsdp_param_group` | by hand, `_reset` |
| 2.12 | several, `_fsdp_param_groups` | by hand, `_reset` |
| 2.13, 2.14 | several, `_fsdp_param_groups` | `FSDPModule.reset_iter_state` |
| 2.15 | several, `_fsdp_param_groups` | `FSDPModule.reset_iter_state`, which drops the gradient |

With `reshard_after_forward=false`, FSDP2's own `reshard` does nothing while a forward runs. After an exception FSDP2
assumes that the forward still runs, so a reader of the shards would get gathered parameters. Call `recover` first then.

Invariants: the functions do the same with every PyTorch that can work (tests/contracts/test_private_names.py);
afterwards a module's parameters are its shards; with `keeps` each unit gathers once, and the outputs are the same
(tests/engine/test_copies.py, test_gradients.py, test_assistant.py).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from verl_digen.hardware.torch_support import FSDP2_HAS_SEVERAL_GROUPS


def units_of(module: nn.Module) -> list[Any]:
    """FSDP2's state of every unit in the module; modules that share a unit give it once."""
    return list(dict.fromkeys(part._get_fsdp_state() for part in module.modules() if isinstance(part, FSDPModule)))


def groups_of(unit: Any) -> list[Any]:
    """Parameter groups of a unit, each of which is gathered at once; none if all its parameters are in other units."""
    if FSDP2_HAS_SEVERAL_GROUPS:
        return unit._fsdp_param_groups
    return [] if unit._fsdp_param_group is None else [unit._fsdp_param_group]


def all_groups(module: nn.Module) -> list[Any]:
    """Parameter groups of all units in the module."""
    return [group for unit in units_of(module) for group in groups_of(unit)]


def parameters_of(module: nn.Module) -> list[Any]:
    """FSDP2's record of every parameter."""
    return [parameter for group in all_groups(module) for parameter in group.fsdp_params]


def reset(root: Any) -> None:
    """Put the shards of a root module in place after an exception in its forward or backward, with nothing in flight. A
    gradient that waits to be reduced stays."""
    if hasattr(root, "reset_iter_state"):
        leaves = (
            getattr(one, name, None) for one in parameters_of(root) for name in ("sharded_param", "_unsharded_param")
        )
        gradients = [(leaf, leaf.grad) for leaf in leaves if leaf is not None and leaf.grad is not None]
        root.reset_iter_state()
        for leaf, gradient in gradients:
            leaf.grad = gradient.to(leaf.grad_dtype)
    else:
        _reset(root._get_fsdp_state())


def _reset(root: Any) -> None:
    """Do what `reset_iter_state` of PyTorch 2.13 does, line by line."""
    stream, shared = root._device_handle.current_stream(), root._comm_ctx
    _wait_for(shared.all_gather_state, stream)
    shared.all_gather_state = None
    if FSDP2_HAS_SEVERAL_GROUPS:
        for reduction in shared.reduce_scatter_states:
            _wait_for(reduction, stream)
        shared.reduce_scatter_states.clear()
    else:
        _wait_for(shared.reduce_scatter_state, stream)
        shared.reduce_scatter_state = None
    shared.post_forward_order.clear()
    for unit in root._state_ctx.all_states:
        unit._modules_to_run_forward.clear()
        unit._training_state = TrainingState.IDLE
        for group in groups_of(unit):
            _reset_group(group, stream)
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def _reset_group(group: Any, stream: Any) -> None:
    if group._all_gather_result is not None:
        if group._all_gather_result.all_gather_event is not None:
            stream.wait_event(group._all_gather_result.all_gather_event)
        if group._all_gather_result.all_gather_work is not None:
            group._all_gather_result.all_gather_work.wait()
        group._all_gather_result = None
    group._wait_for_post_backward()
    if group._reshard_after_forward_event is not None:
        group._wait_all_gather_streams_on_event(group._reshard_after_forward_event)
        group._reshard_after_forward_event = None
    group._partial_reduce_output = None
    group._post_forward_indices.clear()
    group._training_state = TrainingState.IDLE
    group._to_sharded()


def _wait_for(collective: Any, stream: Any) -> None:
    """Make the stream wait for a collective in flight, if there is one."""
    if collective is not None and collective.event is not None:
        stream.wait_event(collective.event)


def compute_dtype(parameter: Any) -> torch.dtype:
    """dtype of a parameter while it is gathered."""
    return parameter.mp_policy.param_dtype or parameter.sharded_param.dtype


def gathered_bytes(parameters: Iterable[Any]) -> int:
    """Bytes that parameters, FSDP2's records of them, take on a rank while they are gathered."""
    return sum(one._orig_size.numel() * compute_dtype(one).itemsize for one in parameters)


def keep_gathered(module: nn.Module) -> Callable[[], None]:
    """Keep parameters from forward to forward, as FSDP2's `set_reshard_after_forward(False)` -> function that undoes
    it, and drops them."""
    meshes = [(group, group.post_forward_mesh_info) for group in all_groups(module)]
    for group, _ in meshes:
        group.post_forward_mesh_info = None

    def undo() -> None:
        for group, mesh in meshes:
            group.post_forward_mesh_info = mesh
        reshard(module)

    return undo


@contextmanager
def forwards(module: nn.Module, *, keeps: bool) -> Iterator[None]:
    """Context for forwards without gradient; after it, also after an exception, the parameters are the shards. With
    `keeps`, the same on all ranks, a unit gathers its parameters in its first forward alone; else in every one, T times
    in a denoising loop."""
    shard_again = keep_gathered(module) if keeps else partial(reshard, module)
    try:
        yield
    except BaseException:
        recover(module)
        raise
    finally:
        shard_again()


@contextmanager
def kept_after_backward(module: nn.Module, keeps: bool) -> Iterator[None]:
    """Context in which units that keep their parameters after a forward (`reshard_after_forward=false`, a whole base)
    keep them after its backward too, if `keeps`: the next tile, with the same weights, does not gather. The same on all
    ranks."""
    groups = [group for group in all_groups(module) if group.post_forward_mesh_info is None] if keeps else []
    for group in groups:
        group.reshard_after_backward = False
    try:
        yield
    finally:
        for group in groups:
            group.reshard_after_backward = True


def reshard(module: nn.Module) -> None:
    """Make every FSDP2 unit of `module` drop its gathered parameters. After an exception call `recover` first."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def recover(module: nn.Module) -> None:
    """Reset the module after an exception in a forward or backward; the gradient stays."""
    # a module becomes a root in its first forward, before which there is nothing to recover from
    if isinstance(module, FSDPModule) and module._get_fsdp_state()._is_root:
        reset(module)
