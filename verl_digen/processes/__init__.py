# SPDX-License-Identifier: Apache-2.0
"""Processes that may be late or dead: one way to call them and to wait for them.

| file | what it does | who uses it |
| --- | --- | --- |
| `deadlines.py` | bounds of calls, learnt from their durations | the driver, agent loop workers |
| `actors.py` | one actor: retries, signs of life, waits while it lives | all of the below, replicas |
| `calls.py` | calls in flight, each with a deadline, and waits for progress | the conductor, loops that poll |
| `bundles.py` | calls of one actor that are sent as one | agent loops, rewards, replicas, the store |
| `supervision.py` | what the driver waits for, and what ends its waits | the trainers |
| `relays.py` | one call of many processes | the trainer's ranks, replicas |
| `workers.py` | pools of workers that restart, are retried and removed | rewards, environments |
| `cluster.py`, `forks.py` | Ray's cluster, before the run has joined it; workers that are forks | the start of a run |
"""
