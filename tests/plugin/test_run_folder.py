# SPDX-License-Identifier: Apache-2.0
"""A start in a folder that holds a run: continued, refused, or with that run's files moved; one live run a folder."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hydra import initialize_config_module
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError

from verl_digen.engine.driver_checkpoint import DriverState, digest, publish, save_driver_state, save_run_description
from verl_digen.errors import ReplicasLost, RunStopped
from verl_digen.observe.run_files import (
    END,
    LOCK,
    METRICS,
    POINTER,
    REPORT,
    RUN_FILE,
    STOP,
    WARNINGS,
    newest_checkpoint,
)
from verl_digen.preflight.callback import Preflight, checked
from verl_digen.preflight.inputs import prompts_of
from verl_digen.preflight.rules import check
from verl_digen.preflight.run_folder import check_run_dir, claim
from verl_digen.preflight.start_config import StartConfig

pytestmark = pytest.mark.slow
PATH = "trainer.resume_mode=resume_path"
ALPHA = "actor_rollout_ref.model.lora.alpha"


@pytest.fixture
def begin(start, runnable, tmp_path):
    """`begin(*words)` -> the config of a start in the test's folder."""
    return lambda *words: start(*runnable, f"trainer.default_local_dir={tmp_path / 'run'}", *words)


def plain(config):
    """A run's config, which has nothing of Hydra's."""
    return OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])


@pytest.fixture
def saved(begin, tmp_path):
    """The folder of a run of 9 steps with a checkpoint of step 6."""
    config, run_dir = begin("trainer.total_training_steps=9"), tmp_path / "run"
    rows = prompts_of(StartConfig(config), "train").prompts
    save_driver_state(run_dir / "global_step_6", DriverState(24, digest(rows)), {}, [])
    (run_dir / "global_step_6" / "actor").mkdir()
    save_run_description(run_dir / "global_step_6", plain(config))
    publish(run_dir, 6)
    (run_dir / METRICS).write_text('{"step": 6}\n')
    return run_dir


def test_a_start_says_what_it_continues_and_how_it_differs(begin, saved):
    found, _ = checked(begin("trainer.total_training_steps=9", "actor_rollout_ref.actor.optim.lr=0.5"))
    assert found[0].startswith(f"continues {saved} after step 6 of 9, saved on 2")
    assert "; other than before: actor_rollout_ref.actor.optim.lr=0.5 (before: " in found[0]


def test_a_checkpoint_is_continued_with_the_optimizer_whose_moments_it_has(begin, saved):
    rule = r"optim\.optimizer must be AdamW to continue a checkpoint, .* got 'SGD'; set it"
    for words in ((), (PATH, f"trainer.resume_from_path={saved / 'global_step_6'}")):
        with pytest.raises(ValueError, match=rule):
            check(begin("trainer.total_training_steps=9", *words, "actor_rollout_ref.actor.optim.optimizer=SGD"))


def test_a_copy_of_a_checkpoint_under_a_name_without_its_step_is_refused(begin, saved):
    copy = shutil.copytree(saved / "global_step_6", saved / "global_step_6_copy")
    with pytest.raises(ValueError, match=r"must be the folder global_step_N of a .*; give RUN/global_step_N"):
        check(begin("trainer.total_training_steps=9", PATH, f"trainer.resume_from_path={copy}"))


def test_an_adapter_in_verl_s_spelling_is_compared_and_how_it_is_sent_is_not(begin, saved):
    rank = "actor_rollout_ref.model.lora_rank=4"
    save_run_description(saved / "global_step_6", plain(begin("trainer.total_training_steps=9", rank)))
    check(begin("trainer.total_training_steps=9", rank, "actor_rollout_ref.model.lora.merge=true"))
    with pytest.raises(ValueError, match=rf"{ALPHA}=3 \(before: \(not there\)\)"):
        check(begin("trainer.total_training_steps=9", rank, f"+{ALPHA}=3"))


