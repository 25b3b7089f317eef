# SPDX-License-Identifier: Apache-2.0
"""The text reward against flow_grpo's rule, written again in the slow and obvious way."""

import random
from functools import cache

import pytest

from verl_digen.reward.scorers.ocr import text_reward, text_target

ALPHABET = 'abAB 1.,\n\t\u3000éÉİßＡａ好你"-'
"""Cases, spaces of several kinds, full-width letters, letters whose lower case is longer."""


def slow_distance(left: str, right: str) -> int:
    """Levenshtein's distance by its recursive definition."""

    @cache
    def distance(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return i + j
        return min(
            distance(i - 1, j) + 1, distance(i, j - 1) + 1, distance(i - 1, j - 1) + (left[i - 1] != right[j - 1])
        )

    return distance(len(left), len(right))


def slow_reward(read: str, target: str) -> float:
    """flow_grpo's rule, step by step."""
    read, target = "".join(c for c in read.lower() if c != " "), "".join(c for c in target.lower() if c != " ")
    is_contained = any(read[start:].startswith(target) for start in range(len(read)))
    distance = 0 if is_contained else slow_distance(read, target)
    return (len(target) - min(distance, len(target))) / len(target)


@pytest.mark.parametrize(
    ("read", "target", "reward"),
    [
        ("cat", "CAT", 1.0),
        ("the cat sat", "cat", 1.0),  # contained: the rest costs nothing
        ("", "cat", 0.0),
        ("something else entirely", "cat", 0.0),  # never below 0
        ("hello\nworld", "hello world", 0.9),  # a line break is a character, a space is none
        ("Ｃat", "cat", 2 / 3),  # full-width letters are other letters
        ("i", "İ", 0.5),  # lower case of İ has two characters
    ],
)
def test_reward_of_known_texts(read, target, reward):
    assert text_reward(read, target) == pytest.approx(reward, abs=1e-9)
    assert slow_reward(read, target) == pytest.approx(reward, abs=1e-9)


def test_reward_equals_the_slow_rule_on_random_texts():
    rng = random.Random(0)
    rewards = set()
    for _ in range(3000):
        read = "".join(rng.choices(ALPHABET, k=rng.randrange(9)))
        target = "".join(rng.choices(ALPHABET, k=rng.randrange(7))) + "x"
        if rng.random() < 0.3:
            read = target[rng.randrange(3) :] + read
        assert text_reward(read, target) == pytest.approx(slow_reward(read, target), abs=1e-9), (read, target)
        rewards.add(round(text_reward(read, target), 3))
    assert len(rewards) > 10


@pytest.mark.parametrize("target", ["", "   "])
def test_a_target_without_characters_is_an_error_that_says_so(target):
    with pytest.raises(ValueError, match=r"must have a character that is not a space, got '.*'; write the text"):
        text_reward("cat", target)


@pytest.mark.parametrize(
    ("prompt", "target"),
    [
        ('a sign that says "Open Now"', "Open Now"),
        ('"A" and "B"', "A"),
        ("a sign that says \u201cOpen Now\u201d", "Open Now"),
        ('ein Schild \u201eAuf\u201c und "Zu"', "Auf"),
        ('quoted over\n"two\nlines"', "two\nlines"),
        ('an empty "" pair before "text"', None),
        ('a blank " " pair', None),
        ("no quotes at all", None),
        ('one quote " only', None),
    ],
)
def test_target_is_the_first_quoted_part(prompt, target):
    if target is not None:
        assert text_target(prompt) == target
        return
    with pytest.raises(ValueError, match="must have the text to show in double quotes"):
        text_target(prompt)
