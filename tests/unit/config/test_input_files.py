"""The record of an input file, and what counts as a change."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rrl.config.input_files import InputChanged, check_input, check_inputs
from rrl.core.run_dir import RunDir
from rrl.core.task_spec import EvalSpec, TaskFile, TaskSpec
from rrl.tests.support.cli.story import job_view


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "runs" / "r")
    made.create()
    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def test_file_with_the_same_content_is_unchanged_whenever_it_was_written(run: RunDir, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    check_input(run, file)
    file.write_text("{}\n")
    check_input(run, file)
    file.unlink()
    check_input(run, file)  # this machine lacks it
    file.write_text("{}\n")
    os.utime(file, (1, 1))
    check_input(run, file)


@pytest.mark.parametrize(("content", "sizes"), [("[]\n", "3 bytes then, 3 other"), ("", "3 bytes then, 0 other")])
def test_file_with_other_content_is_changed_also_after_its_replacement(
    run: RunDir, tmp_path: Path, content: str, sizes: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("{}\n")
    check_input(run, file)
    for write in (file.write_text, (tmp_path / "new").write_text):
        write(content)
        if write != file.write_text:
            os.replace(tmp_path / "new", file)
        with pytest.raises(InputChanged, match=f"{file} has changed since the run first read it \\({sizes} bytes now"):
            check_input(run, file)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda folder: (folder / "tokenizer.json").write_text("[]"), "tokenizer.json"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"), "chat_template.jinja"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
    ],
)
def test_changed_file_of_a_model_is_named(
    run: RunDir, model: Path, change: Callable[[Path], object], name: str
) -> None:
    check_input(run, model)
    change(model)
    with pytest.raises(InputChanged, match=str(model / name)):
        check_input(run, model)


def test_weights_and_other_files_of_a_model_may_change(run: RunDir, model: Path) -> None:
    check_input(run, model)
    (model / "model.safetensors").write_text("[]")
    (model / "README.md").write_text("a model")
    check_input(run, model)


@pytest.mark.parametrize("changed", range(4))
def test_each_of_several_prompt_files_is_an_input(run: RunDir, tmp_path: Path, changed: int) -> None:
    files = [
        TaskFile(str(tmp_path / f"{name}.jsonl"), name, weight)
        for name, weight in zip("abcd", (1, 0, 1, 1), strict=True)
    ]
    for file in files:
        Path(file.path).write_text("{}\n")
    held_out = EvalSpec(1, task=TaskSpec(files=tuple(files[2:])))
    job = msgspec.structs.replace(job_view(), task=TaskSpec(files=tuple(files[:2])), eval=held_out)
    check_inputs(run, job)
    Path(files[changed].path).write_text("[]\n")
    with pytest.raises(InputChanged, match=f"{files[changed].path} has changed since"):
        check_inputs(run, job)
