"""Mistakes in job.toml that only a role can find cause one line and exit code 2, and the role does not join."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

import rrl
from rrl.config.job.resolve import resolve
from rrl.config.job.schema import Job
from rrl.core.launch import Launch
from rrl.core.run_dir import RunDir
from rrl.core.run_spec import ModelSpec, RolloutSettings, SamplingSpec, TrainerSettings
from rrl.core.types import Incarnation, NodeName, ReplicaId
from rrl.roles import reward
from rrl.roles.launcher import end_report
from rrl.roles.launcher.end_report import described, exits_on_invalid_config
from rrl.roles.models.tasks import TaskError
from rrl.roles.rollout import main as rollout_main
from rrl.roles.rollout.vllm import config
from rrl.roles.trainer import main as trainer_main
from rrl.roles.trajectories import server
from rrl.roles.trajectories.durable.log import Log

pytestmark = pytest.mark.torch

_RIGHT = {"tokenizer": {"pieces": "0123456789="}}
_TWICE = {"tokenizer": {"pieces": "00"}}
_NOWHERE = {"path": "/nowhere/model"}


def _end(role: str, main: Callable[[], None], monkeypatch: pytest.MonkeyPatch, **tables: Any) -> Any:
    message_text = {"run": {"name": "x", "steps": 1}, "model": _RIGHT, "task": {"dataset": "no_such_dataset"}} | tables
    job = resolve(Job.model_validate(message_text), "python")
    launch = Launch("t", "/r", Incarnation(ReplicaId(f"{role}/0"), 1), NodeName("n"), (), {}, "/", 1.0, False)
    rollout = job.rollouts["rollout"]
    me = SimpleNamespace(job=job, rollout=rollout, launch=launch)  # without __enter__, so that joining fails
    monkeypatch.setattr(rrl, "join", lambda: me, raising=False)
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.parametrize(
    ("role", "main"),
    [
        ("trainer", trainer_main.main),
        ("rollout", rollout_main.main),
        ("reward", reward.main),
        ("trajectories", server.main),
    ],
)
@pytest.mark.parametrize(
    ("model", "expected_text"),
    [
        (_TWICE, "rrl: [model.tokenizer] `pieces` contains '0' twice; remove one of them\n"),
        (_NOWHERE, "rrl: [model] path: /nowhere/model"),
    ],
)
def test_invalid_model_is_one_line_and_exit_code_2(
    role: str,
    main: Callable[[], None],
    model: dict[str, Any],
    expected_text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _end(role, main, monkeypatch, model=model) == 2
    message_text = capsys.readouterr().err
    assert message_text.startswith(expected_text)
    assert message_text.count("\n") == 1


@pytest.mark.parametrize(("role", "main"), [("reward", reward.main), ("trajectories", server.main)])
def test_invalid_task_is_one_line_and_exit_code_2(
    role: str, main: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _end(role, main, monkeypatch) == 2
    message_text = capsys.readouterr().err
    assert message_text.startswith('rrl: [task] dataset: "no_such_dataset" is not a dataset of reasoning-gym')
    assert message_text.count("\n") == 1


def test_configuration_that_vllm_refuses_on_one_node_is_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another node may have the driver that vLLM does not find on this one."""

    def refuse(*args: object, **given: object) -> None:
        raise config.InvalidEngineConfig("vLLM finds no device")

    monkeypatch.setattr(config, "configure", refuse)
    monkeypatch.setattr(config, "set_environment", lambda threads: None)
    monkeypatch.setattr(end_report, "_report", lambda report: pytest.fail(str(report)))
    job = MagicMock(seed=0, model=ModelSpec(path="/a/model", max_length=8))
    me = MagicMock(job=job, rollout=RolloutSettings())
    me.launch.incarnation = Incarnation(ReplicaId("rollout/0"), 1)
    with pytest.raises(SystemExit) as ended:
        config.prepare(me, MagicMock(), MagicMock())
    assert ended.value.code == 2
    assert capsys.readouterr().err == "rrl: vLLM finds no device\n"


def test_store_log_of_another_format_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = RunDir(tmp_path)
    log = Log(run_dir.store)
    log.rewrite([msgspec.msgpack.encode(["head", 1, 0, 0])])
    log.close()
    job = MagicMock(sampling=SamplingSpec(), trainer=TrainerSettings(), agents=None, fleet_varies=False)
    me = MagicMock(job=job, run_dir=run_dir)
    me.__exit__.return_value = False
    monkeypatch.setattr(rrl, "join", lambda: me, raising=False)
    monkeypatch.setattr(server, "open_tokenizer", MagicMock())
    monkeypatch.setattr(server, "_prompts_and_evaluations", lambda *_: (None, None))
    with pytest.raises(SystemExit) as ended:
        server.main()
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith(f"rrl: the trajectory log in {run_dir.store} has format 1, but")
    assert message.count("\n") == 1


def test_traceback_of_an_exception_in_user_code_is_kept() -> None:
    with pytest.raises(ValueError, match="mine"), exits_on_invalid_config(TaskError):
        raise ValueError("mine")


def test_exit_of_user_code_at_its_import_becomes_an_exception_with_its_line() -> None:
    with (
        pytest.raises(RuntimeError, match="the code raised SystemExit: 0") as raised,
        exits_on_invalid_config(TaskError),
    ):
        sys.exit(0)
    assert described(raised.value, Path(__file__).parent).place.startswith(f"{Path(__file__).name}:")


def test_a_message_of_several_lines_becomes_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), exits_on_invalid_config():
        raise ValueError("several\n  lines")
    assert capsys.readouterr().err == "rrl: several lines\n"
