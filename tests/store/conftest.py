# SPDX-License-Identifier: Apache-2.0
"""A real TransferQueue."""

from collections.abc import Iterator

import pytest
from omegaconf import OmegaConf

from verl_digen.store.client import close, start


@pytest.fixture(scope="module")
def queue(ray_cluster: None) -> Iterator[None]:
    """TransferQueue with one storage process."""
    start(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield
    close()
