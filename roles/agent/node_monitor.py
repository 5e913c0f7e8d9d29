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
from ...health.checks.evaluate import evaluate, is_uninformative, pending
from ...health.checks.node_state import ALL_GPUS, HardwareInventory, NodeState, hardware_inventory, restore_inventory
from ...health.readers.base import ReaderOptions
from ...health.readers.isolation.client import ReaderClient
from ...health.readers.samples import DcgmData, Gpu, NvmlData
from ...transport.messages import FindingReport
from ..launcher.environment import boot_id, configured_readers, slurm_gpus

_log = logging.getLogger("rrl.agent")

_MAX_FILE_BYTES = 1 << 20
"""bytes; what is longer is none of ours"""


def load_inventory(path: Path) -> HardwareInventory | None:
    """None where there is none that can be read."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        if path.stat().st_size <= _MAX_FILE_BYTES:
            return msgspec.json.decode(path.read_bytes(), type=HardwareInventory)
    return None


def save_inventory(path: Path, inventory: HardwareInventory) -> None:
    """A disk that is full costs a memory, and nothing else."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomically(path, msgspec.json.encode(inventory))


REPORT_INTERVAL_S = 1.0
"""s between two judgements"""
MAX_FINDINGS = 256
"""findings of one Hello: what is larger than the manager takes would cut the agent off"""
MAX_SAMPLE_AGE_S = 10.0
"""s after which a reading says nothing of how busy a GPU is"""
RESTORE_TIMEOUT_S = 5.0
"""s that storage has to say what an earlier agent saw here: a node that waits for it helps nobody"""
_MOUNTS = ("/tmp", "/dev/shm")


