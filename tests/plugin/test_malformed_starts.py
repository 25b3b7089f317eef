# SPDX-License-Identifier: Apache-2.0
"""Malformed starts end with one paragraph before Ray starts; unusual valid ones are accepted."""

import json
import os
import re
import shutil
import socket
import sys
from contextlib import suppress

import pytest
import ray
import torch
from hydra.errors import HydraException
from omegaconf import OmegaConf, open_dict
from safetensors.torch import load_file, save_file

from tests.grid import IN_GRID
from tests.plugin.malformed import (
    ADDED_UNKNOWN,
    ALONE,
    RECIPES,
    SEPARATE_MALFORMED,
    SEPARATE_UNUSUAL,
    TOGETHER,
    UNUSUAL,
    batches,
)
from tests.tiny_models import BUILDERS, build_tiny
from verl_digen import preflight
from verl_digen.config import digen_config
from verl_digen.preflight import start_config
from verl_digen.preflight.machine import tracker_notes
from verl_digen.preflight.start_config import StartConfig
from verl_digen.preflight.unread import READERS, _verls_keys, keys_of, unknown_problems
from verl_digen.preflight.values import MODEL, OURS, READ, REFUSED, ROLLOUT, VALUES, unused_keys
from verl_digen.preflight.weights import check_weights

pytestmark = pytest.mark.slow

SEPARATE = "recipe=digen_flowgrpo+disaggregated"


@pytest.fixture(autouse=True)
def no_ray(monkeypatch, tmp_path):
    """Fail if Ray starts; paths are in an empty folder with one file in it."""

    def started(*args, **kwargs):
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray, "init", started)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NO_SUCH_VARIABLE", raising=False)
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")


def said_of(start, *overrides):
    """The paragraph that a user reads, or None. Anything else fails the test."""
    try:
        preflight.check(start(*overrides))
    except ValueError as error:
        return str(error)
    except HydraException as error:  # Hydra's words: the override as typed, and in the cause what is wrong with it
        return f"{error}; {error.__cause__}"
    return None


def assert_told(message, override, key):
    """Assert that some line names the key and the value, and says what to do."""
    assert message is not None, f"{override} was accepted"
    value = override.partition("=")[2].strip("'")
    lines = [line for line in message.splitlines() if key in line]
    assert lines, f"{key} is not named in: {message}"
    assert any("; " in line for line in lines), f"no remedy in: {message}"
    assert any(shows(line, value) for line in message.splitlines()), f"{value} is not in: {message}"
    assert "Traceback" not in message


def _first_of_each_key(starts):
    """The first of each key for every change, the others in the grid."""
    seen = set()
    for override, key in starts:
        yield pytest.param(override, key, id=override, marks=IN_GRID if key in seen else [])
        seen.add(key)


def shows(line, value):
    """True if a line has the value, as typed or as Python prints it."""
    texts = {value, value.strip("[]"), value.strip("[]").split(",")[-1], value.capitalize()}
    with suppress(ValueError, OverflowError):
        texts |= {str(float(value)), str(int(float(value)))}
    if value in ("null", "''") or value.startswith("${") or value == "":
        return True
    return any(re.search(rf"(?<![\w.]){re.escape(text)}(?![\w])", line) for text in texts if text)


@pytest.mark.parametrize(("override", "key"), [*_first_of_each_key(ALONE)])
def test_a_malformed_start_is_told_by_key_value_and_remedy(start, runnable, tmp_path, override, key):
    typed = override.replace("TMP", str(tmp_path))
    assert_told(said_of(start, *runnable, typed), typed, key)


@pytest.mark.parametrize(("override", "part"), ADDED_UNKNOWN, ids=[override for override, _ in ADDED_UNKNOWN])
def test_an_added_key_that_nothing_reads_is_told(start, runnable, override, part):
    said = said_of(start, *runnable, override)
    assert said is not None and part in said and "; " in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(("overrides", "part"), TOGETHER, ids=[" ".join(overrides) for overrides, _ in TOGETHER])
