# SPDX-License-Identifier: Apache-2.0
"""Vision-language models as judges, asked over the OpenAI chat protocol (vLLM, SGLang, hosted services)."""
