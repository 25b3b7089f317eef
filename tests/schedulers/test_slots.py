# SPDX-License-Identifier: Apache-2.0
import random
from collections import Counter

import pytest

from verl_digen.schedulers.slots import SlotPool


def pool_of(*ids: str) -> SlotPool:
    pool = SlotPool()
    for slot in ids:
        pool.join(slot, replica=slot.partition("/")[0], version=0)
    return pool


def taken(pool: SlotPool, version: int = 0) -> str | None:
    slot = pool.take(version)
    return None if slot is None else slot.id


def test_the_least_loaded_replica_goes_first_and_ties_go_by_id():
    pool = pool_of("b/0", "b/1", "a/0", "a/1")
    assert [taken(pool) for _ in range(5)] == ["a/0", "b/0", "a/1", "b/1", None]
    pool.release("b/0")
    pool.release("a/1")
    pool.release("b/1")
    assert [taken(pool) for _ in range(3)] == ["b/0", "a/1", "b/1"]


def test_a_slot_that_loads_is_not_handed_out_and_comes_back_with_its_version():
    pool = pool_of("a", "b")
    assert taken(pool) == "a"
    assert [slot.id for slot in pool.unload(0)] == ["b"]
    assert (taken(pool), pool.has(0)) == (None, True)
    pool.load("b", 1)
    assert (taken(pool, 0), taken(pool, 1), pool.has(1)) == (None, "b", True)
    pool.release("a")
    pool.unload(0)
    assert not pool.has(0)


def test_a_slot_loads_only_after_unload():
    with pytest.raises(RuntimeError, match="loads weights after `unload`, got 'a', which is idle"):
        pool_of("a").load("a", 1)


def test_random_use_agrees_with_a_plain_list():
    rng = random.Random(0)
    pool, slots = SlotPool(), {}  # id -> [replica, version, state]
    for step in range(4_000):
        what = rng.choice(["join", "take", "take", "release", "lose", "unload", "load"])
        version = rng.randint(0, 2)
        if what == "join" and len(slots) < 12:
            slots[f"s{step:04d}"] = [f"r{rng.randint(0, 3)}", version, "idle"]
            pool.join(f"s{step:04d}", replica=slots[f"s{step:04d}"][0], version=version)
        elif what == "take":
            num_busy = Counter(replica for replica, _, state in slots.values() if state == "busy")
            idle = [
                (num_busy[replica], slot)
                for slot, (replica, at, state) in slots.items()
                if at == version and state == "idle"
            ]
            expected = min(idle)[1] if idle else None
            assert taken(pool, version) == expected
            if expected:
                slots[expected][2] = "busy"
        elif what == "unload" and rng.random() < 0.2:
            idle = {slot for slot, (_, at, state) in slots.items() if at == version and state == "idle"}
            assert {slot.id for slot in pool.unload(version)} == idle
            for slot in idle:
                slots[slot][2] = "loading"
        else:
            state = {"release": "busy", "load": "loading"}.get(what)
            candidates = sorted(slot for slot in slots if state is None or slots[slot][2] == state)
            if not candidates:
                continue
            slot = rng.choice(candidates)
            if what == "release":
                pool.release(slot)
                slots[slot][2] = "idle"
            elif what == "load":
                pool.load(slot, version)
                slots[slot][1:] = [version, "idle"]
            elif what == "lose" and rng.random() < 0.3:
                assert pool.lose(slot).state == slots.pop(slot)[2]
        assert len(pool) == len(slots)
        for at in range(3):
            assert pool.has(at) == any(other == at and state != "loading" for _, other, state in slots.values())
