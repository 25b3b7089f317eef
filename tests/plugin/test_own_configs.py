# SPDX-License-Identifier: Apache-2.0
"""A YAML, a main and a program of one's own, built on verl's config, take recipes as verl's main does."""

import subprocess
from pathlib import Path

import pytest
import verl
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import OmegaConf

from tests.local_ray import shared_server
from tests.plugin.conftest import start_main
from verl_digen.preflight.start_config import check_recipes, named_recipes

pytestmark = pytest.mark.slow

VERLS = Path(verl.__file__).parent / "trainer" / "config" / "ppo_trainer.yaml"
SEARCH = "hydra: {searchpath: [pkg://verl.trainer.config]}\n"
MINE = "trainer: {project_name: mine}\ndata: {train_batch_size: 6}\n"


@pytest.fixture
def own(tmp_path):
    """`own("mine", "recipe=NAME")` -> the config of the test's folder, with Hydra's own section."""

    def run(name, *overrides):
        with initialize_config_dir(str(tmp_path), version_base=None):
            return compose(name, overrides=list(overrides), return_hydra_config=True)

    return run


def job(config):
    return {key: value for key, value in OmegaConf.to_container(config).items() if key != "hydra"}


def test_a_yaml_on_verls_takes_a_recipe_and_wins_over_it(own, tmp_path, compose_main):
    (tmp_path / "mine.yaml").write_text(f"{SEARCH}defaults: [ppo_trainer, _self_]\n{MINE}")
    words = "trainer.project_name=mine", "data.train_batch_size=6"
    assert job(own("mine", "recipe=digen_sd3+nft")) == job(compose_main("recipe=digen_sd3+nft", *words))


@pytest.mark.parametrize(
    "defaults",
    [
        ["ppo_trainer", {"recipe": "digen_sd3"}, "_self_"],
        ["ppo_trainer", "_self_", {"override recipe": "digen_sd3"}],
        ["base", {"recipe": ["digen_sd3"]}, "_self_"],
        ["/ppo_trainer", {"recipe": None}, "_self_"],
    ],
)
def test_a_yaml_may_name_the_recipe_and_the_command_line_another(own, tmp_path, compose_main, defaults):
    (tmp_path / "base.yaml").write_text("defaults: [ppo_trainer, more, _self_]\ntrainer: {project_name: base}\n")
    (tmp_path / "more.yaml").write_text("actor_rollout_ref: {rollout: {n: 6}}\nalgorithm: {gamma: 1.0}\n")
    (tmp_path / "mine.yaml").write_text(SEARCH + OmegaConf.to_yaml(OmegaConf.create({"defaults": defaults})) + MINE)
    if {"recipe": None} not in defaults:
        config = own("mine")
        assert config.digen.loss.name == "flow_grpo" and config.actor_rollout_ref.model.lora_rank == 32
        assert (config.trainer.project_name, config.data.train_batch_size) == ("mine", 6)
    nft = own("mine", "recipe=digen_qwen_image+nft")
    assert nft.digen.loss.name == "diffusion_nft" and nft.trainer.project_name == "mine"
    assert named_recipes(nft) == ["digen_qwen_image", "nft"]


def test_a_copy_of_verls_file_under_another_name_takes_recipes(own, tmp_path, compose_main):
    (tmp_path / "mine.yaml").write_text(SEARCH + VERLS.read_text())
    assert job(own("mine", "recipe=digen_flowgrpo")) == job(compose_main("recipe=digen_flowgrpo"))


def test_a_file_of_ones_own_under_verls_name_is_the_one_that_is_read(own, tmp_path):
    (tmp_path / "ppo_trainer.yaml").write_text(
        SEARCH + VERLS.read_text().replace("project_name: verl_examples", "project_name: fork")
    )
    assert own("ppo_trainer").trainer.project_name == "fork"
    assert own("ppo_trainer", "recipe=digen_cpu").trainer.project_name == "fork"


def test_without_a_recipe_a_yaml_composes_to_what_it_is_without_us(own, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"{SEARCH}defaults: [ppo_trainer, _self_]\n{MINE}")
    words = "--config-path", str(tmp_path), "--config-name", "mine", "--cfg", "job"
    runs = [start_main(*words, cwd=tmp_path, VERL_USE_EXTERNAL_PLUGINS=plugins) for plugins in ("auto", "none")]
    (with_us, _), (without_us, _) = answers = [run.communicate(timeout=240) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], [errors for _, errors in answers]
    assert with_us == without_us and "project_name: mine" in with_us


def refused(run):
    """True if the run's config had the recipe, and the check of it ended the run."""
    _, stderr = run.communicate(timeout=240)
    return run.returncode == 2 and "digen.loss.name must be one of" in stderr


def test_verls_main_with_a_yaml_of_ones_own_is_checked(tmp_path, runnable):
    (tmp_path / "mine.yaml").write_text(f"{SEARCH}defaults: [ppo_trainer, _self_]\n{MINE}")
    words = "--config-path", str(tmp_path), "--config-name", "mine", "digen.loss.name=ppo"
    assert refused(start_main(*words, *runnable, cwd=tmp_path))


OWN_MAIN = """
import hydra
import verl

@hydra.main(config_path="conf", config_name="mine", version_base=None)
def main(config):
    raise AssertionError("the config was not checked")

main()
"""


def test_a_main_of_ones_own_takes_recipes_and_is_checked(tmp_path, runnable):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text(f"{SEARCH}defaults: [ppo_trainer, _self_]\n{MINE}")
    (tmp_path / "train.py").write_text(OWN_MAIN)
    command = [shared_server().python, "-m", "train", *runnable, "digen.loss.name=ppo"]
    assert refused(subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))


# -- names and mistakes -------------------------------------------------------------------------------------
def test_recipes_joined_by_a_plus_are_those_of_a_list(compose_main):
    joined, listed = (compose_main(f"recipe={words}") for words in ("digen_sd3+ocr+nft", "[digen_sd3,ocr,nft]"))
    assert job(joined) == job(listed)
    assert named_recipes(joined) == named_recipes(listed) == ["digen_sd3", "ocr", "nft"]


def test_a_wrong_order_is_refused_with_the_right_one(compose_main):
    with pytest.raises(ValueError, match=r"got 'recipe=nft\+digen_sd3'; name recipe=digen_sd3\+nft"):
        check_recipes(compose_main("recipe=nft+digen_sd3"))


def test_a_recipe_appended_to_a_yamls_own_is_refused_or_an_error_of_hydra(own, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"{SEARCH}defaults: [ppo_trainer, recipe: digen_sd3, _self_]\n{MINE}")
    with pytest.raises(ValueError, match=r"got '\+recipe=digen_flux'; type recipe=digen_flux: it replaces digen_sd3"):
        check_recipes(own("mine", "+recipe=digen_flux"))
    (tmp_path / "other.yaml").write_text(f"{SEARCH}defaults: [ppo_trainer, _self_]\n{MINE}")
    with pytest.raises(ConfigCompositionException, match="Multiple values for recipe"):
        own("other", "+recipe=digen_flux")


def test_a_yaml_without_verls_search_path_says_so(own, tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\n")
    with pytest.raises(MissingConfigException, match=r"hydra\.searchpath=\[pkg://verl\.trainer\.config\]"):
        own("mine")
