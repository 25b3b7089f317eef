# SPDX-License-Identifier: Apache-2.0
"""`digen train` and `verl_digen.train`: verl's main in a process of its own, and what a person sees of it."""
