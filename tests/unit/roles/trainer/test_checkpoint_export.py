"""An export has the weights that the run published, and its folder appears complete or not at all.

An export changes nothing else in the run.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rrl.config.input_files import check_inputs
from rrl.core.launch import read_run_spec
from rrl.core.run_dir import RunDir
from rrl.roles.checkpoints.folders import verified
from rrl.roles.checkpoints.stored_tensors import INDEX
from rrl.roles.models.policy import compute_dtype, load_weights, materialise, skeleton
from rrl.roles.models.tokenizer import open_tokenizer
from rrl.roles.trainer import checkpoint_export as exporting
from rrl.roles.trainer.checkpoint_export import NOTE, ExportFailed, ExportRefused, export_checkpoint
from rrl.tests.support.roles import folders
from rrl.tests.support.roles.trainer.committed_run import BUILT, CommittedRun
from rrl.tests.support.roles.trainer.mortal import PUBLISHED
from rrl.tests.support.roles.trainer.stage import Stage

pytestmark = pytest.mark.torch

END_TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "OPEN_RETRY_S", 0.0)


@pytest.fixture
def made(tmp_path: Path) -> CommittedRun:
    run = CommittedRun(tmp_path / "run")
    run.commit(1)
    run.commit(2)
    return run


def _exported(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def _hidden(parent: Path) -> list[str]:
    return [path.name for path in parent.iterdir() if path.name.startswith(".")]


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# ── memory ─────────────────────────────────────────────────────────────────────────────────────────────────────────
WIDE = {**BUILT, "intermediate_size": 2**17, "layers": 1}
"""A model with three tensors of 16 MiB each, and hardly anything else."""
TENSOR_BYTES = 2**17 * BUILT["hidden_size"] * 4
_MEASURED = """
import sys
from pathlib import Path
from rrl.config.input_files import check_inputs
from rrl.core.launch import read_run_spec
from rrl.core.run_dir import RunDir
from rrl.roles.trainer.checkpoint_export import export_checkpoint
def status(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) * 1024
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
export_checkpoint(RunDir(Path(sys.argv[1])), None, Path(sys.argv[2]))
print(status("VmHWM") - before)
"""
"""Program that exports the newest checkpoint and prints the memory (bytes) that this took at most."""


def test_an_export_takes_less_memory_than_one_tensor(tmp_path: Path) -> None:
    CommittedRun(tmp_path / "run", WIDE).commit(1, untrained=True)
    words = [sys.executable, "-P", "-c", _MEASURED, str(tmp_path / "run"), str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=END_TIMEOUT_S, check=True)
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 3 * TENSOR_BYTES
    assert int(done.stdout) < TENSOR_BYTES


# ── exports ────────────────────────────────────────────────────────────────────────────────────────────────────────
def _published(run: RunDir, step: int) -> dict[str, Tensor]:
    tensors = msgspec.msgpack.decode((run.path / PUBLISHED / str(step)).read_bytes())
    return {
        name: torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype)).view(shape)
        for name, dtype, shape, content in tensors
    }


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("tied", [False, True], ids=["untied float32", "tied bfloat16"])
def test_exported_weights_are_those_published_for_the_step_bit_for_bit(
    tmp_path: Path, processes: ForkServerContext, world: int, tied: bool
) -> None:
    model: dict[str, Any] | None = None
    if tied:
        model = {"path": str(folders.tied_llama(tmp_path / "llama")), "dtype": "bfloat16"}

    async def story() -> None:
        async with Stage(tmp_path / "run", processes, world=world, steps=2, model=model).open() as stage:
            run, spec = stage.lab.run, stage.job.model
            (run.path / PUBLISHED).mkdir()
            assert await stage.live() == [0] * world, stage.logs()
            before = sorted(path.name for path in run.path.iterdir())
            newest = export_checkpoint(run, None, tmp_path / "models" / "newest")
            assert (newest.run, newest.step, newest.dtype) == (run.id, 2, spec.dtype)
            export_checkpoint(run, 1, tmp_path / "models" / "first")
            assert sorted(path.name for path in run.path.iterdir()) == before
        first, second = _exported(tmp_path / "models" / "first"), _exported(Path(newest.folder))
        assert not _same(first, second)
        assert _same(first, _published(run, 1))
        assert _same(second, _published(run, 2))
        assert ("lm_head.weight" in second) is not tied

        loaded = AutoModelForCausalLM.from_pretrained(newest.folder, dtype="auto").eval()
        own = skeleton(spec, open_tokenizer(spec).size, compute_dtype(spec))
        materialise(own, torch.device("cpu"))
        load_weights(own, _published(run, 2).items())
        tokens = torch.tensor([[2, 3, 4, 5]])
        with torch.no_grad():
            assert loaded.dtype == compute_dtype(spec)
            assert torch.equal(loaded(tokens).logits, own(input_ids=tokens).logits)
        assert AutoTokenizer.from_pretrained(newest.folder).encode("12") == list(open_tokenizer(spec).prompt("12"))

    asyncio.run(story())


def test_note_names_the_step_and_files_that_the_folder_was_made_from(made: CommittedRun, tmp_path: Path) -> None:
    export_checkpoint(made.run, 2, tmp_path / "out")
    note = json.loads((tmp_path / "out" / NOTE).read_text())
    assert (note["run"], note["step"], note["trainer"]) == (made.run.id, 2, "trainer/0#1")
    assert note["checkpoint"]["folder"] == f"checkpoints/{made.folders[2].name}"
    assert note["checkpoint"]["files"].keys() == {path.name for path in made.folders[2].iterdir()}
    assert len(note["batch"]) == 64


def test_every_retained_step_can_be_exported_after_the_log_was_rewritten(tmp_path: Path) -> None:
    made = CommittedRun(tmp_path / "run", keep=4)
    for step in range(1, 7):
        made.commit(step)
    made.reopen_store()
    for step in (1, 2):
        shutil.rmtree(made.folders[step])  # in place of the store, which deletes checkpoints in a real run
    for step in (3, 4, 5, 6):
        export_checkpoint(made.run, step, tmp_path / str(step))
        assert _same(_exported(tmp_path / str(step)), made.weights(step))
    with pytest.raises(ExportRefused, match=r"step 2 of run has no checkpoint \(never written.* for steps 3, 4, 5, 6"):
        export_checkpoint(made.run, 2, tmp_path / "two")


def test_export_needs_no_torch(made: CommittedRun, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from rrl.core.run_dir import RunDir"
        "; from rrl.roles.trainer import checkpoint_export"
        "; checkpoint_export.export_checkpoint(RunDir(Path(sys.argv[1])), None, Path(sys.argv[2]))"
        "; print(*{name.partition('.')[0] for name in sys.modules} & {'torch', 'transformers', 'tokenizers'})"
    )
    command = [sys.executable, "-c", program, str(made.run.path), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
    assert _same(_exported(tmp_path / "out"), made.weights(2))


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_step_that_is_not_committed_is_refused(made: CommittedRun, tmp_path: Path) -> None:
    shutil.copytree(made.folders[2], made.run.checkpoints / "step-3.1.0")  # written, not committed
    with pytest.raises(ExportRefused, match="step 3 of run is not committed; checkpoints exist for steps 1, 2"):
        export_checkpoint(made.run, 3, tmp_path / "out")
    assert export_checkpoint(made.run, None, tmp_path / "out").step == 2


def test_a_run_without_commits_is_refused(tmp_path: Path) -> None:
    made = CommittedRun(tmp_path / "run")
    with pytest.raises(ExportRefused, match="run has no committed checkpoint yet; see: rrl status run"):
        export_checkpoint(made.run, None, tmp_path / "out")
    shutil.rmtree(made.run.store)
    made.run.store.mkdir()
    with pytest.raises(ExportRefused, match="no committed checkpoint yet"):
        export_checkpoint(made.run, None, tmp_path / "out")


@pytest.mark.parametrize("name", ["weights-0.safetensors", "moments-0.safetensors", INDEX, "rank-0.msgpack"])
def test_files_that_differ_from_those_committed_are_refused(made: CommittedRun, tmp_path: Path, name: str) -> None:
    damaged = made.folders[2] / name
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(
        ExportFailed, match=r"cannot be exported: .*/checkpoints/step-2.* has the digest .* was committed"
    ):
        export_checkpoint(made.run, None, tmp_path / "models" / "out")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_checkpoint_that_lacks_a_file_is_refused(made: CommittedRun, tmp_path: Path) -> None:
    (made.folders[2] / INDEX).unlink()
    with pytest.raises(ExportFailed, match=r"step-2\.1\.0: lacks rrl_tensors\.json, which was committed"):
        export_checkpoint(made.run, None, tmp_path / "out")


def test_a_checkpoint_of_an_older_rrl_is_refused_with_the_version_to_export_it(
    made: CommittedRun, tmp_path: Path
) -> None:
    folder = made.run.checkpoints / "step-3.1.0"
    folder.mkdir()
    for name in (".metadata", "about.json", "__0_0.distcp"):
        (folder / name).write_bytes(b"x")
    made.commit_files(3, [*folder.iterdir()])
    with pytest.raises(ExportRefused, match=r"step 3 of run .* an older rrl wrote it .* export it with rrl at commit "):
        export_checkpoint(made.run, None, tmp_path / "out")


def test_a_tokenizer_that_has_changed_since_the_run_began_is_not_exported(made: CommittedRun, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    spec = read_run_spec(made.run.run_spec)
    spec = msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, path=str(folder)))
    made.run.run_spec.write_bytes(msgspec.json.encode(spec))
    check_inputs(made.run, spec)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ExportFailed, match=r"cannot be exported: .*/tokenizer.json has changed since the run first"):
        export_checkpoint(made.run, None, tmp_path / "out")


def test_a_folder_with_content_is_not_overwritten(made: CommittedRun, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export_checkpoint(made.run, None, tmp_path / "out")  # empty: it is used
    with pytest.raises(ExportRefused, match="out is not empty; name a new folder"):
        export_checkpoint(made.run, None, tmp_path / "out")
    with pytest.raises(ExportRefused, match="is a file; name a new folder"):
        export_checkpoint(made.run, None, tmp_path / "out" / "config.json")


# ── a run at work ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_checkpoint_that_the_store_deletes_meanwhile_is_exported(
    made: CommittedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delete_then_verify(run_dir: Path, manifest: dict[str, Any]) -> Any:
        shutil.rmtree(made.folders[2])
        return verified(run_dir, manifest)

    monkeypatch.setattr(exporting, "verified", delete_then_verify)
    export_checkpoint(made.run, 2, tmp_path / "out")
    assert _same(_exported(tmp_path / "out"), made.weights(2))
    assert _hidden(made.run.path) == []


def test_a_newer_checkpoint_is_exported_if_the_newest_is_deleted_before_it_is_opened(
    made: CommittedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def deleted_before(source: Path, target: Path) -> None:
        if made.folders[2].exists():
            made.commit(3)
            shutil.rmtree(made.folders[2])
        link(source, target)

    monkeypatch.setattr(os, "link", deleted_before)
    assert export_checkpoint(made.run, None, tmp_path / "out").step == 3
    assert _hidden(made.run.path) == []


def test_without_hard_links_the_files_are_read_in_place(
    made: CommittedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    export_checkpoint(made.run, None, tmp_path / "out")
    assert _same(_exported(tmp_path / "out"), made.weights(2))
    assert _hidden(made.run.path) == []


# ── an export that ends early ──────────────────────────────────────────────────────────────────────────────────────
def test_failed_export_leaves_no_files(made: CommittedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(exporting, "sync", refuse)
        with pytest.raises(OSError, match="No space left"):
            export_checkpoint(made.run, None, tmp_path / "models" / "out")
    assert list((tmp_path / "models").iterdir()) == []
    assert _hidden(made.run.path) == []


PATCHED = """
import os, sys, time
from rrl.roles.trainer import checkpoint_export as export
def stop(*_):
    print("there", flush=True)
    time.sleep(600)