def test_overrides_that_do_not_go_together_are_told(start, runnable, tmp_path, overrides, part):
    said = said_of(start, *runnable, *(word.replace("TMP", str(tmp_path)) for word in overrides))
    assert said is not None and part in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("batch", batches(), ids=lambda batch: f"{len(batch)} numbers from {batch[0][0]}")
def test_malformed_numbers_are_all_told_at_once(start, runnable, batch):
    said = said_of(start, *runnable, *(override for override, _ in batch))
    assert said is not None
    for override, key in batch:
        lines = [line for line in said.splitlines() if line.startswith((f"{key} ", f"{key}:"))]
        assert len(lines) == 1, f"{override} is not told once in: {said}"
        assert_told(lines[0], override, key)


@pytest.mark.parametrize(("override", "key"), SEPARATE_MALFORMED, ids=[override for override, _ in SEPARATE_MALFORMED])
def test_a_malformed_start_of_separate_pools_is_told_too(start, runnable, override, key):
    assert_told(said_of(start, SEPARATE, *runnable[1:], override), override, key)


@pytest.mark.parametrize(("recipe", "remedy"), RECIPES, ids=[recipe for recipe, _ in RECIPES])
def test_recipes_that_do_not_go_together_are_answered_with_those_that_do(start, recipe, remedy):
    said = said_of(start, recipe)
    assert said is not None and remedy in said and recipe.partition("=")[2].strip("[]") in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("overrides", UNUSUAL, ids=" ".join)
def test_an_unusual_start_is_accepted(start, runnable, tmp_path, overrides):
    assert said_of(start, *runnable, *(word.replace("TMP", str(tmp_path)) for word in overrides)) is None


@pytest.mark.parametrize("overrides", SEPARATE_UNUSUAL, ids=" ".join)
def test_an_unusual_start_of_separate_pools_is_accepted(start, runnable, overrides):
    assert said_of(start, SEPARATE, *runnable[1:], *overrides) is None


def test_keys_of_verls_without_effect_are_refused_with_their_counterparts(start, runnable):
    config = start(*runnable)
    remedies = {key: remedy for key, _, remedy in unused_keys()} | REFUSED
    for key in remedies:
        OmegaConf.update(config, key, f"not that of {key}", merge=False)
    with pytest.raises(ValueError) as raised:
        preflight.check(config)
    lines = str(raised.value).splitlines()
    for key, remedy in remedies.items():
        assert any(line.startswith(f"{key} must be ") and line.endswith(remedy) for line in lines), key


