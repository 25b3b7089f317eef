# SPDX-License-Identifier: Apache-2.0
"""`digen doctor --gpu`: what a run needs of this machine's devices, checked in minutes with the run's own parts; with
`--full` also what they do with published sizes.

| file | holds |
| --- | --- |
| `outcome.py` | a check's result and its text |
| `setting.py` | what the checks run on: device, number of ranks, architecture, sizes |
| `rates.py`, `identity.py`, `numerics.py`, `gradient.py`, `update.py`, `sleeping.py` | one check each |
| `training.py` | checks that run verl's main: the quick start, and published sizes |
| `checkpoints.py` | checkpoints of published sizes with random weights |
| `registry.py` | the checks in order, with deadline and remedy |
| `runner.py` | each check in a process of its own, and the report |
| `__main__.py` | that process |
| `command.py` | the command |
| `quickstart.py` | devices of `make quickstart`, which the last check runs |

A check is a function of the setting that returns a figure and raises `CheckFailed`, or whatever its parts raise. It
runs on every platform of verl's, and in a test's own process.
"""
