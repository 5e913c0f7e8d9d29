"""A stand-in for the package vllm: its engine arguments can be read, but it cannot be imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SOURCE = """
raise ImportError("nobody may import this")
class Other:
    not_this: int = 1
class EngineArgs:
    max_num_seqs: int | None = None
    \"\"\"how many\"\"\"
    tensor_parallel_size: int = field(default=1)
    gpu_memory_utilization: float = 0.9
    def method(self) -> None:
        local: int = 1
"""


def fake_vllm(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str = SOURCE) -> None:
    (folder / "vllm" / "engine").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text("raise ImportError('nobody may import this')")
    (folder / "vllm" / "engine" / "arg_utils.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
