# SPDX-License-Identifier: Apache-2.0
"""The loop: splits a logical batch into groups, waits for them, trains, commits, publishes."""
