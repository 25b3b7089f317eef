# SPDX-License-Identifier: Apache-2.0
"""The loop: splits a logical batch into groups, waits for them, trains, commits, publishes."""

import verl.trainer.ppo.v1  # noqa: F401 - first: it registers our trainers, which import modules of this package
