# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints of the models that scorers read: CLIP, DINOv2, HPSv2.1, ImageReward, the aesthetic head.

Weights come from NumPy, each tensor from its own name, so that another environment with the original packages makes the
same ones: `references.json` has the scores of hpsv2 1.2.0 and image-reward 1.5 (transformers 4.40.2, timm 0.6.13) on
`hps_state`, `image_reward_state`, `pictures` and `TEXTS`. The CLIP vocabulary is open_clip's, with few merges.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from PIL import Image

from tests.reward.contract import make_picture

PLACE = Path(__file__).with_name("references.json")
PICTURES_PX = ((28, 28), (64, 64), (48, 96), (96, 48), (17, 31), (33, 90), (45, 32), (45, 32))
"""(height, width); 45 x 32 has an odd border to crop."""
TEXTS = (
    *("a red square", "two dogs", "", "a long prompt " * 30, "TWO  Red dogs, 3!", "Red", "dogs &amp;amp; squares"),
    "two “red” ﬂags",
)
WORDS = ("red", "square", "two", "dogs", "long", "prompt")
"""Words that the vocabularies hold whole; any other text is read letter by letter."""
HPS_SIZES: dict[str, Any] = {
    "embed_dim": 16,
    "image_px": 28,
    "patch_px": 14,
    "width": 32,
    "text_width": 24,
    "layers": 2,
}
HPS_HEADS, HPS_CONTEXT = 2, 20
BLIP_SIZES: dict[str, Any] = {"image_px": 32, "patch_px": 16, "width": 128, "layers": 2}
MED_CONFIG: dict[str, Any] = {
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 24,
    "initializer_range": 0.02,
    "intermediate_size": 32,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 64,
    "model_type": "bert",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "add_type_embeddings": False,
    "type_vocab_size": 2,
    "vocab_size": 80,
    "encoder_width": 24,
    "add_cross_attention": True,
}


def pictures() -> list[Image.Image]:
    """The pictures of the references, in order."""
    return [Image.fromarray(make_picture(*size, seed=number)) for number, size in enumerate(PICTURES_PX)]


def tensor_of(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Random values that depend on the name alone; gains of norms lie around 1, matrices keep lengths."""
    values = np.random.default_rng(crc32(name.encode())).standard_normal(shape).astype(np.float32)
    if len(shape) == 1:
        is_gain = name.endswith("weight")
        return torch.from_numpy(values * 0.1 + is_gain)
    return torch.from_numpy(values * np.float32(1 / np.sqrt(np.prod(shape[1:]))))


def layers(weights: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights and biases of layers, from those of the weights."""
    return {f"{name}.weight": shape for name, shape in weights.items()} | {
        f"{name}.bias": shape[:1] for name, shape in weights.items()
    }


def state_like(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """A state dict of these shapes."""
    return {name: torch.tensor(3.0) if shape == () else tensor_of(name, tuple(shape)) for name, shape in shapes.items()}


def merges() -> list[tuple[str, str]]:
    """BPE merges that make each of `WORDS` one token."""
    found: list[tuple[str, str]] = []
    for word in WORDS:
        pieces = [*word[:-1], word[-1] + "</w>"]
        while len(pieces) > 1:
            pair = (pieces[0], pieces[1])
            if pair not in found:
                found.append(pair)
            pieces = [pieces[0] + pieces[1], *pieces[2:]]
    return found


def bytes_as_letters() -> list[str]:
    """The 256 letters that stand for bytes in BPE, in open_clip's order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + number) for number in range(len(rest))]


def clip_vocabulary() -> list[str]:
    """Tokens in open_clip's order: bytes, bytes that end a word, merges, start and end."""
    letters = bytes_as_letters()
    joined = ["".join(pair) for pair in merges()]
    return [*letters, *(letter + "</w>" for letter in letters), *joined, "<|startoftext|>", "<|endoftext|>"]


def write_clip_tokenizer(folder: Path) -> int:
    """Write vocab.json, merges.txt and what transformers needs beside them -> the number of tokens."""
    from transformers import CLIPTokenizer

    words = clip_vocabulary()
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in merges()) + "\n")
    CLIPTokenizer.from_pretrained(folder).save_pretrained(folder)
    return len(words)


