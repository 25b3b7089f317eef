# SPDX-License-Identifier: Apache-2.0
"""Packaging of verl-digen.

`recipes/` and `patches/` lie at the top of the repository and are `verl_digen.recipes` and `verl_digen.patches` once
installed. Both the `package_dir` mapping below and the relative links inside `verl_digen/` are needed: without the
mapping an install from a zip file lacks them, without the links a run from inside a checkout does.
"""

from pathlib import Path

from setuptools import find_packages, setup

REWARDS = [
    "aiohttp>=3.10",
    "ftfy>=6",
    "onnxruntime",
    "rapidfuzz>=3,<4",
    "rapidocr>=3.10,<4",
    "tenacity>=9",
]

setup(
    name="verl-digen",
    version="0.1.0",
    description="Reinforcement learning on diffusion models, as a plugin of verl",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10,<3.13",  # verl's own range
    packages=[
        *find_packages(
            include=["verl_digen", "verl_digen.*"],
            exclude=["verl_digen.recipes*", "verl_digen.patches*"],  # the links
        ),
        "verl_digen.recipes",
        "verl_digen.patches",
    ],
    package_dir={"verl_digen.recipes": "recipes", "verl_digen.patches": "patches"},
    package_data={
        "verl_digen": ["py.typed", "profiles/*.json", "models/published/*.json"],
        "verl_digen.recipes": ["*.yaml", "*/*.yaml"],
    },
    install_requires=[
        "verl>=0.9.1,<0.10",
        "TransferQueue>=0.1.10",
        # Imported by verl's v1 trainer, but listed in none of its requirements outside an extra.
        *("cachetools", "fastapi", "orjson", "uvicorn"),
        "accelerate",
        "datasets",
        "diffusers==0.40.*",
        "hydra-core>=1.3,<1.4",
        "matplotlib",
        "numpy>=2.0.0",
        "omegaconf>=2.3,<2.4",
        "packaging",
        "peft",
        "pillow",
        "pyarrow",
        "ray[default]>=2.41.0",
        "safetensors",
        "tensorboard",
        "tensordict",
        "torch>=2.13,<2.14",  # private names of FSDP2 are used, see tests/contracts
        "transformers",
    ],
    extras_require={
        # The versions that were tested with each other and with this plugin.
        "vllm-omni": ["vllm==0.28.0", "vllm-omni==0.28.0"],
        # Packages of the built-in rewards; each is imported when its reward is made.
        "rewards": REWARDS,
        "dev": [
            *REWARDS,
            "import-linter>=2.16",
            "pre-commit",
            "pyright[nodejs]",
            "pytest",
            "pytest-xdist",
            "ruff",
            "setuptools>=77",
        ],
    },
    entry_points={
        "verl.plugins": ["digen = verl_digen.plugin"],  # a module: verl loads it and calls nothing
        # Active without an accelerator only, where neither finds a platform by itself.
        "vllm.platform_plugins": ["digen_cpu = verl_digen.rollout.vllm_omni.cpu:vllm_platform"],
        "vllm_omni.platform_plugins": ["digen_cpu = verl_digen.rollout.vllm_omni.cpu:omni_platform"],
        "console_scripts": ["digen = verl_digen.cli:main"],
    },
)
