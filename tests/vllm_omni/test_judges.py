# SPDX-License-Identifier: Apache-2.0
"""Judges and vLLM's own types of the chat protocol: it takes what they send, and they read what it makes.

vLLM's wheel has no kernels for a CPU, so no language model runs here; these are the classes of its server's border.
"""

import math

import pytest
from PIL import Image
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionLogProb,
    ChatCompletionLogProbs,
    ChatCompletionLogProbsContent,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    UsageInfo,
)
from vllm.entrypoints.openai.models.serving import ModelCard, ModelList

from verl_digen.reward.judges.chat import JudgeConfig, chat_request, only_model, picture_parts
from verl_digen.reward.judges.reading import read_reply, weighed


async def test_vllm_takes_a_judges_request():
    config = JudgeConfig(
        url="http://h:1",
        system="Be strict.",
        max_tokens=16,
        seed=3,
        request={"chat_template_kwargs": {"enable_thinking": False}},
    )
    (picture,) = await picture_parts([Image.new("RGB", (4, 4))], config.max_px)
    made = chat_request(config, "m", [picture], "Yes or no?", top_logprobs=20)
    taken = ChatCompletionRequest.model_validate(made)
    assert not taken.model_extra, "every field is one that vLLM knows"
    assert taken.chat_template_kwargs == {"enable_thinking": False}
    parameters = taken.to_sampling_params(max_tokens=16, default_sampling_params={"temperature": 0.7, "top_p": 0.8})
    assert (parameters.temperature, parameters.max_tokens, parameters.seed, parameters.logprobs) == (0.0, 16, 3, 20)


def test_a_judge_reads_what_vllm_makes():
    top = [ChatCompletionLogProb(token=token, logprob=math.log(p)) for token, p in (("Yes", 0.6), (" no", 0.2))]
    content = [ChatCompletionLogProbsContent(token="Yes", logprob=math.log(0.6), top_logprobs=top)]
    choice = ChatCompletionResponseChoice(
        index=0,
        message=ChatMessage(role="assistant", content="Yes"),
        logprobs=ChatCompletionLogProbs(content=content),
        finish_reason="length",
    )
    body = ChatCompletionResponse(model="m", choices=[choice], usage=UsageInfo()).model_dump(mode="json")
    found = weighed(read_reply(body), {"Yes": 1.0, "No": 0.0})
    assert found["score"] == pytest.approx(0.75) and found["share"] == pytest.approx(0.8)


def test_the_model_of_a_server_with_an_adapter_is_its_base():
    cards = [ModelCard(id="base"), ModelCard(id="adapter", parent="base")]
    assert only_model(ModelList(data=cards).model_dump(mode="json")) == "base"
