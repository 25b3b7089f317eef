# SPDX-License-Identifier: Apache-2.0
"""Bad input to the `digen` commands is one line and exit code 2; none ends in a traceback."""

import atexit
import gc
import inspect
import io
import logging
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from transformers.utils import import_utils

from verl_digen import cli
from verl_digen.tools.plan.memory import Memory, Phase
from verl_digen.tools.plan.output import _way_out

PROFILE = ("simulate", "--profile", "qwen-image-20b", "--devices", "32")


def digen(capsys, *words):
    """(exit code, what is said on stderr)."""
    return cli.main(words), capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*PROFILE[:-1], "1000000"), "--devices must be <= 4096"),
        (("plan", "recipe=digen_qwen_image", "gpu_memory=80"), "got 'gpu_memory=80'; did you mean gpu_mem?"),
        (
            ("plan", "gpus=8"),
            "recipe must begin with the recipe of an algorithm or a model, got None; add one in front",
        ),
        (("plan", "recipe=digen_sd3+digen_sd3"), "recipe must name a recipe once"),
        (("plan", "recipe=digen_sd"), "did you mean digen_sd3?"),
        (("plan", "recipe=digen_sd3", "+trainer.save_frq=3"), "did you mean trainer.save_freq?"),
        (("plan", "recipe=digen_sd3", "图=1"), "the config cannot be composed: LexerNoViableAltException: 图=1"),
        (("plan", "recipe=digen_sd3", "=3"), "words must be KEY=VALUE, got '=3'"),
        (("plan", "recipe=digen_sd3", "gpu_mem=nan"), "gpu_mem must be > 0 and finite, got nan"),
        (("plan", "recipe=digen_sd3", "trainer=5"), "trainer must be a section with keys of its own, got 5"),
        (
            ("plan", "recipe=digen_sd3", "actor_rollout_ref.model.path=."),
            "must be a folder with a diffusers model_index",
        ),
        (("simulate", "--profile", "qwen-image-20"), "did you mean qwen-image-20b?"),
        (("simulate", "--profile", "bytes"), "--profile must be a file of JSON, got 'bytes'"),
        (("bench", "nosuch"), "overrides must be KEY=VALUE, got 'nosuch'"),
        (("timeline", "no_such_run"), "RUN_DIR must be the folder of a run"),
    ],
)
def test_a_bad_word_is_one_line_before_any_work(capsys, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\0")
    code, err = digen(capsys, *words)
    assert code == 2
    assert said in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("raised", "code"), [(KeyboardInterrupt(), 130), (BrokenPipeError(), 141), (PermissionError(13, "Denied", "x"), 2)]
)
def test_an_interruption_a_closed_pipe_and_a_closed_folder_leave_no_traceback(monkeypatch, capfd, raised, code):
    def fail(args):
        raise raised

    command = SimpleNamespace(NAME="fail", __doc__="Fail.", add_arguments=lambda parser: None, run=fail)
    monkeypatch.setattr(cli, "COMMANDS", (command,))
    monkeypatch.setattr(os, "dup2", lambda *descriptors: None)  # the test's own output goes on
    assert cli.main(["fail"]) == code
    assert "Traceback" not in capfd.readouterr().err


def test_the_module_is_the_command():
    said = subprocess.run([sys.executable, "-m", "verl_digen.cli", "nosuch"], stderr=subprocess.PIPE, text=True)
    assert said.returncode == 2 and "'nosuch'" in said.stderr


def test_a_terminated_command_ends_what_it_started(monkeypatch, capfd, tmp_path):
    program = """
import os, signal, sys, time
open(sys.argv[1], "w").write(str(os.getpid()))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""
    started = tmp_path / "pid"

    def start(args):
        return subprocess.run([sys.executable, "-c", program, str(started)]).returncode

    command = SimpleNamespace(NAME="start", __doc__="Start.", add_arguments=lambda parser: None, run=start)
    monkeypatch.setattr(cli, "COMMANDS", (command,))
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["start"]) == 143
    assert capfd.readouterr().err == "digen start: interrupted\n"
    assert not psutil.pid_exists(int(started.read_text()))
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("weights", "said"), [(30, "use devices with more memory"), (10, "lower digen.sampling.")])
def test_a_remedy_that_cannot_help_is_not_given(weights, said):
    def phase(size):
        return Phase(items={"weights": size}, row_bytes=0, num_rows=1, rows_name="row")

    phases = {"training": phase(1), "generating": phase(weights), "decoding": phase(1)}
    counts = dict(num_recomputed=0, num_blocks=1, limit_bytes=20)
    memory = Memory(**phases, **counts, host={}, is_base_whole=False, encoding=None)
    assert said in _way_out(memory)


def test_the_console_collects_garbage_rarely_and_not_at_exit_and_a_caller_keeps_its_settings(monkeypatch):
    done = []
    monkeypatch.setattr(gc, "set_threshold", lambda *numbers: done.append("rarely"))
    monkeypatch.setattr(atexit, "register", done.append)
    monkeypatch.setattr(sys, "argv", ["digen"])
    for argv, expected in (["simulate", "--profile"], []), (None, ["rarely", gc.freeze]):
        with pytest.raises(SystemExit):
            cli.main(argv)
        assert done == expected


def test_a_console_that_lacks_a_letter_refuses_nothing(monkeypatch):
    def tell(args):
        print("reward 0.5 ±0.1")
        return 0

    said = io.BytesIO()
    command = SimpleNamespace(NAME="tell", __doc__="Tell.", add_arguments=lambda parser: None, run=tell)
    monkeypatch.setattr(cli, "COMMANDS", (command,))
    monkeypatch.setattr(cli, "_collect_rarely", lambda: None)
    monkeypatch.setattr(cli, "_without_torchvision_notes", lambda: None)
    monkeypatch.setattr(sys, "argv", ["digen", "tell"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(said, encoding="ascii"))
    assert cli.main() == 0 and said.getvalue() == b"reward 0.5 ?0.1\n"


def test_what_transformers_says_of_torchvision_is_left_out_and_the_rest_is_not():
    logger, note = logging.getLogger(import_utils.__name__), "requires torchvision (not installed)"
    assert note in inspect.getsource(import_utils)
    cli._without_torchvision_notes()
    try:
        kept = [logger.filter(logging.makeLogRecord({"msg": f"`Processor` {text}"})) for text in (note, "is slow")]
        assert [bool(one) for one in kept] == [False, True]
    finally:
        logger.filters.clear()
