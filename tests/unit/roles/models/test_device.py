from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rrl.core.launch import Launch
from rrl.core.run_spec import RolloutSettings, SamplingSpec
from rrl.core.types import Incarnation, NodeName, ReplicaId
from rrl.roles.models.tensors import assigned_device
from rrl.roles.rollout import torch_engine
from rrl.roles.rollout.vllm.config import forbid_expandable_segments
from rrl.roles.trainer import process_group

pytestmark = pytest.mark.torch


def _launch(role: str, gpus: int) -> Launch:
    return Launch("t", "/r", Incarnation(ReplicaId(f"{role}/0"), 1), NodeName("n7"), (), {}, "/", 1.0, False, gpus=gpus)


def test_role_without_gpus_computes_on_the_cpu_even_if_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert assigned_device(_launch("trainer", 0)) == torch.device("cpu")
    assert assigned_device(_launch("trainer", 1)) == torch.device("cuda", 0)


def _trains(me: Any) -> None:
    process_group.init_process_group(me)


def _rolls_out(me: Any) -> None:
    torch_engine.prepare(me, me, me)


@pytest.mark.parametrize(("role", "begin"), [("trainer", _trains), ("rollout", _rolls_out)])
def test_missing_gpu_that_was_requested_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], role: str, begin: Callable[[Any], None]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        begin(SimpleNamespace(launch=_launch(role, 1), world=1))
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith(f"rrl: {role} has gpus = 1, but torch {torch.__version__}, built ")
    assert message.endswith(" finds no GPU on n7: install a torch for its driver, or set gpus = 0\n")
    assert message.count("\n") == 1


def test_a_rollout_in_torch_has_its_model_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, the test only checks the device on which the rollout would place its weights."""
    devices_used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch_engine, "materialise", lambda model, device: devices_used.append(device))
    monkeypatch.setattr(torch_engine, "TorchEngine", lambda *_, **__: None)
    me: Any = SimpleNamespace(
        launch=_launch("rollout", 1), job=SimpleNamespace(seed=0, sampling=SamplingSpec()), rollout=RolloutSettings()
    )
    nothing: Any = SimpleNamespace(stop_tokens=frozenset())
    torch_engine.prepare(me, nothing, nothing)()
    assert devices_used == [torch.device("cuda", 0)]


def test_a_guest_does_not_look_for_its_gpu_before_it_builds_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched() -> bool:
        raise AssertionError("CUDA is initialised while the trainer uses the GPU")

    monkeypatch.setattr(torch.cuda, "is_available", touched)
    settings = RolloutSettings()
    me: Any = SimpleNamespace(
        launch=_launch("guest", 1), job=SimpleNamespace(sampling=SamplingSpec()), rollout=settings
    )
    build = torch_engine.prepare(me, torch.nn.Linear(1, 1, device="meta"), me)
    with pytest.raises(AssertionError, match="CUDA"):
        build()


def test_a_guest_has_no_expandable_segments_which_vllm_cannot_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    forbid_expandable_segments()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
    assert os.environ["PYTORCH_ALLOC_CONF"] == ""