export.{function} = stop
sys.exit(export.main(sys.argv[1:]))
"""
"""Program of the manager's child process, changed to stop at a function."""


@pytest.fixture(params=["write_weights", "write_model_files", "os.rename"])
def stopped(request: pytest.FixtureRequest, made: CommittedRun) -> Iterator[subprocess.Popen[bytes]]:
    """Yield an export that has reached the function, and stays there."""
    program = PATCHED.format(function=request.param)
    arguments = [str(made.run.path), "2", str(made.run.export_of(2))]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"there\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_killed_export_leaves_no_folder_that_looks_whole(
    made: CommittedRun, stopped: subprocess.Popen[bytes]
) -> None:
    stopped.kill()
    stopped.wait(END_TIMEOUT_S)
    assert _hidden(made.run.exports) == [".step-2.manager"]
    assert not made.run.export_of(2).exists()
    (made.run.exports / ".step-1.manager").mkdir()  # left by an export that another manager had begun
    arguments = [str(made.run.path), "2", str(made.run.export_of(2))]
    with subprocess.Popen([sys.executable, "-P", "-m", exporting.__name__, *arguments], stdin=subprocess.PIPE) as again:
        assert again.wait(END_TIMEOUT_S) == 0
    assert [path.name for path in made.run.exports.iterdir()] == ["step-2"]
    assert _same(_exported(made.run.export_of(2)), made.weights(2))
    assert _hidden(made.run.path) == []


@pytest.mark.parametrize("how", ["stdin is closed", "SIGTERM"])
def test_export_that_gets_sigterm_removes_its_files(
    made: CommittedRun, stopped: subprocess.Popen[bytes], how: str
) -> None:
    assert stopped.stdin is not None
    if how == "SIGTERM":
        stopped.send_signal(signal.SIGTERM)
    else:
        stopped.stdin.close()
    assert stopped.wait(END_TIMEOUT_S) == 1
    assert list(made.run.exports.iterdir()) == []
    assert _hidden(made.run.path) == []
