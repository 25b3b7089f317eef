# SPDX-License-Identifier: Apache-2.0
"""Seeds as pure functions of a key, so that no random draw depends on the process that makes it or on its time."""

import hashlib


def keyed_seed(*key: str | int) -> int:
    """A seed in [0, 2**63): the same for a key on every machine, unrelated for different keys (blake2b)."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