def test_a_manager_of_the_users_own_that_fails_at_its_import_is_told_with_the_cause(
    start, runnable, tmp_path, monkeypatch
):
    (tmp_path / "own_manager.py").write_text("from verl_digen.agent_loop import manager\nNAMES['x']\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = said_of(start, *runnable, f"{ROLLOUT}.agent.agent_loop_manager_class=own_manager.Own")
    assert said is not None and "got 'own_manager.Own' (NameError: name 'NAMES' is not defined); " in said
    (tmp_path / "own_manager.py").write_text("class Own: ...\n")
    said = said_of(start, *runnable, f"{ROLLOUT}.agent.agent_loop_manager_class=own_manager.Own")
    assert said is not None and "or a subclass of it, got 'own_manager.Own'; " in said


def test_a_section_that_an_empty_line_takes_away_is_told(start, runnable):
    read = {key.rpartition(".")[0] for key in (*VALUES, *READ, *REFUSED, *(key for key, *_ in unused_keys()))}
    innermost = sorted(name for name in read if not any(other.startswith(f"{name}.") for other in read))
    assert {f"{ROLLOUT}.trace", f"{MODEL}.lora", "reward.reward_manager.module", "critic"} <= {*innermost}
    said = said_of(start, *runnable, *(f"{name}=null" for name in innermost))
    assert said is not None
    told = {line for line in said.splitlines() if "must be a section" in line}
    assert told == {f"{name} must be a section with keys of its own, got None; leave it out" for name in innermost}


def test_every_key_without_effect_is_one_of_verls(compose_main):
    verls = compose_main()
    keys = [key for key, _, _ in unused_keys()]
    assert len({*keys}) == len(keys) > 100 and {*keys} >= OURS.keys()
    for key in (*keys, *REFUSED):
        section, _, name = key.rpartition(".")
        assert name in OmegaConf.select(verls, section), key


def test_verls_yaml_has_the_keys_of_its_composed_config(start):
    composed = {key for key in keys_of(start()) if key.partition(".")[0] not in ("hydra", "model_engine")}
    assert composed <= set(keys_of(OmegaConf.create(_verls_keys()))) and "trainer.save_freq" in composed


def test_a_key_of_a_fork_of_verl_whose_composed_file_lacks_it_is_accepted(start, runnable, monkeypatch):
    lacking = _verls_keys() | {"trainer": {"save_freq": -1}}
    monkeypatch.setattr("verl_digen.preflight.unread._verls_keys", lambda: lacking)
    assert unknown_problems(StartConfig(start(*runnable))) == []
    (said,) = unknown_problems(StartConfig(start(*runnable, "+trainer.save_frq=3")))
    assert said.startswith("trainer.save_frq must be ")


@pytest.mark.parametrize("reader", READERS)
def test_a_section_that_a_class_of_ones_own_reads_may_have_any_key(start, runnable, reader):
    key, ours = READERS[reader]
    config = start(*runnable, f"+{reader}.mine=1")
    assert [problem.split()[0] for problem in unknown_problems(StartConfig(config))] == [f"{reader}.mine"]
    OmegaConf.update(config, key, f"My{ours}")
    assert unknown_problems(StartConfig(config)) == []


def test_all_problems_of_a_start_are_told_at_once(start, runnable):
    said = said_of(
        *(start, *runnable, "trainer.nnodes=0", "digen.kl.coef=nan", "digen.sde.law=flo", "algorithm.gamma=0.9"),
        *("trainer.logger=[tensorbord]", "actor_rollout_ref.model.path=nowhere", "data.train_batch_size=many"),
    )
    named = [line.split()[0] for line in said.splitlines()]
    assert sorted(named) == sorted(
        [
            *("trainer.nnodes", "trainer.logger", "data.train_batch_size", "digen.sde.law", "digen.kl.coef"),
            *("algorithm.gamma", "actor_rollout_ref.model.path"),
        ]
    )


def test_a_bad_value_is_blamed_on_the_key_that_was_typed_and_on_no_other(start, runnable):
    for override in ("data.train_batch_size=0", "trainer.n_gpus_per_node=0", "digen.seed=99999999999999999999"):
        said = said_of(start, *runnable, override)
        assert [line.split()[0] for line in said.splitlines()] == [override.partition("=")[0]]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[]", "a JSON object, got a list"),
        ("{", "a readable model_index.json, got"),
        ("{}", "that names a pipeline of diffusers, got _class_name=None"),
        ('{"_class_name": ["mine", "Own"]}', "that names a pipeline of diffusers, got _class_name=['mine', 'Own']"),
        ('{"_class_name": "QwenImagePipeline", "transformer": "x"}', "lacks scheduler, text_encoder, tokenizer, "),
    ],
)
def test_a_damaged_index_is_told_with_its_key(start, runnable, tmp_path, text, found):
    (tmp_path / "model_index.json").write_text(text)
    said = said_of(start, *runnable, f"actor_rollout_ref.model.path={tmp_path}")
    assert said is not None and "actor_rollout_ref.model.path must hold" in said and found in said


def _with_weights(change):
    """Damage that writes what `change` makes of the weights' bytes, or takes the files away."""

    def damage(network):
        for file in network.glob("*.safetensors"):
            data = file.read_bytes()
            file.unlink()
            if change is not None:
                file.write_bytes(change(data))

    return damage


