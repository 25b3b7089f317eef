# SPDX-License-Identifier: Apache-2.0
"""Timelines to test on: a small simulated run, and intervals at random."""

import random

from verl_digen.observe.timeline.interval import BUSY_KINDS, WAIT_REASONS, Interval, Lane

START_S = 1_790_000_000.0
"""Unix seconds; numbers of this size have fewer digits left for fractions."""
GROUP_SAMPLES = 24


def lane(pool, index=0, num_devices=1, host="node-0"):
    return Lane(pool, index, host, num_devices)


def interval(kind, start_s, end_s, *, on=None, step=1, **values):
    """An interval `start_s` to `end_s` after START_S, with the ids its kind needs."""
    needed = {"generate": {"chunk_id": "c"}, "assist": {"chunk_id": "c"}, "train": {"fragment_id": "f"}}
    values = {**needed.get(kind, {}), **values}
    return Interval(kind, lane("generator") if on is None else on, step, START_S + start_s, START_S + end_s, **values)


def simulated_run(*, num_steps=3, num_groups=8, num_slots=4, num_trainer_devices=4, chunks_per_group=2, early=True):
    """A run with GAP: with `early`, one chunk per slot of the next batch goes before the weights are there, else the
    trainer generates one chunk of each batch.

    Returns its intervals and the devices of its pools.
    """
    rng = random.Random(0)
    trainer, driver = lane("trainer", num_devices=num_trainer_devices, host="node-1"), lane("driver", num_devices=0)
    slots = [lane("generator", index, host=f"node-{2 + index // 8}") for index in range(num_slots)]
    scorers = [lane("reward", index, num_devices=0) for index in range(2)]
    train_s = 0.9 * chunks_per_group / num_slots  # the trainer just keeps up with the generator
    noted = []

    def note(kind, on, step, start_s, end_s, **values):
        if end_s > start_s:
            noted.append(interval(kind, start_s, end_s, on=on, step=step, **values))

    free_s = [0.0] * num_slots
    scorer_free_s = [0.0, 0.0]
    trainer_s = frame_s = published_s = 0.0
    for step in range(1, num_steps + 1):
        uids = [f"p{(step - 1) * num_groups + group:06d}" for group in range(num_groups)]
        chunks = [(uid, f"{uid}/{part}") for uid in uids for part in range(chunks_per_group)]
        ready_s = {}
        for number, (uid, chunk_id) in enumerate(chunks):
            work = {"chunk_id": chunk_id, "group_ids": (uid,), "num_samples": GROUP_SAMPLES // chunks_per_group}
            if not early and number == len(chunks) // 2:  # while the trainer waits for the first group
                end_s = trainer_s + 1.3
                note("assist", trainer, step, trainer_s, end_s, version=step - 1, detail={"gain_s": 0.2}, **work)
                trainer_s = end_s
            else:
                slot = min(range(num_slots), key=lambda index: (free_s[index], index))
                if not early or number >= num_slots:  # must run under the new weights
                    until = published_s + 0.12
                    if free_s[slot] < until and step > 1:
                        reason = "staleness_bound" if early else "no_chunk_left"
                        note("wait", slots[slot], step, free_s[slot], published_s, reason=reason)
                        note("publish", slots[slot], step - 1, max(published_s, free_s[slot]), until, version=step - 1)
                        free_s[slot] = until
                end_s = free_s[slot] + rng.uniform(0.85, 1.15)
                note("generate", slots[slot], step, free_s[slot], end_s, version=step - 1, **work)
                free_s[slot] = end_s
            scorer = number % 2
            begun_s = max(end_s, scorer_free_s[scorer])
            scorer_free_s[scorer] = begun_s + 0.09 * 4 / num_slots
            note("score", scorers[scorer], step, begun_s, scorer_free_s[scorer], group_ids=(uid,))
            ready_s[uid] = max(ready_s.get(uid, 0.0), scorer_free_s[scorer])
        for number, uid in enumerate(sorted(uids, key=ready_s.__getitem__)):
            note("wait", trainer, step, trainer_s, ready_s[uid], reason="no_fragment_ready")
            trainer_s = max(trainer_s, ready_s[uid])
            work = {"fragment_id": f"{step}/{number}", "group_ids": (uid,), "num_samples": GROUP_SAMPLES}
            note("train", trainer, step, trainer_s, trainer_s + train_s, version=step - 1, **work)
            trainer_s += train_s
        note("commit", trainer, step, trainer_s, trainer_s + 0.25, version=step - 1)
        published_s = trainer_s + 0.25
        note("publish", trainer, step, published_s, published_s + 0.12, version=step)
        trainer_s = published_s + 0.12
        note("step", driver, step, frame_s, trainer_s)
        frame_s = trainer_s
    for slot, on in enumerate(slots):
        note("wait", on, num_steps, free_s[slot], published_s, reason="batch_done")
        note("publish", on, num_steps, max(published_s, free_s[slot]), trainer_s, version=num_steps)
    return noted, {"trainer": num_trainer_devices, "generator": num_slots}


def random_intervals(rng, num_lanes=4, num_intervals=60):
    """Anything that is legal: overlaps within lanes, intervals across the step's edges, of length 0, and outside.

    Returns intervals around a step 1 that lasts 10 s, and devices per pool, some of which no lane stands for.
    """
    lanes = [lane(rng.choice(["trainer", "generator"]), index, rng.randint(1, 3)) for index in range(num_lanes)]
    noted = [interval("step", 0.0, 10.0, on=lane("driver", num_devices=0))]
    for _ in range(num_intervals):
        start_s = rng.uniform(-3, 12)
        end_s = start_s + rng.choice([0.0, rng.expovariate(1.0), rng.uniform(0, 15)])
        on, step = rng.choice(lanes), rng.choice([0, 1, 2])
        if rng.random() < 0.5:
            noted.append(interval(rng.choice(BUSY_KINDS), start_s, end_s, on=on, step=step))
        else:
            noted.append(interval("wait", start_s, end_s, on=on, step=step, reason=rng.choice(WAIT_REASONS)))
    rng.shuffle(noted)
    num_devices = {pool: rng.randint(0, 2) for pool in ("trainer", "generator")}
    for on in {one.lane for one in noted if one.lane.pool != "driver"}:
        num_devices[on.pool] += on.num_devices
    return noted, num_devices
