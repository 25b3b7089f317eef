# SPDX-License-Identifier: Apache-2.0
"""Contract of every model file: the same claims for all architectures, on tiny checkpoints in fp32 on the CPU."""

import copy
import inspect
import itertools
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import peft
import pytest
import torch
from diffusers import AutoencoderKLFlux2
from torch import Tensor

from tests.grid import IN_GRID
from tests.models.cases import CASES, CPU, NEGATIVE, NUM_STEPS, PROMPTS, Loaded, changed, record_inputs
from tests.sampling.runs import close
from tests.tiny_models import BUILDERS, build_tiny
from tests.training_rows import rows_of
from verl_digen.algorithms.noise import INITIAL_LATENTS, sample_seed, step_noise
from verl_digen.algorithms.solvers import SCHEDULERS
from verl_digen.algorithms.window import Window
from verl_digen.inputs.images import PromptInputs
from verl_digen.models import MODELS, load_model, tiny
from verl_digen.models.base import DiffusionModel
from verl_digen.models.locate import CONFIG_FILES
from verl_digen.models.pixels import Decoded, decode_in, in_batches
from verl_digen.models.tiny.parts import image_vae
from verl_digen.sampling.sampler import Sampler, score_rows
from verl_digen.types import Condition, Geometry, SampleRequest, Sampling, Trajectory

pytestmark = pytest.mark.slow

RUN_SEED = 7
GUIDED = 2.0
"""Guidance scale w; it multiplies the branches' rounding errors by up to 2 w - 1."""
PAIRS = pytest.mark.parametrize(
    ("scale", "size"),
    [(GUIDED, 1), *(pytest.param(*pair, marks=IN_GRID) for pair in [(1.0, 0), (1.0, 1), (GUIDED, 0)])],
)
"""Guidance and size; for every change the pair that has both of the branches."""
ODE = Window(sde_steps=(), train_steps=())
TRAINED = Window(sde_steps=(1, 2), train_steps=(1, 2))


def requests(
    geometry: Geometry, scale: float, window: Window = ODE, embedded: float | None = None, num_steps: int = NUM_STEPS
) -> list[SampleRequest]:
    """One request per prompt of PROMPTS."""
    how = Sampling(geometry, num_steps, scale, law="flow", noise_level=0.7, guidance_scale=embedded)
    return [
        SampleRequest(f"p{n}", 0, PromptInputs(prompt), PromptInputs(NEGATIVE), window, how)
        for n, prompt in enumerate(PROMPTS)
    ]


def sample(loaded: Loaded, asked: Sequence[SampleRequest]) -> tuple[list[Trajectory], Tensor]:
    """Samples by the solver that the checkpoint's scheduler names."""
    solver = SCHEDULERS[loaded.model.scheduler]
    how = replace(asked[0].sampling, solver=solver)
    asked = [replace(one, sampling=how) for one in asked]
    sampler = Sampler(loaded.model, loaded.transformer, run_seed=RUN_SEED, device=CPU, latents_dtype=torch.float32)
    return sampler.sample(asked, *conditions(loaded, how.true_cfg_scale, how.geometry), version=3)


def conditions(loaded: Loaded, scale: float, geometry: Geometry) -> tuple[list[Condition], list[Condition] | None]:
    """Conditions of PROMPTS, and the negative ones if `scale` > 1, else None."""
    negative = loaded.encode([NEGATIVE] * len(PROMPTS), geometry) if scale > 1 else None
    return loaded.encode(PROMPTS, geometry), negative


def initial(model: DiffusionModel, geometry: Geometry) -> Tensor:
    shape = model.latent_shape(geometry)
    return torch.stack(
        [step_noise(sample_seed(RUN_SEED, f"p{n}", 0), INITIAL_LATENTS, shape) for n in range(len(PROMPTS))]
    )


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sigmas_of_one_expert(model: DiffusionModel) -> Tensor:
    """Four sigmas, two of them equal, that may share a forward."""
    return torch.tensor([0.8, 0.31, 0.02, 0.31] if len(model.experts) > 1 else [0.97, 0.31, 0.02, 0.31])


# -- against the pipeline ---------------------------------------------------------------------------------


