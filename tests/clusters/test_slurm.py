# SPDX-License-Identifier: Apache-2.0
"""examples/clusters/slurm.sh, run by bash with programs of SLURM and Ray that note what they are told."""

import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.docs.test_commands import composed
from tests.plugin.conftest import start

__all__ = ["start"]

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "clusters" / "slurm.sh"
NODES = ("node-a", "node-b", "node-c")
TIMEOUT_S = 60
PROGRAMS = {
    "scontrol": 'printf "%s\\n" $SLURM_JOB_NODELIST',
    # A step: the command, on the node that is named.
    "srun": """
for word in "$@"; do
    case "$word" in --nodelist=*) export NODE="${word#*=}"; shift ;; --*) shift ;; *) break ;; esac
done
exec "$@" """,
    # A node's Ray serves until it is told to end, or its file is removed. The head answers at its second check.
    "ray": """
echo "$RAY_AUTH_MODE $RAY_AUTH_TOKEN" >>"$STATE/tokens"
case "$1 $2" in
"start "*)
    echo "start $NODE $*" >>"$STATE/log"
    [ ! -e "$STATE/broken-$NODE" ] || exit 1
    trap 'echo "stopped $NODE" >>"$STATE/log"; rm -f "$STATE/alive-$NODE"; exit 0' TERM
    touch "$STATE/alive-$NODE"
    while [ -e "$STATE/alive-$NODE" ]; do sleep 1; done
    exit 1 ;;
"health-check "*)
    echo "check $2" >>"$STATE/log"
    [ ! -e "$STATE/deaf" ] && [ -e "$STATE/alive-node-a" ] && [ "$(grep -c ^check "$STATE/log")" -ge 2 ] ;;
"list nodes") for file in "$STATE"/alive-*; do echo "{\\"node_id\\": \\"$file\\"}"; done ;;
*) exit 9 ;;
esac""",
    # The run: its environment and words, one a line; then what the test wants of it.
    "python": """
trap 'echo "killed run" >>"$STATE/log"; exit 143' TERM
echo "run $NODE $RAY_ADDRESS" >>"$STATE/log"
echo "$RAY_AUTH_MODE $RAY_AUTH_TOKEN" >>"$STATE/tokens"
printf "%s\\n" "$@" >"$STATE/words"
[ ! -e "$STATE/losing" ] || rm "$STATE/alive-$(cat "$STATE/losing")"
while [ -e "$STATE/lasting" ]; do sleep 1; done
exit "$(cat "$STATE/exit" 2>/dev/null || echo 0)" """,
    "sleep": 'exec "$(command -pv sleep)" 0.02',
}


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """(exit code, errors) of the script, when it and all that it started have ended; whatever remains is killed."""
    try:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, errors


@dataclass
class Cluster:
    """An allocation of three nodes."""

    folder: Path
    state: Path = field(init=False)

    def __post_init__(self) -> None:
        self.state = self.folder / "state"
        self.state.mkdir()
        programs = self.folder / "bin"
        programs.mkdir()
        for name, text in PROGRAMS.items():
            (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
            (programs / name).chmod(0o755)

    def plant(self, name: str, text: str = "") -> None:
        """Tell the programs something."""
        (self.state / name).write_text(text)

    def started(self, *words: str, **settings: str) -> subprocess.Popen[str]:
        """The script, in a group of processes of its own."""
        environment = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "STATE": str(self.state),
            "SLURM_JOB_NODELIST": " ".join(NODES),
            "SLURM_JOB_NAME": "verl-digen",
            "SLURM_GPUS_ON_NODE": "8",
            **settings,
        }
        command = ["bash", str(SCRIPT), "train.jsonl", "val.jsonl", *words]
        return subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True, cwd=self.folder, start_new_session=True
        )

    def run(self, *words: str, **settings: str) -> tuple[int, str]:
        """(exit code, errors) of the script, when it has ended."""
        return ended(self.started(*words, **settings))

    @property
    def log(self) -> list[str]:
        """Lines of the programs."""
        file = self.state / "log"
        return file.read_text().splitlines() if file.exists() else []

    def place(self, start: str) -> int:
        """Number of the first line that begins so."""
        [first, *_] = (number for number, line in enumerate(self.log) if line.startswith(start))
        return first

    @property
    def alive(self) -> list[str]:
        """Files of nodes whose Ray runs, or was killed without a chance to end."""
        return sorted(file.name for file in self.state.glob("alive-*"))

    @property
    def stopped(self) -> set[str]:
        """Nodes whose Ray was ended."""
        return {line.split()[1] for line in self.log if line.startswith("stopped ")}


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


