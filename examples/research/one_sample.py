# SPDX-License-Identifier: Apache-2.0
"""One sample of a `diffusers` server in this process, for the scripts beside this file."""

from typing import Any

from verl_digen.rollout.server import DiffusersServer
from verl_digen.types import SampleRequest


async def generate(server: DiffusersServer, request: SampleRequest) -> Any:
    """Generate a sample; raises what ended it."""
    (made,) = await server.generate_all([request])
    if isinstance(made, Exception):
        raise made
    return made
