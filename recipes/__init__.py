# SPDX-License-Identifier: Apache-2.0
"""Hydra recipes: one flat yaml file each, named on the command line as `recipe=NAME`."""
