# SPDX-License-Identifier: Apache-2.0
"""Prompts from the user's files: reading and checking them, and the dataset verl's data loader draws from."""
