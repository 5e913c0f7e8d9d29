"""vLLM gets the job's settings, and an invalid setting ends the rollout before it joins."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import rrl
from rrl.config.vllm_arguments import RESERVED_ARGUMENTS, installed_arguments
from rrl.core.run_spec import ExtraSpec, RoleSpec, RolloutSettings, RunSpec, TokenizerSpec
from rrl.core.types import Incarnation, ReplicaId, Resources
from rrl.roles.models.policy import skeleton
from rrl.roles.rollout import main as rollout_main
from rrl.roles.rollout.vllm import config
from rrl.roles.rollout.vllm.config import InvalidEngineConfig
from rrl.tests.support.engine.engines import MEMORY, SPEC, VOCABULARY

pytestmark = pytest.mark.vllm


def _configure(
    folder: Path,
    lease: int = 16,
    gpus: int = 0,
    routed_experts: ExtraSpec | None = None,
    sleeps: bool = False,
    **given: Any,
) -> Any:
    config.set_environment(1)
    made = config.write_config_folder(skeleton(SPEC, VOCABULARY), folder)
    return config.configure(
        made,
        dtype="float32",
        max_length=SPEC.max_length,
        seed=3,
        lease=lease,
        memory=MEMORY,
        gpus=gpus,
        given=given,
        routed_experts=routed_experts,
        sleeps=sleeps,
    )


def test_guest_on_a_cpu_says_that_it_cannot_sleep(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not _configure(tmp_path, sleeps=True).model_config.enable_sleep_mode
    assert "vLLM cannot sleep on a CPU" in caplog.text


@pytest.mark.parametrize(
    ("given", "expected_text"),
    [
        ({"max_num_seq": 8}, r"^\[roles.rollout\] vllm.max_num_seq: vLLM \S+ has no .*; did you mean max_num_seqs\?$"),
        ({"model": "elsewhere"}, r"^\[roles.rollout\] vllm.model is reserved for rrl: rrl sets it from \[model\]"),
        ({"stream_interval": 8}, r"vllm.stream_interval is reserved for rrl: tokens that vLLM holds back"),
        ({"logprobs_mode": "raw_logprobs"}, r"vllm.logprobs_mode is reserved for rrl: the trainer needs"),
        (
            {"max_num_seqs": -1},
            r"^\[roles.rollout\] vllm = \{'max_num_seqs': -1\}: vLLM \S+ refuses it: .*max_num_seqs",
        ),
        ({"kv_cache_dtype": "none such"}, r"vLLM \S+ refuses it: .*"),
    ],
)
def test_invalid_argument_is_reported_in_one_line(tmp_path: Path, given: dict[str, Any], expected_text: str) -> None:
    with pytest.raises(InvalidEngineConfig, match=expected_text) as caught:
        _configure(tmp_path, **given)
    assert "\n" not in str(caught.value)


def test_routing_that_is_not_as_declared_or_not_possible_is_reported_in_one_line(tmp_path: Path) -> None:
    model = SimpleNamespace(
        get_total_num_hidden_layers=lambda: 48, get_num_experts_per_tok=lambda: 8, get_num_experts=lambda: 128
    )
    config.check_routing(model, ExtraSpec(per_token=384))
    wanted = r'^\[sampling.extras.routed_experts\] must have per_token = "384B": .* 48 layers x 8 experts x 1 bytes'
    for wrong in (ExtraSpec(per_token=192), ExtraSpec(per_trajectory=384)):
        with pytest.raises(InvalidEngineConfig, match=wanted):
            config.check_routing(model, wrong)
    with pytest.raises(InvalidEngineConfig, match=r"with \[sampling.extras.routed_experts\]: vLLM \S+ refuses it"):
        _configure(tmp_path, routed_experts=ExtraSpec(per_token=384))


def test_unused_gpu_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidEngineConfig, match=r"^\[roles.rollout\] gpus = 2, but the installed vLLM \S+ is for CPUs"
    ):
        _configure(tmp_path, gpus=2)


def test_installed_vllm_arguments_are_read_without_importing_it() -> None:
    from vllm import EngineArgs

    assert installed_arguments() == {each.name for each in fields(EngineArgs)}
    assert RESERVED_ARGUMENTS.keys() <= installed_arguments()


def test_workers_are_spawned_and_use_loopback_in_any_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    right = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    for name in right:
        monkeypatch.setenv(name, "fork" if name.startswith("VLLM") else "ib0")
    config.set_environment(1)
    assert {name: os.environ[name] for name in right} == right


def test_user_arguments_reach_vllm_and_the_defaults_fit_a_rollout_on_cpu(tmp_path: Path) -> None:
    plain, moved = _configure(tmp_path), _configure(tmp_path, max_num_seqs=5, kv_cache_memory_bytes=2**25)
    assert (plain.scheduler_config.max_num_seqs, moved.scheduler_config.max_num_seqs) == (16, 5)
    assert moved.cache_config.kv_cache_memory_bytes == 2**25
    assert plain.model_config.max_model_len == SPEC.max_length
    assert plain.model_config.enforce_eager
    a_token = 2 * SPEC.layers * SPEC.kv_heads * SPEC.head_dim * 4  # bytes of a token's keys and values in all layers
    assert 16 * 256 * a_token <= plain.cache_config.kv_cache_memory_bytes <= MEMORY / 2
    many = _configure(tmp_path, lease=100_000)
    assert many.scheduler_config.max_num_seqs == 1024
    assert many.cache_config.kv_cache_memory_bytes == pytest.approx(MEMORY / 2, rel=0.01)


def test_invalid_engine_ends_the_rollout_before_it_joins_with_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = msgspec.structs.replace(SPEC, head_dim=16, tokenizer=TokenizerSpec(tuple("0123456789")))
    role = RoleSpec("rollout", "rollout", 1, 1, Resources(mem=MEMORY), True, ())
    job = RunSpec("x", 1, "local", (role,), (), model=model)
    incarnation = Incarnation(ReplicaId("rollout/0"), 1)
    me = SimpleNamespace(  # no __enter__, so that joining would fail
        job=job,
        rollout=RolloutSettings("vllm", lease=16),
        launch=SimpleNamespace(
            incarnation=incarnation, role="rollout", guest=False, standby=False, gpus=0, cwd=str(tmp_path)
        ),
        run_dir=SimpleNamespace(hf_model=tmp_path / "hf-model"),
    )
    monkeypatch.setattr(rrl, "join", lambda: me, raising=False)
    with pytest.raises(SystemExit) as ended:
        rollout_main.main()
    assert ended.value.code == 2
    message_text = capsys.readouterr().err.splitlines()
    assert message_text[-1].startswith("rrl: [model] head_dim is 16, but on CPU vLLM only has kernels for [32, 64,")
