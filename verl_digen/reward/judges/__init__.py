# SPDX-License-Identifier: Apache-2.0
"""Vision-language models as judges, asked over the OpenAI chat protocol (vLLM, SGLang, hosted services).

reading.py      text and tokens of an answer, without its thoughts; numbers and probabilities in it
chat.py         the text of a question, from a template and the prompt's row; pictures of a request; `ChatModel` asks,
                again where an answer cannot be read; `Judge`: the reward of the scorers
"""
