"""The checks of vLLM's arguments that need no vLLM.

tests/engine/test_setup.py uses a real vLLM.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.config.vllm_arguments import installed_arguments, unknown_argument_text
from rrl.tests.support.fake_vllm import fake_vllm


def test_arguments_are_read_without_importing_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm(tmp_path, monkeypatch)
    assert installed_arguments() == {"max_num_seqs", "tensor_parallel_size", "gpu_memory_utilization"}


def test_unparsable_vllm_source_gives_no_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm(tmp_path, monkeypatch, "def (:")
    assert installed_arguments() == frozenset()


def test_mistyped_argument_suggests_the_nearest_one_that_can_be_set() -> None:
    known = {"max_num_seqs", "stream_interval"}
    assert (
        unknown_argument_text("max_num_seq", known, "X")
        == "X has no such argument (EngineArgs); did you mean max_num_seqs?"
    )
    assert unknown_argument_text("stream_intervall", known, "X") == "X has no such argument (EngineArgs)"
