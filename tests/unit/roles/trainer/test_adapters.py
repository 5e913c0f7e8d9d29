"""LoRA in a learner: what is trained, saved, published and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rrl.core.run_spec import LoraSpec, ModelSpec
from rrl.roles.launcher.end_report import Unrepairable
from rrl.roles.models.policy import build_model, skeleton, weights
from rrl.roles.trainer.adapters import add_adapters
from rrl.roles.trainer.host_buffers import Layout
from rrl.roles.trainer.learner import Learner
from rrl.roles.trainer.lending import DeviceState
from rrl.roles.trainer.process_group import Gang
from rrl.roles.trainer.publisher import Publisher
from rrl.roles.trajectories.batches import Batch
from rrl.roles.trajectories.types import Trajectory
from rrl.tests.support.roles import folders
from rrl.tests.support.roles.trainer import harness
from rrl.tests.support.roles.trainer.publishing import PublishingWorker

pytestmark = pytest.mark.torch

LORA = LoraSpec(rank=4, alpha=8.0)
_TOKENS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module", params=["qwen3", "tied_llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = getattr(folders, request.param)(tmp_path_factory.mktemp("model") / request.param)
    return made


def batch(number: int) -> Batch:
    """Return two groups of two answers, of which one is better."""
    trajectories = tuple(
        Trajectory(
            id=4 * number + place,
            group=2 * number + place // 2,
            prompt=(5, 6 + place // 2),
            tokens=(7 + place, 8, 9),
            logprobs=(-3.0, -2.0, -1.0),
            versions=(),
            reward=float(place % 2),
            training=float(place % 2),
        )
        for place in range(4)
    )
    return Batch(number=number, groups=(2 * number, 2 * number + 1), digest=f"{number}", trajectories=trajectories)


def _trained(folder: Path, steps: int = 2, **changes: Any) -> tuple[Learner, list[dict[str, float]]]:
    student = harness.adapted(folder, LORA, learning_rate=1e-2, **changes)
    return student, [harness.step(student, batch(number)) for number in range(1, steps + 1)]


def _published(student: Learner, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    me: Any = PublishingWorker()
    publisher = Publisher(me, Gang(), student, dtype)
    publisher.publish_live(student.number)
    publisher.finish()
    tensors: dict[str, torch.Tensor] = {name: one.clone() for name, one in me.tensors(student.number).items()}
    return tensors


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    model.set_attn_implementation("sdpa")  # that of packed sequences needs their bounds
    logits: torch.Tensor = model(input_ids=_TOKENS).logits
    return logits


def test_first_version_is_the_model_of_the_folder_and_later_ones_are_merged(folder: Path) -> None:
    plain = build_model(ModelSpec(path=str(folder)), 1, seed=0)
    new = harness.adapted(folder, LORA)
    for name, tensor in _published(new, torch.bfloat16).items():
        assert torch.equal(tensor, weights(plain)[name].to(torch.bfloat16)), name
    student, _ = _trained(folder)
    merged = _published(student)
    assert list(merged) == list(weights(plain))
    before = _logits(plain)
    with torch.no_grad():
        for name, tensor in weights(plain).items():
            tensor.copy_(merged[name])
    assert torch.allclose(_logits(plain), _logits(student.model), atol=1e-4)
    assert not torch.allclose(_logits(plain), before, atol=1e-2)


def test_reference_is_the_model_without_its_adapters(folder: Path) -> None:
    student, metrics = _trained(folder, kl=0.1)
    assert metrics[0]["kl"] == 0.0 < metrics[1]["kl"]
    assert student.adapters is not None
    with student.adapters.off():
        assert torch.equal(_logits(student.model), _logits(build_model(ModelSpec(path=str(folder)), 1, seed=0)))


def test_a_restored_learner_goes_on_bit_for_bit_and_its_state_has_only_the_adapters(folder: Path) -> None:
    student, _ = _trained(folder)
    tensors, rest = harness.saved(student)
    assert {name.partition(".")[0] for name in tensors} == {"model", "exp_avg", "exp_avg_sq"}
    assert all(".lora_A.weight" in name or ".lora_B.weight" in name for name in tensors)
    restored = harness.adapted(folder, LORA, seed=5, learning_rate=1e-2)
    harness.restore(restored, (tensors, rest))
    assert harness.step(restored, batch(3)) == harness.step(student, batch(3))
    for name, tensor in student.tensors().items():
        assert torch.equal(restored.tensors()[name], tensor), name


def test_adapters_of_another_base_are_refused(folder: Path) -> None:
    student, _ = _trained(folder, 1)
    other = harness.adapted(folder, LORA, base="another")
    with pytest.raises(Unrepairable, match="files of weights have changed since this run began"):
        other.resume(student.extra_state())


def test_adapters_begin_equal_however_many_members_share_them(folder: Path) -> None:
    one, same, other = (harness.adapted(folder, LORA, seed).tensors() for seed in (1, 1, 2))
    name = "model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert torch.equal(one[name], same[name])
    assert not torch.equal(one[name], other[name])


@pytest.mark.parametrize("target", ["c_attn", "lm_head", "embed_tokens", "proj", "layers"])
def test_target_that_matches_no_linear_module_is_refused_with_the_names_there_are(folder: Path, target: str) -> None:
    model = skeleton(ModelSpec(path=str(folder)), 1)
    with pytest.raises(ValueError, match=f"'{target}' is no linear module") as refused:
        add_adapters(model, LoraSpec(rank=4, alpha=8.0, targets=("q_proj", target)))
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in str(refused.value)


def test_only_targets_are_adapted(folder: Path) -> None:
    student = harness.adapted(folder, LoraSpec(rank=2, alpha=2.0, targets=("self_attn.q_proj", "up_proj")))
    names = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in student.saved_weights()}
    assert names == {"q_proj", "up_proj"}


@pytest.mark.parametrize("offload", [False, True])
def test_dropped_adapters_and_their_base_come_back_bit_equal(folder: Path, offload: bool) -> None:
    def trained(drops: bool) -> Learner:
        student = harness.adapted(folder, LORA, learning_rate=1e-2, kl=0.1, offload_optimizer=offload)
        layout = Layout(student.tensors())
        state, copy = DeviceState(student, torch.device("cpu"), layout), memoryview(bytearray(layout.nbytes))
        for number in range(1, 4):
            if drops:
                layout.fill(copy, student.tensors())
                state.drop()
                held = (*student.model.parameters(), *student.tensors().values())
                assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 0
                state.restore(copy)
            harness.step(student, batch(number))
        return student

    lent, never = trained(drops=True), trained(drops=False)
    for name, tensor in (never.tensors() | never.weights()).items():
        assert torch.equal((lent.tensors() | lent.weights())[name], tensor), name
    assert lent.extra_state() == never.extra_state()
