# SPDX-License-Identifier: Apache-2.0
"""Reader of pickled answers that runs no code of the sender.

A pickle is a program: it may name any function and call it. This reader knows dict, list, tuple, str, bytes, numbers,
bool, None, and numpy's scalars and arrays of numbers, which become Python numbers and lists. Every other name is
refused, with an error that names it. numpy's own constructors are not called: the names stand for small classes of this
file, so that a forged dtype or shape reaches no C code. `MAX_VALUES` and `MAX_DEPTH` hold however often a pickle refers
to the same list.
"""

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np

from verl_digen.reward.servers.answers import UnusableAnswer, shown

MAX_VALUES = 1_000_000
MAX_DEPTH = 50
KINDS = "biuf"
"""numpy's letters of bool, whole numbers, unsigned ones and floats."""
MEMO = ("PUT", "BINPUT", "LONG_BINPUT")
"""Instructions that name a place of the memo, which the reader allocates."""


class _Dtype:
    """Stand-in of `numpy.dtype(name, align, copy)` with its state (version, byte order, ...)."""

    def __init__(self, name: Any, *more: Any):
        is_number = isinstance(name, str) and name[:1] in KINDS and name[1:] in ("1", "2", "4", "8")
        if not is_number:
            raise UnusableAnswer(f"it holds an array of {shown(name)}; numbers alone are read")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: Any) -> None:
        order = state[1]
        if order not in ("<", ">", "=", "|"):
            raise UnusableAnswer(f"it holds an array with the byte order {shown(order)}")
        self.dtype = self.dtype.newbyteorder(order)


class _Array:
    """Stand-in of an array, filled by its state (version, shape, dtype, is in Fortran's order, data)."""

    def __init__(self, *unused: Any):
        self.values: Any = []

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        self.values = _values(data, dtype, shape, "F" if is_fortran else "C")


def _values(data: Any, dtype: Any, shape: Any, order: str) -> Any:
    """Python numbers of an array's bytes: nested lists, or one number without a shape."""
    if not isinstance(dtype, _Dtype) or not isinstance(data, bytes | bytearray):
        raise UnusableAnswer(f"it holds an array of {shown(data)}")
    if not all(isinstance(length, int) and length >= 0 for length in shape):
        raise UnusableAnswer(f"it holds an array of shape {shown(shape)}")
    if math.prod(shape) * dtype.dtype.itemsize != len(data) or len(shape) > MAX_DEPTH:
        raise UnusableAnswer(f"it holds an array of shape {shown(shape)} with {len(data)} bytes")
    return np.frombuffer(bytes(data), dtype.dtype).reshape(shape, order="F" if order == "F" else "C").tolist()


def _encode(text: Any, encoding: Any) -> bytes:
    """Stand-in of `_codecs.encode`, by which protocols below 3 write bytes."""
    if encoding != "latin1" or not isinstance(text, str):
        raise UnusableAnswer(f"it encodes text as {shown(encoding)}")
    return text.encode("latin1")


KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _Array,
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): lambda: b"",  # protocols below 3 write empty ones so
    **{
        (f"numpy.{core}.{module}", name): stand_in
        for core in ("core", "_core")  # numpy 1 and 2
        for module, name, stand_in in (
            ("multiarray", "scalar", lambda dtype, data: _values(data, dtype, (), "C")),
            ("multiarray", "_reconstruct", _Array),
            ("numeric", "_frombuffer", _values),  # which protocol 5 uses
        )
    },
}


class _Reader(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        """The stand-in of a name."""
        found = KNOWN.get((module_name, global_name))
        if found is None:
            raise UnusableAnswer(
                f"it is a pickle that wants {module_name}.{global_name}; numbers, text, lists and dicts alone are "
                "read, and nothing of it was run"
            )
        return found


def pickle_of(body: bytes) -> Any:
    """An answer as a pickle of plain values; see the module. UnusableAnswer if it is no pickle, wants something else,
    or is too large."""
    try:
        for instruction, argument, _ in pickletools.genops(body):
            if instruction.name in MEMO and int(argument or 0) > len(body):
                raise UnusableAnswer(f"it is a pickle with the place {argument} in a memo, of {len(body)} bytes")
        return _plain(_Reader(io.BytesIO(body)).load(), MAX_DEPTH, [MAX_VALUES])
    except UnusableAnswer:
        raise
    except Exception as error:  # a malformed pickle raises any kind
        raise UnusableAnswer(f"it is no pickle that can be read ({type(error).__name__}: {error})") from error


def _plain(value: Any, depth: int, num_left: list[int]) -> Any:
    """A copy of plain values alone."""
    num_left[0] -= 1
    if depth < 0 or num_left[0] < 0:
        raise UnusableAnswer(f"it is a pickle of more than {MAX_VALUES} values or {MAX_DEPTH} levels")
    if isinstance(value, _Array):
        value = value.values
    if value is None or type(value) in (str, bytes, bool, int, float):
        return value
    if type(value) in (list, tuple):
        return [_plain(one, depth - 1, num_left) for one in value]
    if type(value) is dict:
        return {
            _plain(key, depth - 1, num_left): _plain(one, depth - 1, num_left)
            for key, one in value.items()
            if _is_key(key)
        }
    raise UnusableAnswer(f"it is a pickle with a {type(value).__name__}; numbers, text, lists and dicts alone are read")


def _is_key(key: Any) -> bool:
    if isinstance(key, str | int):
        return True
    raise UnusableAnswer(f"it is a pickle of a dict with the key {shown(key)}; text and whole numbers alone are read")
