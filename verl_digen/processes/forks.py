# SPDX-License-Identifier: Apache-2.0
"""Ray workers that start with their imports done, on a machine that is the whole cluster and has no accelerator.

A run starts a dozen Python processes. Each imports PyTorch, Ray, verl and this package: 6 s of a core, and most of a
short run's start. A server imports them once, while the driver does, and each worker is a fork of it.

    driver              server                          raylet              executable (`CLIENT`)
    start()        ->   imports
    ray.init(), with the executable as interpreter  ->  runs a worker  ->   asks the server, waits for the fork's end
                        fork: becomes the worker   <---------------------   arguments, environment, folder, output

- Forked are Ray's workers; anything else that is run with the executable is the real interpreter's, and so is all
  without a server, because it could not start or was killed, and a worker that has other values of variables that the
  server has read.
- The server ends when the driver does, however it ends, and kills the forks that are left.
"""

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

CLIENT = """#!{python} -IS
import json, os, socket, sys

arguments = sys.argv[1:]
while arguments[:1] in (["-u"], ["-B"]):
    del arguments[0]
is_worker = "".join(arguments[:1]).endswith(("/setup_worker.py", "/default_worker.py"))
with socket.socket(socket.AF_UNIX) as server:
    try:
        if not is_worker and not ({with_modules} and arguments[:1] == ["-m"]):
            raise OSError
        server.connect({address!r})
    except OSError:
        os.execv({python!r}, [{python!r}, *sys.argv[1:]])
    socket.send_fds(server, [b"0"], [0, 1, 2])
    server.sendall(json.dumps([arguments, dict(os.environ), os.getcwd()]).encode())
    server.shutdown(socket.SHUT_WR)
    status = server.recv(1)
os._exit(status[0] if status else 137)
"""
"""The executable; no answer means that the fork was killed."""

PROGRAM = """
import json, sys
given = json.loads(sys.argv[1])
own, sys.path = sys.path[1:], given.pop("path")
from verl_digen.processes.forks import serve
serve(own_path=own, **given)
"""
"""Program of the server. It imports what the process that starts it would; its forks begin with Python's own path."""

LIBRARIES = (
    *("torch.distributed.fsdp", "torch.utils.tensorboard", "torchdata.stateful_dataloader", "tensordict"),
    *("transformers", "diffusers.models.autoencoders.autoencoder_kl", "peft", "datasets"),
    *("fastapi", "uvicorn", "aiohttp"),
)
"""Imported when the server starts: they do nothing with the variables that Ray gives to a worker."""
MODULES = (
    *("verl.trainer.main_ppo", "verl_digen.trainer.disaggregated", "verl_digen.trainer.generating"),
    *("verl_digen.rollout.server", "verl_digen.reward.manager"),
)
"""Imported with the environment of the first worker. Ray and TransferQueue read it on import."""
READ_AT_START = (
    *("PYTHONHASHSEED", "LD_PRELOAD", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"),
    *("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"),
)
"""Variables that a process reads when it starts."""
OF_FIRST_WORKER = ("RAY_JOB_ID", "RAY_RAYLET_PID", "LD_LIBRARY_PATH")
"""Variables that the server takes from the first worker. Ray reads the first two on import. OpenCV, which vLLM imports,
sets the last in the driver, too late for the driver's own loader and for the server's."""
RAY_IS_EARLY = (
    "verl-digen: workers start without a fork server, because Ray, which reads a worker's variables on import, was "
    "imported before them, by a sitecustomize or a .pth file\n"
)
INTERPRETER = sys.executable
_forks: list[int] = []
"""This process, where it is a fork."""


def is_fork() -> bool:
    """True in a process that a server forked."""
    return os.getpid() in _forks


@dataclass(frozen=True)
class ForkServer:
    """The server's process and the executable that asks it."""

    python: Path
    """The executable."""
    process: subprocess.Popen[bytes]
    variables: Mapping[str, str]
    """Variables that its environment has beside this process's own."""

    def end(self) -> None:
        """End the server, and the forks that are left."""
        assert self.process.stdin is not None
        self.process.stdin.close()


def start(
    variables: Mapping[str, str],
    libraries: Sequence[str] = LIBRARIES,
    modules: Sequence[str] = MODULES,
    *,
    with_modules: bool = False,
) -> ForkServer:
    """Start a server that imports `libraries`, and at the first request `modules`; who asks it meanwhile, waits.

    Its environment has `variables` beside this process's own. `with_modules` also forks for programs given as `-m
    MODULE`, and forks have the executable as `sys.executable`.
    """
    folder = Path(tempfile.mkdtemp(prefix="fork_"))  # the path of a socket is at most 107 bytes long
    address = str(folder / "socket")
    client = folder / "python"
    client.write_text(CLIENT.format(python=sys.executable, address=address, with_modules=with_modules))
    client.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(128)
        given = {
            "path": sys.path,
            "folder": str(folder),
            "listener": listener.fileno(),
            "executable": str(client) if with_modules else sys.executable,
            "imports": [libraries, modules],
            "variables": variables,
        }
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(given)],
            stdin=subprocess.PIPE,  # closed when this process ends, however it ends
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the driver's
            pass_fds=[listener.fileno()],
            env={**os.environ, **variables},
        )
    return ForkServer(client, process, variables)


