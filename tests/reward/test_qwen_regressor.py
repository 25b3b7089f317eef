# SPDX-License-Identifier: Apache-2.0
"""HPSv3 and VideoAlign on tiny random checkpoints: scores of transformers' own classes, one sample at a time."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.reward.contract import check_contract, make_picture, make_samples, scores_of
from verl_digen.config.reward import reward_entry
from verl_digen.reward.named import make
from verl_digen.reward.qwen_regressor import patches_of
from verl_digen.reward.scorers import hpsv3, video_align
from verl_digen.reward.scorers.video_align import merged
from verl_digen.types import PromptRow, RewardInput

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
HIDDEN = 32
TEMPLATE = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>{pad}<|vision_end|>"
    "{text}<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Config and tokenizer of a tiny Qwen2-VL whose tokens are the words of the questions."""
    folder = tmp_path_factory.mktemp("tiny_qwen2_vl")
    words = Qwen2Tokenizer().backend_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=2000, min_frequency=1, initial_alphabet=alphabet, show_progress=False)
    words.train_from_iterator([hpsv3.INSTRUCTION, hpsv3.ENDING, video_align.QUESTION], trainer)
    learnt = json.loads(words.to_str())["model"]
    tokenizer = Qwen2Tokenizer(vocab=learnt["vocab"], merges=[tuple(pair) for pair in learnt["merges"]])
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.save_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids
    Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            **{"hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "num_key_value_heads": 1},
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        },
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": HIDDEN, "num_heads": 2, "mlp_ratio": 2},
        **{"image_token_id": ids("<|image_pad|>"), "video_token_id": ids("<|video_pad|>")},
        **{"vision_start_token_id": ids("<|vision_start|>"), "vision_end_token_id": ids("<|vision_end|>")},
    ).save_pretrained(folder)
    return folder


def tiny_model(base: Path, num_tokens: int) -> Qwen2VLModel:
    """A random model with rows for `num_tokens` more special tokens."""
    config = Qwen2VLConfig.from_pretrained(base)
    config.text_config.vocab_size += num_tokens
    torch.manual_seed(0)
    model = Qwen2VLModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.08)
    return model


def published_names(model: Qwen2VLModel) -> dict[str, torch.Tensor]:
    """Its weights under the names of transformers 4.45."""
    return {re.sub(r"^language_model\.", "model.", name): weight.clone() for name, weight in model.state_dict().items()}


def hidden_states(model, base: Path, tokens, text: str, pad: str, pixels, grid) -> torch.Tensor:
    """Hidden states [tokens, hidden] at the special tokens: one sample, no padding, positions as the text model has
    them by itself."""
    tokenizer = Qwen2Tokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    count = int(torch.tensor(grid).prod()) // 4
    ids = tokenizer(TEMPLATE.format(pad=pad * count, text=text), return_tensors="pt").input_ids
    with torch.no_grad():
        embedded = model.language_model.embed_tokens(ids)
        seen = model.visual(pixels, grid_thw=torch.tensor([grid])).pooler_output
        embedded[ids == tokenizer.convert_tokens_to_ids(pad)] = seen
        out = model.language_model(inputs_embeds=embedded).last_hidden_state[0]
    where = [(ids[0] == tokenizer.convert_tokens_to_ids(token)).nonzero().item() for token in tokens]
    return out[where]


@pytest.fixture(scope="module")
def preference(base, tmp_path_factory):
    """(reward hpsv3, model, head) of one random checkpoint."""
    model = tiny_model(base, 1)
    head = hpsv3.make_head(HIDDEN).eval()
    path = tmp_path_factory.mktemp("hpsv3") / hpsv3.WEIGHTS
    names = {f"rm_head.{name}": weight for name, weight in head.state_dict().items()}
    unused = {"lm_head.weight": torch.zeros(3, HIDDEN)}
    save_file(published_names(model) | names | unused, path)
    settings = {"weight": 1.0, "path": str(path), "base": str(base), "dtype": "fp32"}
    return make(reward_entry("hpsv3", settings), torch.device("cpu")), model, head


