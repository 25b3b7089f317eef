# SPDX-License-Identifier: Apache-2.0
"""Weight updates: version v -> v+1, on every replica."""
