# SPDX-License-Identifier: Apache-2.0
"""Watch runs in a browser: a list of them, the report of each, comparisons.

    digen watch
    digen watch outputs/digen --port 9000
    digen watch /data/runs --host 0.0.0.0

Shows the runs below FOLDER. Pages load themselves again while runs write; nothing is written. Without --host the server
answers this machine alone; from another one: ssh -L 8765:localhost:8765 MACHINE. With --host it answers those who
open the printed address, which has a token. Ctrl-C ends it.

Exit code 2 if it cannot start.
"""

import secrets
import socket
from argparse import ArgumentParser, Namespace
from pathlib import Path

from verl_digen.report.runs import find_runs
from verl_digen.require import require
from verl_digen.tools.watch import LOOPBACK

NAME = "watch"
PORT, MAX_TRIES = 8765, 20


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "root", type=Path, nargs="?", default=Path("outputs"), metavar="FOLDER", help="outputs unless given"
    )
    parser.add_argument("--host", default=LOOPBACK[0], help=f"address to serve on ({LOOPBACK[0]}); 0.0.0.0 for every")
    parser.add_argument("--port", type=int, default=PORT, help=f"the next free one is taken ({PORT})")


def run(args: Namespace) -> int:
    """Serve until Ctrl-C."""
    import uvicorn

    from verl_digen.tools.watch.pages import make_app

    require(args.root.is_dir(), "FOLDER must be a folder with runs", str(args.root), "name another, or start a run")
    place = free_port(args.host, args.port)
    port, token = place.getsockname()[1], None if args.host in LOOPBACK else secrets.token_urlsafe(16)
    if port != args.port:
        print(f"digen watch: port {args.port} is taken")
    shown = "localhost" if token is None else socket.gethostname() if args.host in ("0.0.0.0", "::") else args.host
    num_runs = len(find_runs(args.root))
    print(
        f"{num_runs or 'no'} run{'s' * (num_runs != 1)} below {args.root}{'' if num_runs else ' yet'}; Ctrl-C ends this"
    )
    print(f"http://{shown}:{port}/{'' if token is None else f'?token={token}'}", flush=True)
    app = make_app(args.root, token=token, cookie=f"digen-watch-{port}")
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[place])
    return 0


def free_port(host: str, port: int) -> socket.socket:
    """Listen on `port`, or the next free one. ValueError if none is, or the address is not of this machine."""
    require(0 < port <= 65535, "--port must lie in [1, 65535]", port, f"{PORT} is usual")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    problem = None
    for tried in range(port, min(port + MAX_TRIES, 65536)):
        try:
            return socket.create_server((host, tried), family=family)
        except OSError as error:
            problem = error.strerror
    raise ValueError(
        f"--host and --port must be free, got {host}:{port} and the next {MAX_TRIES - 1} ({problem}); choose others"
    )
