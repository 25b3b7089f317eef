# SPDX-License-Identifier: Apache-2.0
"""Ways out of a checkpoint: files for other tools (`digen export`) and pictures (`digen sample`). No Ray, no ranks."""
