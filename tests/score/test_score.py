# SPDX-License-Identifier: Apache-2.0
"""`digen score`: the numbers are the rewards' own, a failure is no number, and every file gets its own prompt."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.reward.contract import make_picture
from verl_digen.cli import main
from verl_digen.data.prompts import read_prompts
from verl_digen.observe.images import Shown
from verl_digen.observe.run_files import image_path
from verl_digen.reward.scorers import jpeg_compressibility
from verl_digen.tools.score import files
from verl_digen.tools.score.files import prompts_of
from verl_digen.tools.score.rewards import summary_of
from verl_digen.trainer.validation import draw_pictures

OWN = """
import sys
from verl_digen.reward.base import Reward

class NoWeights(Reward):
    def __init__(self, config, device):
        open("weights")

    def score(self, batch):
        sys.exit("no key")

class NoKey(NoWeights):
    def __init__(self, config, device):
        sys.exit(0)

class Leaves(NoWeights):
    __init__ = Reward.__init__

def leave(**sample):
    sys.exit("no key")

async def leave_later(**sample):
    sys.exit("no key")

def letters(data_source, solution_image, ground_truth, extra_info=None):
    if extra_info["prompt"] == "bad":
        raise ValueError("not this one")
    return {"score": len(extra_info["prompt"]), "truth": len(str(ground_truth)), "value": int(solution_image[0, 0, 0])}
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "mine.py").write_text(OWN)
    out = tmp_path / "out"
    out.mkdir()
    for number in range(4):
        Image.fromarray(make_picture(seed=number)).save(out / f"{number}.png")
    return tmp_path


def score(capsys, *words) -> tuple[int, str, str]:
    code = main(["score", *map(str, words), "--device", "cpu"])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_scores_are_the_rewards_own(folder, capsys):
    code, out, _ = score(
        capsys, "{jpeg_compressibility: 0.5, jpeg_incompressibility: 2}", folder / "out", "--prompt=", "--json"
    )
    document = json.loads(out)
    expected = [
        jpeg_compressibility.compute_score("x", np.asarray(Image.open(file["file"])), None)
        for file in document["files"]
    ]
    assert code == 0 and document["num_failed"] == 0 and len(expected) == 4
    assert [file["scores"]["jpeg_compressibility"] for file in document["files"]] == pytest.approx(expected)
    assert [file["total"] for file in document["files"]] == pytest.approx([-1.5 * value for value in expected])
    assert document["summary"]["jpeg_compressibility"]["mean"] == pytest.approx(np.mean(expected))
    assert document["summary"]["total"]["std"] == pytest.approx(np.std([-1.5 * value for value in expected]))


def test_a_file_that_fails_has_no_number_and_the_others_have_theirs(folder, capsys):
    (folder / "out" / "broken.png").write_bytes(b"no picture")
    (folder / "prompts.txt").write_text("one\nbad\nthree\nfour\nfive")
    words = (f"{folder / 'mine.py'}:letters", folder / "out", "--prompts", folder / "prompts.txt")
    code, out, _ = score(capsys, *words, "--json")
    document = json.loads(out)
    assert code == 1 and document["num_failed"] == 2
    assert [file["total"] for file in document["files"]] == [3.0, None, 5.0, 4.0, None]
    assert "not this one" in document["files"][1]["errors"]["letters"] and document["files"][1]["scores"] == {}
    assert "broken.png" in document["files"][4]["errors"]["file"]
    code, table, _ = score(capsys, *words)
    assert code == 1 and "2 of 5 files have no score" in table and "not this one" in table
    assert [line.split()[1] for line in table.splitlines()[1:6]] == ["3.0000", "failed", "5.0000", "4.0000", "failed"]
    assert table.splitlines()[6].split()[:2] == ["mean", "4.0000"]


def test_pictures_of_a_runs_validation_have_its_prompts(folder, capsys):
    shown = {uid: Shown(image_path(folder, 3, uid), text, 0.0) for uid, text in (("b", "four"), ("a", "a prompt"))}
    (folder / "images" / "step_000003").mkdir(parents=True)
    for one in shown.values():
        Image.fromarray(make_picture()).save(one.path)
    draw_pictures(folder, 3, shown, to_tensorboard=False)
    code, out, _ = score(capsys, f"{folder / 'mine.py'}:letters", folder / "images" / "step_000003", "--json")
    assert code == 0 and [file["total"] for file in json.loads(out)["files"]] == [8.0, 4.0]


