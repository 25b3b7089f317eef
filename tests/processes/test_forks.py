# SPDX-License-Identifier: Apache-2.0
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import verl  # noqa: F401 - loads the plugin
from hydra import compose, initialize_config_module

from verl_digen.processes import cluster
from verl_digen.processes.forks import start

ANSWER = """
import json, os, sys
from verl_digen.processes.forks import is_fork
print(json.dumps([is_fork(), sys.argv, sys.orig_argv, os.getcwd(), dict(os.environ), sys.stdin.read()]))
sys.exit(int(os.environ["STATUS"]))
"""
MAKES_WORKER = """
import os, shlex, sys
os.environ.update(json.loads(os.environ["OF_ACTOR"])) if (json := __import__("json")) else None
os.execvp("bash", args=["bash", "-c", f"exec {os.environ['INTERPRETER']} {sys.argv[1]} word"])
"""
READS = """
import os
GIVEN = os.environ.get("RAY_JOB_ID"), os.environ.get("OF_RUN")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Folder with the programs `answer` and `setup_worker.py`, and the module `reads`."""
    (tmp_path / "answer.py").write_text(ANSWER)
    (tmp_path / "default_worker.py").write_text(ANSWER)
    (tmp_path / "setup_worker.py").write_text(MAKES_WORKER)
    (tmp_path / "reads.py").write_text(READS)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def server(folder):
    """A server without imports."""
    server = start({}, (), (), with_modules=True)
    yield server
    server.end()
    server.process.wait(30)


def run(server, *words, cwd, given="", **variables):
    """Run the executable -> its exit status, what it printed as JSON, and what it said."""
    environment = {**os.environ, "PYTHONPATH": f"{Path.cwd()}", "STATUS": "0", "INTERPRETER": sys.executable}
    environment |= {"OF_ACTOR": "{}", **variables}
    done = subprocess.run(
        [server.python, *words], cwd=cwd, input=given, text=True, capture_output=True, timeout=600, env=environment
    )
    return done.returncode, json.loads(done.stdout or "null"), done.stderr