class NodeMonitor:
    """``send`` tells the manager; what it does not hear, it hears with the next Hello."""

    def __init__(self, launch: Launch, launch_file: str, send: Callable[[FindingReport], Awaitable[None]]) -> None:
        self._launch, self._send = launch, send
        self._rules, self._rule_findings = _rules(launch)
        mounts = (*dict.fromkeys((launch.run_dir, launch.cwd, *_MOUNTS, *self._rules.expect.mounts)),)
        self._reader_names = configured_readers(launch)
        options = ReaderOptions(mounts=mounts, dcgm_user=self._rules.readers.dcgm_user)
        self._reader_client = ReaderClient(self._reader_names, options, env={LAUNCH_ENV: launch_file})
        self._node_state = NodeState(self._rules.xid.burst)
        self._node_state.own_uid = os.getuid()
        with contextlib.suppress(OSError):
            self._node_state.boot_id = boot_id()
        self._inventory_file = RunDir(Path(launch.run_dir)).hardware_file(launch.node)
        self._job = os.environ.get("SLURM_JOB_ID", "")
        self._saved_inventory = hardware_inventory(self._node_state, self._job)
        """as it was written last"""
        self._saving: asyncio.Task[None] | None = None
        self._wakeup = asyncio.Event()
        self._findings: dict[str, Finding] = {finding.key: finding for finding in self._rule_findings}
        """by key, as of the newest reading"""
        self._reported: dict[str, Finding] = {}
        """as the manager knows it"""
        self._tasks: list[asyncio.Task[None]] = []
        self._admitting = False
        """every reading is waited for"""

    # ── its life ───────────────────────────────────────────────────────────────────────────────────────────────────
    async def start(self, within: float, node_is_free: bool) -> None:
        """Returns when each reader has read and no check waits for a second look, or after ``within`` s. ``vacant``: no
        step of ours lives here, so that nobody may use the GPUs. Raises nothing: without readers the agent goes on, and
        says so."""
        await self._restore_inventory()
        try:
            await self._reader_client.start()
        except Exception as error:  # whatever it is, the agent's beat is worth more
            self._monitoring_lost(f"readers cannot be started: {error!r}")
            self._reported = self._findings
            return
        self._tasks.append(asyncio.create_task(self._guarded(self._evaluate_loop())))
        if not within:
            return
        self._admitting = True
        ours = tuple(filter(None, slurm_gpus().split(","))) or (ALL_GPUS,)  # others of a shared node are their users'
        self._node_state.set_expected_free(ours if node_is_free else ())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while not (self._tasks[0].done() or self._all_readers_reported()):
                    await self._wakeup.wait()
                    self._wakeup.clear()
        self._node_state.set_expected_free(())
        self._reported, self._admitting = self._findings, False

    def start_reporting(self) -> None:
        """From now on tell what changes."""
        if self._tasks:
            self._wakeup.set()
            self._tasks.append(asyncio.create_task(self._guarded(self._report_loop())))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._reader_client.close()

    # ── what others ask or tell ────────────────────────────────────────────────────────────────────────────────────
    @property
    def findings(self) -> tuple[Finding, ...]:
        """All that is not well just now, the worst first; times are of the clock that ``Found.now`` is of."""
        return tuple(sorted(self._reported.values(), key=lambda one: one.verdict is not Verdict.FAIL)[:MAX_FINDINGS])

    def tensor_active(self) -> dict[str, float]:
        """By GPU's UUID, as DCGM read it last: the share of the time in which tensor cores worked."""
        data = self._node_state.data("dcgm")
        gpus = (
            data.gpus
            if isinstance(data, DcgmData) and self.now() - self._node_state.reading_at("dcgm") <= 2 * MAX_SAMPLE_AGE_S
            else ()
        )
        return {gpu.uuid: gpu.tensor_active for gpu in gpus if gpu.tensor_active is not None}

    def gpus(self) -> tuple[Gpu, ...] | None:
        """As NVML read them last; None where it did not, or not of late."""
        newest = self._node_state.newest.get("nvml")
        if newest is None or not isinstance(newest.data, NvmlData) or self.now() - newest.at > MAX_SAMPLE_AGE_S:
            return None
        return newest.data.gpus

    def on_our_kill(self) -> None:
        """A step of ours is ended here: what the GPUs say of it is its end, not theirs."""
        self._node_state.on_our_kill(self.now())

    def set_tenant(self, gpus: Collection[str], role: str, incarnation: str) -> None:
        """These GPUs (UUIDs) are that life's: an application's fault on them follows the application."""
        self._node_state.set_tenant(gpus, role, incarnation)

    def on_role_death(self, gpus: Collection[str]) -> None:
        """One died that we did not end; it had these GPUs (UUIDs)."""
        self._node_state.on_role_death(gpus, self.now())

    @staticmethod
    def now() -> float:
        return time.monotonic()

    # ── inside ─────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _evaluate_loop(self) -> None:
        """Every reading is judged: checks count how often they saw something."""
        while True:
            self._node_state.add(await self._reader_client.next_reading())
            self._save_inventory()
            judged = evaluate(self._node_state, self._launch.node, self._effective_rules(), self.now())
            found = {finding.key: finding for finding in (*self._rule_findings, *judged) if _is_reported(finding)}
            if self._admitting or found != self._findings:
                self._findings = found
                self._wakeup.set()

    async def _restore_inventory(self) -> None:
        with contextlib.suppress(TimeoutError):
            past = await asyncio.wait_for(asyncio.to_thread(load_inventory, self._inventory_file), RESTORE_TIMEOUT_S)
            if past is not None:
                restore_inventory(self._node_state, past, self._job)
                self._saved_inventory = hardware_inventory(self._node_state, self._job)

    def _save_inventory(self) -> None:
        """Storage may hang: it is written beside everything else, and once at a time."""
        past = hardware_inventory(self._node_state, self._job)
        if past.boot_id and past != self._saved_inventory and (self._saving is None or self._saving.done()):
            self._saved_inventory = past
            self._saving = asyncio.create_task(asyncio.to_thread(save_inventory, self._inventory_file, past))

    def _all_readers_reported(self) -> bool:
        return all(name in self._node_state.newest for name in self._reader_names) and not pending(self._node_state)

    async def _report_loop(self) -> None:
        while True:
            await self._wakeup.wait()
            self._wakeup.clear()
            before, self._reported = self._reported, self._findings
            for key, finding in self._reported.items():
                if before.get(key) != finding:
                    await self._report(finding)
            for key, finding in before.items():
                if key not in self._reported:
                    await self._report(msgspec.structs.replace(finding, verdict=Verdict.OK, evidence=()))
            await asyncio.sleep(REPORT_INTERVAL_S)

    def _effective_rules(self) -> Rules:
        """Where the site does not say how many GPUs there are, those that the job asked for must be, if not more."""
        data = self._node_state.data("nvml")
        there = len(data.gpus) if isinstance(data, NvmlData) else 0
        if self._rules.expect.gpus is not None or there >= self._launch.gpus:
            return self._rules
        expect = msgspec.structs.replace(self._rules.expect, gpus=self._launch.gpus)
        return msgspec.structs.replace(self._rules, expect=expect)

    async def _report(self, finding: Finding) -> None:
        await self._send(FindingReport(finding, self._launch.incarnation, self._launch.node, self.now()))

    async def _guarded(self, work: Awaitable[None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            raise
        except Exception as error:  # as above
            self._monitoring_lost(f"the node's health is not watched any more: {error!r}")

    def _monitoring_lost(self, why: str) -> None:
        _log.error("%s", why)
        finding = monitor_finding(self._launch, "watching", why, self.now())
        self._findings = self._findings | {finding.key: finding}
        self._wakeup.set()


def monitor_finding(launch: Launch, detector: str, text: str, now: float) -> Finding:
    """A WARN of the agent about its own means."""
    evidence = (Evidence("agent", text, now),)
    return Finding(detector, Verdict.WARN, Cause.SOFTWARE, Remedy.NONE, now, evidence, node=launch.node)


def _rules(launch: Launch) -> tuple[Rules, tuple[Finding, ...]]:
    """The site's rules, and what is wrong with them."""
    try:
        return load_rules(), ()
    except RulesError as error:
        return Rules(), (monitor_finding(launch, "rules", f"{error}; the defaults are used", time.monotonic()),)


def _is_reported(finding: Finding) -> bool:
    """Something is wrong, or what should be known is not: a reader hangs, GPUs that must be there cannot be read."""
    return finding.verdict is not Verdict.OK and not is_uninformative(finding)
