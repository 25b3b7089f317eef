# SPDX-License-Identifier: Apache-2.0
"""Importing this module files `DiffusersFSDPEngine` with verl's `EngineRegistry`, for model_type
"diffusion_model".

The engine's own module does the filing. It is imported here by module, not by name: whoever imports it first
makes verl import its engines, which brings us here in the middle of that import.
"""

import verl_digen.engine.engine  # noqa: F401
