# SPDX-License-Identifier: Apache-2.0
"""The reader of pickled answers: plain values and numbers of numpy, nothing else, nothing run."""

import collections
import datetime
import decimal
import io
import os
import pickle

import numpy as np
import pytest
import torch

from tests.reward.servers.local import RAN
from verl_digen.reward.servers import pickles
from verl_digen.reward.servers.answers import UnusableAnswer
from verl_digen.reward.servers.pickles import pickle_of

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_values_come_back(protocol):
    value = {"scores": [0.5, -1, True, None, 2**70, 1e-300], "text": "é\n", "bytes": b"\x00\xff", 3: [(1, 2), {}]}
    found = pickle_of(pickle.dumps(value, protocol))
    assert found == {**value, 3: [[1, 2], {}]} and found["scores"][2] is True


ARRAYS = (
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.asfortranarray(np.arange(6, dtype=np.int64).reshape(2, 3)),
    np.arange(4, dtype=">f8"),
    np.arange(4, dtype=np.uint8)[::2],
    np.array([True, False]),
    np.array(0.25, np.float16),
    np.zeros((0, 3)),
)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_arrays_and_scalars_of_numbers_become_lists_and_numbers(protocol):
    for array in ARRAYS:
        assert pickle_of(pickle.dumps([array, array], protocol)) == [array.tolist()] * 2
    scalars = [np.float32(0.1), np.float64(-2.5), np.int32(7), np.bool_(True), np.float16(1.5)]
    found = pickle_of(pickle.dumps(scalars, protocol))
    assert found == [one.item() for one in scalars] and all(type(one) in (float, int, bool) for one in found)


def test_a_pickle_of_numpy_1_is_read():
    new = pickle.dumps({"scores": [np.float64(0.5), np.arange(3)]}, 0)
    assert b"numpy._core" in new
    assert pickle_of(new.replace(b"numpy._core", b"numpy.core")) == {"scores": [0.5, [0, 1, 2]]}


class Runs:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


REFUSED = {
    "posix.system": Runs(os.system, f"touch {RAN}"),
    "builtins.eval": Runs(eval, "1"),
    "builtins.bytes": Runs(bytes, 3),
    "builtins.getattr": Runs(getattr, "a", "upper"),
    "collections.OrderedDict": collections.OrderedDict(a=1),
    "collections.defaultdict": collections.defaultdict(list, a=[1]),
    "decimal.Decimal": decimal.Decimal("0.5"),
    "datetime.date": datetime.date(2026, 1, 1),
    "torch._utils._rebuild_tensor_v2": torch.zeros(1),
    "builtins.complex": 1j,
    "numpy.char": Runs(np.char.upper, "a"),
    "holds an array of 'O8'": np.array([None]),
    "holds an array of 'U1'": np.array(["a"]),
    "holds an array of 'V4'": np.zeros(1, [("a", np.int32)]),
    "a pickle with a set": {1, 2},
    "with the key": {(1, 2): 3},
}


@pytest.mark.parametrize("wanted", REFUSED)
@pytest.mark.parametrize("place", ["bare", "in a list", "as a value"])
def test_everything_else_is_refused_by_name_and_not_run(wanted, place):
    value = REFUSED[wanted]
    shaped = {"bare": value, "in a list": [0.5, value], "as a value": {"scores": [0.5], "more": value}}[place]
    with pytest.raises(UnusableAnswer, match=r"(?i)" + wanted.replace("numpy.char", r"numpy\S* ?.*")):
        pickle_of(pickle.dumps(shaped, 4))
    assert not RAN.exists()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        pickle.dumps({"scores": [0.1, np.float32(2)]})[:-9],
        b"<html>error</html>",
        b"\x80\x04.",
        b"(",
        b"\x80\xff" * 9,
        b'{"scores": [1]}',
    ],
)
def test_what_is_no_pickle_is_unusable(body):
    with pytest.raises(UnusableAnswer):
        pickle_of(body)


def nested(depth):
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


def laughs(levels):
    value: list = [0]
    for _ in range(levels):
        value = [value] * 10
    return value


def circle():
    value: list = []
    value.append(value)
    return value


@pytest.mark.parametrize("make", [lambda: nested(100), lambda: laughs(12), circle])
def test_a_small_pickle_cannot_become_a_large_value(make, monkeypatch):
    monkeypatch.setattr(pickles, "MAX_VALUES", 10_000)
    with pytest.raises(UnusableAnswer, match="values or 50 levels"):
        pickle_of(pickle.dumps(make()))


@pytest.mark.parametrize(
    "body, says",
    [
        (b"\x80\x02]r\xff\xff\xff\x7f.", "the place 2147483647 in a memo"),
        (b"\x80\x02]p999999999\n.", "the place 999999999 in a memo"),
        (b"Psomewhere\n.", "no pickle that can be read"),
        (b"\x80\x02\x82\x01.", "no pickle that can be read"),
        (b"(ios\nsystem\n(S'true'\n.", "no pickle that can be read|wants os.system"),
        (b"\x80\x05\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "no pickle that can be read"),
    ],
)
def test_forged_instructions_are_refused(body, says):
    with pytest.raises(UnusableAnswer, match=says):
        pickle_of(body)


def forged(state):
    """Pickle of an array with this state."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 2)

    class Array:
        def __reduce__(self):
            return (np.ndarray.__reduce__(np.arange(2))[0], (np.ndarray, (0,), b"b"), state)

    pickler.dump(Array())
    return buffer.getvalue()


@pytest.mark.parametrize(
    "state",
    [
        (1, (1 << 40,), np.dtype("f4"), False, b"1234"),
        (1, (-1,), np.dtype("f4"), False, b"1234"),
        (1, (1,), np.dtype("f4"), False, [os.system]),
        (1, ("a",), np.dtype("f4"), False, b"1234"),
        (1, (1,) * 70, np.dtype("f4"), False, b"1234"),
        (1, (1,), "f4", False, b"1234"),
        (1, (1,)),
    ],
)
def test_a_forged_array_is_refused(state):
    with pytest.raises(UnusableAnswer):
        pickle_of(forged(state))
