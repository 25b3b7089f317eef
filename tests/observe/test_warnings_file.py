# SPDX-License-Identifier: Apache-2.0
"""Warnings on disk: what is written, and what a resumed run keeps."""

import logging

import pytest

from verl_digen.observe.run_files import WarningsFile, read_lines


@pytest.fixture
def logger():
    made = logging.getLogger("verl_digen.tests.warnings")
    yield made
    for handler in [*made.handlers]:
        made.removeHandler(handler)


def test_warnings_and_errors_are_written_with_their_step(tmp_path, logger):
    handler = WarningsFile(tmp_path / "warnings.jsonl")
    handler.step = 3
    logger.addHandler(handler)
    logger.info("not kept")
    logger.warning("%d groups\nfailed \u2028 again", 2)
    handler.step = 4
    logger.error("worse")
    found = read_lines(tmp_path / "warnings.jsonl")
    assert [(line["step"], line["level"], line["text"]) for line in found] == [
        (3, "WARNING", "2 groups\nfailed \u2028 again"),
        (4, "ERROR", "worse"),
    ]


@pytest.mark.parametrize(("resumed_after", "kept"), [(0, ["setup"]), (5, ["step 0", "step 5", "setup"])])
def test_a_start_keeps_what_it_does_not_repeat(tmp_path, logger, resumed_after, kept):
    path = tmp_path / "warnings.jsonl"
    for step in (0, 5, 6):
        earlier = WarningsFile(path)
        earlier.step = step
        earlier.emit(logging.makeLogRecord({"levelname": "WARNING", "msg": f"step {step}", "created": 1.0}))
    handler = WarningsFile(path)
    logger.addHandler(handler)
    logger.warning("setup")
    handler.keep_until(resumed_after)
    assert [line["text"] for line in read_lines(path)] == kept


def test_a_line_that_is_being_written_is_left_out_and_no_file_is_no_warning(tmp_path):
    path = tmp_path / "warnings.jsonl"
    assert read_lines(path) == []
    path.write_text('{"step": 1}\n{"st')
    assert read_lines(path) == [{"step": 1}]
    for broken in (b"no json", b"[]", b'{"a": 1}', b'{"step": null}', b"\xff\x00"):
        path.write_bytes(b'{"step": 1}\n' + broken + b"\n")
        with pytest.raises(ValueError, match=r"line 2 must be a JSON object with a step, got .* delete that line"):
            read_lines(path)


def test_a_full_disk_does_not_stop_the_caller(tmp_path, logger, monkeypatch, capsys):
    monkeypatch.setattr(logging, "raiseExceptions", True)
    logger.addHandler(WarningsFile(tmp_path / "no_such_folder" / "warnings.jsonl"))
    logger.warning("a warning")
    assert "No such file or directory" in capsys.readouterr().err
