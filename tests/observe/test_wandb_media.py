# SPDX-License-Identifier: Apache-2.0
"""Pictures, videos, tables and histograms in a real offline run of W&B: the files that it leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from verl_digen.observe.images import save_pixels

LOG = """
import sys
from pathlib import Path
import wandb
from verl_digen.observe.images import Shown
from verl_digen.observe.wandb_media import log_to_wandb

folder = Path(sys.argv[1])
with wandb.init(mode="offline", dir=folder, project="digen", settings=wandb.Settings(x_disable_stats=True)):
    shown = [Shown(folder / "a.png", "a cat", 0.5), Shown(folder / "b.png", "a dog", 0.25)]
    log_to_wandb(wandb, 10, {"val/pictures": shown}, {"distribution/reward": [0.0, 0.5, 1.0]})
"""


def test_an_offline_run_holds_pictures_videos_tables_and_histograms(tmp_path: Path):
    """Log in a process of its own, because W&B starts threads and a service that outlive a run."""
    save_pixels(torch.zeros(8, 8, 3, dtype=torch.uint8), tmp_path / "a.png")
    save_pixels(torch.zeros(2, 8, 8, 3, dtype=torch.uint8), tmp_path / "b.png")
    environment = {**os.environ, "WANDB_SILENT": "true", "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", LOG, str(tmp_path)], check=True, env=environment, timeout=300)
    [run] = (tmp_path / "wandb").glob("offline-run-*")
    media = run / "files" / "media"
    found = sorted(path.relative_to(media).as_posix() for path in media.rglob("*") if path.is_file())
    [table] = (media / "table").rglob("*.table.json")
    assert any(name.startswith("images/val/pictures") for name in found)
    assert any(name.startswith("videos/val/pictures") and name.endswith(".gif") for name in found), found
    rows = json.loads(table.read_text())
    assert rows["columns"] == ["step", "prompt", "reward", "picture"]
    assert [row[:3] for row in rows["data"]] == [[10, "a cat", 0.5], [10, "a dog", 0.25]]
    logged = next(run.glob("*.wandb")).read_bytes()
    assert all(part in logged for part in (b"distribution/reward", b"histogram", b"0.500  a cat", b"0.250  a dog"))
