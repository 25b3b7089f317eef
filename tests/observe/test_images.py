# SPDX-License-Identifier: Apache-2.0
import json
import os
import subprocess
import sys
import wave
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from verl_digen.inputs.audio import Audio
from verl_digen.observe import images
from verl_digen.observe.images import (
    CAPTION_PX,
    CELL_PX,
    STRIP_FRAMES,
    VIDEO_PX,
    Shown,
    filmstrip,
    save_before_after,
    save_grid,
    save_pixels,
    video_path,
)
from verl_digen.observe.trackers import log_to_tensorboard

RED, GREEN = (255, 0, 0), (0, 255, 0)


def picture(colour, height=16, width=16):
    return torch.tensor(colour, dtype=torch.uint8).expand(height, width, 3)


def video(num_frames, height=16, width=16):
    """Frame n is gray of brightness 10 n."""
    return torch.stack([picture((10 * number,) * 3, height, width) for number in range(num_frames)])


def show(path, pixels):
    save_pixels(pixels, path)
    return Shown(path, f"prompt {path.stem}", 0.5)


def test_grids_show_every_picture_at_its_place(tmp_path):
    shown = [show(tmp_path / f"{index}.png", picture(colour)) for index, colour in enumerate([RED, GREEN])]
    save_grid([("title", shown)], tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.size == (2 * CELL_PX, 24 + CELL_PX + CAPTION_PX)
        assert grid.getpixel((CELL_PX // 2, 24 + CELL_PX // 2)) == RED
        assert grid.getpixel((CELL_PX + CELL_PX // 2, 24 + CELL_PX // 2)) == GREEN
    save_before_after(shown, shown[::-1], tmp_path / "both.png", ("before", "after"))
    with Image.open(tmp_path / "both.png") as both:
        below = 24 + CELL_PX + CAPTION_PX + 24 + CELL_PX // 2
        assert both.getpixel((CELL_PX // 2, 24 + CELL_PX // 2)) == RED
        assert both.getpixel((CELL_PX // 2, below)) == GREEN
    assert not list(tmp_path.glob("*.gif")), "a picture is no video"


def test_before_and_after_say_means_and_changes_and_mark_what_fell(tmp_path):
    def entries(folder, rewards):
        shown = [show(tmp_path / folder / f"val-{index}.png", picture(RED)) for index in range(len(rewards))]
        return [replace(entry, reward=reward) for entry, reward in zip(shown, rewards, strict=True)]

    before, after = entries("a", [0.5, 0.75, None]), entries("b", [0.75, 0.5, 0.5])
    compared = images._compared(before, after)
    assert [entry.change for entry in compared] == [0.25, -0.25, None]
    assert [entry.caption(2) for entry in compared[:2]] == ["0.75 (+0.25)  prompt val-0", "0.50 (-0.25)  prompt val-1"]
    assert images._with_mean("after 0 steps", before) == "after 0 steps, mean reward of these 0.625"
    assert images._with_mean("after 9 steps", compared) == "after 9 steps, mean reward of these 0.583 (+0.000)"
    save_before_after(before, after, tmp_path / "both.png", ("first", "last"))
    below = 24 + CELL_PX + CAPTION_PX + 24 + CELL_PX
    with Image.open(tmp_path / "both.png") as both:
        reddish = [
            int((cell[..., 0] > cell[..., 1].astype(int) + 60).sum())
            for cell in (
                np.asarray(both.crop((left, below, left + CELL_PX, below + 40))) for left in (0, CELL_PX, 2 * CELL_PX)
            )
        ]
    assert reddish[1] > 20 and reddish[0] == reddish[2] == 0


def test_a_video_has_its_sound_in_a_file_beside_it(tmp_path):
    """Values outside [-1, 1] are cut off, not wrapped."""
    waveform = np.array([[0.0, 0.5, -0.5, 1.5], [-1.0, -2.0, 0.25, 1.0]], np.float32)
    save_pixels(video(3), tmp_path / "a.png", audio=Audio(waveform, rate_hz=24000))
    save_pixels(video(3), tmp_path / "silent.png")
    assert [path.name for path in tmp_path.glob("*.wav")] == ["a.wav"]
    assert video_path(tmp_path / "a.png").is_file()
    with wave.open(str(tmp_path / "a.wav")) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (2, 2, 24000)
        values = np.frombuffer(file.readframes(4), "<i2").reshape(4, 2).T
    np.testing.assert_allclose(values / 32767, waveform.clip(-1, 1), atol=1 / 32767)


def test_a_picture_stands_beside_the_images_of_its_prompt_which_keep_their_shape(tmp_path):
    Image.new("RGB", (20, 40), GREEN).save(tmp_path / "source.png")
    images = (str(tmp_path / "source.png"),) * 2
    save_pixels(picture(RED), tmp_path / "edit.png", images)
    with Image.open(tmp_path / "edit.png") as row:
        assert row.size == (8 + 8 + 16, 16)
        assert [row.getpixel((x, 8)) for x in (0, 15, 16, 31)] == [GREEN, GREEN, RED, RED]
    save_pixels(video(5), tmp_path / "moving.png", images)
    with Image.open(video_path(tmp_path / "moving.png")) as gif, Image.open(tmp_path / "moving.png") as strip:
        assert (gif.size, strip.size) == ((16, 16), (8 + 8 + STRIP_FRAMES * 16, 16))


def test_a_video_is_a_gif_of_all_its_frames_and_a_filmstrip_in_the_grid(tmp_path):
    shown = [show(tmp_path / f"{index}.png", video(9)) for index in range(3)]
    with Image.open(video_path(shown[0].path)) as gif:
        assert (gif.n_frames, gif.size, gif.info["loop"]) == (9, (16, 16), 0)
        for number in range(9):
            gif.seek(number)
            assert abs(gif.convert("RGB").getpixel((8, 8))[0] - 10 * number) <= 2
    with Image.open(shown[0].path) as strip:
        assert strip.size == (16 * STRIP_FRAMES, 16)
        assert [strip.getpixel((16 * n + 8, 8))[0] for n in range(STRIP_FRAMES)] == [0, 30, 50, 80]
    save_grid([("title", shown)], tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.size == (2 * STRIP_FRAMES * CELL_PX, 24 + 2 * (CELL_PX + CAPTION_PX))
        assert grid.getpixel((int(3.5 * CELL_PX), 24 + CELL_PX // 2)) == (80, 80, 80)


def test_a_short_video_shows_each_frame_once():
    assert filmstrip(video(2)).shape == (16, 32, 3)
    assert filmstrip(video(1)).shape == (16, 16, 3)


@pytest.mark.parametrize(("height", "width"), [(480, 832), (832, 480)])
def test_nothing_is_stretched(tmp_path, height, width):
    still = show(tmp_path / "still.png", picture(RED, height, width))
    save_grid([("title", [still])], tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as grid:
        pixels = np.asarray(grid)[24 : 24 + CELL_PX]
    rows, columns = np.nonzero((pixels == RED).all(-1))
    assert np.ptp(columns) / np.ptp(rows) == pytest.approx(width / height, rel=0.02)
    save_pixels(video(2, height, width), tmp_path / "moving.png")
    with Image.open(tmp_path / "moving.gif") as gif:
        assert gif.size == (round(VIDEO_PX * width / max(height, width)), round(VIDEO_PX * height / max(height, width)))


def test_tensorboard_reads_a_table_whose_cells_are_plain_text(tmp_path):
    rows = [["prompt", "reward"], ["a | <b>cat</b>\n  *on* a_mat", "0.5"]]
    log_to_tensorboard(tmp_path / "board", 3, {}, {}, {"val/rewards": rows})
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    [event] = board.Tensors("val/rewards/text_summary")
    lines = event.tensor_proto.string_val[0].decode().splitlines()
    assert event.step == 3 and lines == [
        "| prompt | reward |",
        "| --- | --- |",
        r"| a \| \<b>cat\</b> \*on\* a\_mat | 0.5 |",
    ]


def test_tensorboard_reads_the_very_files(tmp_path):
    shown = show(tmp_path / "val-00000.png", video(5))
    for step in (0, 3):
        pictures = {"val/pictures": shown.path, "val/videos/val-00000": video_path(shown.path)}
        log_to_tensorboard(tmp_path / "board", step, pictures, {}, {})
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert board.Tags()["images"] == ["val/pictures", "val/videos/val-00000"]
    events = board.Images("val/videos/val-00000")
    assert [event.step for event in events] == [0, 3]
    assert events[0].encoded_image_string == video_path(shown.path).read_bytes()
    assert (events[0].width, events[0].height) == (16, 16)


# -- pictures, videos, tables and histograms in a real offline run of W&B: the files that it leaves ----------
LOG = """
import sys
from pathlib import Path
import wandb
from verl_digen.observe.images import Shown
from verl_digen.observe.trackers import log_to_wandb

folder = Path(sys.argv[1])
with wandb.init(mode="offline", dir=folder, project="digen", settings=wandb.Settings(x_disable_stats=True)):
    shown = [Shown(folder / "a.png", "a cat", 0.5), Shown(folder / "b.png", "a dog", 0.25)]
    values = {"distribution/reward": [0.0, 0.5, 1.0], "distribution/equal_but_for_rounding": [0.1 + 0.2, 0.3]}
    log_to_wandb(wandb, 10, {"val/pictures": shown}, values)
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
