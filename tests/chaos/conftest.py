# SPDX-License-Identifier: Apache-2.0
"""Silence the project's log messages about intended faults."""

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
