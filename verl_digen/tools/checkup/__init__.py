# SPDX-License-Identifier: Apache-2.0
"""`digen doctor`: what is missing on this machine, whether a model computes the same here, and whether the devices do
what a run needs of them.

| file | holds |
| --- | --- |
| `command.py` | the command; it runs each check in a process of its own, and reports |
| `machine.py` | versions, plugin, platform, registered names |
| `selftest.py` | numerics of one architecture, and the checks that run them |
| `checks.py` | the checks of devices in order, with deadline and remedy, and what they are given |
| `device.py`, `gradient.py`, `weights.py` | the checks of parts |
| `training.py` | checks that run verl's main: the quick start, and published sizes |
"""
