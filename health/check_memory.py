"""State that a site's Slurm hooks (prolog, epilog, HealthCheckProgram) keep between two checks of a node.

The state contains the last check that passed, the findings that have not cleared, and whether a hook has drained the
node. This state, the node's *memory*, is one file in a folder of the node that is emptied at boot. The file saves work
in three cases. A prolog need not repeat a check that an epilog has just made. A finding that has not cleared is not
recorded again at each check. The HealthCheckProgram need not ask slurmctld whether a hook has drained its node. Times
are seconds of CLOCK_BOOTTIME, because changes of the date do not affect this clock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ..core.run_dir import write_atomically
from ..core.types import NodeName
from .history.check_records import Standing

FOLDER_ENV = "RRL_HEALTH_STATE"
"""Environment variable that names the folder of the memory files. Without it, the folder is ``/run/rrl`` for root and
``rrl`` in ``$XDG_CACHE_HOME`` (by default ``~/.cache``) for other users."""
ROOT_FOLDER = Path("/run/rrl")
FOLDER_MODE, FILE_MODE = 0o755, 0o644
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class CheckMemory(Struct, frozen=True):
    """What the hooks have stored about the checks of one node since its boot (the node's *memory*)."""

    boot_id: str
    passed_at: float | None = None
    """Start (s) of the newest full check that passed (OK or WARN). None if no full check has passed since the boot or
    since the last check that did not pass."""
    free_gpus: dict[str, float] = {}
    """GPU's index → time (s) of the check that found the GPU free after its last job."""
    occupied_gpus: tuple[str, ...] = ()
    """Indices of the GPUs of jobs whose prolog or epilog found the node failing. A GPU is removed once a later check
    finds it free."""
    standing: tuple[Standing, ...] | None = None
    """Findings that are recorded in the history and have not cleared; None if they are unknown."""
    drained: Literal["unknown", "no", "by hook"] = "unknown"
    """Whether a drain by the hooks is in effect, according to the last answer of slurmctld."""

    @property
    def gpus_to_be_freed(self) -> tuple[str, ...]:
        """Return the GPUs that must be free before the hooks take back their drain."""
        return self.occupied_gpus if self.drained == "by hook" else ()

    def is_fresh(self, gpus: Collection[str], max_age_s: float) -> bool:
        """Return whether, within ``max_age_s``, the node passed a full check and these GPUs were found free."""
        now = boot_time()
        times = (self.passed_at, *(self.free_gpus.get(gpu) for gpu in gpus))
        return all(at is not None and 0.0 <= now - at <= max_age_s for at in times)


def boot_time() -> float:
    """Return the seconds since this machine was booted, including the time for which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def memory_path(node: NodeName) -> Path:
    """Return the path of a node's memory file. Its name contains the node, because nodes may share a home folder."""
    if given := os.environ.get(FOLDER_ENV):
        folder = Path(given)
    elif os.geteuid() == 0:
        folder = ROOT_FOLDER
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "rrl"
    return folder / f"health-{node}.json"


def read_memory(path: Path) -> CheckMemory:
    """Return the stored memory, or an empty memory if no valid file of this boot exists.

    A file that another user may have written is not valid.
    """
    boot_id = _BOOT_ID.read_text().strip()
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        _check_owner(path.parent)
        memory = msgspec.json.decode(path.read_bytes(), type=CheckMemory)
        if memory.boot_id == boot_id:
            return memory
    return CheckMemory(boot_id)


def update_memory(path: Path, change: Callable[[CheckMemory], CheckMemory]) -> None:
    """Replace the memory by the result of ``change``, under a lock because several hooks may run at the same time.

    Raises OSError if the file cannot be written, or if another user may have written it.
    """
    with _locked(path):
        memory = read_memory(path)
        if (changed := change(memory)) != memory:
            write_atomically(path, msgspec.json.encode(changed), FILE_MODE)


def take_if_fresh(path: Path, gpus: Collection[str], max_age_s: float) -> float | None:
    """Return the age (s) of the last full check that passed; None if a job with these GPUs needs a new check.

    `CheckMemory.is_fresh` decides whether a new check is needed. In either case the GPUs no longer count as free,
    because the job uses them. Raises OSError like `update_memory`.
    """
    ages: list[float] = []

    def take(memory: CheckMemory) -> CheckMemory:
        if memory.passed_at is not None and memory.is_fresh(gpus, max_age_s):
            ages.append(boot_time() - memory.passed_at)
        return replace(memory, free_gpus={gpu: at for gpu, at in memory.free_gpus.items() if gpu not in gpus})

    update_memory(path, take)
    return ages[0] if ages else None


def after_check(
    memory: CheckMemory, *, passed: bool, full: bool, gpus: Collection[str], freed: bool, at: float
) -> CheckMemory:
    """Return the memory after a check that began at ``at``.

    Args:
        memory: Memory before the check.
        passed: Whether the node is OK or WARN.
        full: Whether all checks were made.
        gpus: GPUs that the check expected to be free: the GPUs of the job whose prolog or epilog made the check, or the
            GPUs that must be free before a drain is taken back.
        freed: Whether the job has ended, so that a passed check shows that its GPUs are free.
        at: Start of the check (s of CLOCK_BOOTTIME).
    """
    free = {gpu: then for gpu, then in memory.free_gpus.items() if gpu not in gpus}
    if not passed:
        occupied = tuple(sorted({*memory.occupied_gpus, *gpus}))
        return replace(memory, passed_at=None, free_gpus=free, occupied_gpus=occupied)
    occupied = tuple(gpu for gpu in memory.occupied_gpus if gpu not in gpus)
    if freed:
        free |= dict.fromkeys(gpus, at)
    passed_at = at if full else memory.passed_at
    return replace(memory, passed_at=passed_at, free_gpus=free, occupied_gpus=occupied)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    _check_owner(path.parent)
    fd = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _check_owner(folder: Path) -> None:
    """Raise PermissionError if another user owns the folder or may write to it.

    The folder stores the results of earlier checks. Whoever can write to it can cause checks to be skipped.
    """
    about = os.stat(folder)
    if about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise PermissionError(0, f"{folder} belongs to another user, or others may write to it")
