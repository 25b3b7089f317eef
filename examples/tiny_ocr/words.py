# SPDX-License-Identifier: Apache-2.0
"""The world of the tiny OCR model: words of three letters, black on white, 32x80 px.

- A caption is `the word "CAT"`; rapidocr reads drawings of it as CAT.
- The letters are of a font with one pitch (DejaVu Sans Mono Bold, which matplotlib brings), so each has its place.
- All strings over the alphabet are drawn in pretraining, but for the validation words.
"""

from functools import cache
from itertools import product

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

HEIGHT_PX, WIDTH_PX = 32, 80
ALPHABET = "ACDEGHLMNOPRSTU"
"""Letters that look least like digits and each other."""
LENGTH = 3
FONT_PX = 34
JITTER_PX = (3, 1)
"""Largest shift to the right or left, up or down."""

WORDS = tuple(
    """
ACE ACT ADD AGE AGO AHA ALE ALL AND ANT APE APT ARC ARE ARM ART ASH CAN CAP CAR CAT COD COG CON COP COT CUE CUP CUT DAD
DAM DEN DOE DOG DOT DUE DUG DUO EAR EAT EEL EGG EGO ELM END EON ERA GAP GAS GEL GEM GET GNU GOT GUM GUN GUT HAD HAM HAS
HAT HEM HEN HER HOG HOP HOT HUE HUG HUM HUT LAD LAP LEG LET LOG LOT LUG MAD MAN MAP MAT MEN MET MOP MUD MUG NAP NET NOD
NOT NUN NUT OAR OAT ODD ONE OPT ORE OUR OUT PAD PAL PAN PAR PAT PEA PEG PEN PET POD POP POT PRO PUG PUN PUT RAG RAM RAN
RAP RAT RED ROD ROT RUG RUN RUT SAD SAP SAT SEA SEE SET SHE SOD SON SUM SUN TAG TAN TAP TAR TEA TEN THE TOE TON TOP TUG
USE
""".split()  # noqa: SIM905
)
"""English words over the alphabet: prompts of reinforcement learning."""


def caption(word: str) -> str:
    """The prompt that asks for a word."""
    return f'the word "{word}"'


@cache
def all_strings() -> tuple[str, ...]:
    """Every string of the world, in the order of the alphabet."""
    return tuple("".join(letters) for letters in product(ALPHABET, repeat=LENGTH))


@cache
def _font() -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSansMono-Bold.ttf", FONT_PX)


def draw(word: str, rng: np.random.Generator | None = None) -> np.ndarray:
    """A drawing of a word, uint8 [32, 80, 3], in the middle; shifted by up to `JITTER_PX` with a generator."""
    left, top, right, bottom = _font().getbbox("H" * len(word))
    shift_x, shift_y = (0 if rng is None else int(rng.integers(-most, most + 1)) for most in JITTER_PX)
    place = ((WIDTH_PX - right - left) / 2 + shift_x, (HEIGHT_PX - bottom - top) / 2 + shift_y)
    image = Image.new("RGB", (WIDTH_PX, HEIGHT_PX), "white")
    ImageDraw.Draw(image).text(place, word, fill="black", font=_font())
    return np.asarray(image)


def misspell(word: str, probability: float, rng: np.random.Generator) -> str:
    """The word with each letter replaced by a random one with the given probability."""
    return "".join(ALPHABET[rng.integers(len(ALPHABET))] if rng.random() < probability else letter for letter in word)
