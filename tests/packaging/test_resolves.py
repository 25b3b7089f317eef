# SPDX-License-Identifier: Apache-2.0
"""The sets of docs/install.md have a solution on the package index; nothing is installed."""

import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.long

UNREACHABLE = ("Failed to fetch", "error sending request", "dns error")
VLLM_OMNI = {"vllm": "0.28.0", "vllm-omni": "0.28.0", "torch": "2.13.0", "diffusers": "0.40.0"}
NEWER = {**VLLM_OMNI, "vllm": "0.30.0", "vllm-omni": "0.30.0", "verl": "0.9.1"}
OVERRIDE = Path(__file__).parents[2] / "docs" / "vllm_omni_0.30.txt"


def ours(extra=""):
    """Requirements of this package as it is installed, with those of an extra."""
    found = [Requirement(text) for text in requires("verl-digen") or ()]
    return [
        str(one).partition(";")[0]
        for one in found
        if one.marker is None or (extra and one.marker.evaluate({"extra": extra}))
    ]


def resolve(requirements, folder: Path, *options: str) -> dict[str, str]:
    """Package -> version of one solution for Linux and Python 3.12."""
    (folder / "set.in").write_text("\n".join(requirements))
    uv = str(Path(sys.executable).with_name("uv"))
    done = subprocess.run(
        [
            *(uv, "pip", "compile", "--quiet", "--no-annotate", "--no-header", str(folder / "set.in")),
            *("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_28", *options),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if any(sign in done.stderr for sign in UNREACHABLE):
        pytest.skip(f"no package index can be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return dict(line.split("==") for line in done.stdout.splitlines() if "==" in line)


@pytest.mark.parametrize(
    ("beside", "extra", "options", "expected"),
    [
        ((), "", (), {"verl": "0.9.1"}),
        (("verl[vllm]==0.9.1",), "", (), {"torch": "2.11.0", "vllm": "0.24.0"}),
        (("verl[fsdp]==0.9.1",), "", (), {"torch": "2.11.0"}),
        ((), "vllm-omni", (), VLLM_OMNI),
        ((), "vllm-omni", ("--override", str(OVERRIDE)), NEWER),
    ],
    ids=["alone", "verl[vllm]", "verl[fsdp]", "vllm-omni", "vllm-omni 0.30"],
)
def test_a_set_of_the_install_page_has_a_solution(tmp_path, beside, extra, options, expected):
    found = resolve([*ours(extra), *beside], tmp_path, *options)
    for name, version in expected.items():
        assert found[name].partition("+")[0] == version, f"{name} {found[name]}"
