# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's own HTTP API in front of a replica's engine (`digen.rollout.http`): to look at what the policy draws.

Its requests run beside the training samples with the current full weights; with LoRA adapters, the bare model's. They
are not recorded.
"""

from __future__ import annotations

import asyncio
from typing import Any

from verl.workers.rollout.utils import run_uvicorn
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai import api_server
from vllm_omni.utils.tracking_parser import TrackingArgumentParser

from verl_digen.config import HttpConfig


async def serve_http_api(engine: AsyncOmni, model: str, config: HttpConfig) -> tuple[int, asyncio.Task[Any]]:
    """Start to serve -> (port, the server's task)."""
    words = ["--model", model, "--host", config.host]
    if config.api_key is not None:
        words += ["--api-key", config.api_key]
    args = make_arg_parser(TrackingArgumentParser()).parse_args(words)
    app = build_app(args, ("generate",))
    for path, methods in (("/v1/chat/completions", {"POST"}), ("/v1/models", {"GET"})):
        api_server._remove_route_from_app(app, path, methods)
    app.include_router(api_server.router)
    await api_server.omni_init_app_state(engine, app.state, args)
    return await run_uvicorn(app, args, config.host)
