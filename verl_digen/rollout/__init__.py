# SPDX-License-Identifier: Apache-2.0
"""Generation: the denoising loop, and the replicas that run it."""
