# SPDX-License-Identifier: Apache-2.0
"""Build a tiny tokenizer and text encoder: Qwen-Image's classes, with the words of the captions only.

- The pipeline wraps a prompt into a chat template and drops the embeddings of its first 34 tokens (64 where it edits),
  a number that is written into the pipeline. With a byte-level vocabulary in which every word of the template is one
  token, the template's head has exactly as many tokens, as with the real vocabulary.
- Words that the vocabulary does not know fall apart into bytes: they work, and mean nothing to the model.
"""

import inspect
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from diffusers import QwenImagePipeline
from tokenizers import pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

IMAGE_TOKENS = {
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
}
"""Name of a mark around a picture, or in its place -> the token; for pipelines that read pictures."""

HIDDEN_SIZE = 64


def build_tokenizer(
    captions: Iterable[str], pipeline_class: Any = QwenImagePipeline, marks: Iterable[str] = ()
) -> Qwen2Tokenizer:
    """A tokenizer in which each word of the template and of these captions is one token.

    Args:
        pipeline_class: the pipeline whose template it is.
        marks: further special tokens.

    A `RuntimeError` if the installed pipeline drops another number of tokens than its template has.
    """
    parts = dict.fromkeys(name for name in inspect.signature(pipeline_class).parameters)
    pipeline = pipeline_class(**parts)  # carries the template; needs no weights for it
    head, tail = pipeline.prompt_template_encode.split("{}")
    corpus = [head, tail, " ", *captions]
    special_tokens = (*SPECIAL_TOKENS, *marks)
    for token in special_tokens:
        corpus = [piece for text in corpus for piece in text.split(token)]

    backend = Qwen2Tokenizer().backend_tokenizer
    trainer = BpeTrainer(
        vocab_size=10_000,  # more than there are merges: every word grows into one token
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.model = type(backend.model)()
    backend.train_from_iterator(corpus, trainer)
    trained = json.loads(backend.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=[tuple(pair) for pair in trained["merges"]],
        extra_special_tokens=list(special_tokens[1:]),
        padding_side="right",
        model_max_length=1058,
    )
    num_head = len(tokenizer(head).input_ids)
    if num_head != pipeline.prompt_template_encode_start_idx:
        raise RuntimeError(
            f"the pipeline drops {pipeline.prompt_template_encode_start_idx} tokens of its prompt template, "
            f"but the template's head has {num_head}; the words of the template must be one token each"
        )
    return tokenizer


def build_text_encoder(
    tokenizer: Qwen2Tokenizer, seed: int, marks: Mapping[str, str] | None = None
) -> Qwen2_5_VLForConditionalGeneration:
    """An untrained text encoder of 0.13 M parameters; without `marks` only the class needs its vision tower.

    Args:
        marks: `IMAGE_TOKENS` for a pipeline that reads pictures.
    """
    torch.manual_seed(seed)
    token_id = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": HIDDEN_SIZE,
            "intermediate_size": 2 * HIDDEN_SIZE,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "bos_token_id": token_id("<|endoftext|>"),
            "eos_token_id": token_id("<|im_end|>"),
            "pad_token_id": token_id("<|endoftext|>"),
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 1,
            "out_hidden_size": HIDDEN_SIZE,
            "fullatt_block_indexes": [0],
        },
        tie_word_embeddings=True,
        **{f"{name}_token_id": token_id(mark) for name, mark in (marks or {}).items()},
    )
    return Qwen2_5_VLForConditionalGeneration(config)
