"""Monitor the health of the agent's node: readers in processes of their own, and the checks over their readings.

One round runs before the agent reports the node (admission), later ones as readings arrive. A finding is sent when it
changes, and all of them to every new manager. Nothing here blocks the agent's heartbeats: a reader that hangs, dies or
never starts is reported once. The hardware that was seen is stored for the next agent of the node.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

import msgspec

from ...config.health_rules import Rules
from ...config.health_rules_file import RulesError, load_rules
from ...core.launch import LAUNCH_ENV, Launch
from ...core.run_dir import RunDir, write_atomically
from ...core.types import Cause, Evidence, Finding, Remedy, Verdict
from ...health.checks.evaluate import judge, pending, tells_nothing
from ...health.checks.node_state import EVERY, HardwarePast, Seen, hardware_of, recall
from ...health.readers.base import ReaderOptions
from ...health.readers.isolation.client import Keeper
from ...health.readers.samples import DcgmData, Gpu, NvmlData
from ...transport.messages import Found
from ..launcher.environment import boot_id, readers_of, slurms_gpus

_log = logging.getLogger("rrl.agent")

_MOST = 1 << 20
"""bytes; what is longer is none of ours"""


def load_past(path: Path) -> HardwarePast | None:
    """None where there is none that can be read."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        if path.stat().st_size <= _MOST:
            return msgspec.json.decode(path.read_bytes(), type=HardwarePast)
    return None