def test_a_reward_of_groups_compares_the_files_of_a_prompt(folder, capsys):
    (folder / "prompts.txt").write_text("a\nb\na\nb")
    Image.fromarray(make_picture(seed=0)).save(folder / "out" / "2.png")  # as 0.png
    code, out, _ = score(capsys, "diversity", folder / "out", "--prompts", folder / "prompts.txt", "--json")
    totals = [file["total"] for file in json.loads(out)["files"]]
    assert code == 0 and totals[0] == totals[2] == 0.0 and totals[1] == totals[3] > 0.1


def test_a_reward_of_groups_fails_for_a_prompt_with_one_file(folder, capsys):
    code, out, err = score(capsys, "diversity", folder / "out" / "0.png", "--prompt", "a")
    assert code == 1 and "diversity needs at least 2 samples of a prompt, got 1" in out and err == ""


def test_prompts_belong_to_files_by_name_place_or_neighbour(folder):
    pictures = [folder / "out" / f"{number}.png" for number in range(4)]
    rows = [{"prompt": f"p{number}", "file_name": f"out/{number}.png", "tag": number} for number in (3, 1, 0, 2)]
    (folder / "named.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    named = prompts_of(pictures, prompt=None, prompt_file=str(folder / "named.jsonl"))
    assert [(row.text, row.extra["tag"]) for row in named] == [(f"p{number}", number) for number in range(4)]
    (folder / "two.txt").write_text("a\nb")
    assert [r.text for r in prompts_of(pictures, prompt=None, prompt_file=str(folder / "two.txt"))] == list("aabb")
    (folder / "out" / "1.txt").write_text("beside\n")
    (folder / "out" / "metadata.jsonl").write_text((folder / "named.jsonl").read_text().replace("out/", ""))
    assert [row.text for row in prompts_of(pictures, prompt=None, prompt_file=None)] == ["p0", "beside", "p2", "p3"]


def test_a_table_of_a_folder_is_read_once_and_needs_names(folder, monkeypatch):
    read, pictures = [], [folder / "out" / f"{number}.png" for number in range(4)]
    table = folder / "out" / "metadata.jsonl"
    table.write_text("\n".join(json.dumps({"prompt": f"p{n}", "file_name": f"{n}.png"}) for n in range(4)))
    monkeypatch.setattr(files, "read_prompts", lambda *args: read.append(args[0]) or read_prompts(*args))
    assert [row.text for row in prompts_of(pictures, prompt=None, prompt_file=None)] == ["p0", "p1", "p2", "p3"]
    assert read == [str(table)]
    table.write_text('{"prompt": "a"}\n' * 4)
    with pytest.raises(ValueError, match="add a column file_name"):
        prompts_of(pictures, prompt=None, prompt_file=None)


def test_a_prompt_is_found_beside_a_file_in_the_current_folder(folder, monkeypatch):
    (folder / "out.json").write_text('{"prompt": "of the run", "file_name": "0.png"}')
    (folder / "v1.json").write_text("of another folder")
    out = (folder / "out").rename(folder / "v1.5")
    (out / "1.txt").write_bytes("\ufeffbeside".encode())
    monkeypatch.chdir(out)
    assert [row.text for row in prompts_of([Path("1.png")], prompt=None, prompt_file=None)] == ["beside"]
    (folder / "out.json").rename(folder / "v1.5.json")
    assert [row.text for row in prompts_of([Path("0.png")], prompt=None, prompt_file=None)] == ["of the run"]
    (out / "2.txt").write_bytes("café".encode("latin1"))
    with pytest.raises(ValueError, match=r"the prompt of a file: line 1 of '2\.txt' must be UTF-8"):
        prompts_of([Path("2.png")], prompt=None, prompt_file=None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["jpeg_compressibility", "out"], "must have a prompt: there is no 0.txt beside it"),
        (["jpeg_compressibility", "out", "--prompt", "x", "--prompts", "three.txt"], "exclude each other"),
        (
            ["jpeg_compressibility", "out", "--prompts", "three.txt"],
            "one row per file, or a row per n of them, for 4 files, got '3 rows'",
        ),
        (
            ["jpeg_compressibility", "out", "--prompts", "half.jsonl"],
            "must have a row for every file, none has file_name '1.png'",
        ),
        (["jpeg_compressibility", "out", "--prompts", "twice.jsonl"], "one row, got '2 rows with 1 names'"),
        (["jpeg_compressibility", "out", "--prompts", "gone.jsonl"], "--prompts must name an existing file"),
        (["shapess", "out", "--prompt", ""], "digen.reward.functions.shapess must name one of"),
        (
            ["{jpeg_compressibility: }", "out", "--prompt", ""],
            "digen.reward.functions.jpeg_compressibility must be a number",
        ),
        (["{jpeg_compressibility", "out", "--prompt", ""], "must be names or a YAML mapping"),
        (
            ["{jpeg_compressibility: {weight: 1, num_workers: 2}}", "out", "--prompt", ""],
            "num_gpus and timeshare belong to a run",
        ),
        (["{diversity: {weight: 1, size: 2}}", "out", "--prompt", ""], "must be a setting of Diversity"),
        (["jpeg_compressibility", "gone", "--prompt", ""], "must exist, got 'gone'"),
        (
            ["{jpeg_compressibility: .nan}", "out", "--prompt", ""],
            "functions.jpeg_compressibility must be a number, got nan",
        ),
        (["mine.py:letters,other.py:letters", "out", "--prompt", ""], "REWARD must name different rewards, got"),
        (
            ["mine.py::letters", "out", "--prompt", ""],
            "digen.reward.functions.letters must name what can be loaded, got 'mine.py::letters' (FileNotFoundError",
        ),
        *(
            (
                [f"mine.py:{name}", "out", "--prompt", ""],
                f"digen.reward.functions.{name} must be a reward that can be made, got 'mine.py:{name}' ({why}",
            )
            for name, why in (("NoWeights", "FileNotFoundError: [Errno 2] No such file"), ("NoKey", "SystemExit: 0)"))
        ),
    ],
)
def test_what_cannot_be_scored_is_refused_in_one_line(folder, capsys, monkeypatch, words, message):
    monkeypatch.chdir(folder)
    (folder / "three.txt").write_text("a\nb\nc")
    (folder / "half.jsonl").write_text('{"prompt": "a", "file_name": "0.png"}')
    (folder / "twice.jsonl").write_text('{"prompt": "a", "file_name": "0.png"}\n{"prompt": "b", "file_name": "0.png"}')
    code, out, err = score(capsys, *words)
    assert code == 2 and out == "" and message in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["leave", "leave_later", "Leaves"])