def test_a_checkpoint_that_is_gone_or_broken_is_told_with_those_that_are_left(begin, saved):
    shutil.copytree(saved / "global_step_6", saved / "global_step_4")
    (saved / "global_step_6" / "digen.json").write_text('{"num_prompts_dra')
    remedy = "take an earlier one: trainer.resume_mode=resume_path trainer.resume_from_path=RUN/global_step_N"
    with pytest.raises(ValueError, match=rf"global_step_6/digen\.json must be JSON, .*; {remedy}"):
        check(begin("trainer.total_training_steps=9"))
    earlier = saved / "global_step_4"
    check(begin("trainer.resume_mode=resume_path", f"trainer.resume_from_path={earlier}"))
    shutil.rmtree(saved / "global_step_6")
    with pytest.raises(ValueError, match=r"the newest checkpoint, got '6'; write the number of global_step_4 there"):
        check(begin("trainer.total_training_steps=9"))
    publish(saved, 4)
    check(begin("trainer.total_training_steps=9"))
    assert newest_checkpoint(saved) == saved / "global_step_4"
    shutil.rmtree(saved / "global_step_4")
    assert newest_checkpoint(saved) is None


def test_nothing_is_said_where_nothing_is_continued(begin):
    assert not [note for note in checked(begin())[0] if "continue" in note]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["digen.reward.functions={jpeg_compressibility: 2.0}"], "jpeg_compressibility=2.0 (before: (not there))"),
        (["digen.loss.name=tis"], "digen.loss.name=tis (before: flow_grpo)"),
        (["digen.kl.coef=0.1"], "digen.kl.coef=0.1 (before: 0.0)"),
        (["actor_rollout_ref.model.lora_rank=8"], "actor_rollout_ref.model.lora_rank=8 (before: 0)"),
        (["data.train_max_samples=5"], "prompts of data.train_files"),
        (["trainer.total_training_steps=6", "digen.seed=7"], "taken its 6 steps with other settings"),
    ],
)
def test_a_run_that_learns_something_else_is_refused_unless_its_checkpoint_is_named(begin, saved, words, said):
    with pytest.raises(ValueError) as raised:
        check(begin("trainer.total_training_steps=9", *words))
    message = str(raised.value)
    assert said in message and "trainer.experiment_name" in message and "trainer.resume_mode=disable" in message
    way = f"{PATH} trainer.resume_from_path={saved}/global_step_6"
    assert message.endswith(way)
    found, _ = checked(begin("trainer.total_training_steps=9", *words, *way.split()))
    assert "other than before: " in found[0]


def test_rewards_that_are_no_mapping_are_told_in_a_folder_that_holds_a_run_too(begin, saved):
    with pytest.raises(
        ValueError, match=r"digen\.reward\.functions must be a mapping of names.*, got 'mine\.py:score'"
    ):
        check(begin("digen.reward.functions=mine.py:score"))


def test_a_mistyped_reward_is_no_other_run(begin, saved):
    with pytest.raises(ValueError, match=r"^[^\n]*jpeg_compressibilty[^\n]*$"):
        check(begin("digen.reward.functions={jpeg_compressibilty: 1.0}"))


def test_a_reward_may_get_other_processes_and_one_without_weight_may_come_or_go(begin, saved):
    path = saved / "global_step_6" / "run.json"
    known = json.loads(path.read_text())
    seen = {"weight": 0, "gold": True, "reward": "jpeg_compressibility"}
    given = {"jpeg_compressibility": {"weight": 1.0, "num_workers": 2}, "seen": seen, "other": 0.0, "out": None}
    del known["config"]["digen"]["branches"]  # an older version had none
    known["config"]["digen"]["reward"]["recipe_functions"] = given
    path.write_text(json.dumps(known))
    words = "digen.reward.recipe_functions={jpeg_compressibility: {weight: 1.0, num_workers: 3}}"
    check(begin("trainer.total_training_steps=9", words))


