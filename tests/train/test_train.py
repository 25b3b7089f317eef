# SPDX-License-Identifier: Apache-2.0
"""`digen train` and `verl_digen.train`: words, exit codes, signals, files; a program stands in for verl's main."""

import json
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

import verl_digen
from verl_digen.cli import main
from verl_digen.tools.train import launcher
from verl_digen.tools.train.launcher import Console
from verl_digen.tools.train.program import rewards_of, word_of
from verl_digen.tools.train.train_command import words_of
from verl_digen.user_modules import load

MAIN = """
import json, os, pathlib, signal, sys, time
words = sys.argv[1:]
def ask():
    [os.kill(os.getppid(), int(word[7:])) for word in words if word.startswith("signal=")]
def interrupted(number, frame):
    print(f"verl-digen: the run stopped: {'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'}; go on", flush=True)
    os._exit(130)
signal.signal(signal.SIGTERM, interrupted)
if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as Python and verl's main do
    signal.signal(signal.SIGINT, interrupted)
print("noise of a library")
words = [word.removeprefix("recipe=") for word in words] if len(words) < 3 else words
if "refuse" in words:
    print("verl-digen: this config cannot run.", "a key must be > 0", sep="\\n")
    sys.exit(2)
if "compose" in words:
    print(*(f"Could not find {number}" for number in range(40)), sep="\\n")
    print("Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.")
    sys.exit(1)
if "broken" in words:
    sys.exit("ImportError: no torch")
folder = pathlib.Path("run")
folder.mkdir(exist_ok=True)
print("verl-digen: the run's folder is run", "(A pid=1) more noise", sep="\\n")
if "hang" in words:
    ask()
    time.sleep(60)
print("INFO:2026-11-27 19:54:52,210:step 1/2 | reward 0.5")
if "leave" in words:  # a process that holds the pipe
    os.fork() or time.sleep(30)
ask()
while "wait" in words and not (folder / "stop").exists():
    time.sleep(0.02)
if "crash" in words:
    print(*range(100), sep="\\n")
    print("Traceback (most recent call last):", "OSError: the disk", sep="\\n")
    os.kill(os.getpid(), signal.SIGKILL)
(folder / "words.json").write_text(json.dumps(words))
(folder / "metrics.jsonl").write_text('{"step": 0, "val/reward": 0.1}\\n{"step": 2, "val/reward": 0.4}\\n')
(folder / "global_step_2").mkdir(exist_ok=True)
(folder / "latest_checkpointed_iteration.txt").write_text("2")
"""