@PAIRS
def test_without_sde_steps_it_is_the_diffusers_pipeline(loaded: Loaded, size: int, scale: float) -> None:
    """Latents of two prompts of different length in one batch, and pixels after two steps."""
    geometry = loaded.case.sizes[size]
    trajectories, latents = sample(loaded, requests(geometry, scale))
    start = initial(loaded.model, geometry)
    close(latents, loaded.run_pipeline(geometry, scale, start))
    assert [path.record.latents.shape[0] for path in trajectories] == [0, 0]
    decode = loaded.model.load_decoder(torch.float32, CPU)
    _, latents = sample(loaded, requests(geometry, scale, num_steps=2))
    latents = loaded.model.completed(latents, conditions(loaded, scale, geometry)[0])
    pixels, is_finite = decode(latents, geometry)
    assert is_finite.tolist() == [True, True]
    gap = (in_batches(decode, latents, geometry, 1).pixels.int() - pixels.int()).abs()
    assert (
        gap.max() <= 1 and gap.count_nonzero() <= 2e-3 * gap.numel()
    )  # a batch of another size is summed in another order
    frames = (geometry.num_frames,) if loaded.case.is_video else ()
    assert pixels.shape == (2, *frames, geometry.height_px, geometry.width_px, 3)
    assert pixels.dtype == torch.uint8
    assert pixels.float().std() > 20  # not a blank picture
    expected = loaded.run_pipeline(geometry, scale, start, output_type="np", num_inference_steps=2)
    assert (pixels.float() - expected * 255).abs().max() < 0.5 + 0.02  # rounding to 8 bits, and an error of 8e-5


def test_at_most_so_many_pictures_are_decoded_together() -> None:
    sizes = []

    def decode(latents: Tensor, geometry: Geometry) -> Decoded:
        sizes.append(len(latents))
        return Decoded(latents.to(torch.uint8), latents >= 0)

    assert in_batches(decode, torch.arange(7), Geometry(16, 16), 3).pixels.tolist() == list(range(7))
    assert sizes == [3, 3, 1]


def test_embedded_guidance_is_the_pipelines(loaded: Loaded) -> None:
    """The pipeline's default unless given; an error if the network has no such input."""
    geometry = loaded.case.sizes[0]
    if loaded.model.default_embedded_guidance is None:
        assert loaded.model.embedded_guidance(None) is None
        with pytest.raises(ValueError, match=r"digen\.sampling\.guidance_scale must be null .* got 2\.0"):
            sample(loaded, requests(geometry, 1.0, embedded=2.0))
        return
    _, by_default = sample(loaded, requests(geometry, 1.0))
    _, asked = sample(loaded, requests(geometry, 1.0, embedded=2.0))
    assert (asked - by_default).abs().max() > 0.01
    start = initial(loaded.model, geometry)
    close(asked, loaded.run_pipeline(geometry, 1.0, start, guidance_scale=2.0))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=IN_GRID)])
