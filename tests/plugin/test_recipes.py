# SPDX-License-Identifier: Apache-2.0
import subprocess
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import OmegaConf

from tests.local_ray import shared_server
from tests.plugin.conftest import start_main
from verl_digen.config import DigenConfig, digen_config
from verl_digen.preflight.start_config import StartConfig
from verl_digen.preflight.unread import unknown_problems
from verl_digen.recipe_source import OBJECTIVES, PRIMARY

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
OBJECTIVES_OF = {
    **{"nft": "diffusion_nft", "awm": "awm", "dgpo": "dgpo", "dpo": "online_dpo", "guard": "grpo_guard"},
    **{"dppo": "flow_dppo", "mixgrpo": "flow_grpo"},
}


def job(config):
    """The config without Hydra's own section."""
    return {key: value for key, value in OmegaConf.to_container(config).items() if key != "hydra"}


def test_without_a_recipe_the_config_is_verls_byte_for_byte(tmp_path):
    runs = [start_main("--cfg", "job", cwd=tmp_path, VERL_USE_EXTERNAL_PLUGINS=p) for p in ("auto", "none")]
    (with_plugin, _), (without_plugin, _) = answers = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], [errors for _, errors in answers]
    assert with_plugin == without_plugin
    assert "\ntrainer:\n" in with_plugin


def test_without_a_recipe_a_mistyped_key_has_hydras_own_message(tmp_path):
    slip = "actor_rollout_ref.rollout.nme=vllm"
    runs = [start_main(slip, cwd=tmp_path, VERL_USE_EXTERNAL_PLUGINS=plugins) for plugins in ("auto", "none")]
    answers = [run.communicate(timeout=120)[1] for run in runs]
    with_plugin, without_plugin = (
        [line for line in text.splitlines() if "WARN" not in line.upper() and "INFO:" not in line] for text in answers
    )
    assert with_plugin == without_plugin and f"'{slip.partition('=')[0]}'" in "".join(with_plugin)


def test_unknown_recipe_is_one_paragraph_with_the_known_ones_and_no_traceback(tmp_path):
    run = start_main("recipe=nope", cwd=tmp_path)
    _, stderr = run.communicate(timeout=120)
    assert run.returncode == 1
    assert "Could not find 'recipe/nope'" in stderr
    assert "\tdigen_flowgrpo\n" in stderr
    assert "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []


def test_unknown_recipe_in_a_list_shows_the_known_ones_too(compose_main):
    with pytest.raises(MissingConfigException, match=r"recipe/nope(.|\n)*recipes: .*digen_cpu, .*digen_flowgrpo"):
        compose_main("recipe=digen_flowgrpo+nope")


def test_an_objectives_name_in_a_list_says_which_recipe_is_its(compose_main):
    with pytest.raises(MissingConfigException, match="the recipe of diffusion_nft is nft"):
        compose_main("recipe=digen_sd3+diffusion_nft")
    assert {path.stem for path in RECIPES.glob("*.yaml")} >= {*OBJECTIVES.values()}


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_every_recipe_composes_at_the_root(compose_main, name):
    assert "# @package _global_" in (RECIPES / f"{name}.yaml").read_text()
    config = compose_main(f"recipe={name}")
    assert "recipe" not in config
    if "digen" in config:
        assert digen_config(config)
        assert unknown_problems(StartConfig(config)) == []


def test_a_recipe_without_the_base_leaves_our_section_out(compose_main):
    assert "digen" not in compose_main("recipe=digen_cpu")


def test_machine_recipe_applies_itself_and_may_be_named_too(compose_main):
    from verl.plugin.platform import get_platform

    if get_platform().device_name != "cpu":
        pytest.skip("this machine has an accelerator")
    by_itself = compose_main("recipe=digen_flowgrpo")
    assert by_itself.trainer.device == "cpu"
    assert by_itself.ray_kwargs.ray_init.num_gpus == 8
    assert job(compose_main("recipe=digen_flowgrpo+digen_cpu")) == job(by_itself)


@pytest.mark.parametrize(("platform", "backend"), [("cpu", "digen_gloo"), ("nvidia", "nccl")])
def test_weights_travel_over_nccl_between_pools_where_devices_have_it(compose_main, monkeypatch, platform, backend):
    import verl.plugin.platform as platforms

    chosen = platforms.PlatformRegistry.get(platform)
    assert chosen is not None
    monkeypatch.setattr(platforms, "get_platform", lambda: chosen())
    rollout = compose_main("recipe=digen_flowgrpo+disaggregated").actor_rollout_ref.rollout
    assert rollout.checkpoint_engine.backend == backend
    by_hand = compose_main(
        "recipe=digen_flowgrpo+disaggregated", "actor_rollout_ref.rollout.checkpoint_engine.backend=nixl"
    )
    assert by_hand.actor_rollout_ref.rollout.checkpoint_engine.backend == "nixl"