def gone(*processes):
    """Wait until these processes have ended, for 10 s at most -> True if they have."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in processes
    ):
        time.sleep(0.01)
    return time.monotonic() < deadline


def test_a_fork_is_the_program_that_was_asked_for(server, folder):
    status, answer, errors = run(server, "-m", "answer", "word", cwd=folder, given="text", STATUS="7")
    assert status == 7, errors
    forked, argv, orig, cwd, environment, text = answer
    assert forked and argv[1:] == ["word"] and orig == [str(server.python), "-m", "answer", "word"]
    assert (cwd, text, environment["STATUS"]) == (str(folder), "text", "7")


def test_rays_workers_are_followed_where_their_interpreter_and_what_it_read_are_the_servers(server, folder):
    words = str(folder / "setup_worker.py"), str(folder / "default_worker.py")

    def is_fork(**variables):
        status, answer, errors = run(server, *words, cwd=folder, **variables)
        assert answer is not None, (status, errors)
        assert answer[1][1:] == ["word"]
        return answer[0]

    assert is_fork()
    assert not is_fork(INTERPRETER=f"env {sys.executable}"), "one under a profiler"
    assert not is_fork(OF_ACTOR='{"PYTHONHASHSEED": "1"}'), "the actor's own"
    assert not is_fork(PYTHONHASHSEED="1"), "the run's own"


def test_a_library_path_that_an_import_set_in_the_driver_keeps_the_forks_and_an_actors_own_does_not(folder):
    """OpenCV, which vLLM imports, sets one."""
    server = start({}, (), ("reads",), with_modules=True)
    words = str(folder / "setup_worker.py"), str(folder / "default_worker.py")
    assert run(server, *words, cwd=folder, LD_LIBRARY_PATH="/of/cv2")[1][0]
    own = '{"LD_LIBRARY_PATH": "/of/the/actor"}'
    assert not run(server, *words, cwd=folder, LD_LIBRARY_PATH="/of/cv2", OF_ACTOR=own)[1][0]
    server.end()


def test_modules_read_the_first_workers_environment_and_the_runs(folder):
    (folder / "answer.py").write_text("import json, reads\nprint(json.dumps(reads.GIVEN))")
    server = start({"OF_RUN": "given"}, (), ("reads",), with_modules=True)
    environment = {"RAY_JOB_ID": "1"}
    assert run(server, "-m", "answer", cwd=folder, **environment)[1] == ["1", "given"]
    assert run(server, "-m", "answer", cwd=folder, **environment)[1] == ["1", "given"]
    server.end()
    assert gone(server.process.pid) and not server.python.exists()


def test_forks_draw_different_ids_after_all_that_a_run_imports(folder):
    """Objects of two processes with one ID would be one object."""
    (folder / "answer.py").write_text(
        "import json\nfrom ray import JobID\nfrom ray._raylet import TaskID\n"
        "print(json.dumps(TaskID.for_fake_task(JobID.from_int(1)).hex()))"
    )
    server = start({}, with_modules=True)
    drawn = [run(server, "-m", "answer", cwd=folder)[1] for _ in range(2)]
    server.end()
    assert all(drawn) and len({*drawn}) == 2, drawn


def test_a_fork_that_was_killed_has_a_killed_processes_status(server, folder):
    (folder / "answer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert run(server, "-m", "answer", cwd=folder)[0] == 137


@pytest.mark.parametrize("asked", [b"", b"0", b'0[["-m", "ans'])
def test_a_process_that_is_killed_while_it_asks_leaves_the_server_to_others(server, folder, asked):
    with socket.socket(socket.AF_UNIX) as killed:
        killed.connect(str(server.python.parent / "socket"))
        if asked:
            socket.send_fds(killed, [asked], [0, 1, 2])
    status, answer, errors = run(server, "-m", "answer", cwd=folder)
    assert status == 0 and answer[0], errors


def test_a_sitecustomize_that_raises_says_so(server, folder):
    (folder / "sitecustomize.py").write_text("raise LookupError('of the user')")
    _, _, errors = run(server, "-m", "answer", cwd=folder, PYTHONPATH=str(folder))
    assert "LookupError: of the user" in errors


@pytest.mark.parametrize("libraries", [(), ("no_such_module",), ("ray",)])
def test_without_its_server_the_executable_is_the_interpreter(folder, libraries, capfd):
    server = start({}, libraries, (), with_modules=True)
    if not libraries:
        server.process.kill()
    server.process.wait(30)
    status, answer, errors = run(server, "-m", "answer", cwd=folder, STATUS="3")
    assert (status, answer[0]) == (3, False), errors
    said = capfd.readouterr().err
    assert said.count("\n") == said.count("workers start without a fork server") == len(libraries)


def test_server_and_forks_end_with_the_process_that_started_it_however_it_ends(folder):
    (folder / "sleeps.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)")
    (folder / "driver.py").write_text(
        "import subprocess, time\nfrom verl_digen.processes.forks import start\n"
        "server = start({}, (), (), with_modules=True)\nprint(server.process.pid, server.python, flush=True)\n"
        "subprocess.Popen([server.python, '-m', 'sleeps'])\ntime.sleep(60)"
    )
    driver = subprocess.Popen(
        [sys.executable, "driver.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    assert driver.stdout is not None
    (server, python), fork = driver.stdout.readline().split(), int(driver.stdout.readline())
    assert psutil.Process(fork).ppid() == int(server)
    driver.send_signal(signal.SIGKILL)
    driver.wait(10)
    assert gone(int(server), fork)
    assert not Path(python).parent.exists()


class Server:
    """Stands for a server."""

    python = Path("/fork/python")

    def __init__(self, variables):
        self.variables, self.is_ended = variables, False

    def end(self):
        self.is_ended = True


@pytest.fixture
def started(monkeypatch):
    """The servers that were started, of a process that is no fork, on a machine without accelerator."""
    servers = []
    monkeypatch.setattr(sys, "executable", "python")
    monkeypatch.setattr(cluster, "_servers", [])
    monkeypatch.setattr(cluster, "is_fork", lambda: False)
    monkeypatch.setattr(cluster, "joins_cluster", lambda address: address is not None)
    monkeypatch.setattr(cluster, "start", lambda variables: servers.append(Server(variables)) or servers[-1])
    return servers


def test_verls_main_with_a_recipe_starts_the_server_that_the_run_takes(started, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "verl.trainer.main_ppo", "recipe=digen_quickstart"])
    cluster.start_early()
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=["recipe=digen_quickstart"])
    cluster.fork_workers(config.ray_kwargs.ray_init)
    assert len(started) == 1 and sys.executable == "/fork/python"


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "verl.trainer.main_ppo", "recipe=digen_quickstart", "--cfg", "job"],
        ["-m", "verl.trainer.main_ppo"],
        ["-m", "verl_digen.cli", "plan", "recipe=digen_quickstart"],
        ["train.py", "recipe=digen_quickstart"],
    ],
)
def test_other_programs_start_no_server_early(started, monkeypatch, words):
    monkeypatch.setattr(sys, "orig_argv", ["python", *words])
    cluster.start_early()
    assert started == []


def test_a_run_that_is_a_fork_starts_no_server_of_its_own(started, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "verl.trainer.main_ppo", "recipe=digen_quickstart"])
    monkeypatch.setattr(cluster, "is_fork", lambda: True)
    cluster.start_early()
    cluster.fork_workers({})
    assert started == []


def test_a_run_with_other_variables_has_a_server_of_its_own(started):
    cluster._servers.append(cluster.start({"OMP_NUM_THREADS": "1"}))
    cluster.fork_workers({"runtime_env": {"env_vars": {"OMP_NUM_THREADS": "2"}}})
    assert [(server.variables["OMP_NUM_THREADS"], server.is_ended) for server in started] == [("1", True), ("2", False)]


@pytest.mark.parametrize("ray_init", [{"address": "10.0.0.1:6379"}, {"runtime_env": {"py_executable": "python"}}])
def test_a_run_on_a_cluster_or_with_an_interpreter_of_its_own_has_no_forks(started, ray_init):
    cluster._servers.append(cluster.start({}))
    cluster.fork_workers(ray_init)
    assert started[0].is_ended and sys.executable == "python"
