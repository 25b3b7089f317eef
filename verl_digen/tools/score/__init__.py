# SPDX-License-Identifier: Apache-2.0
"""Rewards outside a run: `digen score` scores files. No Ray.

files.py     paths -> pixels                     score_command.py   digen score
prompts.py   which prompt belongs to which file  rewards.py         rewards by name -> batches -> scores
"""
