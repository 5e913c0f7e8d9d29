"""``rrl export`` writes a folder and prints one line. A wrong request ends with one line and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rrl.cli import main
from rrl.core.run_dir import RUNS_ENV
from rrl.tests.support.cli.json_keys import assert_fits_its_schema
from rrl.tests.support.roles.trainer.committed_run import CommittedRun

pytestmark = pytest.mark.torch


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommittedRun:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path / "runs"))
    (tmp_path / "runs").mkdir()
    run = CommittedRun(tmp_path / "runs" / "quick-1")
    run.commit(1)
    run.commit(2)
    return run


def test_export_writes_the_newest_checkpoint_and_prints_its_folder(
    made: CommittedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "models" / "quick"
    assert main.run(["export", "quick", str(out)]) == 0
    line = capsys.readouterr().out
    assert line.startswith(f"step 2 of quick-1: {out}  (")
    assert line.endswith("KiB, float32)\n")
    assert {path.name for path in out.iterdir()} == {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "rrl_export.json",
    }


def test_export_of_one_step_as_json(made: CommittedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["export", "quick", str(tmp_path / "out"), "--step", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert_fits_its_schema("export", document)
    assert (document["run"], document["step"], document["folder"]) == ("quick-1", 1, str(tmp_path / "out"))
    assert document["nbytes"] == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quick", "out", "--step", "7"], "step 7 of quick-1 is not committed; checkpoints exist for steps 1,"),
        (["quick", "out", "--step", "0"], '--step: must be at least 1, not "0"; see: rrl export --help'),
        (["quick", "out", "--step", "last"], '--step: must be a whole number, not "last"; see: rrl export --help'),
        (["quick", "full"], "full is not empty; name a new folder"),
        (["quick"], "Missing argument 'FOLDER'; see: rrl export --help"),
        (["slow", "out"], 'no run "slow" in '),
    ],
)
def test_invalid_request_is_one_line_and_exit_code_2(
    made: CommittedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    assert main.run(["export", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


def test_damaged_checkpoint_is_exit_code_1(
    made: CommittedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (made.folders[2] / "rank-0.msgpack").write_text("{}")
    assert main.run(["export", "quick", str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rrl: step 2 of quick-1 cannot be exported: ")


def test_folder_that_cannot_be_created_is_exit_code_1(
    made: CommittedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main.run(["export", "quick", str(tmp_path / "file" / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"rrl: {tmp_path / 'file'}: File exists; nothing was exported"
