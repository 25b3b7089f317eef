# SPDX-License-Identifier: Apache-2.0
"""Compose the config of verl's main as the tests of the plugin do."""

from tests.plugin.conftest import start

__all__ = ["start"]
