# SPDX-License-Identifier: Apache-2.0
"""verl-digen: reinforcement learning on diffusion models, as a plugin of verl. Importing this package does nothing."""


def __getattr__(name: str) -> str:
    """`__version__`: the version of the installed distribution, read when it is asked for.

    Raises:
        PackageNotFoundError: no distribution is installed, so that verl does not know the plugin either.
    """
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("verl-digen")