def test_hpsv3_is_the_score_of_transformers_own_parts(preference, base):
    reward, model, head = preference
    samples = make_samples()
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": hpsv3.PIXELS, "longest_edge": hpsv3.PIXELS}, resample=3, patch_size=14
    )
    for sample, (score, details) in zip(samples, scores_of(reward, samples), strict=True):
        seen = processor(sample.pixels, return_tensors="pt")
        grid = seen.image_grid_thw[0].tolist()
        text = hpsv3.INSTRUCTION.format(prompt=sample.row.text) + hpsv3.ENDING
        (hidden,) = hidden_states(model, base, [hpsv3.TOKEN], text, "<|image_pad|>", seen.pixel_values, grid)
        with torch.no_grad():
            mean, sigma = head(hidden).tolist()
        assert score == pytest.approx(mean, abs=1e-5) and details["sigma_logit"] == pytest.approx(sigma, abs=1e-5)


def test_positions_turn_by_fp32_angles_in_a_network_of_bf16(preference, base, tmp_path):
    """transformers loads networks so. Rounded to bf16, Qwen2-VL-7B's angles are off by up to 1.2 at token 1000."""
    _, model, head = preference
    names = {f"rm_head.{name}": weight for name, weight in head.state_dict().items()}
    save_file(published_names(model) | names, tmp_path / hpsv3.WEIGHTS)
    entry = reward_entry("hpsv3", {"weight": 1.0, "path": str(tmp_path), "base": str(base)})
    (network,) = [part for part in make(entry, torch.device("cpu")).modules() if isinstance(part, Qwen2VLModel)]
    expected, found = dict(model.named_buffers()), dict(network.named_buffers())
    assert network.dtype == torch.bfloat16
    assert expected and all(torch.equal(found[name], expected[name]) for name in expected)


def test_hpsv3_keeps_the_contract_and_a_video_is_the_mean_of_frames(preference):
    reward, _, _ = preference
    check_contract(reward)
    row = PromptRow("a cat", "test", None)
    frames = make_picture(64, 64, frames=7)
    (video, _), *pictures = scores_of(
        reward, [RewardInput(pixels, row, 0) for pixels in (frames, *(frames[number] for number in (0, 2, 4, 6)))]
    )
    assert video == pytest.approx(np.mean([value for value, _ in pictures]), abs=1e-5)
    with pytest.raises(ValueError, match="must not contain the special tokens"):
        reward.score([RewardInput(frames[0], PromptRow("rate it <|Reward|>", "test", None), 0)])


def test_patches_of_a_video_hold_two_frames_each():
    frames = np.stack([np.full((28, 28, 3), value, np.uint8) for value in (0, 255, 51, 102, 204)])
    found = patches_of(frames)
    assert found.grid == (3, 2, 2) and found.num_tokens == 3
    by_time = found.values.view(3, 4, 3, 2, 14, 14)
    expected = patches_of(frames[1:2]).values.view(1, 4, 3, 2, 14, 14)
    assert torch.equal(by_time[0][:, :, 1], expected[0][:, :, 0]), "the second frame of the first pair"
    assert torch.equal(by_time[2][:, :, 0], by_time[2][:, :, 1]), "an odd last frame is repeated"


NORM = {"VQ_mean": 0.5, "VQ_std": 2.0, "MQ_mean": -0.25, "MQ_std": 0.5, "TA_mean": 0.0, "TA_std": 1.5}


@pytest.fixture(scope="module")
def video_checkpoint(base, tmp_path_factory):
    """(folder with LoRA factors, model with their sum, head)."""
    model = tiny_model(base, 3)
    head = torch.nn.Linear(HIDDEN, 1, bias=False)
    weights = published_names(model) | {"lm_head.weight": torch.zeros(3, HIDDEN)}
    saved: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        if not re.search(r"layers\.\d+\.self_attn\.[qv]_proj\.weight$", name):
            saved[f"base_model.model.{name}"] = weight
            continue
        down, up = torch.randn(4, weight.shape[1]) * 0.3, torch.randn(weight.shape[0], 4) * 0.3
        saved[f"base_model.model.{layer}.base_layer.weight"] = weight
        saved[f"base_model.model.{layer}.lora_A.default.weight"] = down
        saved[f"base_model.model.{layer}.lora_B.default.weight"] = up
        model.get_parameter(re.sub(r"^model\.", "language_model.", name)).data += 8 / 4 * up @ down
    saved["base_model.model.rm_head.weight"] = head.weight.detach()
    folder = tmp_path_factory.mktemp("video_reward")
    (folder / "checkpoint-9").mkdir()
    torch.save({}, folder / "checkpoint-9" / "model.pth")
    (folder / "checkpoint-11").mkdir()
    torch.save(saved, folder / "checkpoint-11" / "model.pth")
    settings = {
        "data_config": {"fps": 2.0, "max_frame_pixels": 28 * 28 * 140},
        "model_config": {"output_dim": 1},
        "peft_lora_config": {"lora_enable": True, "lora_alpha": 8, "lora_r": 4, "use_rslora": False},
        "inference_config": NORM,
    }
    (folder / "model_config.json").write_text(json.dumps(settings))
    return folder, model, head


