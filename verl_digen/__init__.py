# SPDX-License-Identifier: Apache-2.0
"""verl-digen: reinforcement learning on diffusion models, as a plugin of verl. Importing this package does nothing."""
