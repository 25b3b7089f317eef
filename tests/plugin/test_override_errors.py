# SPDX-License-Identifier: Apache-2.0
"""Mistyped keys and recipes, as Hydra answers them."""

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import OmegaConf

from verl_digen.patches.hydra_override_errors import closest_keys, explaining

RECIPE = "recipe=digen_flowgrpo"


def hydras_error(overrides, cfg, apply):
    """The error of applying the overrides to a config by `apply`."""
    with pytest.raises(ConfigCompositionException) as raised:
        apply(OverridesParser.create().parse_overrides(overrides), OmegaConf.create(cfg, flags={"struct": True}))
    return str(raised.value)


def test_hydra_by_itself_suggests_no_key():
    # no config of verl's, so Hydra's own words reach it
    said = hydras_error(["seeed=1"], {"seed": 1}, ConfigLoaderImpl._apply_overrides_to_config)
    assert "use +seeed=1" in said and "did you mean" not in said


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("digen.seed=3",), "digen.seed needs a recipe of verl-digen, got 'digen.seed=3'; add e.g. recipe="),
        ((RECIPE, "digen.digen.sde.law=cps"), "did you mean digen.sde.law?"),
        ((RECIPE, "digen.digen.seed=3"), "did you mean digen.seed"),
        ((RECIPE, "digen.sampling.nun_steps=6"), "did you mean digen.sampling.num_steps or "),
        ((RECIPE, "trainer.n_gpu_per_node=3"), "did you mean trainer.n_gpus_per_node?"),
        ((RECIPE, "lr=1e-3"), "did you mean actor_rollout_ref.actor.optim.lr"),
        ((RECIPE, "digen.nonsense=1"), "digen.nonsense must be a key of the config, got 'digen.nonsense=1'; --cfg job"),
        ((RECIPE, "digen.sampling.num_steps=many"), "Value 'many' of type 'str' could not be converted to Integer"),
        ((RECIPE, "+trainer.nnodes=3"), "An item is already at 'trainer.nnodes'. Either remove + prefix"),
        (("trainer.nnode=3",), "did you mean trainer.nnodes?"),
        ((RECIPE, "图=1"), "'图=1' must be KEY=VALUE in Hydra's grammar"),
        ((RECIPE, "digen.reward.functions={'': 1}"), "put a text with other characters into quotes"),
        (("recipe={a: b}",), "recipe must be a name or a list of names, got 'recipe={a: b}'; give e.g."),
        ((RECIPE, "~data.val_files"), "got '~data.val_files' for one that is null; leave the word out"),
        (("recipe=5",), "Config group override must be a string or a list. Got int; a config group is given a name"),
    ],
)
def test_a_mistyped_key_is_answered_with_the_one_that_was_meant(compose_main, overrides, said):
    with pytest.raises(ConfigCompositionException) as raised:
        compose_main(*overrides)
    assert said in str(raised.value)


def test_all_mistyped_keys_are_named_at_once(compose_main):
    with pytest.raises(ConfigCompositionException) as raised:
        compose_main(RECIPE, "trainer.nnode=3", "digen.seeed=1", "digen.seed=4", "data.batch=2")
    assert [line.split()[0] for line in str(raised.value).splitlines()] == [
        "trainer.nnode",
        "digen.seeed",
        "data.batch",
    ]


@pytest.mark.parametrize("recipe", ["digen_flowgro", "[digen_flowgro,disaggregated]"])
def test_a_mistyped_recipe_is_answered_with_the_one_that_was_meant(compose_main, recipe):
    with pytest.raises(MissingConfigException, match="did you mean digen_flowgrpo\\?"):
        compose_main(f"recipe={recipe}")


def test_what_can_be_applied_is_applied_in_order():
    applied = []

    def record(overrides, cfg):
        applied.extend(override.input_line for override in overrides)

    overrides = OverridesParser.create().parse_overrides(["a=1", "b=2", "a=3"])
    explaining(record)(overrides, OmegaConf.create({"actor_rollout_ref": {}}))
    assert applied == ["a=1", "b=2", "a=3"]


def test_other_applications_keep_hydras_words(tmp_path):
    (tmp_path / "app.yaml").write_text("seed: 1\n")
    with (
        initialize_config_dir(str(tmp_path), version_base=None),
        pytest.raises(ConfigCompositionException, match=r"use \+seeed=1"),
    ):
        compose("app", overrides=["seeed=1"])


def test_a_key_that_resembles_none_is_answered_with_no_guess():
    assert closest_keys("zzz", OmegaConf.create({"actor_rollout_ref": {"seed": 1}})) == []
