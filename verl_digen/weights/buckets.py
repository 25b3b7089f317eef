# SPDX-License-Identifier: Apache-2.0
"""Conversion of a stream of named tensors into byte buckets in host memory, and back.

A tensor larger than a bucket is split over several; small ones share one. Splitting and joining is verl's code. Each
number is copied once on the way in, from its device straight into the bucket, which is page-locked if the device is an
accelerator; and not at all on the way out, unless its tensor was split.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from verl.checkpoint_engine.base import TensorMeta, merge_weight_chunks, split_weight_chunks


@dataclass(frozen=True)
class Bucket:
    """Part of an update."""

    parts: tuple[TensorMeta, ...]
    """Tensors, or pieces of them, in `data`, in order, each at its `offset`."""
    data: Tensor
    """uint8 [num_bytes], on the CPU; may be part of a larger allocation."""
    is_last: bool

    def header(self) -> bytes:
        """All fields except `data`, as JSON."""
        rows = [[getattr(part, name) for name in _PLAIN] + [list(part.shape), str(part.dtype)] for part in self.parts]
        return json.dumps([rows, self.is_last]).encode()

    @classmethod
    def of(cls, header: bytes, data: Tensor) -> Bucket:
        """Inverse of `header`.

        Raises:
            ValueError: the header is malformed, or does not fit `data`.
        """
        try:
            rows, is_last = json.loads(header)
            parts = tuple(
                TensorMeta(**dict(zip(_PLAIN, plain, strict=True)), shape=torch.Size(shape), dtype=_DTYPES[dtype])
                for *plain, shape, dtype in rows
            )
            is_sound = isinstance(is_last, bool) and all(
                isinstance(part.name, str)
                and min(part.chunk_offset, part.chunk_size, part.offset) >= 0
                and part.offset + part.chunk_size <= len(data)
                for part in parts
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the header of a weight bucket cannot be read: {error!r}") from error
        if not is_sound:
            raise ValueError(f"the header of a weight bucket does not fit its {len(data)} bytes")
        return cls(parts, data, is_last)


_PLAIN = ("name", "chunk_offset", "chunk_size", "offset")
"""Fields of `TensorMeta` that JSON has types for."""
ALIGNMENT_BYTES = 16
"""Each piece starts at a multiple of it, so that a piece can be read as numbers where it lies."""
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


async def to_buckets(
    weights: Iterable[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]], bucket_bytes: int
) -> AsyncIterator[Bucket]:
    """Fill buckets of at most `bucket_bytes`; the last one, which may be empty, has `is_last`."""
    parts: list[TensorMeta] = []
    data = torch.empty(0, dtype=torch.uint8)
    num_bytes = 0
    device = torch.device("cpu")
    async for part, piece in split_weight_chunks(weights, bucket_bytes):  # type: ignore[arg-type]
        assert piece is not None
        device = piece.device
        if num_bytes + part.chunk_size > bucket_bytes:
            _wait_for_copies(device)
            yield Bucket(tuple(parts), data[:num_bytes], is_last=False)
            parts, num_bytes = [], 0
        if not parts:
            data = torch.empty(bucket_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
        part.offset = num_bytes
        parts.append(part)
        data[num_bytes : num_bytes + part.chunk_size].copy_(piece, non_blocking=True)
        num_bytes = _aligned(num_bytes + part.chunk_size)
    _wait_for_copies(device)
    yield Bucket(tuple(parts), data[:num_bytes], is_last=True)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _wait_for_copies(device: torch.device) -> None:
    """Return when a bucket that was filled from `device` may be read."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


async def from_buckets(buckets: AsyncIterator[Bucket], bucket_bytes: int) -> AsyncIterator[tuple[str, Tensor]]:
    """Inverse of `to_buckets`."""

    async def parts() -> AsyncIterator[tuple[TensorMeta, Tensor]]:
        async for bucket in buckets:
            for part in bucket.parts:
                yield part, bucket.data[part.offset : part.offset + part.chunk_size]

    async for named in merge_weight_chunks(parts(), bucket_bytes):  # type: ignore[arg-type]
        yield named
