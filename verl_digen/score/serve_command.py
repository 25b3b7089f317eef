# SPDX-License-Identifier: Apache-2.0
"""Offer rewards to other clusters over HTTP, in the JSON form of UniRL's reward service.

    DIGEN_REWARD_TOKEN=secret digen serve-reward ocr --host 0.0.0.0 --port 8080
    digen serve-reward '{pick: {weight: 1, reward: pickscore, path: ~/PickScore_v1, max_batch_size: 16}}'

POST /score, GET /rewards and GET /health; requests that overlap share batches. A run elsewhere asks for them with
digen.reward.functions={text: {weight: 1.0, reward: server, protocol: unirl, url: "http://HOST:8080",
rewards: {ocr: 1.0}, token_env: DIGEN_REWARD_TOKEN}}.

Exit code 0 after SIGINT or SIGTERM, when requests in work are answered; 2 if it cannot start.
"""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from verl_digen.require import require

NAME = "serve-reward"
TOKEN = "DIGEN_REWARD_TOKEN"
"""Environment variable with the token, unless --token-env names another."""
GRACE_S = 60
"""Seconds for requests in work after SIGTERM."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare options and arguments."""
    parser.add_argument("reward", metavar="REWARD", help="name(s), FILE.py:NAME, or {name: {weight: 1.0, ...}}")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is every one")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--token-env", default=TOKEN, metavar="NAME", help="environment variable with the token")
    parser.add_argument("--no-token", action="store_true", help="answer everybody who reaches the port")
    parser.add_argument("--device", help="e.g. cpu or cuda:1; this machine's accelerator without it")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="seconds of one call before it counts as failed")
    parser.add_argument("--max-retries", type=int, default=0, help="retries of a sample whose reward failed")
    parser.add_argument("--max-samples", type=int, default=4096, help="samples in work or waiting, of all requests")
    parser.add_argument("--max-body-mb", type=float, default=256.0, help="size of a request, MB of 1e6 bytes")
    parser.add_argument("--max-megapixels", type=float, default=64.0, help="size of a picture or frame")
    parser.add_argument("--video-root", metavar="DIR", help="folder whose videos requests may name by path")


def run(args: Namespace) -> int:
    """Serve until told to stop."""
    import uvicorn

    from verl_digen.score.app import ServerLimits, make_app
    from verl_digen.score.rewards import LocalRewards, chosen_device, parse
    from verl_digen.score.unirl import Limits

    try:
        token = token_of(args)
        require(0 <= args.port < 2**16, "--port must lie in [0, 65535]", args.port, "8080 is the default")
        root = None if args.video_root is None else Path(args.video_root).expanduser()
        require(root is None or root.is_dir(), "--video-root must be a folder", args.video_root, "check the path")
        rewards = LocalRewards(
            parse(args.reward),
            chosen_device(args.device),
            max_retries=args.max_retries,
            timeout_s=args.timeout_s,
        )
        require(
            not rewards.of_groups,
            "REWARD must score single samples",
            rewards.of_groups,
            "a request has one sample; leave out what compares the samples of a prompt",
        )
    except ValueError as error:
        print(f"digen serve-reward: {error}", file=sys.stderr)
        return 2
    limits = ServerLimits(
        Limits(int(args.max_megapixels * 1e6), root), int(args.max_body_mb * 1e6), max_samples=args.max_samples
    )
    print(f"serving {', '.join(rewards.names)} on {args.host}:{args.port}", file=sys.stderr)
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, _stopped)
    uvicorn.run(
        make_app(rewards, limits, token),
        host=args.host,
        port=args.port,
        log_level="warning",
        timeout_graceful_shutdown=GRACE_S,
    )
    return 0


def _stopped(number: int, frame: object) -> None:
    """Do nothing: uvicorn has its own handlers while it serves, and raises the signal again once it has stopped."""


def token_of(args: Namespace) -> str | None:
    """The token to ask for; None where none is asked for.

    Raises:
        ValueError: the port is open to other machines and no token is set.
    """
    token = os.environ.get(args.token_env) or None
    if args.no_token:
        require(token is None, f"--no-token excludes {args.token_env} in the environment", "both", "leave one out")
        return None
    require(
        token is not None or args.host in ("127.0.0.1", "localhost", "::1"),
        f"{args.token_env} must hold a token where other machines reach the port",
        args.host,
        f"set it in the environment, e.g. {args.token_env}=$(openssl rand -hex 16), or give --no-token",
    )
    return token
