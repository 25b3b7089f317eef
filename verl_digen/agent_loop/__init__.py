# SPDX-License-Identifier: Apache-2.0
"""From a prompt to a published group: one coroutine per sample asks for a generation and has it scored."""
