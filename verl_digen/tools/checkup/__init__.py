# SPDX-License-Identifier: Apache-2.0
"""`digen doctor`: what is missing on this machine, whether a model computes the same here, and whether the devices do
what a run needs of them."""
