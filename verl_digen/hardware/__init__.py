# SPDX-License-Identifier: Apache-2.0
"""Facts about devices, PyTorch and kernels of a machine, and copies between devices. Nothing heavy is imported here."""
