# SPDX-License-Identifier: Apache-2.0
"""One rank's process group, as in tests/engine."""

from tests.engine.conftest import one_rank

__all__ = ["one_rank"]
