# SPDX-License-Identifier: Apache-2.0
"""Vision-language models as judges, asked over the OpenAI chat protocol (vLLM, SGLang, hosted services).

    question.py     the text of a question, from a template and the prompt's row
    content.py      pictures of a request: size limit, data URI, order
    reply.py        text and tokens of an answer, without its thoughts; what makes it unusable
    reading.py      numbers in a text; probabilities of answers from `top_logprobs`
    chat.py         `ChatModel`: asks, again where an answer cannot be read
    base.py         `Judge`: the reward that the scorers are made of

All but the last two are pure.
"""
