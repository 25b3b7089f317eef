# SPDX-License-Identifier: Apache-2.0
"""`digen score`: the numbers are the rewards' own, a failure is no number, and every file gets its own prompt."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.reward.contract import make_picture
from verl_digen.cli import main
from verl_digen.reward.scorers import jpeg_compressibility
from verl_digen.score.prompts import prompts_of
from verl_digen.score.table import summary_of

OWN = """
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["shapes", "out"], "must have a prompt: there is no 0.txt beside it"),
        (["shapes", "out", "--prompt", "x", "--prompts", "three.txt"], "exclude each other"),
        (
            ["shapes", "out", "--prompts", "three.txt"],
            "one row per file, or a row per n of them, for 4 files, got '3 rows'",
        ),
        (["shapes", "out", "--prompts", "half.jsonl"], "must have a row for every file, none has file_name '1.png'"),
        (["shapes", "out", "--prompts", "gone.jsonl"], "--prompts must name an existing file"),
        (["shapess", "out", "--prompt", ""], "digen.reward.functions.shapess must name one of"),
        (["{shapes: }", "out", "--prompt", ""], "digen.reward.functions.shapes must be a number"),
        (["{shapes", "out", "--prompt", ""], "must be names or a YAML mapping"),
        (["{shapes: {weight: 1, num_workers: 2}}", "out", "--prompt", ""], "num_gpus and timeshare belong to a run"),
        (["{diversity: {weight: 1, size: 2}}", "out", "--prompt", ""], "must be a setting of Diversity"),
        (["shapes", "gone", "--prompt", ""], "must exist, got 'gone'"),
        (["shapes", "out", "--prompt", "", "--timeout-s", "-1"], "--timeout-s must be > 0 seconds, got -1.0"),
    ],
)
def test_what_cannot_be_scored_is_refused_in_one_line(folder, capsys, monkeypatch, words, message):
    monkeypatch.chdir(folder)
    (folder / "three.txt").write_text("a\nb\nc")
    (folder / "half.jsonl").write_text('{"prompt": "a", "file_name": "0.png"}')
    code, out, err = score(capsys, *words)
    assert code == 2 and out == "" and message in err and len(err.strip().splitlines()) == 1


def test_the_summary_of_nothing_has_no_numbers():
    assert summary_of([]).mean is None and summary_of([1.0, 3.0]).std == 1.0


def test_memory_holds_few_files_at_once(folder, capsys, monkeypatch):
    """Chunks of one file give the scores that one chunk of all gives; groups stay whole."""
    from verl_digen.score import score_command

    (folder / "prompts.txt").write_text("a\nb\na\nb")
    words = ("{diversity: 1, jpeg_compressibility: 1}", folder / "out", "--prompts", folder / "prompts.txt", "--json")
    together = score(capsys, *words)
    monkeypatch.setattr(score_command, "CHUNK_BYTES", 1)
    assert score(capsys, *words) == together
