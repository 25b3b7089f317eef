# SPDX-License-Identifier: Apache-2.0
"""The one denoising loop and its records, for replicas, trainer-assisted generation, self-test and plan."""
