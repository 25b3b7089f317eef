# SPDX-License-Identifier: Apache-2.0
"""The tensors of the pretend device, and how an operation on them runs.

A `PretendTensor` wraps a CPU tensor. Operations reach `dispatch` in two ways: those on a wrapper through
`__torch_dispatch__`, and those that make a tensor on the device through the device's fallback (`backend.py`). No mode
needs to be active, so threads work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.pretend import copies
from tests.pretend.memory import memory
from tests.pretend.record import current, place

NAME = "pretend"
aten = torch.ops.aten

READS = {
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}
"""Operations whose result, or its shape, the host waits for."""
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""Operations whose indices may be on the host."""
TAKES_SCALARS = {aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.where.self, aten.fill_.Tensor}
"""Operations, besides elementwise ones, that take a scalar tensor of the host."""


class PretendTensor(Tensor):
    """A tensor on the pretend device; `inner` holds its numbers on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> PretendTensor:
        return Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device(NAME, 0),
        )

    def __init__(self, inner: Tensor):
        memory.track(inner)
        self.inner = inner

    def __repr__(self, **unused: Any) -> str:
        return f"PretendTensor({tuple(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def set_(self, source: torch.UntypedStorage) -> PretendTensor:  # type: ignore[override]
        """A tensor of all of `source`; unlike PyTorch's it is another object."""
        return PretendTensor(torch.empty(0, dtype=self.dtype).set_(source))

    def tolist(self) -> Any:
        copies.wait("value")
        return self.inner.tolist()

    def numpy(self, *unused: Any, **options: Any) -> Any:
        raise TypeError("can't convert a pretend:0 tensor to numpy; use Tensor.cpu() first")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = self.detach().clone().requires_grad_(self.requires_grad)
        return torch.nn.Parameter(copy, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copy

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return dispatch(func, *args, **(kwargs or {}))


def dispatch(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run one operation on the CPU, with the rules of the device."""
    if func is aten._to_copy.default:
        return _to_copy(*args, **kwargs)
    if func is aten.copy_.default:
        return _copy(*args, **kwargs)
    if func is aten._pin_memory.default:
        raise RuntimeError(f"cannot pin {NAME} tensors: only dense CPU tensors can be pinned")
    if func is aten.is_pinned.default:
        return False
    flat, spec = tree_flatten((args, kwargs))
    own = {id(value.inner): value for value in flat if isinstance(value, PretendTensor)}
    _check_devices(func, flat, bool(own))
    if func in READS or (func in INDEXING and _index_stalls(func, args)):
        copies.wait("value" if func in READS else "index")
    target = kwargs.get("device")
    on_device = is_device(target) if target is not None else bool(own)
    inner_args, inner_kwargs = tree_unflatten([_inner(value) for value in flat], spec)
    result = func(*inner_args, **inner_kwargs)
    flat_result, result_spec = tree_flatten(result)
    return tree_unflatten([_outer(func, value, own, on_device) for value in flat_result], result_spec)


def is_device(device: Any) -> bool:
    """True if this names the pretend device."""
    return device is not None and torch.device(device).type == NAME


def _inner(value: Any) -> Any:
    if isinstance(value, PretendTensor):
        return value.inner
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


def _outer(func: Any, value: Any, own: dict[int, PretendTensor], on_device: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if id(value) in own:  # changed in place
        wrapper = own[id(value)]
        if wrapper.shape != value.shape or wrapper.stride() != value.stride():
            raise NotImplementedError(f"{func} changes a shape in place; the pretend device cannot")
        return wrapper
    if not on_device:
        return value
    if value.dtype in (torch.float64, torch.complex128):
        current().float64[str(func), place()] += 1
    if value.is_conj():  # a wrapper does not show this bit, and backwards dropped it
        value = torch.conj_physical(torch._conj(value))
    if value.is_neg():
        value = torch.neg(torch._neg_view(value))
    return PretendTensor(value)


def _check_devices(func: Any, flat: Sequence[Any], on_device: bool) -> None:
    """Raise RuntimeError, as CUDA does, for tensors of two devices."""
    if not on_device or func in INDEXING:
        return
    takes_scalars = torch.Tag.pointwise in func.tags or func in TAKES_SCALARS
    for number, value in enumerate(flat):
        if not isinstance(value, Tensor) or isinstance(value, PretendTensor):
            continue
        is_written = number == 0 and func._schema.is_mutable
        if is_written or value.dim() > 0 or not takes_scalars:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, pretend:0 and cpu! "
                f"{func} got a CPU tensor of shape {list(value.shape)} at {place()}"
            )


def _index_stalls(func: Any, args: Sequence[Any]) -> bool:
    """A mask has to be counted and an index of the host to be moved. Writing one number under a mask is neither."""
    indices = [index for index in args[1] if isinstance(index, Tensor)]
    if any(not isinstance(index, PretendTensor) for index in indices):
        return True
    is_fill = func is not aten.index.Tensor and args[2].numel() == 1
    return not is_fill and any(index.dtype in (torch.bool, torch.uint8) for index in indices)


def _to_copy(source: Tensor, **options: Any) -> Tensor:
    target, non_blocking = options.pop("device", None), options.pop("non_blocking", False)
    options.pop("pin_memory", None)
    assert isinstance(source, PretendTensor)
    if target is None or is_device(target):
        return _outer(aten._to_copy.default, aten._to_copy.default(source.inner, **options), {}, True)
    made = torch.empty_like(source.inner, dtype=options.get("dtype"))
    copies.to_host(copies.pin(made) if non_blocking else made, source.inner, non_blocking)
    return made


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if isinstance(target, PretendTensor) and isinstance(source, PretendTensor):
        target.inner.copy_(source.inner)
    elif isinstance(target, PretendTensor):
        copies.to_device(target.inner, source, non_blocking)
    else:
        assert isinstance(source, PretendTensor)
        copies.to_host(target, source.inner, non_blocking)
    return target