def test_a_reward_that_ends_python_fails_its_files(folder, capsys, monkeypatch, name):
    monkeypatch.setenv("HOME", str(folder))
    code, out, _ = score(capsys, f"~/mine.py:{name}", folder / "out", "--prompt", "")
    assert code == 1 and "4 of 4 files have no score" in out and "it raised SystemExit: no key" in out


def test_the_summary_of_nothing_has_no_numbers():
    assert summary_of([])["mean"] is None and summary_of([1.0, 3.0])["std"] == 1.0


def test_memory_holds_few_files_at_once(folder, capsys, monkeypatch):
    """Chunks of one file give the scores that one chunk of all gives; groups stay whole."""
    from verl_digen.tools.score import rewards

    (folder / "prompts.txt").write_text("a\nb\na\nb")
    words = ("{diversity: 1, jpeg_compressibility: 1}", folder / "out", "--prompts", folder / "prompts.txt", "--json")
    together = score(capsys, *words)
    monkeypatch.setattr(rewards, "CHUNK_BYTES", 1)
    assert score(capsys, *words) == together


# -- pictures and videos on disk become pixels, or a ValueError that names the file --------------------------
def save(pixels, path, **options):
    Image.fromarray(pixels).save(path, **options)
    return path


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (6, 4, 3), np.uint8)


def test_files_come_in_natural_order_and_folders_are_searched(tmp_path, pixels):
    in_order = ["2.PNG", "10.png", "sub/1.png", "²/1.png"]
    for name in sorted(in_order):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save(pixels, tmp_path / name)
    (tmp_path / "notes.txt").write_text("no picture")
    assert [str(path.relative_to(tmp_path)) for path in files.find([str(tmp_path)])] == in_order
    named = [str(tmp_path / "10.png"), str(tmp_path)]
    names = [path.name for path in files.find(named)]
    assert names == ["10.png", "2.PNG", "1.png", "1.png"], "each once, in the order given"


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


def test_sixteen_bits_and_floats_become_eight(tmp_path):
    deep = np.array([[0, 257 * 7, 65535]], np.uint16)
    assert files.read(save(deep, tmp_path / "deep.png"))[0, :, 0].tolist() == [0, 7, 255]
    floats = np.array([[0.0, 7 / 255, 1.0]], np.float32)
    assert files.read(save(floats, tmp_path / "floats.tif"))[0, :, 0].tolist() == [0, 7, 255]


def test_an_animation_and_a_film_are_videos(tmp_path):
    frames = [Image.new("RGB", (32, 16), color) for color in ("red", "lime", "blue")]
    frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:], lossless=True)
    assert np.array_equal(files.read(tmp_path / "a.webp"), np.stack([np.asarray(frame) for frame in frames]))
    frames[0].save(tmp_path / "phone.jpg", "MPO", save_all=True, append_images=[frames[1].resize((8, 4))])
    assert files.read(tmp_path / "phone.jpg").shape == (16, 32, 3), "with a smaller picture beside it"
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
