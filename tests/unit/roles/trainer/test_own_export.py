"""The export of checkpoints of a trainer of the user's own: those that have a Hugging Face folder, and the others."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rrl.cli.run import submit
from rrl.roles.trainer.checkpoint_export import NOTE, ExportFailed, ExportRefused, export_checkpoint
from rrl.tests.support.roles import folders
from rrl.tests.support.roles.trainer.committed_run import CommittedRun

pytestmark = pytest.mark.torch

TEMPLATE = "chat_template.jinja"
DEADLINE_S = 120.0


@pytest.fixture
def made(tmp_path: Path) -> CommittedRun:
    """Return a run whose model is a folder; its trainer is of the user's own."""
    return CommittedRun(tmp_path / "run", {"path": str(folders.qwen3(tmp_path / "model")), "chat": True})


def _commit(made: CommittedRun, write: Callable[[Path], object]) -> Path:
    """Commit step 1 with what ``write`` writes into its folder and its subfolder ``checkpoint-1``."""
    folder = made.run.checkpoints / "step-1.1.0"
    (folder / "checkpoint-1").mkdir(parents=True)
    write(folder)
    made.commit_files(1, [folder])
    return folder


def _weights(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Write a model without its tokenizer, as a trainer with ``save_pretrained`` does; return its weights."""
    spare = folders.qwen3(folder / "spare", seed=7)
    model = AutoModelForCausalLM.from_pretrained(spare, dtype=torch.bfloat16)
    shutil.rmtree(spare)
    model.save_pretrained(folder, **options)
    return dict(model.state_dict())


def _same(folder: Path, expected: dict[str, torch.Tensor]) -> bool:
    found = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_folder_of_the_checkpoint_gets_the_tokenizer_of_the_model(made: CommittedRun, tmp_path: Path) -> None:
    expected: dict[str, torch.Tensor] = {}

    def write(folder: Path) -> None:
        expected.update(_weights(folder))
        for name in ("optimizer.pt", "checkpoint-1/config.json", "trainer_state.json"):
            (folder / name).write_text("{}")

    folder = _commit(made, write)
    done = export_checkpoint(made.run, None, tmp_path / "out")
    assert done.dtype == "bfloat16"
    assert done.nbytes == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert _same(tmp_path / "out", expected)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"tokenizer.json", "tokenizer_config.json", TEMPLATE, NOTE}
    assert not names & {"optimizer.pt", "checkpoint-1"}
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (tmp_path / "model", tmp_path / "out")]
    says = [{"role": "user", "content": "7"}]
    assert len({str(one.apply_chat_template(says, tokenize=False)) for one in tokenizers}) == 1
    note = json.loads((tmp_path / "out" / NOTE).read_text())
    assert note["checkpoint"]["files"].keys() == {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    }
    assert submit._weights(made.run).startswith("rrl export run ")


def test_single_subfolder_is_exported_with_all_its_files_of_weights_and_its_own_tokenizer(
    made: CommittedRun, tmp_path: Path
) -> None:
    expected: dict[str, torch.Tensor] = {}

    def write(folder: Path) -> None:
        expected.update(_weights(folder / "checkpoint-1", max_shard_size="20KB"))
        own = json.loads((tmp_path / "model" / "tokenizer.json").read_text()) | {"truncation": None}
        (folder / "checkpoint-1" / "tokenizer.json").write_text(json.dumps(own | {"mine": True}))
        (folder / "state.pt").write_text("x")

    _commit(made, write)
    (tmp_path / "model" / "vocab.json").write_text("{}")
    export_checkpoint(made.run, 1, tmp_path / "out")
    assert len([*(tmp_path / "out").glob("model-0*.safetensors")]) > 1
    assert _same(tmp_path / "out", expected)
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())["mine"]
    assert (tmp_path / "out" / TEMPLATE).read_text() == folders.CHAT
    assert not (tmp_path / "out" / "vocab.json").exists(), "files of two tokenizers are mixed"


def test_chat_template_in_the_settings_of_the_model_is_added_as_a_file(made: CommittedRun, tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / TEMPLATE).unlink()
    folders.rewrite(model / "tokenizer_config.json", chat_template="{{ 1 }}")

    def write(folder: Path) -> None:
        _weights(folder)
        shutil.copy(model / "tokenizer.json", folder)

    _commit(made, write)
    export_checkpoint(made.run, 1, tmp_path / "out")
    assert (tmp_path / "out" / TEMPLATE).read_text() == "{{ 1 }}"
    assert not (tmp_path / "out" / "tokenizer_config.json").exists()


def test_model_that_rrl_describes_gives_its_tokenizer_too(tmp_path: Path) -> None:
    made = CommittedRun(tmp_path / "run")
    _commit(made, _weights)
    export_checkpoint(made.run, 1, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("12") == [3, 4]


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _touch(*names: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("{}")

    return write


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["own.bin"], r"it lacks config\.json and \*\.safetensors, which save_pretrained of transformers writes"),
        (["config.json", "model.bin"], r"it lacks \*\.safetensors, which"),
        (["a/adapter_model.safetensors"], r"it lacks config\.json, which"),
        (["a/config.json", "b/model.safetensors"], r"it lacks a folder with both config\.json and \*\.safetensors"),
        (
            [f"{folder}/{name}" for folder in ("b", "a") for name in ("config.json", "model.safetensors")],
            r"it has several folders with config\.json and \*\.safetensors: a, b; commit only one",
        ),
    ],
)
def test_checkpoint_without_one_hugging_face_folder_is_refused(
    made: CommittedRun, tmp_path: Path, names: list[str], why: str
) -> None:
    folder = _commit(made, _touch(*names))
    with pytest.raises(ExportRefused, match=rf"step 1 of run .* a trainer of your own wrote .*{why}") as caught:
        export_checkpoint(made.run, None, tmp_path / "out")
    assert str(caught.value).endswith(f"; the files are in {folder}")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def _damaged_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        _weights(folder, max_shard_size="20KB")
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        change(index["weight_map"])
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return write


def _header(header: object) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        text = json.dumps(header).encode()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)

    return write


def _with_config(text: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        _header({})(folder)
        (folder / "config.json").write_text(text)

    return write


def _truncated(folder: Path) -> None:
    _weights(folder)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1])


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (_truncated, r"step-1\.1\.0/model\.safetensors has only \d+ of the \d+ bytes that its header declares"),
        (_header({"a": {"data_offsets": [0, 0]}}), r"step-1\.1\.0/model\.safetensors is not a safetensors file"),
        (_header({"a": {"dtype": 3, "data_offsets": [0, 0]}}), "is not a safetensors file"),
        (_header({"a": {"dtype": "F32", "data_offsets": [0, "4"]}}), "is not a safetensors file"),
        (_header([]), "is not a safetensors file"),
        (_with_config("{"), r"step-1\.1\.0/config\.json cannot be read: Expecting property name"),
        (_with_config("[]"), r"step-1\.1\.0/config\.json does not contain a JSON object"),
        (
            _damaged_index(lambda files: files.update({"more": "../other.safetensors"})),
            r"index\.json names \.\./other\.safetensors, which was not committed",
        ),
        (_damaged_index(lambda files: files.update({"more": None})), "names None, which was not committed"),
        (_touch("config.json", "model.safetensors"), r"step-1\.1\.0/model\.safetensors is not a safetensors file"),
        (
            _damaged_index(lambda files: files.update({"more": "other.safetensors"})),
            r"index\.json names other\.safetensors, which was not committed",
        ),
        (
            _damaged_index(lambda files: files.update({"more": min(files.values())})),
            r"safetensors lacks the tensor more, which model\.safetensors\.index\.json names",
        ),
    ],
)
def test_damaged_weights_are_not_exported(
    made: CommittedRun, tmp_path: Path, write: Callable[[Path], object], why: str
) -> None:
    _commit(made, write)
    with pytest.raises(ExportFailed, match=rf"step 1 of run cannot be exported: .*{why}"):
        export_checkpoint(made.run, None, tmp_path / "models" / "out")
    assert list((tmp_path / "models").iterdir()) == []


def test_file_that_differs_from_the_committed_one_is_not_exported(made: CommittedRun, tmp_path: Path) -> None:
    folder = _commit(made, _weights)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ExportFailed, match=r"checkpoints/step-1\.1\.0/model\.safetensors has the digest .* committed"):
        export_checkpoint(made.run, None, tmp_path / "out")


def test_missing_tokenizer_of_the_model_is_named(made: CommittedRun, tmp_path: Path) -> None:
    _commit(made, _weights)
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(ExportFailed, match=r"\[model\] path: .*model/tokenizer\.json does not exist"):
        export_checkpoint(made.run, None, tmp_path / "out")


KILLED = """
import os, sys
from pathlib import Path
from rrl.core.run_dir import RunDir
from rrl.roles.trainer import checkpoint_export as export
export.add_missing_files = lambda *_: os.kill(os.getpid(), 9)
export.export_checkpoint(RunDir(Path(sys.argv[1])), None, Path(sys.argv[2]))
"""


def test_export_killed_after_its_copy_leaves_no_folder_and_can_be_repeated(made: CommittedRun, tmp_path: Path) -> None:
    _commit(made, _weights)
    out = tmp_path / "models" / "out"
    words = [sys.executable, "-P", "-c", KILLED, str(made.run.path), str(out)]
    assert subprocess.run(words, timeout=DEADLINE_S).returncode == -9
    assert not out.exists()
    export_checkpoint(made.run, None, out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert not [path for path in made.run.path.iterdir() if path.name.startswith(".export.")]
