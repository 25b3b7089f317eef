# SPDX-License-Identifier: Apache-2.0
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
        return [{"embeds": prompt} for prompt in prompts]


def test_a_prompt_is_encoded_once_while_there_is_room():
    encode = Encode()
    cache = PromptCache(encode, 2)
    for text in ("a", "b", "a", "c", "a", "b"):
        assert cache.lookup([text]) == {text: {"embeds": text}}
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
    assert (found["a"], found["c"]) == ({"embeds": "a"}, {"embeds": "c"})
    assert isinstance(found["long b"], ValueError) and str(found["long b"]) == "long b is too long"
    assert cache.stats()["size"] == 2
    assert isinstance(cache.lookup(["long b"])["long b"], ValueError)
