from __future__ import annotations

import json
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rrl.roles.trainer import main
from rrl.tests.support.roles.trainer import publishing
from rrl.tests.support.roles.trainer.stage import END_TIMEOUT_S

pytestmark = pytest.mark.torch

_BESIDE = 0.35
"""of the model that a process may need beside the version; a second copy would be half of it (bfloat16) or all"""


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_a_sharded_model_is_published_and_taken_over_without_a_second_copy_of_it(
    tmp_path: Path, processes: ForkServerContext, dtype: str
) -> None:
    words = 2, str(tmp_path), dtype
    members = [processes.Process(target=publishing.play, args=(rank, *words), daemon=True) for rank in range(2)]
    try:
        for member in members:
            member.start()
        for member in members:
            member.join(END_TIMEOUT_S)
    finally:
        for member in members:
            member.kill()
            member.join()
    assert [member.exitcode for member in members] == [0, 0]
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    version, beside = first["version"], _BESIDE * first["model"]
    assert version == first["model"] * (2 if dtype == "bfloat16" else 4) / 4 > 100e6
    assert first["publishing"] < version + beside, first
    assert second["publishing"] < beside, second
    assert first["loading"] < beside, first
    assert first["right"]


def test_a_member_that_publishes_nothing_itself_copies_nothing_off_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Any] = []
    asked: list[torch.dtype] = []

    def pack(tensors: Any) -> list[Any]:
        packed.append(tensors)
        return []

    monkeypatch.setattr(main, "pack", pack)
    monkeypatch.setattr(main, "full_tensor", lambda tensor: asked.append(tensor.dtype))
    weights = {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.int64)}
    learner: Any = SimpleNamespace(weights=lambda: weights, number=1)
    nobody: Any = None
    gang: Any = SimpleNamespace(rank=3)
    main._publish(nobody, gang, learner, torch.bfloat16)
    assert asked == [torch.bfloat16, torch.int64], "it gives its shard of each, as they are to be sent"
    assert packed == []
