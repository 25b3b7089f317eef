# SPDX-License-Identifier: Apache-2.0
"""Python processes that start with their imports done: a server imports once, and each process is a fork of it.

A run of verl's main starts a dozen Python processes, and each imports PyTorch, Ray, verl and diffusers, 5 to 10 s of a
core. `ForkServer.python` is an executable that takes the place of `sys.executable` in a run: it asks the server for a
fork with its own arguments, environment, folder and output, and waits for the fork's end.

- Forked are programs given as `-m MODULE`, and Ray's workers. Everything else is the real interpreter's: Ray's agents
  look at who their parent process is.
- A fork is a child of the server, not of the process that asked for it.
- `sitecustomize` of a folder that PYTHONPATH names is imported in the fork, as in a process that starts.
"""

import array
import atexit
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NoReturn

import psutil

ROOT = Path(__file__).resolve().parents[1]
CLIENT = """#!{python} -IS
import array, json, os, socket, sys

arguments = sys.argv[1:]
while arguments[:1] in (["-u"], ["-B"]):
    del arguments[0]
if arguments[:1] != ["-m"] and not "".join(arguments[:1]).endswith(("/setup_worker.py", "/default_worker.py")):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    asked = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
    files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
    server.sendmsg([len(asked).to_bytes(4, "big")], files)
    server.sendall(asked)
    status = server.recv(1)
os._exit(status[0] if status else 137)
"""
"""The executable; no answer means that the fork was killed."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment of the server: a pool of threads would be missing in its forks."""

MODULES = (
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
    "torchdata.stateful_dataloader",
    "transformers",
    "diffusers",
    "peft",
    "datasets",
    "tensordict",
    "fastapi",
    "uvicorn",
    "aiohttp",
)
"""Imported once: libraries that do nothing with the environment of a run. Ray reads it on import, and verl loads its
plugins then, so each process imports these two by itself, in 1 s."""


class ForkServer:
    """The server's process and the executable that asks it."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.python = folder / "python"
        """The executable."""
        self._process = process

    def processes(self) -> list[psutil.Process]:
        """The processes that were forked and are alive, and their children."""
        return psutil.Process(self._process.pid).children(recursive=True)


@cache
def shared_server() -> ForkServer:
    """The server of this process; it ends with this process, and its forks with it."""
    name = tempfile.mkdtemp(prefix="fork_")  # the path of a socket is at most 107 bytes long
    atexit.register(shutil.rmtree, name)
    folder = Path(name)
    client = folder / "python"
    client.write_text(CLIENT.format(python=sys.executable, address=f"{name}/socket"))
    client.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.fork_server", name],
        cwd=ROOT,
        stdin=subprocess.PIPE,  # closed when this process ends, however it ends
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, **ONE_THREAD},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n", "the server could not import its modules"
    return ForkServer(folder, process)


def serve(folder: str) -> None:
    """Import `MODULES` and fork for every connection, until stdin is closed."""
    for module in MODULES:
        importlib.import_module(module)
    assert threading.active_count() == 1, "a fork has only the thread that forks"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks leave no zombies
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/socket")
    listener.listen(64)
    del sys.path[0]  # this folder; a fork has its own in its place
    print("ready", flush=True)
    while True:
        if 0 in select.select([0, listener], [], [])[0]:
            for left in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    left.kill()
            os._exit(0)
        connection, _ = listener.accept()
        with connection:
            if os.fork() == 0:
                listener.close()
                _become(connection, f"{folder}/python")


def _become(connection: socket.socket, python: str) -> NoReturn:
    """Be the process that was asked for, and answer with its exit status."""
    status = 1
    os.setpgid(0, 0)  # Ray ends the whole group of a worker
    try:
        arguments, environment, folder = _receive(connection)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.executable = python
        _customize()
        sys.stdout.reconfigure(line_buffering=True)
        status = _exit_status_of(arguments)
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        connection.sendall(bytes([status]))
        os._exit(status)


def _receive(connection: socket.socket) -> list:
    size, ancillary, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(12))
    files = array.array("i", ancillary[0][2])
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    left = int.from_bytes(size, "big")
    received = b""
    while len(received) < left:
        received += connection.recv(left - len(received))
    return json.loads(received)


def _customize() -> None:
    """Take the folders of PYTHONPATH, and import their `sitecustomize`."""
    given = [folder for folder in os.environ.get("PYTHONPATH", "").split(":") if folder and folder not in sys.path]
    sys.path[:0] = given
    for folder in given:
        if (file := Path(folder) / "sitecustomize.py").exists():
            runpy.run_path(str(file))


class _Replaced(BaseException):
    """A program replaces itself by another one."""


def _exit_status_of(arguments: list[str]) -> int:
    """Run a program; one that replaces itself by another worker is followed."""

    def exec_bash(file: str, args: Sequence[str]) -> NoReturn:
        raise _Replaced(args[-1])

    os.execvp = exec_bash  # setup_worker.py: bash -c "exec PYTHON default_worker.py ..."
    try:
        _run(arguments)
    except _Replaced as replaced:
        return _exit_status_of(shlex.split(str(replaced))[2:])
    except SystemExit as stopped:
        return stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _run(arguments: list[str]) -> None:
    arguments = [argument for argument in arguments if argument not in ("-u", "-B")]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1])
