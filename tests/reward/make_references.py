# SPDX-License-Identifier: Apache-2.0
"""Makes `references.json`: scores of the original packages hpsv2 and image-reward on the tiny checkpoints.

Run in an environment of its own, from the root of the repository, beside the PyTorch of this one:

    uv pip install --no-deps hpsv2==1.2.0 image-reward==1.5 transformers==4.40.2 tokenizers==0.19.1 \
        huggingface-hub==0.25.2 timm==0.6.13 fairscale==0.4.13 torchvision ftfy wcwidth regex
    python -m tests.reward.make_references

torchvision may be built for another PyTorch: its compiled operators are declared and never called.
"""

import gzip
import json
import re
import shutil
import sys
import tempfile
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from PIL import Image

from tests.reward import tiny_scorers as tiny
from tests.reward.contract import make_picture

SIZES = ((28, 28), (64, 64), (48, 96), (96, 48), (17, 31), (33, 90), (45, 32), (45, 32))
"""(height, width) in px; 45 x 32 has an odd border to crop."""
TEXTS = (
    "a red square",
    "two dogs",
    "",
    "a long prompt " * 30,
    "TWO  Red dogs, 3!",
    "Red",
    "dogs &amp;amp; squares",
    "two “red” ﬂags",
)
PLACE = Path(__file__).with_name("references.json")


def pictures() -> list[Image.Image]:
    """The pictures of the references, in order."""
    return [Image.fromarray(make_picture(*size, seed=number)) for number, size in enumerate(SIZES)]


def declare_torchvision() -> torch.library.Library:
    """Declare torchvision's operators, so that its Python part can be imported."""
    sources = "".join(path.read_text() for path in folder_of("torchvision").rglob("*.py"))
    library = torch.library.Library("torchvision", "DEF")
    for name in sorted(set(re.findall(r"torchvision(?:::|\.)(q?nms)\b", sources))):
        library.define(f"{name}(Tensor boxes) -> Tensor")
    return library


def bare_package(name: str, path: Path) -> None:
    """Make a package importable without its `__init__`, which imports what no score needs."""
    package = ModuleType(name)
    package.__path__ = [str(path)]
    sys.modules[name] = package


def folder_of(package: str) -> Path:
    """Folder of an installed package."""
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def import_hps(folder: Path) -> list[ModuleType]:
    """Modules model, tokenizer and transform of hpsv2's open_clip, which reads the tiny vocabulary.

    They are imported from a copy: the wheel lacks its vocabulary, and what imports the package imports a terminal.
    """
    shutil.copytree(folder_of("hpsv2") / "src" / "open_clip", folder / "hps_open_clip")
    with gzip.open(folder / "hps_open_clip" / "bpe_simple_vocab_16e6.txt.gz", "wt", encoding="utf-8") as file:
        file.write("#version\n" + "\n".join(" ".join(pair) for pair in tiny.merges()))
    bare_package("hps_open_clip", folder / "hps_open_clip")
    return [import_module(f"hps_open_clip.{name}") for name in ("model", "tokenizer", "transform")]


def scores_of_hps(folder: Path) -> list[float]:
    """Cosines by hpsv2's own model, transform and tokenizer."""
    models, tokenizers, transforms = import_hps(folder)
    words, sizes, heads = len(tiny.clip_vocabulary()), tiny.HPS_SIZES, tiny.HPS_HEADS
    assert tokenizers._tokenizer.vocab_size == words
    model = models.CLIP(
        sizes["embed_dim"],
        models.CLIPVisionCfg(
            layers=sizes["layers"],
            width=sizes["width"],
            head_width=sizes["width"] // heads,
            patch_size=sizes["patch_px"],
            image_size=sizes["image_px"],
        ),
        models.CLIPTextCfg(
            context_length=tiny.HPS_CONTEXT,
            vocab_size=words,
            width=sizes["text_width"],
            heads=heads,
            layers=sizes["layers"],
        ),
        output_dict=True,
    ).eval()
    model.load_state_dict(tiny.hps_state())
    transform: Any = transforms.image_transform(sizes["image_px"], is_train=False, resize_longest_max=True)
    return [
        cosine(model(transform(image)[None], tokenizers.tokenize([text], tiny.HPS_CONTEXT)))
        for image, text in zip(pictures(), TEXTS, strict=True)
    ]


def cosine(outputs: Any) -> float:
    """img_score.py's number."""
    return (outputs["image_features"] @ outputs["text_features"].T).item()


def scores_of_image_reward(folder: Path) -> list[float]:
    """Scores by image-reward's own model, with smaller sizes."""
    home = folder_of("ImageReward")
    bare_package("ImageReward", home)
    bare_package("ImageReward.models", home / "models")
    package: Any = import_module("ImageReward.ImageReward")
    blip, blip_pretrain = (import_module(f"ImageReward.models.BLIP.{name}") for name in ("blip", "blip_pretrain"))
    from transformers import BertTokenizer

    sizes = tiny.BLIP_SIZES
    (folder / "med_config.json").write_text(json.dumps(tiny.MED_CONFIG))
    tiny.write_bert_tokenizer(folder)
    small = blip.VisionTransformer(
        img_size=sizes["image_px"],
        patch_size=sizes["patch_px"],
        embed_dim=sizes["width"],
        depth=sizes["layers"],
        num_heads=sizes["width"] // 64,
    )
    blip_pretrain.create_vit = lambda *_: (small, sizes["width"])
    blip_pretrain.init_tokenizer = partial(BertTokenizer.from_pretrained, str(folder))
    package.MLP = lambda _, make=package.MLP: make(tiny.MED_CONFIG["hidden_size"])
    model = package.ImageReward(med_config=str(folder / "med_config.json")).eval()
    model.preprocess = package._transform(sizes["image_px"])
    model.load_state_dict(tiny.image_reward_state())
    scores: list[float] = []
    for number, (image, text) in enumerate(zip(pictures(), TEXTS, strict=True)):
        path = folder / f"{number}.png"
        image.save(path)
        scores.append(float(model.score(text, str(path))))
    return scores


def main() -> None:
    """Write the references."""
    library = declare_torchvision()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        found = {"hpsv2": scores_of_hps(Path(folder)), "image_reward": scores_of_image_reward(Path(folder))}
    PLACE.write_text(json.dumps(found, indent=1) + "\n")
    del library


if __name__ == "__main__":
    main()
