# SPDX-License-Identifier: Apache-2.0
"""Sound of a generated video: a waveform with its sample rate, and its file.

Invariant (tests/observe): a file has the waveform's channels, samples and rate, and its values to 16 bits.
"""

import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PEAK = 32767
"""Largest value of a 16-bit sample."""


@dataclass(frozen=True)
class Audio:
    """Waveform of one sample. Made by a replica, read by rewards and logs."""

    waveform: NDArray[np.float32]
    """[channels, samples] in [-1, 1]; values outside are cut off in a file."""
    rate_hz: int
    """Samples per second and channel."""


def save_wav(audio: Audio, path: Path) -> None:
    """Write a WAV file of 16-bit samples. Python's own module does it: no player or package is needed."""
    values = (audio.waveform.clip(-1, 1) * PEAK).round().astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(values))
        file.setsampwidth(values.itemsize)
        file.setframerate(audio.rate_hz)
        file.writeframes(values.T.tobytes())