def _sharded(missing=(), *, has_index=True, tensor=None):
    """Damage that makes two files and an index of the one."""

    def damage(network):
        (whole,) = network.glob("*.safetensors")
        tensors = load_file(whole)
        shards = {name: f"{whole.stem}-0000{number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
        for file in set(shards.values()) - set(missing):
            save_file({name: tensors[name] for name, place in shards.items() if place == file}, network / file)
        named = shards | ({tensor: f"{whole.stem}-00000.safetensors"} if tensor else {})
        if has_index:
            (network / f"{whole.name}.index.json").write_text(json.dumps({"weight_map": named}))
        whole.unlink()

    return damage


def _linked_to_nothing(network):
    (file,) = network.glob("*.safetensors")
    file.unlink()
    file.symlink_to("nowhere")


def _pickled(network):
    (file,) = network.glob("*.safetensors")
    torch.save(load_file(file), file.with_suffix(".bin"))
    file.unlink()


def _renamed(name, content=None):
    def damage(network):
        (file,) = network.glob("*.safetensors")
        file.rename(network / name)
        if content is not None:
            (network / name).write_bytes(content)

    return damage


def _with_config(**changed):
    def damage(network):
        config = json.loads((network / "config.json").read_text())
        (network / "config.json").write_text(json.dumps(config | changed))

    return damage


OF_TRANSFORMER = [
    (_with_config(num_layers=1), "has weights that the network lacks: transformer_blocks.1."),
    (_with_config(num_layers=3), "/transformer' has no weights for transformer_blocks.2."),
    (_with_config(num_layers="many"), "config.json' (TypeError"),
    (_with_config(in_channels=60), "/transformer' has other shapes for img_in.weight"),
    (_with_weights(None), "transformer' has no weights; download it, or rename them"),
    (_linked_to_nothing, "must hold diffusion_pytorch_model.safetensors, or parts and the "),
    (_with_weights(lambda data: data[:-1]), "was cut short: "),
    (_with_weights(lambda data: b"\x04\0\0\0\0\0\0\0junk"), "was cut short: 12 bytes; download"),
    (_sharded(["diffusion_pytorch_model-00001.safetensors"]), "lacks diffusion_pytorch_model-00001.safetensors; "),
    (_sharded(has_index=False), "has diffusion_pytorch_model-00000.safetensors, diffusion_pytorch_model-00001."),
    (_with_config(_class_name=None), "that names a network of diffusers, got _class_name=None"),
    (_with_config(quantization_config={"quant_method": "bitsandbytes"}), "weights that train, but"),
    (_renamed("diffusion_pytorch_model.fp16.safetensors"), "has diffusion_pytorch_model.fp16.safetensors; "),
    (_renamed("diffusion_pytorch_model.bin", b"PK" + bytes(3000)), "was cut short: 3002 bytes; download"),
    (_renamed("diffusion_pytorch_model.bin", b"version https://git-lfs"), "is a pointer of Git LFS; fetch"),
]
OF_OTHERS = [
    (_with_weights(lambda data: data[:1000]), "was cut short: 1000 bytes; download"),
    (_with_weights(None), "has no weights"),
    (_with_weights(lambda data: b"version https://git-lfs"), "is a pointer of Git LFS; fetch"),
    (_renamed("model.fp16.safetensors"), "model.fp16.safetensors; download it, or rename them"),
    (_renamed("weights.safetensors"), "model.safetensors, or parts and the "),
    (_sharded(tensor="a.b"), "-00000.safetensors' has no a.b; take both from the same checkpoint"),
    (lambda folder: (folder / "config.json").write_text("{}"), "a class in each config.json, but"),
    (lambda folder: (folder / "config.json").unlink(), "config.json"),
    (_with_config(quantization_config={"load_in_4bit": True}), "encoders in plain weights, but"),
]
OF_TOKENIZER = [
    (lambda folder: (folder / "tokenizer.json").unlink(), "must hold the vocabulary of its tokenizer"),
    (
        lambda folder: (folder / "tokenizer.json").write_text("version https://git-lfs"),
        "is a pointer of Git LFS; fetch",
    ),
]


@pytest.fixture
def checkpoint(runnable, tmp_path):
    """A copy of the checkpoint, which a test may damage."""
    return shutil.copytree(runnable[1].partition("=")[2], tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("part", "damage", "found"),
    [
        *(("transformer", *one) for one in OF_TRANSFORMER),
        *((part, *one) for part in ("vae", "text_encoder") for one in OF_OTHERS),
        *(("tokenizer", *one) for one in OF_TOKENIZER),
        ("vae", lambda folder: _half(folder), "/vae' has no weights for "),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_told_before_it_is_loaded(start, runnable, checkpoint, part, damage, found):
    damage(checkpoint / part)
    said = said_of(start, *runnable, f"actor_rollout_ref.model.path={checkpoint}")
    assert said is not None and said.startswith("actor_rollout_ref.model.path must hold") and found in said


@pytest.mark.parametrize("name", BUILDERS)
def test_the_parts_of_every_architecture_are_accepted(tmp_path, name):
    path = build_tiny(name, tmp_path / "checkpoint")
    check_weights(StartConfig(OmegaConf.create({"actor_rollout_ref": {"model": {"path": str(path)}}})))


def _half(network):
    (file,) = network.glob("*.safetensors")
    save_file(dict([*load_file(file).items()][::2]), file)


@pytest.mark.parametrize("damage", [_sharded(), _pickled])
@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder"])
def test_weights_in_several_files_or_pickles_are_accepted(start, runnable, checkpoint, damage, part):
    damage(checkpoint / part)
    if damage is _pickled and part == "text_encoder":
        (checkpoint / part / "model.bin").rename(checkpoint / part / "pytorch_model.bin")
    assert said_of(start, *runnable, f"actor_rollout_ref.model.path={checkpoint}") is None


@pytest.mark.parametrize(
    "word",
    [
        *("trainer.default_local_dir=s3://bucket/run", "trainer.rollout_data_dir=hdfs://host/data"),
        "digen.reward.functions={aesthetic: {weight: 1, head: /no/such/file}}",
        *("actor_rollout_ref.model.path=https://huggingface.co/Qwen/Qwen-Image", "data.truncation=left"),
        *("trainer.default_local_dir='~/run'", "trainer.rollout_data_dir=$HOME/data", "trainer.device=cuda"),
        "digen.sampling.image_px=256",
        *("actor_rollout_ref.actor.optim.min_lr_ratio=0.1", "actor_rollout_ref.actor.optim.num_cycles=2"),
    ],
)
def test_an_address_or_a_setting_that_nothing_reads_is_told(start, runnable, word):
    said = said_of(start, *runnable, word)
    assert said is not None and re.match(rf"{word.partition('=')[0]}\S* must be ", said)


def test_wandb_without_a_key_is_told_and_with_one_or_offline_is_not(start, runnable, monkeypatch, tmp_path):
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = start(*runnable, "trainer.logger=[console,wandb]")
    (said,) = tracker_notes(config)
    assert "trainer.logger=['console', 'wandb']: no key of W&B" in said and "WANDB_MODE=offline" in said
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password x\n")
    assert tracker_notes(config) == []
    (tmp_path / "netrc").unlink()
    for name, value in (("WANDB_API_KEY", "x"), ("WANDB_MODE", "offline")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert tracker_notes(config) == []


def test_a_tracker_that_is_not_installed_is_told(start, runnable, monkeypatch):
    monkeypatch.setitem(sys.modules, "volcengine_ml_platform", None)
    said = said_of(start, *runnable, "trainer.logger=[console,vemlp_wandb]")
    assert said is not None and "trainer.logger must name trackers whose packages can be imported, got 'vemlp" in said
    assert said.endswith("pip install --upgrade volcengine_ml_platform on this machine, or take vemlp_wandb out")


def test_a_tracker_that_is_installed_and_broken_is_told(start, runnable, monkeypatch, tmp_path):
    (tmp_path / "trackio.py").write_text("raise TypeError('its protobuf is another one')")
    monkeypatch.syspath_prepend(tmp_path)
    said = said_of(start, *runnable, "trainer.logger=trackio")
    assert said is not None and "can be imported, got 'trackio' (TypeError: its protobuf is another one)" in said


def test_resources_of_one_machine_are_refused_in_a_cluster(start, runnable, monkeypatch):
    given = [f"ray_kwargs.ray_init.{name}" for name in ("num_cpus", "num_gpus", "_system_config")]
    nulls = [f"{name}=null" for name in given]
    with socket.create_server(("127.0.0.1", 0)) as head:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{head.getsockname()[1]}")
        said = said_of(start, *runnable)
        assert said is not None and f"{' and '.join(given)} must be null" in said and f"set {' '.join(nulls)}" in said
        assert said_of(start, *runnable, *nulls) is None
    for address in ("127.0.0.1:1", "junk", "junk:(", "auto"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        said = said_of(start, *runnable, *nulls)
        assert said is not None and "RAY_ADDRESS or ray_kwargs.ray_init.address must be HOST:PORT of a Ray" in said
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    assert said_of(start, *runnable) is None, "a program that has started Ray itself"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "a readable adapter_config.json, got"),
        ("[]", "a JSON object, got a list"),
        ("{}", "with r >= 1 and lora_alpha > 0, got {'r': None, 'lora_alpha': None}"),
    ],
)
def test_a_damaged_adapter_is_told_with_its_key(start, runnable, tmp_path, text, found):
    (tmp_path / "adapter_config.json").write_text(text)
    said = said_of(start, *runnable, f"actor_rollout_ref.model.lora_adapter_path={tmp_path}")
    assert said is not None and said.startswith("actor_rollout_ref.model.lora_adapter_path must hold") and found in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_told(start, runnable, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    said = said_of(start, *runnable, f"trainer.default_local_dir={tmp_path}/closed/run")
    assert said is not None and said.startswith("trainer.default_local_dir must be a folder that can be written")


def test_a_checkpoint_to_resume_from_is_accepted(start, runnable, tmp_path):
    (tmp_path / "global_step_3" / "actor").mkdir(parents=True)
    (tmp_path / "global_step_3" / "digen.json").write_text('{"num_prompts_drawn": 0, "drawn_from": ""}')
    resumed = f"trainer.resume_from_path={tmp_path}/global_step_3"
    assert said_of(start, *runnable, "trainer.resume_mode=resume_path", resumed) is None


def test_the_fast_composition_is_the_real_one(start, compose_main, runnable):
    overrides = (*runnable, "digen.seed=3", "+trainer.mine=1", "trainer.logger=[console]")
    fast, real = start(*overrides), compose_main(*overrides)
    for config in (fast, real):
        with open_dict(config):
            del config["hydra"]
    assert fast == real


@pytest.mark.parametrize("word", ["digen.seed=3", "digen.sde.law=flo"])
def test_the_section_is_parsed_once_for_all_rules(start, runnable, monkeypatch, word):
    calls = []
    monkeypatch.setattr(start_config, "digen_config", lambda config: calls.append(config) or digen_config(config))
    said_of(start, *runnable, word)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ((), "trainer"),
        (("trainer.n_gpus_per_node=2",), "diffusers"),
        (("recipe=digen_flowgrpo+disaggregated",), "diffusers"),
        (("actor_rollout_ref.actor.fsdp_config.param_offload=true",), "diffusers"),
        (("digen.reward.functions={hpsv2: {weight: 1, timeshare: true}}",), "diffusers"),
        (("digen.window.kind=consecutive", "digen.sampling.outside.cache=0.1"), "diffusers"),
        (("recipe=digen_flowgrpo+vllm_omni",), "vllm_omni"),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, tuple) else one,
)
def test_one_device_generates_with_the_weights_that_it_trains_unless_their_memory_is_needed(start, overrides, name):
    recipe = () if any(word.startswith("recipe=") for word in overrides) else ("recipe=digen_flowgrpo",)
    assert start(*recipe, "trainer.n_gpus_per_node=1", *overrides).actor_rollout_ref.rollout.name == name
