# SPDX-License-Identifier: Apache-2.0
"""Device platforms that verl does not have."""

import verl  # noqa: F401 - first: importing verl loads our plugin, which imports and registers what is in this package
