# SPDX-License-Identifier: Apache-2.0
"""The reward a run trains on: which functions the command line gives, and which of them cannot be called."""

import shlex
from pathlib import Path

import pytest
from hydra._internal.callbacks import Callbacks
from omegaconf import DictConfig, OmegaConf, open_dict

from verl_digen.config import RewardConfig, digen_config
from verl_digen.config.reward import reward_entry
from verl_digen.observe.run_files import FOLDER_LINE
from verl_digen.preflight.rewards import (
    check_combination,
    check_group_rewards,
    check_reward_devices,
    check_reward_keys,
    check_reward_manager,
    check_rewards,
    check_timeshared,
    reward_formula,
)
from verl_digen.preflight.start_config import StartConfig
from verl_digen.reward.functions import require_reward_function
from verl_digen.reward.named import find
from verl_digen.reward.scorers import jpeg_compressibility

ROOT = Path(__file__).resolve().parents[2]


def given(config: DictConfig) -> dict[str, object]:
    reward = config.digen.reward
    return OmegaConf.to_container(reward.recipe_functions if reward.functions is None else reward.functions)  # type: ignore[return-value]


SHAPES = {"weight": 1.0, "reward": "examples/drawn_world/shapes_reward.py:compute_score"}
"""Reward of recipe=digen_quickstart."""


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], {"shapes": SHAPES}),
        (["functions={jpeg_compressibility: 0.5}"], {"jpeg_compressibility": 0.5}),
        (["functions={}"], {}),
        (["functions={my_rewards.ocr.score: 1}"], {"my_rewards.ocr.score": 1.0}),
        (["functions={a: {weight: 1, url: x}}", "functions.a.weight=0.5"], {"a": {"weight": 0.5, "url": "x"}}),
        (["recipe_functions.jpeg_compressibility=0.5"], {"shapes": SHAPES, "jpeg_compressibility": 0.5}),
        (["recipe_functions.shapes.weight=0.5"], {"shapes": {**SHAPES, "weight": 0.5}}),
        (["recipe_functions.shapes.num_workers=2"], {"shapes": {**SHAPES, "num_workers": 2}}),
    ],
)
def test_functions_replace_the_recipes_which_can_be_added_to(compose_main, overrides, expected):
    config = compose_main("recipe=digen_quickstart", *(f"digen.reward.{one}" for one in overrides))
    assert given(config) == expected
    assert {entry.name for entry in digen_config(config).reward.entries} == {*expected}


def test_other_mappings_are_merged_as_ever(compose_main):
    config = compose_main("recipe=digen_quickstart", "actor_rollout_ref.actor.optim={lr: 1.0}")
    assert config.actor_rollout_ref.actor.optim.lr == 1.0 and config.actor_rollout_ref.actor.optim.clip_grad == 1.0


def test_the_documented_way_to_a_reward_of_ones_own_trains_on_it_alone(start, runnable, tmp_path):
    (tmp_path / "mine.py").write_text("def compute_score(**sample):\n    return 0.0\n")
    mine = ("digen.reward.functions={}", f"reward.custom_reward_function.path={tmp_path / 'mine.py'}")
    config = start(*runnable, *mine)
    assert reward_formula(StartConfig(config)) == "reward = 1 x custom"
    check_rewards(StartConfig(config))


def test_the_cookbooks_line_for_a_reward_weighs_just_what_it_names(compose_main, tmp_path):
    page = (ROOT / "docs" / "reward_cookbook.md").read_text()
    line = next(line for line in page.splitlines() if "path=brightness.py" in line)
    (tmp_path / "brightness.py").write_text("def compute_score(**sample):\n    return 0.0\n")
    words = shlex.split(line.replace("brightness.py", str(tmp_path / "brightness.py")))
    config = compose_main("recipe=digen_quickstart", *words)
    assert reward_formula(StartConfig(config)) == "reward = 0.2 x jpeg_compressibility + 1 x custom"
    check_rewards(StartConfig(config))


