from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from rrl.core.types import ReplicaId
from rrl.roles.snapshots.format import SnapshotError, SnapshotInfo
from rrl.roles.snapshots.mapping import MappedBuffer, map_snapshot

STORED = SnapshotInfo(ReplicaId("trainer/0"), 0, 1, 1, 8, b"", own=True)


@pytest.mark.parametrize(
    "use", [lambda fd: map_snapshot(fd, STORED), lambda fd: MappedBuffer(fd, 8)], ids=["read", "written"]
)
def test_unmappable_memory_loses_only_the_snapshot_and_leaks_no_descriptor(use: Callable[[int], object]) -> None:
    """Mapping fails as it does under ``vm.overcommit_memory = 2`` or with a limit of the address space.

    The test uses a pipe, which cannot be mapped.
    """
    fd, other = os.pipe()
    os.close(other)
    with pytest.raises(SnapshotError, match="cannot be mapped"):
        use(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