def video_reward(base, folder, **changes):
    settings = {"weight": 1.0, "path": str(folder), "base": str(base), "dtype": "fp32", "video_fps": 4.0} | changes
    return make(reward_entry("video_align", settings), torch.device("cpu"))


def test_video_align_is_the_score_of_transformers_own_parts(base, video_checkpoint):
    folder, model, head = video_checkpoint
    reward = video_reward(base, folder)
    clips = [make_picture(336, 336, seed=seed, frames=frames) for seed, frames in ((0, 9), (1, 12))]
    samples = [RewardInput(pixels, PromptRow(f"clip {n}", "test", None), 0) for n, pixels in enumerate(clips)]
    scores = scores_of(reward, samples)
    for sample, numbers, (score, details) in zip(samples, ([0, 3, 5, 8], [0, 2, 4, 7, 9, 11]), scores, strict=True):
        chosen = sample.pixels[numbers]
        assert 128 * 784 < 336 * 336 == 144 * 784, "scaled to 308 x 308, as 140 tokens are the most"
        moved = torch.from_numpy(chosen).permute(0, 3, 1, 2).float()
        scaled = torch.nn.functional.interpolate(moved, (308, 308), mode="bicubic", antialias=True)
        seen = patches_of(scaled.round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy())
        text = video_align.QUESTION.format(prompt=sample.row.text)
        args = (video_align.TOKENS, text, "<|video_pad|>", seen.values, seen.grid)
        hidden = hidden_states(model, base, *args)
        raw = dict(zip(["VQ", "MQ", "TA"], (hidden @ head.weight.detach().T)[:, 0].tolist(), strict=True))
        expected = {axis: (raw[axis] - NORM[f"{axis}_mean"]) / NORM[f"{axis}_std"] for axis in raw}
        assert details == pytest.approx(expected, abs=1e-5) and score == pytest.approx(sum(expected.values()), abs=1e-5)
    by_axis = video_reward(base, folder, axis="MQ")
    assert scores_of(by_axis, samples)[1][0] == pytest.approx(scores[1][1]["MQ"], abs=1e-6)


def test_video_align_keeps_the_contract(base, video_checkpoint):
    check_contract(video_reward(base, video_checkpoint[0]), make_samples()[:3])


@pytest.mark.parametrize(
    ("num_frames", "fps", "expected"),
    [(1, 16, [0, 0]), (2, 16, [0, 1]), (5, 16, [0, 1, 3, 4]), (33, 16, [0, 11, 21, 32]), (81, 16, 10), (3000, 2, 768)],
)
def test_frames_are_two_per_second_and_an_even_number(num_frames, fps, expected):
    found = video_align.frame_numbers(num_frames, float(fps), 2.0).tolist()
    assert found == expected if isinstance(expected, list) else len(found) == expected


def test_lora_factors_are_merged_as_peft_merges_them():
    from peft import LoraConfig, get_peft_model

    for rslora in (False, True):
        plain = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
        config = LoraConfig(r=2, lora_alpha=6, target_modules=["0"], modules_to_save=["1"], use_rslora=rslora)
        model = get_peft_model(plain, config, adapter_name="default")
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter)
        saved = {name: weight.clone() for name, weight in model.state_dict().items()}
        found = merged(saved, alpha=6, rank=2, rslora=rslora)
        expected = model.merge_and_unload().state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("rm_head.0.bias"), r"path must hold the tensors of its head .* missing: 0.bias"),
        (lambda weights: weights.pop("model.norm.weight"), r"of Qwen2-VL .* missing: language_model.norm.weight"),
    ],
)
def test_weights_of_another_model_are_refused(preference, base, tmp_path, change, message):
    _, model, head = preference
    weights = published_names(model) | {f"rm_head.{name}": weight for name, weight in head.state_dict().items()}
    change(weights)
    save_file(weights, tmp_path / hpsv3.WEIGHTS)
    entry = reward_entry("hpsv3", {"weight": 1.0, "path": str(tmp_path), "base": str(base)})
    with pytest.raises(ValueError, match=message):
        make(entry, torch.device("cpu"))
