# SPDX-License-Identifier: Apache-2.0
"""JSON of a request of the OpenAI chat protocol: one user message of pictures, then the question.

Fields and limits: https://platform.openai.com/docs/api-reference/chat/create; vLLM and SGLang take the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_digen.reward.judges.content import Part, text_part

PATH = "/chat/completions"
"""Path below the address of an API, which ends with its version."""
MODELS_PATH = "/models"

MAX_TOP_LOGPROBS = 20
"""The protocol's limit, and vLLM's default of `--max-logprobs`."""

OWN_FIELDS = frozenset(
    ("model", "messages", "temperature", "max_tokens", "seed", "logprobs", "top_logprobs", "n", "stream")
)
"""Fields that a judge sets itself, or relies on being left out."""


def chat_request(
    model: str,
    pictures: Sequence[Part],
    question: str,
    *,
    system: str,
    max_tokens: int,
    seed: int,
    top_logprobs: int,
    further: Mapping[str, Any],
) -> dict[str, Any]:
    """A request at temperature 0.

    Args:
        pictures: in the order in which the judge sees them.
        system: text of a system message; empty for none.
        top_logprobs: tokens whose probability the answer gives at each position; 0 asks for none.
        further: fields beyond `OWN_FIELDS`.
    """
    content = [*pictures, text_part(question)]
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    request: dict[str, Any] = {
        "model": model,
        "messages": [*messages, {"role": "user", "content": content}],
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "seed": seed,
        **further,
    }
    if top_logprobs:
        request |= {"logprobs": True, "top_logprobs": top_logprobs}
    return request


def only_model(body: Any) -> str:
    """The model of a server that serves one, from its answer to GET /v1/models; adapters (with a parent) do not count.

    Raises:
        ValueError: it serves none or several, or the answer is another one.
    """
    listed = body.get("data") if isinstance(body, Mapping) else None
    if not isinstance(listed, list) or not all(isinstance(model, Mapping) and "id" in model for model in listed):
        raise ValueError(f"{MODELS_PATH} must list the models of a server, got {str(body)[:200]!r}; set model=NAME")
    names = [str(model["id"]) for model in listed if not model.get("parent")]
    if len(names) != 1:
        raise ValueError(
            f"a server that is asked without a model must serve one, got {', '.join(names) or 'none'}; set model=NAME"
        )
    return names[0]