def test_defaults_of_our_section_are_those_of_the_dataclasses(compose_main):
    assert digen_config(compose_main("recipe=digen_base")) == DigenConfig()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("digen.sampling.nun_steps=6", "Key 'nun_steps' not in 'SamplingConfig'"),
        ("digen.nonsense=1", "Key 'nonsense' not in 'DigenConfig'"),
        ("digen.sampling.num_steps=many", "Value 'many' of type 'str' could not be converted to Integer"),
    ],
)
def test_unknown_keys_and_wrong_types_are_errors_of_hydra(compose_main, override, message):
    with pytest.raises(ConfigCompositionException) as raised:
        compose_main("recipe=digen_flowgrpo", override)
    assert message in f"{raised.value} {raised.value.__cause__}"


def test_an_algorithms_recipe_changes_the_one_of_flow_grpo(compose_main):
    for name, objective in OBJECTIVES_OF.items():
        digen = digen_config(compose_main(f"recipe=[digen_flowgrpo,{name}]"))
        assert (digen.loss_name, digen.window.shift_every) == (objective, 25 if name == "mixgrpo" else None)


def test_a_users_recipe_on_the_search_path_builds_on_ours_and_a_slip_is_told(compose_main, tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [digen_flowgrpo, _self_]\ndigen: {seed: 7}\ntrainer: {save_frq: 7}\n"
    )
    config = compose_main(f"hydra.searchpath=[file://{tmp_path}]", "recipe=mine")
    assert (config.digen.seed, config.trainer.experiment_name) == (7, "flowgrpo")
    (problem,) = unknown_problems(StartConfig(config))
    assert problem.startswith("trainer.save_frq must be a key that is read, got 7; did you mean trainer.save_freq?")


def test_other_hydra_applications_are_left_alone(tmp_path):
    (tmp_path / "ppo_trainer.yaml").write_text("recipe: a key of theirs\n")
    (tmp_path / "broken.yaml").write_text("defaults: [ppo_trainer\n")
    with initialize_config_dir(str(tmp_path), version_base=None):
        assert compose("ppo_trainer", overrides=["recipe=changed"]) == {"recipe": "changed"}


@pytest.mark.parametrize("through_a_link", [False, True])
def test_verls_config_folder_given_as_a_path_has_recipes(tmp_path, through_a_link):
    import verl

    folder = Path(verl.__file__).parent / "trainer" / "config"
    if through_a_link:
        (tmp_path / "verl").symlink_to(folder.parents[1])
        folder = tmp_path / "verl" / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        assert compose("ppo_trainer", overrides=["recipe=digen_flowgrpo"]).digen.seed == 42


MAIN_OF_ANOTHER_PROGRAM = """
import sys

import ray

def tripped(*args, **kwargs):
    print("ray.init was reached")
    raise SystemExit(7)

ray.init = tripped
from verl.trainer.main_ppo import main
main()
"""


def test_another_program_that_calls_verls_main_has_recipes_and_checks(tmp_path, runnable):
    (tmp_path / "launcher.py").write_text(MAIN_OF_ANOTHER_PROGRAM)

    def start(*overrides):
        command = [shared_server().python, "-m", "launcher", *runnable, *overrides]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    good, bad = start(), start("digen.loss.name=ppo")
    stdout, stderr = good.communicate(timeout=240)
    assert good.returncode == 7 and "ray.init was reached" in stdout, stderr
    assert "verl-digen: reward = 1 x jpeg_compressibility" in stderr
    stdout, stderr = bad.communicate(timeout=240)
    assert bad.returncode == 2 and "ray.init was reached" not in stdout
    assert "digen.loss.name must be one of" in stderr and "Traceback" not in stderr


@pytest.mark.parametrize("recipe", ["digen_flowgro", "[digen_flowgro,disaggregated]"])
def test_a_mistyped_recipe_is_answered_with_the_one_that_was_meant(compose_main, recipe):
    with pytest.raises(MissingConfigException, match="did you mean digen_flowgrpo\\?"):
        compose_main(f"recipe={recipe}")


def test_hydras_many_questions_read_verls_primary_config_once_per_source(compose_main, monkeypatch):
    read, load = [], ImportlibResourcesConfigSource.load_config
    monkeypatch.setattr(
        ImportlibResourcesConfigSource,
        "load_config",
        lambda self, config_path: read.append(config_path) or load(self, config_path),
    )
    first, second = compose_main("recipe=digen_sd3"), compose_main("recipe=digen_flux")
    assert read.count(PRIMARY) <= 2 * 2 and "digen" in first and "digen" in second