def serve(
    own_path: list[str],
    folder: str,
    listener: int,
    executable: str,
    imports: list[list[str]],
    variables: dict[str, str],
) -> NoReturn:
    """Import what there is to import, and fork for every connection, until stdin is closed."""
    libraries, modules = imports
    fixed = {name: os.environ.get(name) for name in READ_AT_START}
    with socket.socket(fileno=listener) as asking:
        _import_quietly(libraries)
        if "ray" in sys.modules:
            os.write(2, RAY_IS_EARLY.encode())
            raise SystemExit(1)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks leave no zombies
        while not _is_orphan(asking, wait_s=None):
            connection, _ = asking.accept()
            with connection:
                asked, files = _receive(connection)
                if asked:
                    arguments, environment, cwd = asked
                    if modules:
                        _take({**environment, **variables})  # which a worker takes later, in setup_worker.py
                        _import_quietly(("ray.actor",))
                        _leave_generator_alone()
                        _import_quietly(modules)
                        modules, fixed = (), fixed | {name: environment.get(name) for name in OF_FIRST_WORKER}
                    sys.path = own_path
                    if os.fork() == 0:
                        asking.close()
                        for number, file in enumerate(files):
                            os.dup2(file, number)
                        os.chdir(cwd)
                        _take(environment)
                        sys.executable = executable
                        _become(arguments, connection, fixed)
                for file in files:
                    os.close(file)
    import psutil

    for left in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            left.kill()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _is_orphan(*others: socket.socket, wait_s: float | None = 0.0) -> bool:
    """True once the process that started the server has ended; waits for that, or for a connection to `others`."""
    return 0 in select.select([0, *others], [], [], wait_s)[0]


def _import_quietly(modules: Sequence[str]) -> None:
    """Import the modules; what they say, the driver says too."""
    console, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        for module in modules:
            if not _is_orphan():
                importlib.import_module(module)
    except BaseException as error:
        said = f"verl-digen: workers start without a fork server, which could not import {module}: {error!r}\n"
        os.write(console, said.encode())
        raise SystemExit(1) from None
    finally:
        os.dup2(console, 2)
        os.close(console)
        os.close(nowhere)
    assert threading.active_count() == 1, "a fork has only the thread that forks"
    gc.collect()
    gc.freeze()


def _leave_generator_alone() -> None:
    """Have Ray draw the IDs of actor classes from the kernel. With one of its own generator all forks would go on from
    one state: objects of two of them could have the same ID, and a reader would get the wrong one."""
    from ray import ActorClassID, actor

    def from_random() -> ActorClassID:
        return ActorClassID(os.urandom(ActorClassID.size()))

    actor.ActorClassID = SimpleNamespace(from_random=from_random)  # type: ignore[assignment, misc]


def _receive(connection: socket.socket) -> tuple[list | None, Sequence[int]]:
    """A request: (arguments, environment, folder), None of a process that was killed while it asked; and its stdin,
    stdout and stderr."""
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as asked, suppress(ValueError):
        return json.loads(asked.read()), files
    return None, files


def _take(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _become(arguments: list[str], connection: socket.socket, fixed: Mapping[str, str | None]) -> NoReturn:
    """Be the process that was asked for, and answer with its exit status."""
    status = 1
    _forks.append(os.getpid())
    os.setpgid(0, 0)  # Ray ends the whole group of a worker
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.orig_argv = [sys.executable, *arguments]
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # as in a process that starts; Python's own generator does it by itself
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        status = _exit_status_of(arguments, connection, fixed)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        with suppress(OSError):  # who asked was killed
            connection.sendall(bytes([status & 255]))
        os._exit(status)


def _customize() -> None:
    """Take the folders of PYTHONPATH, and import their `sitecustomize`."""
    given = [folder for folder in os.environ.get("PYTHONPATH", "").split(":") if folder and folder not in sys.path]
    sys.path[:0] = given
    for folder in given:
        if (file := Path(folder) / "sitecustomize.py").exists():
            runpy.run_path(str(file))


class _Replaced(BaseException):
    """A program replaces itself by another one."""


def _exit_status_of(arguments: list[str], connection: socket.socket, fixed: Mapping[str, str | None]) -> int:
    """Run a program; one that replaces itself by a worker with the same interpreter is followed, unless it has other
    values of variables that were read already, which no fork can change (`fixed`)."""
    replace = os.execvp

    def exec_bash(file: str, args: tuple[str, ...] | list[str]) -> NoReturn:
        command = shlex.split(args[-1])
        is_same = all(os.environ.get(name, value) == value for name, value in fixed.items())
        if command[:2] == ["exec", INTERPRETER] and is_same:
            raise _Replaced(*command[2:])
        connection.set_inheritable(True)  # closed when that program ends; its status is lost
        replace(file, args)

    os.execvp = exec_bash  # setup_worker.py: bash -c "exec PYTHON default_worker.py ..."
    try:
        _run(arguments)
    except _Replaced as replaced:
        return _exit_status_of([*replaced.args], connection, fixed)
    except SystemExit as stopped:
        return stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    finally:
        os.execvp = replace
    return 0


def _run(arguments: list[str]) -> None:
    _customize()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
