# SPDX-License-Identifier: Apache-2.0
"""Processes that may be late or dead, for the trainer, rewards and environments."""
