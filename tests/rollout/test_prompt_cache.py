# SPDX-License-Identifier: Apache-2.0
import torch

from verl_digen.rollout.prompt_cache import PromptCache


class Encode:
    """Encoder that refuses prompts containing "long" and records its calls."""

    def __init__(self):
        self.asked = []

    def __call__(self, prompts):
        self.asked.append(list(prompts))
        for prompt in prompts:
            if "long" in prompt:
                raise ValueError(f"{prompt} is too long")
        return [{f"of {prompt}": torch.zeros(1)} for prompt in prompts]


def names(found):
    return [(text, *condition) for text, condition in found.items()]


def test_a_prompt_is_encoded_once_while_there_is_room():
    encode = Encode()
    cache = PromptCache(encode, 2)
    for text in ("a", "b", "a", "c", "a", "b"):
        assert names(cache.lookup([text])) == [(text, f"of {text}")]
    assert encode.asked == [["a"], ["b"], ["c"], ["b"]], "b was the least recently used when c came"
    assert cache.stats() == {"hits": 2, "misses": 4, "size": 2, "max_size": 2}


def test_what_one_call_needs_is_there_even_without_room():
    encode = Encode()
    cache = PromptCache(encode, 1)
    assert list(cache.lookup(["a", "b", "a", "c"])) == ["a", "b", "c"]
    assert encode.asked == [["a", "b", "c"]]
    assert cache.stats() == {"hits": 1, "misses": 3, "size": 1, "max_size": 1}


def test_a_refused_prompt_refuses_no_other_and_is_not_kept():
    encode = Encode()
    cache = PromptCache(encode, 4)
    found = cache.lookup(["a", "long b", "c"])
    assert names({text: found[text] for text in "ac"}) == [("a", "of a"), ("c", "of c")]
    assert isinstance(found["long b"], ValueError) and str(found["long b"]) == "long b is too long"
    assert cache.stats()["size"] == 2
    assert isinstance(cache.lookup(["long b"])["long b"], ValueError)


def test_prompts_that_wait_are_encoded_in_the_turn_of_those_that_are_needed():
    encode = Encode()
    cache = PromptCache(encode, 3)
    cache.prepare(["a"], ["b", "c", "d", "a"])
    assert encode.asked == [["c", "d", "a"]], "as many as there is room for"
    cache.prepare(["a"], ["e"])
    assert len(encode.asked) == 1, "nothing is needed"
    assert cache.find(["a", "e"]) is None and names(cache.find(["a", "c"]) or {}) == [("a", "of a"), ("c", "of c")]
