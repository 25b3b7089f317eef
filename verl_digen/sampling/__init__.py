# SPDX-License-Identifier: Apache-2.0
"""The one denoising loop and its records, for replicas, the trainer's own generation, self-test and plan."""