def keep_past(path: Path, past: HardwarePast) -> None:
    """A disk that is full costs a memory, and nothing else."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomically(path, msgspec.json.encode(past))


PAUSE = 1.0
"""s between two judgements"""
MOST = 256
"""findings of one Hello: what is larger than the manager takes would cut the agent off"""
FRESH = 10.0
"""s after which a reading says nothing of how busy a GPU is"""
RECALL = 5.0
"""s that storage has to say what an earlier agent saw here: a node that waits for it helps nobody"""
_MOUNTS = ("/tmp", "/dev/shm")


class NodeHealth:
    """``send`` tells the manager; what it does not hear, it hears with the next Hello."""

    def __init__(self, launch: Launch, launch_file: str, send: Callable[[Found], Awaitable[None]]) -> None:
        self._launch, self._send = launch, send
        self._rules, self._own = _rules(launch)
        mounts = (*dict.fromkeys((launch.run_dir, launch.cwd, *_MOUNTS, *self._rules.expect.mounts)),)
        self._names = readers_of(launch)
        options = ReaderOptions(mounts=mounts, dcgm_user=self._rules.readers.dcgm_user)
        self._keeper = Keeper(self._names, options, env={LAUNCH_ENV: launch_file})
        self._seen = Seen(self._rules.xid.burst)
        self._seen.uid = os.getuid()
        with contextlib.suppress(OSError):
            self._seen.boot = boot_id()
        self._file = RunDir(Path(launch.run_dir)).hardware_file(launch.node)
        self._job = os.environ.get("SLURM_JOB_ID", "")
        self._kept = hardware_of(self._seen, self._job)
        """as it was written last"""
        self._keeping: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._found: dict[str, Finding] = {finding.key: finding for finding in self._own}
        """by key, as of the newest reading"""
        self._told: dict[str, Finding] = {}
        """as the manager knows it"""
        self._tasks: list[asyncio.Task[None]] = []
        self._admitting = False
        """every reading is waited for"""

    # ── its life ───────────────────────────────────────────────────────────────────────────────────────────────────
    async def start(self, within: float, vacant: bool) -> None:
        """Returns when each reader has read and no check waits for a second look, or after ``within`` s. ``vacant``: no
        step of ours lives here, so that nobody may use the GPUs. Raises nothing: without readers the agent goes on, and
        says so."""
        await self._recall()
        try:
            await self._keeper.start()
        except Exception as error:  # whatever it is, the agent's beat is worth more
            self._unwatched(f"readers cannot be started: {error!r}")
            self._told = self._found
            return
        self._tasks.append(asyncio.create_task(self._guarded(self._listen())))
        if not within:
            return
        self._admitting = True
        ours = tuple(filter(None, slurms_gpus().split(","))) or (EVERY,)  # others of a shared node are their users'
        self._seen.vacant(ours if vacant else ())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while not (self._tasks[0].done() or self._all_said()):
                    await self._news.wait()
                    self._news.clear()
        self._seen.vacant(())
        self._told, self._admitting = self._found, False

    def watch(self) -> None:
        """From now on tell what changes."""
        if self._tasks:
            self._news.set()
            self._tasks.append(asyncio.create_task(self._guarded(self._conclude())))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._keeper.close()

    # ── what others ask or tell ────────────────────────────────────────────────────────────────────────────────────
    @property
    def findings(self) -> tuple[Finding, ...]:
        """All that is not well just now, the worst first; times are of the clock that ``Found.now`` is of."""
        return tuple(sorted(self._told.values(), key=lambda one: one.verdict is not Verdict.FAIL)[:MOST])

    def tensor_active(self) -> dict[str, float]:
        """By GPU's UUID, as DCGM read it last: the share of the time in which tensor cores worked."""
        data = self._seen.data("dcgm")
        gpus = data.gpus if isinstance(data, DcgmData) and self.now() - self._seen.at("dcgm") <= 2 * FRESH else ()
        return {gpu.uuid: gpu.tensor_active for gpu in gpus if gpu.tensor_active is not None}

    def gpus(self) -> tuple[Gpu, ...] | None:
        """As NVML read them last; None where it did not, or not of late."""
        newest = self._seen.newest.get("nvml")
        if newest is None or not isinstance(newest.data, NvmlData) or self.now() - newest.at > FRESH:
            return None
        return newest.data.gpus

    def killed(self) -> None:
        """A step of ours is ended here: what the GPUs say of it is its end, not theirs."""
        self._seen.killed(self.now())

    def occupied(self, gpus: Collection[str], role: str, life: str) -> None:
        """These GPUs (UUIDs) are that life's: an application's fault on them follows the application."""
        self._seen.occupied(gpus, role, life)

    def role_died(self, gpus: Collection[str]) -> None:
        """One died that we did not end; it had these GPUs (UUIDs)."""
        self._seen.role_died(gpus, self.now())

    @staticmethod
    def now() -> float:
        return time.monotonic()

    # ── inside ─────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _listen(self) -> None:
        """Every reading is judged: checks count how often they saw something."""
        while True:
            self._seen.add(await self._keeper.next())
            self._keep()
            judged = judge(self._seen, self._launch.node, self._expecting(), self.now())
            found = {finding.key: finding for finding in (*self._own, *judged) if _is_told(finding)}
            if self._admitting or found != self._found:
                self._found = found
                self._news.set()

    async def _recall(self) -> None:
        with contextlib.suppress(TimeoutError):
            past = await asyncio.wait_for(asyncio.to_thread(load_past, self._file), RECALL)
            if past is not None:
                recall(self._seen, past, self._job)
                self._kept = hardware_of(self._seen, self._job)

    def _keep(self) -> None:
        """Storage may hang: it is written beside everything else, and once at a time."""
        past = hardware_of(self._seen, self._job)
        if past.boot and past != self._kept and (self._keeping is None or self._keeping.done()):
            self._kept = past
            self._keeping = asyncio.create_task(asyncio.to_thread(keep_past, self._file, past))

    def _all_said(self) -> bool:
        return all(name in self._seen.newest for name in self._names) and not pending(self._seen)

    async def _conclude(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            before, self._told = self._told, self._found
            for key, finding in self._told.items():
                if before.get(key) != finding:
                    await self._say(finding)
            for key, finding in before.items():
                if key not in self._told:
                    await self._say(msgspec.structs.replace(finding, verdict=Verdict.OK, evidence=()))
            await asyncio.sleep(PAUSE)

    def _expecting(self) -> Rules:
        """Where the site does not say how many GPUs there are, those that the job asked for must be, if not more."""
        data = self._seen.data("nvml")
        there = len(data.gpus) if isinstance(data, NvmlData) else 0
        if self._rules.expect.gpus is not None or there >= self._launch.gpus:
            return self._rules
        expect = msgspec.structs.replace(self._rules.expect, gpus=self._launch.gpus)
        return msgspec.structs.replace(self._rules, expect=expect)

    async def _say(self, finding: Finding) -> None:
        await self._send(Found(finding, self._launch.life, self._launch.node, self.now()))

    async def _guarded(self, work: Awaitable[None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            raise
        except Exception as error:  # as above
            self._unwatched(f"the node's health is not watched any more: {error!r}")

    def _unwatched(self, why: str) -> None:
        _log.error("%s", why)
        finding = own_finding(self._launch, "watching", why, self.now())
        self._found = self._found | {finding.key: finding}
        self._news.set()


def own_finding(launch: Launch, detector: str, text: str, now: float) -> Finding:
    """A WARN of the agent about its own means."""
    evidence = (Evidence("agent", text, now),)
    return Finding(detector, Verdict.WARN, Cause.SOFTWARE, Remedy.NONE, now, evidence, node=launch.node)


def _rules(launch: Launch) -> tuple[Rules, tuple[Finding, ...]]:
    """The site's rules, and what is wrong with them."""
    try:
        return load_rules(), ()
    except RulesError as error:
        return Rules(), (own_finding(launch, "rules", f"{error}; the defaults are used", time.monotonic()),)


def _is_told(finding: Finding) -> bool:
    """Something is wrong, or what should be known is not: a reader hangs, GPUs that must be there cannot be read."""
    return finding.verdict is not Verdict.OK and not tells_nothing(finding)
