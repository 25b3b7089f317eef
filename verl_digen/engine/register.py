# SPDX-License-Identifier: Apache-2.0
"""Importing this module registers `DiffusersFSDPEngine` with verl's `EngineRegistry`, for model_type
"diffusion_model".

The registration itself is in `engine.engine`. Import that as a module, not by name: if it is imported first, it imports
verl's engines, whose import hook runs this file while `engine.engine` is only partly initialised.
"""

import verl_digen.engine.engine  # noqa: F401
