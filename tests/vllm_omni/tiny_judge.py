# SPDX-License-Identifier: Apache-2.0
"""A vision-language model of a few thousand random weights, as a checkpoint that vLLM serves.

It is an Idefics3: vLLM and transformers prepare its pictures without torchvision, which has no build for this PyTorch.
"""

import json
from pathlib import Path
from typing import Any

import torch

from tests.vllm_omni.cpu_kernels import find_pictures

SIDE_PX, PATCH_PX, SCALE = 56, 14, 2
MARKS = (
    *("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>", *MARKS[:4])
WORDS = ("Yes", "No", "show", "red", "blue", "green", "circle", "square")
"""With the others 20 tokens, as many as an answer tells the probabilities of."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build_tiny_judge(folder: Path) -> Path:
    """Write the checkpoint -> its folder. Weights are so large that answers differ from picture to picture."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig

    processor = _processor()
    tokenizer = processor.tokenizer
    config = Idefics3Config(
        vision_config=Idefics3VisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=SIDE_PX,
            patch_size=PATCH_PX,
        ),
        text_config=LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=256,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        ),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=SCALE,
    )
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    file = folder / "processor_config.json"
    written = json.loads(file.read_text())
    del written["image_processor"]["image_processor_type"]  # see find_pictures
    file.write_text(json.dumps(written))
    return folder


def _processor() -> Any:
    """Idefics3's processor with a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import Idefics3Processor, PreTrainedTokenizerFast
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate((*SPECIAL, *WORDS))}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=list(MARKS),
    )
    pixels = Idefics3ImageProcessorPil(
        size={"longest_edge": 2 * SIDE_PX},
        max_image_size={"longest_edge": SIDE_PX},  # four parts, and the whole
    )
    num_tokens = (SIDE_PX // PATCH_PX // SCALE) ** 2
    return Idefics3Processor(pixels, tokenizer, image_seq_len=num_tokens, chat_template=TEMPLATE)


def probability_of_yes(folder: Path, pictures: Any, questions: Any) -> list[float]:
    """P(Yes) / (P(Yes) + P(No)) at the first token of the answer, by transformers, in fp32.

    Args:
        pictures: uint8 [H, W, 3] each. questions: text each, asked after its picture.
    """
    from PIL import Image
    from transformers import Idefics3ForConditionalGeneration, Idefics3Processor

    find_pictures()
    model = Idefics3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    processor = Idefics3Processor.from_pretrained(folder)
    yes, no = processor.tokenizer.convert_tokens_to_ids(["Yes", "No"])
    found = []
    for picture, question in zip(pictures, questions, strict=True):
        inputs = processor(images=[Image.fromarray(picture)], text=f"<image>\n{question}", return_tensors="pt")
        with torch.no_grad():
            logits = model(**inputs).logits[0, -1]
        found.append(float(logits[[yes, no]].softmax(0)[0]))
    return found