@pytest.mark.parametrize(("save_freq", "num_warnings"), [(5, 0), (-1, 1)])
def test_a_start_names_its_folder_and_reward_and_warns_if_it_saves_nothing(
    start, runnable, capsys, tmp_path, save_freq, num_warnings
):
    no_forks = "+ray_kwargs.ray_init.runtime_env.py_executable=python"
    run_dir = f"trainer.default_local_dir={tmp_path}/run"
    config = start(*runnable, f"trainer.save_freq={save_freq}", run_dir, no_forks)
    Callbacks(config).on_run_start(config=config, config_name="ppo_trainer")
    folder, *said = capsys.readouterr().err.splitlines()
    assert folder == f"{FOLDER_LINE}{tmp_path}/run", "`digen train` reads it"
    told = [f"its report is {tmp_path}/run/report.html", "reward = 1 x jpeg_compressibility"]
    assert said[:2] == [f"verl-digen: {text}" for text in told] and len(said) == 2 + num_warnings
    assert all(line.startswith("verl-digen: trainer.save_freq=-1: no checkpoint will be saved") for line in said[2:])


@pytest.fixture
def composed(start) -> DictConfig:
    return start("recipe=digen_quickstart")


def refused(check, config: DictConfig, **changes: object) -> str:
    """The message of a check for a copy of `config` with changes."""
    changed = config.copy()
    with open_dict(changed):
        for key, value in changes.items():
            OmegaConf.update(changed, key.replace("__", "."), value, merge=False, force_add=True)
    with pytest.raises(ValueError) as raised:
        check(StartConfig(changed))
    assert "\n" not in str(raised.value)
    return str(raised.value)


PATH, NAME = "reward__custom_reward_function__path", "reward__custom_reward_function__name"
KWARGS = "reward__custom_reward_function__reward_kwargs"


@pytest.mark.parametrize(
    ("text", "kwargs", "message"),
    [
        ("compute_score = 5", None, "must be a function that returns a number or a dict with 'score', got 5;"),
        ("class compute_score: ...", None, "got the class compute_score;"),
        ("def compute_score(**sample):\n    yield 1", None, "got the generator compute_score;"),
        ("async def compute_score(**sample):\n    yield 1", None, "got the generator compute_score;"),
        (
            "def compute_score(images, prompts, metadata): ...",
            None,
            "this is flow_grpo's form: write a compute_score of these arguments that calls it with [solution_image]",
        ),
        (
            "def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...",
            None,
            "this is verl's form for text: rename solution_str to solution_image",
        ),
        ("def compute_score(): ...", None, "got a function of () (got an unexpected keyword argument"),
        (
            "def compute_score(data_source, solution_image, ground_truth, extra_info): ...",
            {"scale": 2},
            "take the other names out of reward.custom_reward_function.reward_kwargs",
        ),
        (
            "def compute_score(data_source, solution_image, ground_truth, extra_info, url): ...",
            None,
            "missing a required argument: 'url'",
        ),
        ("def compute_score(**sample): ...", 5, "reward_kwargs must be a mapping of arguments, got 5;"),
        ("import no_such_package", None, "(ModuleNotFoundError: No module named 'no_such_package'); repair"),
        ("def compute_score(:", None, "got 'compute_score' (SyntaxError: invalid syntax"),
        ("def score(**sample): ...", None, "has a function reward.custom_reward_function.name, got 'compute_score'"),
    ],
)
def test_a_function_that_a_run_could_not_call_is_refused_with_its_rule(composed, tmp_path, text, kwargs, message):
    path = tmp_path / "reward.py"
    path.write_text(text)
    found = refused(check_rewards, composed, **{PATH: str(path), KWARGS: kwargs})
    assert found.startswith("reward.custom_reward_function") and message in found


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("pass", "score(self, batch), got 'Mine' (TypeError: it has none); write it so"),
        ("scope = 'batch'\n    def score(self, batch): ...", "scope of Mine must be one of sample, group, got 'batch'"),
        ("def score(self): ...", "(TypeError: too many positional arguments)"),
        (
            "def score(self, batch): ...\n    def __init__(self): ...",
            "__init__(self, config, device), got 'Mine' (TypeError: too many positional arguments); write it so",
        ),
    ],
)
def test_a_class_that_a_run_could_not_make_or_call_is_refused(composed, tmp_path, body, message):
    path = tmp_path / "mine.py"
    path.write_text(f"from verl_digen.reward.base import Reward\nclass Mine(Reward):\n    {body}\n")
    assert message in refused(check_rewards, composed, digen__reward__functions={f"{path}:Mine": 1.0})


