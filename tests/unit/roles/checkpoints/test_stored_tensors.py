"""The list of tensors of a checkpoint is a pickle, from which no code is executed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from rrl.roles.checkpoints.stored_tensors import METADATA, UnreadableTensors, read_index


class _Hostile:
    """An object that makes a folder when the plain unpickler reads it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def test_list_of_tensors_that_names_a_function_of_another_module_executes_nothing(tmp_path: Path) -> None:
    made = tmp_path / "made"
    data = pickle.dumps({"state_dict_metadata": _Hostile(made)})
    (tmp_path / METADATA).write_bytes(data)
    with pytest.raises(UnreadableTensors, match="cannot be read as torch's list of tensors"):
        read_index(tmp_path)
    assert not made.exists()
    pickle.loads(data)
    assert made.exists(), "the plain unpickler has not executed the code, so this test proves nothing"
