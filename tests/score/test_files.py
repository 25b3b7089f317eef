# SPDX-License-Identifier: Apache-2.0
"""Pictures and videos on disk become pixels, or a ValueError that names the file."""

import numpy as np
import pytest
from PIL import Image

from verl_digen.score import files


def save(pixels, path, **options):
    Image.fromarray(pixels).save(path, **options)
    return path


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (6, 4, 3), np.uint8)


def test_files_come_in_natural_order_and_folders_are_searched(tmp_path, pixels):
    (tmp_path / "sub").mkdir()
    for name in ("10.png", "2.PNG", "sub/1.png"):
        save(pixels, tmp_path / name)
    (tmp_path / "notes.txt").write_text("no picture")
    assert [str(path.relative_to(tmp_path)) for path in files.find([str(tmp_path)])] == ["2.PNG", "10.png", "sub/1.png"]
    named = [str(tmp_path / "10.png"), str(tmp_path)]
    assert [path.name for path in files.find(named)] == ["10.png", "2.PNG", "1.png"], "each once, in the order given"


@pytest.mark.parametrize(
    ("name", "message"), [("gone.png", "must exist"), ("notes.txt", "must end in"), ("empty", "must hold")]
)
def test_a_path_that_is_no_picture_is_refused(tmp_path, name, message):
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        files.find([str(tmp_path / name)])


def test_pixels_are_those_of_the_file(tmp_path, pixels):
    assert np.array_equal(files.read(save(pixels, tmp_path / "a.png")), pixels)
    np.save(tmp_path / "a.npy", pixels)
    assert np.array_equal(files.read(tmp_path / "a.npy"), pixels)
    np.save(tmp_path / "b.npy", pixels / 255)
    assert np.array_equal(files.read(tmp_path / "b.npy"), pixels)
    grey = files.read(save(pixels[..., 0], tmp_path / "grey.png"))
    assert np.array_equal(grey, np.repeat(pixels[..., :1], 3, axis=2))


def test_what_is_transparent_is_white_and_exif_turns_the_picture(tmp_path, pixels):
    clear = np.zeros((2, 3, 4), np.uint8)
    assert np.array_equal(files.read(save(clear, tmp_path / "clear.png")), np.full((2, 3, 3), 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    turned = files.read(save(pixels, tmp_path / "turned.png", exif=exif))
    assert np.array_equal(turned, np.rot90(pixels, -1))


def test_sixteen_bits_become_eight(tmp_path):
    deep = np.array([[0, 257 * 7, 65535]], np.uint16)
    assert files.read(save(deep, tmp_path / "deep.png"))[0, :, 0].tolist() == [0, 7, 255]


def test_an_animation_and_a_film_are_videos(tmp_path):
    frames = [Image.new("RGB", (32, 16), color) for color in ("red", "lime", "blue")]
    frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:], lossless=True)
    assert np.array_equal(files.read(tmp_path / "a.webp"), np.stack([np.asarray(frame) for frame in frames]))
    import cv2

    film = cv2.VideoWriter(str(tmp_path / "a.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 8, (32, 16))
    for frame in frames:
        film.write(np.asarray(frame)[..., ::-1])
    film.release()
    read = files.read(tmp_path / "a.avi")
    assert read.shape == (3, 16, 32, 3)
    assert [int(frame.mean(axis=(0, 1)).argmax()) for frame in read] == [0, 1, 2], "red, green, blue"


@pytest.mark.parametrize("name", ["bad.png", "bad.jpg", "bad.gif", "bad.mp4", "bad.npy", "cut.png"])
def test_a_malformed_file_is_a_value_error_that_names_it(tmp_path, pixels, name):
    data = b"\x00\x01garbage" * 30
    if name == "cut.png":
        data = save(pixels, tmp_path / "whole.png").read_bytes()[:-40]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=name):
        files.read(tmp_path / name)


@pytest.mark.parametrize(
    "array",
    [np.zeros((3, 4, 4), np.uint8), np.full((4, 4, 3), np.nan), np.full((4, 4, 3), 2.0), np.zeros((0, 4, 3), np.uint8)],
    ids=["channels first", "nan", "above 1", "empty"],
)
def test_an_array_that_is_no_picture_is_refused(tmp_path, array):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ValueError, match="an array must be"):
        files.read(tmp_path / "a.npy")


def test_a_pickle_in_an_array_is_not_run(tmp_path):
    np.save(tmp_path / "a.npy", np.array([object()], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"a\.npy"):
        files.read(tmp_path / "a.npy")