@pytest.mark.parametrize(
    ("text", "kwargs"),
    [
        ("def compute_score(**sample): ...", None),
        ("async def compute_score(data_source, solution_image, ground_truth, extra_info=None): ...", None),
        ("def compute_score(data_source, solution_image, ground_truth, extra_info, url): ...", {"url": "x"}),
        ("def compute_score(solution_image, ground_truth, *, data_source, **rest): ...", {"scale": 2}),
        ("class Score:\n    def __call__(self, **sample): ...\ncompute_score = Score()", None),
        ("from functools import partial\ncompute_score = partial(lambda a, **sample: 1.0, 2)", None),
    ],
)
def test_a_function_of_an_unusual_form_that_can_be_called_is_accepted(composed, tmp_path, text, kwargs):
    path = tmp_path / "reward.py"
    path.write_text(text)
    config = composed.copy()
    with open_dict(config):
        config.reward.custom_reward_function = {"path": str(path), "name": "compute_score", "reward_kwargs": kwargs}
    check_rewards(StartConfig(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({PATH: "missing.py"}, "got 'missing.py'; check the path (it is relative to the working directory "),
        ({PATH: "s3://bucket/reward.py"}, "path must be an existing file, or pkg://MODULE, got 's3://bucket"),
        ({PATH: "pkg://no_such.module"}, "(ModuleNotFoundError: No module named 'no_such'); repair the file"),
        ({PATH: str(ROOT / "README.md")}, "(ImportError: Could not load module"),
        ({PATH: __file__, NAME: None}, "has a function reward.custom_reward_function.name, got None (TypeError"),
        ({"digen__reward__functions": {}}, "digen.reward.functions must name a reward function and its weight"),
        ({"digen__reward__functions": {"jpeg_compressibility": 0.0}}, "must have a weight that is not 0"),
        ({"digen__reward__functions": {"nonsense": 1.0}}, "must name one of aesthetic, clip_score, diversity, "),
        (
            {"digen__reward__functions": {"no_such.module:f": 1.0}},
            "must name what can be loaded, got 'no_such.module:f' (Mod",
        ),
        (
            {"digen__reward__functions": {"math:pi": 1.0}},
            "functions.math:pi must be a function that returns a number or a dict",
        ),
        ({"digen__reward__functions": {"json.dumps": 1.0}}, "functions.json.dumps must take the keyword arguments"),
        (
            {"digen__reward__functions": {"jpeg_compressibility": float("nan")}},
            "functions.jpeg_compressibility must be a finite number, got nan",
        ),
        (
            {"digen__reward__functions": {"jpeg_compressibility": "much"}},
            "functions.jpeg_compressibility must be a number, got 'much'; 1.0 is usual",
        ),
        (
            {"digen__reward__functions": {"mine": "mine.py:score"}},
            "got 'mine.py:score'; 1.0 is usual; a function is {weight: 1, reward: FILE.py:NAME}",
        ),
        ({"digen__reward__functions": {1: 1.0}}, "functions.1 must name one of aesthetic, clip_score, "),
        (
            {"digen__reward__functions": {"std": {"weight": 1, "reward": "json.dumps"}}},
            "functions must not name a reward mean, std, min, max, zero_spread_fraction: its metric would hide",
        ),
        (
            {"digen__reward__functions": {"jpeg_compressibility": {"num_gpus": 1}}},
            "functions.jpeg_compressibility must have a weight, got {'num_gpus'",
        ),
        (
            {"digen__reward__functions": {"jpeg_compressibility": {"weight": 1, "num_gpus": 1.5}}},
            "functions.jpeg_compressibility.num_gpus must be a fraction of one device, or a whole number, got 1.5",
        ),
        (
            {"digen__reward__functions": {"diversity": {"weight": 1, "sise_px": 8}}},
            "functions.diversity.sise_px must be a setting of Diversity (size_px), got 8; did you mean size_px?",
        ),
        (
            {"digen__reward__functions": {"diversity": {"weight": 1, "timeshare": "on"}}},
            "functions.diversity.timeshare must be true or false, got 'on'",
        ),
        (
            {"digen__reward__functions": {"diversity": {"weight": 1, "timeshare": True, "num_workers": 2}}},
            "functions.diversity.num_workers must be left out with digen.reward.functions.diversity.timeshare=true",
        ),
        ({NAME: "mine"}, "must have a path where its name or reward_kwargs are given, got ('mine', {})"),
        ({KWARGS: {"scale": 2}}, "name or reward_kwargs are given, got ('compute_score', {'scale': 2})"),
    ],
)
def test_a_reward_that_cannot_be_found_or_weighed_is_refused(composed, changes, message):
    assert message in refused(check_rewards, composed, **changes)