def moved(begin, saved, tmp_path, *, is_copied, is_recorded):
    """The words of a start whose base lies in another folder than when the checkpoint was saved."""
    path, first, second = saved / "global_step_6" / RUN_FILE, tmp_path / "a b", tmp_path / "other"
    shutil.copytree(begin().actor_rollout_ref.model.path, first)
    save_run_description(path.parent, plain(begin(f"actor_rollout_ref.model.path='{first}'")))
    if not is_recorded:
        known = json.loads(path.read_text())
        path.write_text(json.dumps({"config": known["config"], "versions": {}}))
    (shutil.copytree if is_copied else shutil.move)(first, second)
    return "trainer.total_training_steps=9", f"actor_rollout_ref.model.path={second}"


@pytest.mark.parametrize(("is_copied", "is_recorded"), [(True, False), (False, True), (False, False)])
def test_a_base_in_another_folder_is_compared_by_what_it_holds(begin, saved, tmp_path, is_copied, is_recorded):
    words = moved(begin, saved, tmp_path, is_copied=is_copied, is_recorded=is_recorded)
    if is_copied or is_recorded:
        check(begin(*words))
        [file] = (tmp_path / "other" / "transformer").glob("*.safetensors")
        content = file.read_bytes()
        file.write_bytes(content[:-4] + bytes(4))  # the same names, shapes and sizes, as of a fine-tuned base
    with pytest.raises(ValueError, match=r"model\.path=\S+other \(before: \S+ b, ") as raised:
        check(begin(*words))
    how = "compared by fingerprints in run.json" if is_recorded else "compared by files"
    assert (how if is_copied or is_recorded else "compared by name, because it is gone and not recorded") in str(
        raised.value
    )


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_the_files_of_a_run_that_is_not_continued_are_moved_not_mixed(begin, saved, tmp_path, has_checkpoint):
    (saved / "own.txt").write_text("of the user")
    if not has_checkpoint:
        (saved / "latest_checkpointed_iteration.txt").unlink()
    _, [note] = claim(begin(*["trainer.resume_mode=disable"] * has_checkpoint))
    [aside] = tmp_path.glob("run-2*")
    assert str(aside) in note and sorted(os.listdir(saved)) == ["own.txt", LOCK]
    assert {"global_step_6", METRICS} <= {path.name for path in aside.iterdir()}
    if has_checkpoint:
        assert claim(begin(f"trainer.default_local_dir={aside}"))[1] == [], "it can be continued there"


