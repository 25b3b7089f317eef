# SPDX-License-Identifier: Apache-2.0
"""Pure decisions: state in, decision out. Standard library only; no clock, no randomness, no I/O.

`planner.py` decides what slots and trainer do, live and in the simulator (`simulation.py`) alike.
"""