@pytest.fixture(autouse=True)
def stand_in(tmp_path, monkeypatch):
    """A program in place of verl's main, in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "MAIN", (sys.executable, "-c", MAIN))


@pytest.fixture
def train(capsys):
    """`train(*words)` -> (exit code, what a person saw)."""

    def run(*words: str) -> tuple[int, str]:
        code = main(["train", "digen_sd3", *words])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def test_words_are_those_of_verls_main():
    assert words_of(["digen_sd3+nft", "x.y=1"]) == ["recipe=digen_sd3+nft", "x.y=1"] and words_of(["recipe=a"]) == [
        "recipe=a"
    ]
    assert words_of(["~x", "--config-name", "job"]) == ["~x", "--config-name", "job"]
    assert words_of(["x=1"], needs_recipe=False) == ["x=1"]
    for given in ([], [""], ["x.y=1"]):
        with pytest.raises(ValueError, match="the first word must be a recipe, got"):
            words_of(given)
    for given, meant in (
        ("digen_sd3+nftt", "got 'nftt'; did you mean nft[?]"),
        ("grpo_guard", "of grpo_guard is guard;"),
    ):
        with pytest.raises(ValueError, match=meant):
            words_of([given])
    assert words_of(["mine", "hydra.searchpath=[pkg://mine]"])[0] == "recipe=mine"


def test_a_run_shows_little_keeps_all_and_ends_with_what_one_does_next(train, tmp_path):
    code, said = train("trainer.resume_mode=auto")
    assert code == 0 and "noise" not in said and "step 1/2 | reward 0.5" in said
    assert said.startswith("starts python -m verl.trainer.main_ppo recipe=digen_sd3 trainer.resume_mode=auto\n")
    assert "reward 0.4000 after step 2, 0.1000 before training" in said and "digen export run\n" in said
    log = (tmp_path / "run" / "console.log").read_text()
    assert log.startswith("noise of a library\n") and "more noise" in log and "step 1/2" in log
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0, "val/reward": 0.1}\n')  # of trainer.val_only
    assert next(launcher.summary(tmp_path / "run", [], 0)) == "Best validation  reward 0.1000 after step 0"


def test_a_folder_of_configs_is_taken_from_where_one_stands(tmp_path):
    (tmp_path / "conf").mkdir()
    assert main(["train", "--config-path", "conf", "--config-name", "conf"]) == 0
    words = json.loads((tmp_path / "run" / "words.json").read_text())
    assert words == ["--config-path", str(tmp_path / "conf"), "--config-name", "conf"]


def test_a_full_disk_costs_lines_of_the_log_and_not_the_run(train, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "console.log").symlink_to("/dev/full")
    code, said = train()
    assert code == 0 and "step 1/2 | reward 0.5" in said and "Best validation" in said
    assert said.count("console.log lacks lines from here on ([Errno 28] No space left on device); the run goes on") == 1


@pytest.mark.parametrize(
    ("word", "code", "shown", "left_out"),
    [
        ("refuse", 2, "cannot run.\na key must be > 0", "exit code"),
        ("compose", 2, "exit code 2; it said:\nnoise of a library\nCould not find 0\n", "run's folder"),
        ("broken", 1, "exit code 1; it said:\nnoise of a library\nImportError: no torch\n", "run's folder"),
        (
            "crash",
            137,
            "exit code 137 (killed by SIGKILL; out of host memory is common); the end of run/console.log:\n72\n",
            "\n71\n",
        ),
    ],
)
def test_a_run_that_failed_says_why(train, word, code, shown, left_out):
    got, said = train(word)
    assert got == code and shown in said and left_out not in said
    assert said.count("OSError: the disk") == 2 * (word == "crash"), "once as it happened, once in the end of the log"


def test_a_process_that_a_run_leaves_behind_does_not_hold_it_up(train):
    began_s = time.monotonic()
    assert train("leave")[0] == 0 and time.monotonic() - began_s < 15


@pytest.mark.parametrize(
    ("word", "number", "code", "shown"),
    [
        ("wait", signal.SIGINT, 130, "the run ends after this step"),
        ("hang", signal.SIGINT, 130, "the run ends at once"),
        ("wait", signal.SIGTERM, 143, "the run ends at once"),
    ],
)
def test_a_signal_ends_a_run_with_the_command_that_continues_it(train, tmp_path, word, number, code, shown):
    before = signal.getsignal(signal.SIGINT)
    got, said = train(word, f"signal={number:d}", "trainer.resume_mode=disable")
    assert got == code and shown in said and "go on" not in said and not (tmp_path / "run" / "stop").exists()
    way, mode = ("Continue", "auto") if shown.endswith("step") else ("Begin again", "disable")
    assert f"{way:<17}digen train digen_sd3 {word} signal={number:d} trainer.resume_mode={mode}\n" in said
    assert signal.getsignal(signal.SIGINT) == before


def test_a_run_in_the_background_of_a_script_or_under_nohup_ends_by_a_signal_that_asks_for_it(train, tmp_path):
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        assert train("signal=1")[0] == 0
        assert train("wait", "signal=15")[0] == 143
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert "the run stopped: SIGTERM" in (tmp_path / "run" / "console.log").read_text(), "it was not killed"


def test_a_run_that_cannot_be_asked_to_end_goes_on_until_it_is_asked_again(train, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stop").symlink_to(tmp_path / "no_such_folder" / "stop")
    code, said = train("wait", "signal=2", "signal=15")
    assert code == 143 and "the run does not end: [Errno 2] No such file" in said and "the run ends at once" in said


def test_a_folder_in_place_of_the_request_to_end_does_not_fail_a_run_that_ended(train, tmp_path):
    (tmp_path / "run" / "stop").mkdir(parents=True)
    code, said = train()
    assert code == 0 and "Console          run/console.log" in said


# -- from a program -------------------------------------------------------------------------------------------
def test_a_program_gets_the_run_or_the_reason(tmp_path):
    told: list[str] = []
    keys = {"trainer.default_local_dir": "run", "data.train_batch_size": 2}
    run = verl_digen.train("digen_x", ["a", {"prompt": "b"}], "ocr", val_prompts=["c"], show=told.append, **keys)
    assert isinstance(run, verl_digen.Run) and run.folder == Path("run") and "step 1/2 | reward 0.5" in told
    words = json.loads((tmp_path / "run" / "words.json").read_text())
    files = [
        f"data.{kind}_files='{tmp_path}/run/{name}.jsonl'"
        for kind, name in (("train", "prompts"), ("val", "val_prompts"))
    ]
    given = ["trainer.default_local_dir='run'", "data.train_batch_size=2", *files, "digen.reward.functions={ocr: 1.0}"]
    assert words == ["recipe=digen_x", *given]
    assert (tmp_path / "run" / "prompts.jsonl").read_text() == '"a"\n{"prompt": "b"}\n'
    for recipe, error, reason in (("refuse", ValueError, "a key must be > 0"), ("crash", RuntimeError, "code 137")):
        with pytest.raises(error, match=reason):
            verl_digen.train(recipe)
    with pytest.raises(ValueError, match="got 'outputs/mine/red'"):  # where this file's main leaves nothing
        verl_digen.train("digen_x", **{"trainer.project_name": "mine", "trainer.experiment_name": "red"})
    for name in ("prompts", "val_prompts"):  # a text has letters
        with pytest.raises(ValueError, match=f"{name} must be a list of texts or rows, got 'a cat'; write .TEXT."):
            verl_digen.train("digen_x", **{name: "a cat"})


def test_values_are_words_that_hydra_reads_back():
    values = [None, True, 3, 2.5e-4, "it's", "a\\'b\\", "x=[1, 2]", [1, "two"], {"a": {"weight": 1.0}}]
    read = OverridesParser.create().parse_overrides([f"key={word_of(value)}" for value in values])
    assert [override.value() for override in read] == [
        str(value) if isinstance(value, Path) else value for value in values
    ]


def redness(solution_image, **sample):
    return 1.0


def test_a_reward_is_a_name_a_file_or_an_object_that_other_processes_can_have(tmp_path):
    scale, held = 3.0, threading.Lock()

    def own(solution_image, **sample):
        return scale * solution_image

    assert rewards_of({"a": 2.0}, tmp_path) == {"a": 2.0}
    target = "red.py:redness"
    assert rewards_of(target, tmp_path) == {"redness": {"weight": 1.0, "reward": target}}
    assert rewards_of(redness, tmp_path)["redness"]["reward"] == f"{__name__}.redness"
    loaded = load(rewards_of(own, tmp_path)["own"]["reward"], "key", "")
    assert loaded(2.0) == 6.0 and loaded is not own
    given = rewards_of(partial(own, scale_2=1.0), tmp_path / "partial")
    assert load(given["reward"]["reward"], "key", "").keywords == {"scale_2": 1.0}
    with pytest.raises(ValueError, match=r"that can be pickled for other processes, got .*lambda.*give FILE.py:NAME"):
        rewards_of(lambda: held, tmp_path)
    with pytest.raises(ValueError, match="reward must be a name"):
        rewards_of(3, tmp_path)


TASK = "\x1b[36m(TaskRunnerV1 pid=24729)\x1b[0m "
LOGGED = "INFO:2026-11-27 19:54:52,210:"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (f"{TASK}{LOGGED}step 1/3 | reward 0.592 ±0.262 | eta 19s", "step 1/3 | reward 0.592 ±0.262 | eta 19s"),
        (f"{TASK}{LOGGED}validation after 0 steps: reward 0.6", "validation after 0 steps: reward 0.6"),
        (f"{TASK}WARNING:2026-11-27 19:54:52,210:replacing 2 groups", "warning: replacing 2 groups"),
        ("verl-digen: reward = 1 x shapes", "verl-digen: reward = 1 x shapes"),
        (f"{TASK}wandb: 🚀 View run at https://wandb.ai/a/b", "wandb: 🚀 View run at https://wandb.ai/a/b"),
        ("(WorkerDict pid=3, ip=10.0.0.2) ValueError: no", "ValueError: no"),
        (
            "(A pid=3) ray.exceptions.RayTaskError(OSError): x [repeated 2x across cluster] (Ray deduplicates)",
            "ray.exceptions.RayTaskError(OSError): x",
        ),
        ("(raylet) 2 workers (tasks / actors) were killed", "2 workers (tasks / actors) were killed"),
        (f"{TASK}{LOGGED}Total training steps: 3", "   7 s  prompts are read; ranks, replicas and rewards start"),
        (f"{TASK}{LOGGED}create worker group dict_keys(['actor_rollout'])", None),
        (f"{TASK} 'actor_rollout_ref': {{'actor': {{'step 1/3 |': 0}}}}", None),
        (f'{TASK}  warnings.warn("automodel engine is not available: ModuleNotFoundError(x)")', None),
        (f"{TASK}Training Progress:  33%|███▎      | 1/3 [00:09<00:19,  9.51s/it]", None),
    ],
)
def test_a_person_sees_steps_warnings_links_and_errors(line, shown):
    console = Console()
    assert console.read(line, 7.0) == shown
    assert console.read(line, 7.0) is None, "a text is shown once"
    assert console.has_begun == (shown is not None and shown.startswith(("step", "validation")))


def test_the_end_is_explained_whole_and_what_ray_says_meanwhile_is_not():
    console = Console()
    lines = ["verl-digen: this config cannot run.", "data.x must be > 0", "", "see docs", "(A pid=3) bye"]
    assert [console.read(line, 0) for line in lines] == [*lines[:2], None, "see docs", None]
    assert console.explains_end


def test_a_run_that_was_interrupted_is_explained_by_the_command_that_started_it():
    console = Console()
    assert console.read("verl-digen: the run stopped: Ctrl-C; this continues after it: python -m x", 0) is None
    assert not console.explains_end and console.run_dir is None
    console.read("verl-digen: the run's folder is outputs/a b", 0)
    assert console.run_dir == Path("outputs/a b")