def clip_config(*, sizes: Mapping[str, Any] = HPS_SIZES, act: str = "gelu") -> Any:
    """Config of a tiny CLIP."""
    from transformers import CLIPConfig

    number = len(clip_vocabulary())
    common = {"num_hidden_layers": sizes["layers"], "num_attention_heads": HPS_HEADS, "hidden_act": act}
    text = {
        "hidden_size": sizes["text_width"],
        "intermediate_size": 4 * sizes["text_width"],
        "vocab_size": number,
        "max_position_embeddings": HPS_CONTEXT,
        "eos_token_id": number - 1,
        "bos_token_id": number - 2,
        "pad_token_id": number - 1,
    }
    vision = {
        "hidden_size": sizes["width"],
        "intermediate_size": 4 * sizes["width"],
        "image_size": sizes["image_px"],
        "patch_size": sizes["patch_px"],
    }
    return CLIPConfig(
        text_config={**common, **text}, vision_config={**common, **vision}, projection_dim=sizes["embed_dim"]
    )


def write_clip(folder: Path) -> Path:
    """A CLIP checkpoint in transformers' format."""
    from transformers import CLIPImageProcessorPil, CLIPModel

    config = clip_config(act="quick_gelu")
    write_clip_tokenizer(folder)
    model = CLIPModel(config)
    model.load_state_dict(state_like({name: tensor.shape for name, tensor in model.state_dict().items()}))
    model.save_pretrained(folder)
    side = HPS_SIZES["image_px"]
    CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side}).save_pretrained(
        folder
    )
    return folder


def write_dino(folder: Path) -> Path:
    """A DINOv2 checkpoint in transformers' format."""
    from transformers import BitImageProcessorPil, Dinov2Config, Dinov2Model

    config = Dinov2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, mlp_ratio=2, image_size=28, patch_size=14
    )
    model = Dinov2Model(config)
    model.load_state_dict(state_like({name: tensor.shape for name, tensor in model.state_dict().items()}))
    model.save_pretrained(folder)
    BitImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 28, "width": 28}).save_pretrained(folder)
    return folder


