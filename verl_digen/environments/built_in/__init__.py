# SPDX-License-Identifier: Apache-2.0
"""Built-in environments, one file each; the file's name is the environment's, and its `ENVIRONMENT` the class."""
