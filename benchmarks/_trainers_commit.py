"""How long one more small file takes in a commit of a checkpoint."""

from __future__ import annotations

import shutil
import statistics
import time
from pathlib import Path

from rrl.core.run_dir import RunDir
from rrl.roles.checkpoints.folders import describe, fresh_folder

_FILES = 2000
_BYTES = 4096
_REPETITIONS = 5


def seconds_per_extra_file(folder: Path) -> float:
    """Return the time of a commit of 2,000 files over that of one file, divided by the number of further files (s).

    It is the median of 5 repetitions. A commit syncs and reads the files; the request to the store is left out.
    ``folder`` is a new folder on a disk. It is removed.
    """
    run = RunDir(folder)
    run.create()
    try:
        return statistics.median((_commit(run, _FILES) - _commit(run, 1)) / (_FILES - 1) for _ in range(_REPETITIONS))
    finally:
        shutil.rmtree(folder)


def _commit(run: RunDir, files: int) -> float:
    """Return the time that makes a new checkpoint with these many files in folders of 100 durable."""
    folder = fresh_folder(run.checkpoints, 1, 1)
    for number in range(files):
        file = folder / str(number // 100) / f"{number}.bin"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(number.to_bytes(8, "big") * (_BYTES // 8))
    begin = time.perf_counter()
    describe(run.path, [folder])
    return time.perf_counter() - begin