@pytest.fixture
def joined(monkeypatch, tmp_path):
    """A Ray that was started in the test's folder, which a run joins; another one runs here."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    folders = {6379: str(tmp_path), 16379: os.getcwd()}
    raylets = [
        SimpleNamespace(info={"name": "raylet", "cmdline": ["raylet", f"--gcs-address=10.0.0.1:{port}"], "cwd": path})
        for port, path in folders.items()
    ]
    monkeypatch.setattr("psutil.process_iter", lambda names: raylets)


def test_relative_paths_are_refused_where_a_ray_of_another_folder_is_joined(start, joined, tmp_path, monkeypatch):
    words = [
        *(
            "recipe=digen_flowgrpo",
            "data.train_files=[pyproject.toml,/b]",
            "data.val_files=/c",
            "actor_rollout_ref.model.path=/m",
        ),
        "digen.reward.functions={own: {weight: 1, reward: setup.py:score}}",
    ]
    with pytest.raises(ValueError) as told:
        check_run_dir(StartConfig(start(*words)))
    here = os.getcwd()
    assert str(told.value) == (
        "trainer.default_local_dir, data.train_files, digen.reward.functions.own.reward must be absolute where a run "
        "joins a Ray that was started in another folder, whose processes read relative paths there, got "
        f"{str(tmp_path)!r}; begin the run there, or set trainer.default_local_dir={here}/outputs/digen/flowgrpo "
        f"data.train_files=[{here}/pyproject.toml,/b] digen.reward.functions.own.reward={here}/setup.py:score"
    )
    check_run_dir(StartConfig(start(*words, "+ray_kwargs.ray_init.runtime_env.working_dir=.")))
    monkeypatch.chdir(tmp_path)
    check_run_dir(StartConfig(start(*words)))


@pytest.mark.parametrize(("name", "line"), [(METRICS, '{"step": 1}\nhalf\n{"step": 2}\n'), (WARNINGS, "{}\n")])
def test_a_damaged_line_is_told_before_ray_starts(begin, saved, name, line):
    (saved / name).write_text(line)
    with pytest.raises(ValueError, match=rf"run/{name}: line \d must be a JSON object with a step, got .* delete that"):
        claim(begin())


def test_a_folder_in_place_of_stop_is_refused(begin, saved):
    (saved / STOP).mkdir()
    with pytest.raises(
        ValueError, match=r"must hold no folder stop or end\.json, got .*/run' \(IsADirectoryError: .*; re"
    ):
        claim(begin())


def test_an_earlier_checkpoint_of_its_own_that_a_run_begins_from_is_its_newest(begin, saved, monkeypatch, capsys):
    shutil.copytree(saved / "global_step_6", saved / "global_step_3")
    claim(begin(PATH, f"trainer.resume_from_path={saved}/global_step_3"))
    monkeypatch.setattr("ray.shutdown", lambda: None)
    done = JobReturn(status=JobStatus.FAILED)
    done.return_value = RunStopped("a rank died")
    with pytest.raises(SystemExit, match="1"):
        Preflight().on_job_end(begin(), done)
    assert f"{saved}/global_step_3 is saved; this continues after it" in capsys.readouterr().err


def test_a_folder_is_held_by_one_run_until_its_process_ends(begin, tmp_path):
    code = "import sys, fcntl\nfile = open(sys.argv[1], 'w')\nfcntl.flock(file, fcntl.LOCK_EX)\nfile.write('process 1')"
    (tmp_path / "run").mkdir()
    words = [sys.executable, "-c", f"{code}; file.flush(); print(); input()", str(tmp_path / "run" / LOCK)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ValueError, match="held by process 1; end that run, or name another folder"):
            claim(begin())
        other.kill()
    lock, notes = claim(begin())
    assert notes == [] and f"process {os.getpid()} on " in (tmp_path / "run" / LOCK).read_text()
    again, notes = claim(begin())  # Hydra's callback and the trainer of a main of one's own
    assert again is lock and notes == []
    with pytest.raises(BlockingIOError), open(tmp_path / "run" / LOCK) as other_start:
        fcntl.flock(other_start, fcntl.LOCK_EX | fcntl.LOCK_NB)
    lock.close()
    assert claim(begin())[0] is not lock


def test_a_file_system_without_locks_is_told(begin, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert "has no locks (Operation not supported)" in claim(begin())[1][0]


def test_a_full_disk_is_told(begin, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to("/dev/full")
    with pytest.raises(ValueError, match=r"must lie on a disk with free space, got .*run' \(OSError: "):
        claim(begin())


@pytest.fixture
def hooks(monkeypatch):
    """Hooks that Ray calls once it has started. SIGTERM is handled as before after the test."""
    before, found = signal.getsignal(signal.SIGTERM), []
    monkeypatch.setattr("verl_digen.preflight.callback._post_init_hooks", found)
    yield found
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("by", "code"), [("Ctrl-C", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize("is_saved", [True, False])
def test_an_interrupted_run_ends_with_the_command_that_goes_on(
    begin, saved, tmp_path, monkeypatch, capsys, hooks, is_saved, by, code
):
    words = ["python", "-m", "verl.trainer.main_ppo", "recipe=a b", "trainer.resume_mode=disable"]
    monkeypatch.setattr("sys.orig_argv", ["/usr/bin/python3", *words[1:]])
    config = begin() if is_saved else begin(f"trainer.default_local_dir={tmp_path / 'new'}")
    monkeypatch.setattr("sys.excepthook", lambda *error: print(error[0].__name__))
    monkeypatch.setattr("ray.shutdown", lambda: None)
    with initialize_config_module("verl.trainer.config", version_base=None):
        Preflight().on_job_start(config)
    if is_saved:  # else Ray has not started yet
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        hooks[-1]()
    if by == "SIGTERM":
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit, match=str(code)):
        sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    said = capsys.readouterr().err
    mode = "auto" if is_saved else "disable"  # what it began with is not lost
    assert said.endswith(f"python -m verl.trainer.main_ppo 'recipe=a b' trainer.resume_mode={mode}\n")
    assert len(said.splitlines()) == 1
    ended = json.loads((tmp_path / ("run" if is_saved else "new") / END).read_text())
    assert ended == {"state": "stopped", "reason": by}
    assert ("global_step_6 is saved; this continues" in said) == is_saved, said
    assert ("no checkpoint is saved yet; this begins again" in said) != is_saved, said
    sys.excepthook(OSError, OSError(), None)
    assert capsys.readouterr().out == "OSError\n", "others are shown as they were"


@pytest.mark.parametrize(
    ("mode", "status", "result", "ended", "ends_ray"),
    [
        (RunMode.RUN, JobStatus.COMPLETED, None, {"state": "ended", "reason": ""}, False),
        (RunMode.MULTIRUN, JobStatus.COMPLETED, None, {"state": "ended", "reason": ""}, True),
        (RunMode.RUN, JobStatus.FAILED, OSError("no disk"), {"state": "failed", "reason": "OSError: no disk"}, False),
        (RunMode.RUN, JobStatus.FAILED, RunStopped("a rank died"), {"state": "failed", "reason": "a rank died"}, True),
    ],
)
def test_a_run_leaves_how_it_ended_and_the_next_start_removes_it(
    begin, saved, monkeypatch, mode, status, result, ended, ends_ray
):
    ended_ray = []
    monkeypatch.setattr("ray.shutdown", lambda: ended_ray.append(True))
    (saved / REPORT).touch()
    config, done = begin("trainer.total_training_steps=9"), JobReturn(status=status)
    done.return_value, config.hydra.mode = result, mode
    with contextlib.suppress(SystemExit):
        Preflight().on_job_end(config, done)
    assert json.loads((saved / END).read_text()) == ended and bool(ended_ray) == ends_ray
    is_new = bool((saved / REPORT).read_text())
    assert is_new == (status == JobStatus.FAILED), "the report of a run that took all steps says so already"
    claim(config)
    assert not (saved / END).exists()


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (ActorDiedError(), "ActorDiedError"),
        (RayTaskError("run", "traceback", ActorDiedError()).as_instanceof_cause(), "ActorDiedError"),
        (OutOfMemoryError("killed"), "OutOfMemoryError"),
        (RayTaskError("run", "traceback", ReplicasLost()).as_instanceof_cause(), "every rollout replica is lost"),
    ],
    ids=["task runner", "rank", "memory", "replicas"],
)
def test_a_lost_process_is_said_with_the_command_that_goes_on(begin, saved, monkeypatch, capsys, error, name):
    monkeypatch.setattr("sys.orig_argv", ["python", "own_main.py", "recipe=a", "trainer.resume_mode=disable"])
    monkeypatch.setattr("ray.shutdown", lambda: None)
    done = JobReturn(status=JobStatus.FAILED)
    done.return_value = error
    with pytest.raises(SystemExit, match="1"):
        Preflight().on_job_end(begin("trainer.total_training_steps=9"), done)
    said = capsys.readouterr().err
    lost = name if name.endswith("is lost") else f"a process is lost ({name}: "
    assert said.startswith(f"verl-digen: the run stopped: {lost}") and len(said.splitlines()) == 1
    command = "python own_main.py recipe=a trainer.resume_mode=auto\n"
    assert said.endswith(f"global_step_6 is saved; this continues after it: {command}")
    assert json.loads((saved / END).read_text())["reason"] in said


def test_a_damaged_pointer_is_named_at_the_end_too(begin, saved, monkeypatch, capsys):
    monkeypatch.setattr("ray.shutdown", lambda: None)
    (saved / POINTER).write_text("")
    done = JobReturn(status=JobStatus.FAILED)
    done.return_value = RunStopped("a rank died")
    with pytest.raises(SystemExit, match="1"):
        Preflight().on_job_end(begin("trainer.total_training_steps=9"), done)
    said = capsys.readouterr().err
    assert said.startswith(f"verl-digen: the run stopped: a rank died; {saved / POINTER} must hold the step of"), said
