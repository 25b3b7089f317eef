# SPDX-License-Identifier: Apache-2.0
"""Agent loop, from a prompt to a published group: one coroutine per sample requests its generation and score."""
