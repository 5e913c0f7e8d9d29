"""The report of a Python process about the exception that ends it."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import rrl
from rrl.core.launch import LAUNCH_ENV, Launch, Raised, read_end_report
from rrl.core.run_dir import RunDir
from rrl.core.types import Incarnation, NodeName, RaisedException, ReplicaId, Version
from rrl.roles.launcher.end_report import (
    Diverged,
    Misuse,
    ScorerFails,
    Unrepairable,
    described,
    report_uncaught_exceptions,
)
from rrl.roles.models.tokenizer import open_tokenizer


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def caught(act: Callable[[], object], folder: Path = Path("/nowhere")) -> RaisedException:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        act()
    return described(raised.value, folder)


def program(folder: Path, text: str) -> Callable[[], object]:
    """Return a function that runs a program of the user in ``folder``."""
    file = folder / "rollout.py"
    file.write_text(text)
    return lambda: exec(compile(text, str(file), "exec"), {"__name__": "__main__"})


def test_place_is_the_users_line_even_if_a_library_raises(tmp_path: Path) -> None:
    error = caught(program(tmp_path, "import json\n\njson.loads('nothing')\n"), tmp_path)
    assert (error.type, error.place) == ("json.decoder.JSONDecodeError", "rollout.py:3")
    assert str(error) == f"json.decoder.JSONDecodeError: {error.message} (rollout.py:3)"


def test_place_of_a_file_outside_of_the_jobs_folder_is_its_path(tmp_path: Path) -> None:
    assert caught(program(tmp_path, "1 / 0")).place == f"{tmp_path}/rollout.py:1"


def test_place_in_an_example_of_rrl_is_the_examples_line() -> None:
    """Examples are in the folder of the package rrl, as this test is, and still count as code of the user."""
    folder = Path(__file__).parent
    assert caught(lambda: open_tokenizer(None), folder).place.startswith(f"{Path(__file__).name}:")  # type: ignore[arg-type]


def test_place_without_the_users_code_is_the_line_of_rrl_or_of_the_library() -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        open_tokenizer(None)  # type: ignore[arg-type]
    trace = raised.value.__traceback__
    assert trace is not None
    in_rrl = described(raised.value.with_traceback(trace.tb_next), Path("/nowhere"))
    assert "/roles/models/tokenizer.py:" in in_rrl.place
    with pytest.raises(json.JSONDecodeError) as in_library:
        json.loads("nothing")
    trace = in_library.value.__traceback__
    assert trace is not None
    assert "/json/" in described(in_library.value.with_traceback(trace.tb_next), Path("/nowhere")).place


@pytest.mark.parametrize(
    ("text", "same"),
    [("raise ValueError('item 2')", True), ("\nraise ValueError('item 1')", False), ("raise TypeError()", False)],
)
def test_fingerprint_depends_on_type_and_place_but_not_on_the_message(tmp_path: Path, text: str, same: bool) -> None:
    first = caught(program(tmp_path, "raise ValueError('item 1')"))
    assert (caught(program(tmp_path, text)).fingerprint == first.fingerprint) is same


def _raise(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def _torch_error(name: str, module: str) -> Exception:
    kind = type(name, (RuntimeError,), {"__module__": module})
    error: Exception = type("Sub", (kind,), {})("made by a GPU")
    return error


@pytest.mark.parametrize(
    ("error", "environmental"),
    [
        (OSError(errno.EIO, "input/output error"), True),
        (ConnectionRefusedError(), True),
        (TimeoutError(), True),
        (MemoryError(), True),
        (_torch_error("OutOfMemoryError", "torch"), True),
        (_torch_error("DistError", "torch.distributed"), True),
        (FileNotFoundError(), False),
        (PermissionError(), False),
        (RuntimeError("a shape"), False),
        (KeyError("a key"), False),
    ],
    ids=lambda case: type(case).__name__,
)
def test_errors_of_storage_network_and_memory_are_environmental(error: Exception, environmental: bool) -> None:
    assert caught(_raise(error)).environmental is environmental


def test_full_disk_is_named_although_a_library_raises_another_error() -> None:
    def save() -> None:
        try:
            Path("/dev/full").write_text("a checkpoint")
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598") from None

    exception = caught(save)
    assert exception.environmental
    assert exception.message == "[Errno 28] No space left on device (unexpected pos 704 vs 598)"


@pytest.mark.parametrize(
    ("module", "name"),
    [("httpx", "TransportError"), ("urllib3.exceptions", "HTTPError"), ("aiohttp.client_exceptions", "ClientError")],
)
def test_errors_of_service_clients_are_environmental(module: str, name: str) -> None:
    assert caught(_raise(_torch_error(name, module))).environmental


def test_exception_that_leaves_a_wait_for_a_service_is_environmental() -> None:
    def ask() -> None:
        with rrl.waiting("judge"):
            raise KeyError("choices")

    assert caught(ask).environmental


def reported(error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch) -> RaisedException:
    """Return the report of a process that this exception ends."""
    incarnation, run = Incarnation(ReplicaId("reward/0"), 1), RunDir(folder / "run")
    run.steps.mkdir(parents=True)
    launch = Launch("t", str(run.path), incarnation, NodeName("n1"), ("true",), {}, str(folder), 1.0, False)
    launch_file = folder / "t.launch"
    launch_file.write_bytes(msgspec.json.encode(launch))
    monkeypatch.setenv(LAUNCH_ENV, str(launch_file))
    monkeypatch.setattr("sys.excepthook", lambda *_: None)
    report_uncaught_exceptions(launch)
    sys.excepthook(type(error), error, None)
    report = read_end_report(run.end_report_file("t"))
    assert isinstance(report, Raised)
    return report.exception


def test_report_of_a_scorer_that_fails_is_its_exception_and_why_no_start_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = caught(program(tmp_path, "[][0]"), tmp_path)
    got = reported(ScorerFails(raised, 17), tmp_path, monkeypatch)
    assert str(got) == "IndexError: list index out of range (rollout.py:1)"
    assert got.unrepairable == "scorer exceptions dropped 17 groups, including most of the newest ones"


def test_report_of_an_end_that_no_start_repairs_says_why_and_names_no_class_of_rrl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = reported(Unrepairable("step 3: loss nan", "lower the learning rate"), tmp_path, monkeypatch)
    assert (got.type, got.message, got.unrepairable) == ("RuntimeError", "step 3: loss nan", "lower the learning rate")


def test_report_of_a_broken_rule_of_the_worker_api_is_marked_and_names_no_class_of_rrl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = reported(Misuse("offset 0, expected 2"), tmp_path, monkeypatch)
    assert (got.type, got.message, got.counts_always) == ("ValueError", "offset 0, expected 2", True)


def test_report_of_values_that_are_not_finite_is_marked_and_names_no_class_of_rrl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = reported(Diverged(Version(3, 1), "NaN or infinite logits"), tmp_path, monkeypatch)
    expected = "the model with weights v3.1 returned NaN or infinite logits: training may have diverged"
    assert (got.type, got.message, got.counts_always) == ("RuntimeError", expected, True)


def test_report_of_any_other_exception_has_no_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got = reported(ValueError("mine"), tmp_path, monkeypatch)
    assert (got.unrepairable, got.counts_always) == (None, False)


def test_message_is_one_short_line_and_may_be_missing() -> None:
    assert caught(_raise(ValueError("several\n  lines\x1b[2J"))).message == "several lines\\x1b[2J"
    assert len(caught(_raise(ValueError("x" * 9999))).message) == 400
    unprintable = caught(_raise(Unprintable()))
    assert (unprintable.message, str(unprintable)) == ("", f"{unprintable.type} ({unprintable.place})")