@pytest.mark.parametrize(
    ("check", "changes", "message"),
    [
        (
            check_combination,
            {"digen__reward__combine": "product"},
            "digen.reward.combine must name one of sum, gdpo, or package.module.function, got 'product'",
        ),
        (
            check_combination,
            {"digen__reward__combine": "math.pi"},
            "digen.reward.combine must be a function of (values, weights), got 3.14",
        ),
        (
            check_combination,
            {"digen__reward__combine": "gdpo", "reward__reward_manager__name": "Mine"},
            "digen.reward.combine must be sum with reward.reward_manager.name=Mine, which returns one number, got",
        ),
        (
            check_combination,
            {"digen__reward__combine": "gdpo", "digen__queue__drop_zero_spread": True},
            "digen.queue.drop_zero_spread must be false with digen.reward.combine=gdpo",
        ),
        (
            check_combination,
            {"digen__reward__functions": {"custom": {"weight": 1, "reward": "jpeg_compressibility"}}, PATH: "mine.py"},
            "digen.reward.functions must not name a reward 'custom' beside reward.custom_reward_function.path",
        ),
        (
            check_group_rewards,
            {"digen__reward__functions": {"diversity": 1.0}},
            "actor_rollout_ref.rollout.val_kwargs.n must be >= 2 with diversity, which compares samples of a prompt",
        ),
        (
            check_group_rewards,
            {
                "digen__reward__functions": {"diversity": 1.0},
                "actor_rollout_ref__rollout__n": 1,
                "trainer__test_freq": -1,
                "trainer__val_before_train": False,
            },
            "actor_rollout_ref.rollout.n must be >= 2 with diversity",
        ),
        (
            check_reward_devices,
            {"digen__reward__functions": {"diversity": 1.0}, "reward__reward_model__enable_resource_pool": True},
            "enable_resource_pool must be false where every reward has processes of its own, got True;",
        ),
        (
            check_reward_keys,
            {"custom_reward_function__path": "mine.py"},
            "custom_reward_function.path must be left out: verl's main does not read its older section "
            "'custom_reward_function', got ['mine.py']; the keys are under reward.custom_reward_function now",
        ),
        (check_reward_keys, {"reward_model__rollout__name": "vllm"}, "reward_model.rollout.name must be left out"),
        (check_reward_manager, {"reward__reward_manager__name": "naive"}, "must name a class that can be imported"),
        (check_reward_manager, {"reward__reward_manager__module__path": "pkg://nowhere"}, "got 'DiffusionRewardMan"),
    ],
)
def test_keys_around_rewards_that_would_do_nothing_or_fail_later_are_refused(composed, check, changes, message):
    assert message in refused(check, composed, **changes)


def test_a_name_with_a_colon_and_one_with_dots_are_the_same_function():
    module = "verl_digen.reward.scorers.jpeg_compressibility"
    colon, dots = (find(reward_entry(f"{module}{sign}compute_score", 1.0)) for sign in ":.")
    assert colon.function is dots.function is jpeg_compressibility.compute_score  # type: ignore[attr-defined]


def test_a_compiled_function_that_hides_its_signature_is_not_refused():
    require_reward_function("key", max)


def test_the_custom_function_is_weighed_only_if_there_is_one():
    reward = RewardConfig({"ocr": 2.0}, custom_weight=0.5)
    assert reward.weights(has_custom=False) == {"ocr": 2.0}
    assert reward.weights(has_custom=True) == {"ocr": 2.0, "custom": 0.5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"actor_rollout_ref__rollout__name": "vllm_omni"},
            "rollout.name must be diffusers with digen.reward.functions.diversity.timeshare=true, as it has not",
        ),
        (
            {"trainer__v1__trainer_mode": "digen_disaggregated"},
            "trainer_mode must be digen_colocated with digen.reward.functions.diversity.timeshare=true, for",
        ),
        (
            {"actor_rollout_ref__rollout__free_cache_engine": False},
            "free_cache_engine must be true with digen.reward.functions.diversity.timeshare=true, so",
        ),
        (
            {"digen__reward__functions": {"jpeg_compressibility": {"weight": 1, "timeshare": True}}},
            "for the function 'jpeg_compressibility',",
        ),
    ],
)
def test_a_reward_takes_turns_with_replicas_that_sleep_and_has_weights(composed, changes, message):
    given = {"digen__reward__functions": {"diversity": {"weight": 1, "timeshare": True}}}
    assert message in refused(check_timeshared, composed, **(given | changes))