@pytest.mark.parametrize("given", [{}, {"RAY_AUTH_TOKEN": "mine"}, {"RAY_AUTH_MODE": "disabled"}])
def test_all_of_a_job_have_one_token(cluster: Cluster, given: dict[str, str]):
    code, errors = cluster.run(**given)
    assert code == 0, errors
    lines = (cluster.state / "tokens").read_text().splitlines()
    [(mode, token)] = {tuple(line.split()) for line in lines}
    assert len(lines) >= 6 and mode == given.get("RAY_AUTH_MODE", "token")
    assert token == given["RAY_AUTH_TOKEN"] if "RAY_AUTH_TOKEN" in given else len(token) == 64


def test_head_then_workers_then_the_run_with_the_address_of_ray_then_the_end(cluster: Cluster):
    code, errors = cluster.run()
    assert code == 0, errors
    checks = [number for number, line in enumerate(cluster.log) if line.startswith("check ")]
    first = cluster.place("start node-a")
    assert "--head" in cluster.log[first] and "--block" in cluster.log[first]
    assert len(checks) >= 2 and first < checks[-1] < cluster.place("start node-b"), "an answer of the head comes first"
    for node in NODES[1:]:
        assert "--address=node-a:6379" in cluster.log[cluster.place(f"start {node}")]
        assert cluster.place(f"start {node}") < cluster.place("run ")
    assert cluster.log[cluster.place("run ")] == "run node-a node-a:6379"
    assert cluster.stopped == set(NODES) and not cluster.alive


def test_the_run_is_verls_main_on_all_devices_with_the_users_words_last(cluster: Cluster, start):
    assert cluster.run("trainer.total_epochs=3", RECIPE="digen_sd3")[0] == 0
    words = (cluster.state / "words").read_text().splitlines()
    assert words[:2] == ["-m", "verl.trainer.main_ppo"] and words[-1] == "trainer.total_epochs=3"
    config = composed(start, words[2:])
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (len(NODES), 8)
    assert config.data.train_files == "train.jsonl" and config.trainer.resume_mode == "auto"


def test_a_failed_run_ends_all_nodes_and_gives_its_exit_code(cluster: Cluster):
    cluster.plant("exit", "3")
    assert cluster.run()[0] == 3
    assert cluster.stopped == set(NODES)


def test_a_lost_node_ends_the_run_and_the_others(cluster: Cluster):
    cluster.plant("lasting")
    cluster.plant("losing", "node-b")
    code, errors = cluster.run()
    assert code == 1 and "Ray ended on a node during the run" in errors
    assert "killed run" in cluster.log and cluster.stopped == {"node-a", "node-c"}


def test_a_head_that_never_answers_ends_the_job_at_the_deadline(cluster: Cluster):
    cluster.plant("deaf")
    code, errors = cluster.run(START_TIMEOUT_S="1")
    assert code == 1 and "no Ray on node-a after 1 s" in errors and "START_TIMEOUT_S" in errors
    assert not cluster.alive and not [line for line in cluster.log if line.startswith("run ")]
    assert not [line for line in cluster.log if line.startswith("start node-b")]


@pytest.mark.parametrize("node", ["node-a", "node-c"])
def test_a_node_that_does_not_start_ends_the_job_at_once(cluster: Cluster, node: str):
    cluster.plant(f"broken-{node}")
    code, errors = cluster.run()
    assert code == 1 and "Ray ended on a node while it waited for" in errors
    assert not cluster.alive and ("node-a" in cluster.stopped) == (node == "node-c")
    assert not [line for line in cluster.log if line.startswith("run ")]


def test_the_time_limit_ends_the_run_and_all_nodes(cluster: Cluster):
    cluster.plant("lasting")
    process = cluster.started()
    for _ in range(TIMEOUT_S * 50):
        if "run node-a node-a:6379" in cluster.log:
            break
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.02)
    process.terminate()
    assert ended(process)[0] == 128 + signal.SIGTERM
    assert "killed run" in cluster.log and cluster.stopped == set(NODES)


def test_missing_prompts_are_told_before_anything_starts():
    run = subprocess.run(["bash", str(SCRIPT), "train.jsonl"], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert run.returncode == 1 and "usage: sbatch" in run.stderr