def hps_state() -> dict[str, torch.Tensor]:
    """Tensors of open_clip's CLIP of `HPS_SIZES`."""
    sizes, words = HPS_SIZES, len(clip_vocabulary())
    width, text = sizes["width"], sizes["text_width"]
    shapes: dict[str, tuple[int, ...]] = {
        "positional_embedding": (HPS_CONTEXT, text),
        "text_projection": (text, sizes["embed_dim"]),
        "logit_scale": (),
        "token_embedding.weight": (words, text),
        "visual.class_embedding": (width,),
        "visual.positional_embedding": ((sizes["image_px"] // sizes["patch_px"]) ** 2 + 1, width),
        "visual.proj": (width, sizes["embed_dim"]),
        "visual.conv1.weight": (width, 3, sizes["patch_px"], sizes["patch_px"]),
        **layers({"ln_final": (text,), "visual.ln_pre": (width,), "visual.ln_post": (width,)}),
    }
    for start, own in (("transformer", text), ("visual.transformer", width)):
        for number in range(sizes["layers"]):
            block = f"{start}.resblocks.{number}"
            shapes |= {f"{block}.attn.in_proj_weight": (3 * own, own), f"{block}.attn.in_proj_bias": (3 * own,)}
            linears = {"attn.out_proj": (own, own), "mlp.c_fc": (4 * own, own), "mlp.c_proj": (own, 4 * own)}
            parts = linears | {"ln_1": (own,), "ln_2": (own,)}
            shapes |= layers({f"{block}.{part}": shape for part, shape in parts.items()})
    return state_like(shapes)


def write_hps(folder: Path) -> Path:
    """HPSv2.1's weights, and the config and tokenizer of its base in the same folder."""
    torch.save({"state_dict": hps_state()}, folder / "HPS_v2.1_compressed.pt")
    write_clip_tokenizer(folder)
    clip_config().save_pretrained(folder)
    return folder


def head_shapes(width: int, start: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a head's tensors."""
    sizes = (width, 1024, 128, 64, 16, 1)
    places = zip((0, 2, 4, 6, 7), sizes[1:], sizes[:-1], strict=True)
    return layers({f"{start}layers.{place}": (outputs, inputs) for place, outputs, inputs in places})


def image_reward_state() -> dict[str, torch.Tensor]:
    """Tensors of the image-reward package's model of `BLIP_SIZES` and `MED_CONFIG`, with those it does not use."""
    width, patch, med = BLIP_SIZES["width"], BLIP_SIZES["patch_px"], MED_CONFIG
    text, inner = med["hidden_size"], med["intermediate_size"]
    see, read = "blip.visual_encoder", "blip.text_encoder"
    shapes: dict[str, tuple[int, ...]] = {
        f"{see}.cls_token": (1, 1, width),
        f"{see}.pos_embed": (1, (BLIP_SIZES["image_px"] // patch) ** 2 + 1, width),
        f"{read}.embeddings.word_embeddings.weight": (med["vocab_size"], text),
        f"{read}.embeddings.position_embeddings.weight": (med["max_position_embeddings"], text),
        **layers({f"{see}.patch_embed.proj": (width, 3, patch, patch), f"{see}.norm": (width,)}),
        **layers({f"{read}.embeddings.LayerNorm": (text,)}),
        **layers({"blip.vision_proj": (256, width), "blip.text_proj": (256, text)}),
        **head_shapes(text, "mlp."),
    }
    for number in range(BLIP_SIZES["layers"]):
        block = f"{see}.blocks.{number}"
        linears = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
        linears |= {"mlp.fc1": (4 * width, width), "mlp.fc2": (width, 4 * width)}
        parts = linears | {"norm1": (width,), "norm2": (width,)}
        shapes |= layers({f"{block}.{part}": shape for part, shape in parts.items()})
    for number in range(med["num_hidden_layers"]):
        layer = f"{read}.encoder.layer.{number}"
        linears = {"intermediate.dense": (inner, text), "output.dense": (text, inner)}
        norms = ["output"]
        for kind, source in (("attention", text), ("crossattention", width)):
            linears |= {f"{kind}.self.query": (text, text), f"{kind}.output.dense": (text, text)}
            linears |= {f"{kind}.self.key": (text, source), f"{kind}.self.value": (text, source)}
            norms.append(f"{kind}.output")
        parts = linears | {f"{norm}.LayerNorm": (text,) for norm in norms}
        shapes |= layers({f"{layer}.{part}": shape for part, shape in parts.items()})
    positions = torch.arange(med["max_position_embeddings"])[None]
    return {**state_like(shapes), f"{read}.embeddings.position_ids": positions}


def bert_words() -> list[str]:
    """The words of a tiny BERT vocabulary; the two last numbers of `MED_CONFIG` are BLIP's own tokens."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    own = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", *WORDS, *letters[1:], *(f"##{one}" for one in letters)]
    return own


def write_image_reward(folder: Path) -> Path:
    """ImageReward's files, and its tokenizer in the same folder."""
    torch.save(image_reward_state(), folder / "ImageReward.pt")
    (folder / "med_config.json").write_text(json.dumps(MED_CONFIG))
    write_bert_tokenizer(folder)
    return folder


def write_bert_tokenizer(folder: Path) -> None:
    """Write the files of a BERT tokenizer."""
    (folder / "vocab.txt").write_text("\n".join(bert_words()) + "\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 512})
    )


def write_aesthetic_head(folder: Path) -> Path:
    """The head of `aesthetic` for the tiny CLIP."""
    path = folder / "aesthetic-model.pth"
    torch.save(state_like(head_shapes(HPS_SIZES["embed_dim"], "")), path)
    return path
