"""The number of a model's weights, computed without torch, equals the number that torch counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.config.model_size import weight_count
from rrl.core.run_spec import ModelSpec, TokenizerSpec

BUILT = ModelSpec(
    hidden_size=48,
    intermediate_size=80,
    layers=3,
    heads=6,
    kv_heads=2,
    head_dim=10,
    tokenizer=TokenizerSpec(tuple("0123456")),
)


def test_estimated_weights_of_a_built_model_equal_those_of_torch() -> None:
    pytest.importorskip("torch")
    from rrl.roles.models.policy import skeleton

    model = skeleton(BUILT, 2 + 7)
    assert weight_count(BUILT) == sum(parameter.numel() for parameter in model.parameters())


def test_estimated_weights_of_a_folder_equal_those_in_its_files(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from safetensors.torch import load_file

    from rrl.tests.support.roles.folders import qwen3

    folder = qwen3(tmp_path / "m")
    expected = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert weight_count(ModelSpec(path=str(folder))) == expected > 0
