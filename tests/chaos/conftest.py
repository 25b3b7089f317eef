# SPDX-License-Identifier: Apache-2.0
"""No word of the project about faults that are meant."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Log nothing in a test of this folder."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(before)
