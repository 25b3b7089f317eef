# SPDX-License-Identifier: Apache-2.0
"""Version v -> v+1, to every replica."""
