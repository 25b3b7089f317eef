# SPDX-License-Identifier: Apache-2.0
"""Registers the pretend device with PyTorch: `torch.pretend`, and the ways in which operations reach it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.nn import functional
from torch.utils._device import _device_constructors
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from verl.plugin.platform import PlatformRegistry, set_platform

from tests.pretend import copies
from tests.pretend.memory import memory
from tests.pretend.record import current, place
from tests.pretend.tensor import NAME, PretendTensor, aten, dispatch, is_device
from verl_digen.platforms.cpu import CpuPlatform

RESIZING = (
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.linspace.default,
    aten.eye.default,
    aten.eye.m,
)
"""Factories that PyTorch builds on operations which resize their result."""


class Stream:
    """The only stream."""

    stream_id = device_index = device_type = 0

    def __init__(self, *args: Any, **kwargs: Any):
        self.device = torch.device(NAME, 0)

    def wait_stream(self, other: Stream) -> None:
        """No-op: there is one stream."""

    def wait_event(self, event: Event) -> None:
        """No-op: there is one stream."""

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        copies.wait("synchronize")


class Event:
    """A point of the only stream."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def record(self, stream: Stream | None = None) -> Event:
        return self

    def wait(self, stream: Stream | None = None) -> None:
        """No-op: there is one stream."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        copies.wait("synchronize")


class PretendModule:
    """`torch.pretend`, with the names of `torch.cuda`."""

    Stream, Event = Stream, Event
    _stream = Stream.__new__(Stream)

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device: Any) -> None:
        """No-op: there is one device."""

    def get_device_name(self, device: Any = None) -> str:
        return "Pretend accelerator"

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        """No-op: random numbers are the CPU's."""

    def manual_seed_all(self, seed: int) -> None:
        """No-op: random numbers are the CPU's."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    # -- the stream ---------------------------------------------------------------------------------------
    def synchronize(self, device: Any = None) -> None:
        copies.wait("synchronize")

    def current_stream(self, device: Any = None) -> Stream:
        return self._stream

    def default_stream(self, device: Any = None) -> Stream:
        return self._stream

    def stream(self, stream: Stream | None) -> AbstractContextManager[None]:
        return nullcontext()

    # -- memory -------------------------------------------------------------------------------------------
    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return memory.total - memory.allocated, memory.total

    def memory_allocated(self, device: Any = None) -> int:
        return memory.recount()

    def max_memory_allocated(self, device: Any = None) -> int:
        return memory.peak

    def memory_reserved(self, device: Any = None) -> int:
        return memory.recount()

    def max_memory_reserved(self, device: Any = None) -> int:
        return memory.peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        memory.peak = memory.allocated

    def empty_cache(self) -> None:
        """No-op: nothing is cached. It does not synchronise either, as nothing says that CUDA's does."""

    def ipc_collect(self) -> None:
        """No-op: tensors are not shared by handle."""


_libraries: list[torch.library.Library] = []


def register() -> None:
    """Give this process the device, for good. Call it before the process's first backward, which counts devices."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=PretendModule())
    # tensors of both devices then have one Parameter over `module.to`, as CPU and CUDA tensors have
    torch.__future__.set_swap_module_params_on_conversion(True)
    made = torch.library.Library("_", "IMPL")
    made.fallback(dispatch, "PrivateUse1")
    host = torch.library.Library("aten", "IMPL")
    for factory in RESIZING:  # their own way is an empty tensor of another shape
        name = factory._schema.name.removeprefix("aten::")
        overload = factory._overloadname
        host.impl(name if overload == "default" else f"{name}.{overload}", partial(dispatch, factory), "PrivateUse1")
    host.impl("_pin_memory", lambda tensor, device=None: copies.pin(tensor.clone()), "CPU")
    host.impl("is_pinned", lambda tensor, device=None: copies.is_pinned(tensor), "CPU")
    _libraries.extend([made, host])
    _device_constructors()  # PyTorch's list of the functions that `with torch.device(...)` is about, with the originals
    for name in ("tensor", "as_tensor"):
        setattr(torch, name, _by_copy(getattr(torch, name)))
    torch.empty = _pinning(torch.empty)
    _note_masks()
    _fsdp_init._move_states_to_device = _move_states_to_device


def _pinning(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """PyTorch asks the device's C++ side for page-locked memory."""

    def made(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return copies.pin(empty(*size, **options)) if pin_memory else empty(*size, **options)

    return made


def _by_copy(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """PyTorch's own constructors copy to the device beneath the level at which a wrapper exists."""

    def made(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
        if not is_device(device):
            return make(data, *args, device=device, **options)
        return make(data, *args, **options).to(device)

    return made


def _note_masks() -> None:
    """Replace PyTorch's attention by itself and a note of masks: with one, an accelerator has no fast kernel."""
    attention = functional.scaled_dot_product_attention

    def noting(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any):
        if isinstance(query, PretendTensor):
            record = current()
            record.num_attentions += 1
            if attn_mask is not None:
                record.masks[f"{list(attn_mask.shape)} {attn_mask.dtype}", place()] += 1
        return attention(query, key, value, attn_mask, *args, **kwargs)

    functional.scaled_dot_product_attention = noting


def _move_states_to_device(params: Sequence[Tensor], buffers: Sequence[Tensor], device: torch.device) -> None:
    """FSDP2's function of this name, which assigns `tensor.data`; that cannot make a wrapper of a tensor."""
    for tensor in (*params, *buffers):
        if tensor.device.type not in (device.type, "meta"):
            moved = tensor.detach().to(device)
            new = torch.nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else moved
            torch.utils.swap_tensors(tensor, new)


class PretendPlatform(CpuPlatform):
    """The pretend device as a verl platform, for `get_platform()` and `get_device_name()`."""

    @property
    def device_name(self) -> str:
        return NAME

    @property
    def vendor_name(self) -> str:
        return NAME

    @property
    def device_module(self) -> Any:
        return torch.get_device_module(NAME)

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # chosen by name alone

    def current_device(self) -> int:
        return 0

    def synchronize(self, device_index: int | None = None) -> None:
        self.device_module.synchronize()

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return 9, 0

    def communication_backend_name(self) -> str:
        return f"cpu:gloo,{NAME}:gloo"


def use_platform() -> None:
    """Make it this process's platform; VERL_PLATFORM=pretend names it too."""
    PlatformRegistry.register(platform=NAME)(PretendPlatform)
    set_platform(PretendPlatform())
