# SPDX-License-Identifier: Apache-2.0
"""One rank's process group for the tests of a module."""

from collections.abc import Iterator

import pytest

from tests.engine.harness import process_group


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A gloo group of this process alone."""
    with process_group(0, 1, str(tmp_path_factory.mktemp("rendezvous") / "store")):
        yield
