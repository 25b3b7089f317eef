# SPDX-License-Identifier: Apache-2.0
"""Seeds as pure functions of a key, so that no random draw depends on the process that makes it or on its time; and
noise as one of (run seed, uid, sample_index, step). Nothing local to a worker (rank, slot, position) enters, and it is
drawn in fp32 on the CPU, so it is the same on every worker and platform.

torch's CPU generator keeps only the low 32 bits of a seed, so among n draws about n²/2³³ unrelated pairs coincide.
Within a group (say 16 samples, 10 steps) the chance of one is 3e-6; elsewhere it does no harm.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

INITIAL_LATENTS = -1
"""The `step` of the initial latents."""


def keyed_seed(*key: str | int) -> int:
    """A seed in [0, 2**63): the same for a key on every machine, unrelated for different keys (blake2b)."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@lru_cache(maxsize=4096)
def sample_seed(run_seed: int, uid: str, sample_index: int, turn: int = 0) -> int:
    """The seed of one sample, or of one turn of its episode, in [0, 2**63). It is recorded with the trajectory, and is
    all that a worker needs."""
    later = (int(turn),) if turn else ()
    return keyed_seed("sample", int(run_seed), str(uid), int(sample_index), *later)


def step_noise(seed: int, step: int, shape: Sequence[int]) -> Tensor:
    """Standard normal noise of the sample with `seed` at denoise step `step`, of `shape`, fp32 on the CPU. It depends
    on the whole shape: a smaller latent's noise is not a slice of a larger one's."""
    generator = torch.Generator("cpu").manual_seed(keyed_seed("noise", int(seed), int(step)))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")
