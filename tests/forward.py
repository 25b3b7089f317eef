# SPDX-License-Identifier: Apache-2.0
"""A config whose objective trains forward points, whatever objectives there are."""

from __future__ import annotations

from verl_digen.config import DigenConfig


class ForwardDigen(DigenConfig):
    """`DigenConfig` of a run that trains forward points."""

    @property
    def trains_forward_points(self) -> bool:
        return True
