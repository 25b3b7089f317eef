# SPDX-License-Identifier: Apache-2.0
"""Errors that end a run and are meant for the person who started it."""


class RunStopped(RuntimeError):
    """The run cannot go on, and the message says why and what to do: shown as one paragraph, without a traceback."""