def test_the_network_is_given_what_the_pipeline_gives_it(loaded: Loaded, dtype: torch.dtype) -> None:
    """Seven steps, each with the same dtypes and bit-equal timestep and guidance scale."""
    geometry, num_steps = loaded.case.sizes[0], 7
    model, is_fp32 = loaded.model, dtype == torch.float32
    pipeline = loaded.pipeline if is_fp32 else loaded.load_pipeline(dtype)
    experts = [getattr(pipeline, name) for name in model.experts]
    noted = [record_inputs(network) for network in experts]
    start = initial(model, geometry).to(dtype)
    embedded = None if model.default_embedded_guidance is None else 3.4  # not exact in bf16
    more = {} if embedded is None else {"guidance_scale": embedded}
    loaded.run_pipeline(geometry, 1.0, start, pipeline=pipeline, num_inference_steps=num_steps, **more)
    by_expert = [calls for calls, _ in noted]
    for _, stop in noted:
        stop()
    if loaded.case.has_images:
        pairs = [zip(calls[: len(calls) // 2], calls[len(calls) // 2 :], strict=True) for calls in by_expert]
        numbers = ("timestep", "guidance")
        by_expert = [
            [
                {**one, **{name: torch.cat([one[name], other[name]]) for name in numbers if one.get(name) is not None}}
                for one, other in calls
            ]
            for calls in pairs
        ]
    theirs = [call for calls in by_expert for call in calls]
    assert len(theirs) == num_steps

    transformer = loaded.transformer if is_fp32 else model.load_transformer(dtype)
    networks = [transformer.get_submodule(name) for name in model.experts] if len(experts) > 1 else [transformer]
    noted = [record_inputs(network) for network in networks]
    encoded = loaded.of_texts(loaded.encoder if is_fp32 else model.load_encoder(dtype, CPU))(PROMPTS)
    sigmas = model.sigmas(num_steps, geometry)
    with torch.no_grad():
        for sigma in sigmas[:-1]:
            model.velocity(transformer, start, sigma.expand(2), encoded, None, 1.0, geometry, embedded)
    ours = [call for calls, _ in noted for call in calls]
    for _, stop in noted:
        stop()
    assert len(ours) == num_steps
    for own, other in zip(ours, theirs, strict=True):
        for name, mine in own.items():
            if name in ("sources", "prompts"):  # of our Qwen-Image-2.1 alone
                continue
            yours = other[name]
            if name in ("timestep", "t"):
                # Wan's TI2V-5B repeats a row's timestep for every token.
                assert (yours.reshape(2, -1).double() == mine.double().reshape(2, -1)).all()
            elif name in ("x", "cap_feats", "encoder_hidden_states"):  # lists of Z-Image and of our Qwen-Image-2.1
                of_theirs, of_ours = ([one] if isinstance(one, Tensor) else one for one in (yours, mine))
                assert {entry.dtype for entry in of_ours} == {entry.dtype for entry in of_theirs}, name
            elif isinstance(mine, Tensor) and not name.endswith("mask"):
                assert mine.dtype == yours.dtype, name
            if name == "guidance" and mine is not None:
                assert torch.equal(mine, yours)


# -- rows -------------------------------------------------------------------------------------------------


@PAIRS
def test_rows_at_different_sigmas_and_prompts_equal_one_at_a_time(loaded: Loaded, size: int, scale: float) -> None:
    """And both branches of guidance in one forward those in two."""
    model, geometry = loaded.model, loaded.case.sizes[size]
    short, long, negative = loaded.encode([*PROMPTS, NEGATIVE], geometry)
    x = draw(4, *model.latent_shape(geometry))
    sigmas = sigmas_of_one_expert(model)
    positives, negatives = [short, long, long, short], [negative, negative, short, negative]

    def velocity(rows: slice, splits: bool = False) -> Tensor:
        given = negatives[rows] if scale > 1 else None
        where = x[rows], sigmas[rows], positives[rows]
        return model.velocity(loaded.transformer, *where, given, scale, geometry, splits=splits)

    together = velocity(slice(0, 4))
    assert together.dtype == torch.float32
    close(together, torch.cat([velocity(slice(n, n + 1)) for n in range(4)]))
    close(together, velocity(slice(0, 4), splits=True))


def test_only_sigmas_stay_on_the_host(loaded: Loaded) -> None:
    """Everything else is created on the latents' device: the meta device, which does not mix with others."""
    model, geometry, device = loaded.model, loaded.case.sizes[0], torch.device("meta")
    transformer = model.load_transformer(torch.bfloat16, meta=True).to(device)
    x = draw(2, *model.latent_shape(geometry)).to(device)
    given = [{name: tensor.to(device) for name, tensor in one.items()} for one in loaded.encode(PROMPTS)]
    sigmas = sigmas_of_one_expert(model)[:2]
    velocity = model.velocity(transformer, x, sigmas, given, list(reversed(given)), GUIDED, geometry)
    assert (velocity.device, velocity.shape, velocity.dtype) == (device, x.shape, torch.float32)


@pytest.mark.parametrize("scale", [pytest.param(1.0, marks=IN_GRID), GUIDED])
def test_replay_gives_the_recorded_log_probs(loaded: Loaded, scale: float) -> None:
    """All trained steps of both samples, per expert; a replay with other prompts does not."""
    model, geometry = loaded.model, loaded.case.sizes[0]
    asked = requests(geometry, scale, TRAINED)
    trajectories, _ = sample(loaded, asked)
    pairs = list(itertools.product(range(len(trajectories)), range(len(TRAINED.train_steps))))
    experts = [model.expert_of(path.record.sigmas).tolist() for path in trajectories]
    for expert in {one for own in experts for one in own}:
        mine = [(n, k) for n, k in pairs if experts[n][k] == expert]
        tile = rows_of(trajectories, mine, *conditions(loaded, scale, geometry))
        assert (tile.point.log_probs != 0).all()
        step, _ = score_rows(model, loaded.transformer, tile)
        close(step.log_prob, tile.point.log_probs)
        other_prompts = replace(tile, conditions=loaded.encode([NEGATIVE] * len(tile)))
        wrong, _ = score_rows(model, loaded.transformer, other_prompts)
        assert (wrong.log_prob - tile.point.log_probs).abs().max() > 1e-3


def test_the_tiny_network_notices_what_it_is_given(loaded: Loaded) -> None:
    """The comparisons in this file can fail: every input changes the velocity by far more than their tolerance."""
    model, geometry = loaded.model, loaded.case.sizes[0]
    short, long = loaded.encode(PROMPTS)
    x = draw(1, *model.latent_shape(geometry))

    def velocity(sigma: float, condition: Condition, latents: Tensor, network: Any = loaded.transformer) -> Tensor:
        return model.velocity(network, latents, torch.tensor([sigma]), [condition], None, 1.0, geometry)

    assert all(parameter.count_nonzero() for parameter in loaded.transformer.parameters())
    base = velocity(0.5, short, x)
    assert (velocity(0.4, short, x) - base).abs().mean() > 0.01
    assert (velocity(0.5, long, x) - base).abs().mean() > 0.01
    assert (velocity(0.5, short, x.flip(1)).flip(1) - base).abs().mean() > 0.01
    other = model.load_transformer(torch.float32)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if parameter.dim() > 1 and ("blocks.0" in name or "layers.0" in name):
                parameter.mul_(1.01)
        assert (velocity(0.5, short, x, other) - base).abs().max() > 1e-3  # a hundred times the tolerance


# -- loading ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=IN_GRID)])
def test_a_state_dict_fills_a_meta_transformer(loaded: Loaded, dtype: torch.dtype) -> None:
    """Names, values and dtypes of all parameters and of all tables are those of the real load."""
    model = loaded.model
    real, empty = model.load_transformer(dtype), model.load_transformer(dtype, meta=True)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert not empty.training and not real.training
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in real.state_dict().items()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in empty.state_dict().items()} == shapes
    empty.load_state_dict(real.state_dict(), assign=True)
    filled = {**dict(empty.named_parameters()), **dict(empty.named_buffers())}
    for name, tensor in [*real.named_parameters(), *real.named_buffers()]:
        assert filled[name].dtype == tensor.dtype, name
        close(filled[name], tensor, 0)
    geometry = loaded.case.sizes[0]
    given = (draw(1, *model.latent_shape(geometry)), torch.tensor([0.5]), loaded.encode(PROMPTS[:1]), None, 1.0)
    with torch.no_grad():
        close(model.velocity(empty, *given, geometry), model.velocity(real, *given, geometry), 0)


def test_lora_wraps_every_target_and_starts_as_the_base(loaded: Loaded) -> None:
    model, geometry = loaded.model, loaded.case.sizes[0]
    given = (draw(1, *model.latent_shape(geometry)), torch.tensor([0.5]), loaded.encode(PROMPTS[:1]), None, 1.0)
    base = model.velocity(loaded.transformer, *given, geometry)
    config = peft.LoraConfig(r=2, target_modules=list(model.spec.lora_targets))
    adapted = peft.get_peft_model(model.load_transformer(torch.float32), config)  # pyright: ignore
    wrapped = {name for name, module in adapted.named_modules() if hasattr(module, "lora_A")}
    for target in model.spec.lora_targets:
        assert any(name.endswith(target) for name in wrapped), target
    velocity = model.velocity(adapted, *given, geometry)
    close(velocity, base)
    velocity.sum().backward()
    learning = {name for name, p in adapted.named_parameters() if "lora_B" in name and p.grad is not None}
    # Not the expert that did not run, nor layers whose output only the last block's text stream reads.
    assert len(learning) >= len(wrapped) / len(model.experts) * 0.6


def test_a_model_is_made_of_what_is_fetched_of_a_repository_before_a_run(loaded: Loaded, tmp_path: Path) -> None:
    parts = (*loaded.model.spec.components, *loaded.model.experts)
    for name in ("model_index.json", *(f"{part}/{file}" for part in parts for file in CONFIG_FILES)):
        if (loaded.path / name).is_file():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            shutil.copy(loaded.path / name, tmp_path / name)
    geometry, model = loaded.case.sizes[0], load_model(tmp_path)
    assert type(model) is type(loaded.model)
    assert model.latent_shape(geometry) == loaded.model.latent_shape(geometry)
    sigmas = model.sigmas(10, geometry)
    assert sigmas.shape == (11,) and sigmas.dtype == torch.float32
    assert sigmas[0] == pytest.approx(1.0, abs=2e-6) and sigmas[-1] == 0.0
    assert (sigmas.diff() < 0).all()


def test_an_older_config_file_is_silent_about_newer_arguments(loaded: Loaded, tmp_path: Path) -> None:
    """E.g. Wan2.1's VAE, which was published before its class had the compression factors."""
    configs = shutil.copytree(loaded.path, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    for folder in ("transformer", "vae"):
        file = configs / folder / "config.json"
        config = json.loads(file.read_text())
        arguments = inspect.signature(getattr(diffusers, config["_class_name"]).__init__).parameters
        spoken = {
            name: value
            for name, value in config.items()
            if name not in arguments
            or value != (list(default) if isinstance(default := arguments[name].default, tuple) else default)
        }
        assert len(spoken) < len(config)
        file.write_text(json.dumps(spoken))
    model, geometry = load_model(configs), loaded.case.sizes[1]
    assert model.latent_shape(geometry) == loaded.model.latent_shape(geometry)
    assert model.default_embedded_guidance == loaded.model.default_embedded_guidance


def test_a_missing_part_of_a_checkpoint_is_an_error_that_names_it(loaded: Loaded, tmp_path: Path) -> None:
    configs = shutil.copytree(loaded.path, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    folders = sorted(folder.name for folder in configs.iterdir() if folder.is_dir())
    assert {*loaded.model.spec.components, *loaded.model.experts} == set(folders)
    for name in folders:
        (configs / name).rename(tmp_path / "aside")
        with pytest.raises(ValueError, match=rf"actor_rollout_ref\.model\.path .* lacks {name};"):
            load_model(configs)
        (tmp_path / "aside").rename(configs / name)
    index = json.loads((configs / "model_index.json").read_text())
    (configs / "model_index.json").write_text(json.dumps(index | {"text_encoder": [None, None]}))
    with pytest.raises(ValueError, match="lacks text_encoder;"):
        load_model(configs)


# -- bad input --------------------------------------------------------------------------------------------


def test_an_impossible_size_is_an_error_that_names_the_key_and_the_nearest(loaded: Loaded) -> None:
    good, multiple = loaded.case.sizes[0], loaded.case.px_multiple
    for key in ("height_px", "width_px"):
        value = getattr(good, key) + multiple // 4
        message = rf"digen\.sampling\.{key} must be a multiple of {multiple} .* got {value}; the nearest is"
        with pytest.raises(ValueError, match=f"{message} {getattr(good, key)}"):
            loaded.model.latent_shape(replace(good, **{key: value}))
        with pytest.raises(ValueError, match=f"the nearest is {multiple}"):
            loaded.model.latent_shape(replace(good, **{key: 3}))
    loaded.model.latent_shape(good)
    if loaded.case.is_video:
        stride = rf"digen\.sampling\.num_frames must be 1 plus a multiple of {loaded.case.frame_stride} "
        message = stride + r".* got 80; the nearest is 81"
        with pytest.raises(ValueError, match=message):
            loaded.model.latent_shape(replace(good, num_frames=80))
        with pytest.raises(ValueError, match="got 0; the nearest is 1"):
            loaded.model.latent_shape(replace(good, num_frames=0))
    else:
        with pytest.raises(ValueError, match=r"digen\.sampling\.num_frames must be 1 .* got 5"):
            loaded.model.latent_shape(replace(good, num_frames=5))


def test_a_prompt_of_one_token_too_many_is_an_error(loaded: Loaded) -> None:
    case = loaded.case
    fits = " ".join(["red"] * case.word_limit)
    assert len(loaded.encode([fits])) == 1
    check = loaded.model.load_prompt_check()
    check(fits)
    message = rf"a prompt must have at most {case.max_tokens} tokens.* got {case.max_tokens + 1} for 'red red .*data"
    with pytest.raises(ValueError, match=message):
        loaded.encode([f"{fits} red"])
    with pytest.raises(ValueError, match=message):
        check(f"{fits} red")


def test_a_single_frame_of_a_video_model_is_a_picture(loaded: Loaded) -> None:
    picture = replace(loaded.case.sizes[0], num_frames=1, sources=())
    latents = draw(2, *loaded.model.latent_shape(picture))
    pixels = loaded.model.load_decoder(torch.float32, CPU)(latents, picture).pixels
    assert pixels.shape == (2, picture.height_px, picture.width_px, 3)


def test_a_vae_of_another_s_pipeline_decodes_latents_of_any_dtype() -> None:
    vae = image_vae(scaling_factor=1.0, shift_factor=0.0).to(torch.bfloat16)
    decode_in(vae, torch.float32)
    assert vae.decode(draw(1, 4, 4, 4).to(torch.bfloat16), return_dict=False)[0].dtype == torch.float32


FP32_DECODERS = ("sd3", "flux", "z_image", "wan")
"""Beginnings of the names of cases whose authors decode in fp32: diffusers' `AutoencoderKL`, and Wan's."""


def test_pictures_are_decoded_in_the_dtype_of_the_pipeline_s_authors(loaded: Loaded) -> None:
    model, geometry = loaded.model, loaded.case.sizes[0]
    is_fp32 = loaded.case.name.startswith(FP32_DECODERS)
    if loaded.case.name.startswith("flux2"):  # a checkpoint that diffusers 0.41 and later make does not ask for it
        is_fp32 = "force_upcast" in inspect.signature(AutoencoderKLFlux2.__init__).parameters
    assert model.decoder_dtype(torch.bfloat16) == (torch.float32 if is_fp32 else torch.bfloat16)
    assert model.decoder_dtype(torch.float32) == torch.float32
    decode = model.load_decoder(torch.bfloat16, CPU)
    assert {parameter.dtype for parameter in decode.modules[0].parameters()} == {model.decoder_dtype(torch.bfloat16)}
    if is_fp32:
        latents = draw(1, *model.latent_shape(replace(geometry, sources=())))
        exact = model.load_decoder(torch.float32, CPU)(latents, geometry).pixels
        assert torch.equal(decode(latents, geometry).pixels, exact)


def test_every_word_counts(loaded: Loaded) -> None:
    """The tiny tokenizers distinguish words that are not in their corpus."""
    words = ("red", "blue", "Ünal", "zebra", "Zebra 4", "xyz", "zyx")
    embeds = [condition["embeds"] for condition in loaded.encode([f"a {word} circle" for word in words])]
    for one, other in itertools.combinations(embeds, 2):
        length = min(len(one), len(other))
        assert not torch.allclose(one[:length], other[:length], atol=1e-3)


# -- the schedule -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("loaded", [case for case in CASES if not case.is_video], indirect=True, ids=lambda c: c.name)
@pytest.mark.parametrize("by_size", [False, True])
def test_a_schedule_shifts_as_in_the_pipeline(loaded: Loaded, tmp_path: Path, by_size: bool) -> None:
    """Shift by a constant or by the size, as the checkpoint says; with numbers other than the published ones."""
    values = {"use_dynamic_shifting": by_size, "shift": 2.5, "base_shift": 0.4, "max_shift": 1.3}
    configs = changed(loaded.path, tmp_path / "m", "scheduler/scheduler_config.json", values)
    model, pipeline, schedules = load_model(configs), copy.copy(loaded.pipeline), []
    pipeline.scheduler = type(pipeline.scheduler).from_pretrained(configs / "scheduler")
    for geometry in loaded.case.sizes:
        loaded.run_pipeline(geometry, 1.0, initial(model, geometry), pipeline=pipeline)
        schedules.append(model.sigmas(NUM_STEPS, geometry))
        close(schedules[-1], pipeline.scheduler.sigmas, 0)
    assert torch.equal(*schedules) != by_size


# -- the registry -----------------------------------------------------------------------------------------


def test_every_pipeline_has_a_tiny_checkpoint(tmp_path: Path) -> None:
    known = {load_model(build_tiny(name, tmp_path / name)).pipeline for name in BUILDERS}
    assert known == set(MODELS)


def test_a_tiny_checkpoint_is_a_function_of_its_name_and_seed(tmp_path: Path) -> None:
    for folder, seed in (("a", 3), ("b", 3), ("c", 4)):
        tiny.build_tiny("sd3", tmp_path / folder, seed)
    first, again, other = (
        (tmp_path / folder / "transformer" / "diffusion_pytorch_model.safetensors").read_bytes() for folder in "abc"
    )
    assert first == again != other
    with pytest.raises(ValueError, match=r"unknown tiny checkpoint 'sdxl'; known ones: flux2_klein, .*, z_image"):
        build_tiny("sdxl", tmp_path / "d")
