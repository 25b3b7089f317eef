# SPDX-License-Identifier: Apache-2.0
"""Rewards outside a run: `digen score` scores files. No Ray.

files.py     paths -> pixels and prompts         score_command.py   digen score
                                                 rewards.py         rewards by name -> batches -> scores -> text
"""
