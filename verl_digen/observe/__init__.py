# SPDX-License-Identifier: Apache-2.0
"""Output for people: progress, metrics and pictures."""
