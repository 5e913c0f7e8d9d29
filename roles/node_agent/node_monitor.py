"""Monitor the health of the agent's node, with readers in separate processes and checks of their readings.

One round of checks runs before the agent reports the node (admission). Later rounds run as readings arrive. A finding
is sent when it changes, and all findings are sent to every new manager. The monitor never blocks the agent's
heartbeats: a reader that hangs, dies or never starts is reported once. The node's hardware inventory is stored for the
next agent of the node.
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
from ...health.checks.evaluate import NodeChecks, is_uninformative
from ...health.checks.node_state import ALL_GPUS, HardwareInventory, NodeState, hardware_inventory, restore_inventory
from ...health.readers.base import ReaderOptions
from ...health.readers.isolation.client import ReaderClient
from ...health.readers.samples import Accelerator, AcceleratorData, DcgmData
from ...transport.messages import FindingReport
from ..launcher.environment import boot_id, configured_readers, slurm_gpus

_log = logging.getLogger("rrl.agent")

_MAX_FILE_BYTES = 1 << 20
"""Maximum size in bytes of an inventory file; a longer file was not written by an agent."""


def load_inventory(path: Path) -> HardwareInventory | None:
    """Return the stored hardware inventory, or None if none can be read."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        if path.stat().st_size <= _MAX_FILE_BYTES:
            return msgspec.json.decode(path.read_bytes(), type=HardwareInventory)
    return None


def save_inventory(path: Path, inventory: HardwareInventory) -> None:
    """Store the hardware inventory. Ignore errors of the disk, because agents work without a stored inventory."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomically(path, msgspec.json.encode(inventory))


REPORT_INTERVAL_S = 1.0
"""Minimum number of seconds between two reports of changed findings to the manager."""
MAX_FINDINGS = 256
"""Maximum number of findings in one Hello. The limit exists because the manager closes a connection after a message
that is too long."""
MAX_SAMPLE_AGE_S = 10.0
"""Seconds after which a reading of the GPUs is too old to show a GPU's load; a DCGM reading may be twice as old."""
RESTORE_TIMEOUT_S = 5.0
"""Timeout (s) for reading the inventory of an earlier agent, because hung storage must not delay the node's
admission."""
_MOUNTS = ("/tmp", "/dev/shm")
"""Mount points that are read on every node, in addition to those of the run and of the site's rules."""


class NodeMonitor:
    """Runs the readers and checks of one node.

    ``send`` sends a finding to the manager. The next Hello repeats findings that did not arrive (:attr:`findings`).
    """

    def __init__(self, launch: Launch, launch_file: str, send: Callable[[FindingReport], Awaitable[None]]) -> None:
        self._launch, self._send = launch, send
        self._rules, self._rule_findings = _rules(launch)
        mounts = (*dict.fromkeys((launch.run_dir, launch.cwd, *_MOUNTS, *self._rules.expect.mounts)),)
        self._reader_names = configured_readers(launch)
        options = ReaderOptions(mounts=mounts, dcgm_user=self._rules.readers.dcgm_user)
        self._reader_client = ReaderClient(self._reader_names, options, env={LAUNCH_ENV: launch_file})
        self._node_state = NodeState(self._rules.xid.burst)
        self._node_state.own_uid = os.getuid()
        self._checks = NodeChecks(launch.node)
        with contextlib.suppress(OSError):
            self._node_state.boot_id = boot_id()
        self._inventory_file = RunDir(Path(launch.run_dir)).hardware_file(launch.node)
        self._job = os.environ.get("SLURM_JOB_ID", "")
        self._saved_inventory = hardware_inventory(self._node_state, self._job)
        """The hardware inventory that was stored last."""
        self._saving: asyncio.Task[None] | None = None
        self._wakeup = asyncio.Event()
        self._findings: dict[str, Finding] = {finding.key: finding for finding in self._rule_findings}
        """Findings of the newest evaluation, by key."""
        self._reported: dict[str, Finding] = {}
        """Findings that the newest Hello contained or that were sent after it, by key."""
        self._tasks: list[asyncio.Task[None]] = []
        self._admitting = False
        """Whether :meth:`start` is waiting for the readings of the admission round."""

    # ── lifecycle ──────────────────────────────────────────────────────────────────────────────────────────────────
    async def start(self, within: float, node_is_free: bool) -> None:
        """Start the readers and run the admission round.

        Returns when every reader has read and no check needs another reading. Raises nothing.

        Args:
            within: maximum duration (s) of the call; 0 to skip the admission round.
            node_is_free: whether no step of this run runs on the node, so that any process on its GPUs is a finding.
        """
        await self._restore_inventory()
        self._reader_client.start()
        self._tasks.append(asyncio.create_task(self._guarded(self._evaluate_loop())))
        if not within:
            return
        self._admitting = True
        own_gpus = tuple(filter(None, slurm_gpus().split(","))) or (ALL_GPUS,)  # other jobs may use the other GPUs
        self._node_state.set_expected_free(own_gpus if node_is_free else ())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while not (self._tasks[0].done() or self._all_readers_reported()):
                    await self._wakeup.wait()
                    self._wakeup.clear()
        self._node_state.set_expected_free(())
        self._reported, self._admitting = self._findings, False

    def start_reporting(self) -> None:
        """Start to send findings that change."""
        if self._tasks:
            self._wakeup.set()
            self._tasks.append(asyncio.create_task(self._guarded(self._report_loop())))

    async def close(self) -> None:
        """Stop the checks and the readers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._reader_client.close()

    # ── for the agent ──────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def findings(self) -> tuple[Finding, ...]:
        """The current findings whose verdict is not OK, those with FAIL first.

        Their times are on the clock of :meth:`now`.
        """
        by_severity = sorted(self._reported.values(), key=lambda finding: finding.verdict is not Verdict.FAIL)
        return tuple(by_severity[:MAX_FINDINGS])

    def tensor_active(self) -> dict[str, float]:
        """Return the share of time in which tensor cores were active, by GPU UUID, from a recent DCGM reading."""
        data = self._node_state.data("dcgm")
        gpus = (
            data.gpus
            if isinstance(data, DcgmData) and self.now() - self._node_state.reading_at("dcgm") <= 2 * MAX_SAMPLE_AGE_S
            else ()
        )
        return {gpu.uuid: gpu.tensor_active for gpu in gpus if gpu.tensor_active is not None}

    def gpus(self) -> tuple[Accelerator, ...] | None:
        """Return the GPUs of a recent reading, or None if there is none."""
        newest = self._node_state.newest.get(self._node_state.accelerator_reader)
        if newest is None or not isinstance(newest.data, AcceleratorData) or self.now() - newest.at > MAX_SAMPLE_AGE_S:
            return None
        return newest.data.gpus

    def on_our_kill(self) -> None:
        """Record that rrl has just ended a step on this node, which explains GPU errors near this time."""
        self._node_state.on_our_kill(self.now())

    def set_tenant(self, gpus: Collection[str], role: str, incarnation: str) -> None:
        """Record that ``incarnation`` uses these GPUs (UUIDs).

        Application errors on these GPUs are attributed to that incarnation.
        """
        self._node_state.set_tenant(gpus, role, incarnation)

    def on_role_death(self, gpus: Collection[str]) -> None:
        """Record that a role that used these GPUs (UUIDs) has just ended without a request by rrl."""
        self._node_state.on_role_death(gpus, self.now())

    @staticmethod
    def now() -> float:
        """Return the time (s) on the clock that all findings of this node use."""
        return time.monotonic()

    # ── tasks ──────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _evaluate_loop(self) -> None:
        """Evaluate the checks after every reading, because the checks count consecutive readings."""
        while True:
            self._node_state.add(await self._reader_client.next_reading())
            self._save_inventory()
            results = self._checks.evaluate(self._node_state, self._effective_rules(), self.now())
            findings = {finding.key: finding for finding in (*self._rule_findings, *results) if _is_reported(finding)}
            if self._admitting or findings != self._findings:
                self._findings = findings
                self._wakeup.set()

    async def _restore_inventory(self) -> None:
        with contextlib.suppress(TimeoutError):
            stored = await asyncio.wait_for(asyncio.to_thread(load_inventory, self._inventory_file), RESTORE_TIMEOUT_S)
            if stored is not None:
                restore_inventory(self._node_state, stored, self._job)
                self._saved_inventory = hardware_inventory(self._node_state, self._job)

    def _save_inventory(self) -> None:
        """Store a changed inventory in the background, with one write at a time, because the storage may hang."""
        inventory = hardware_inventory(self._node_state, self._job)
        if inventory.boot_id and inventory != self._saved_inventory and (self._saving is None or self._saving.done()):
            self._saved_inventory = inventory
            self._saving = asyncio.create_task(asyncio.to_thread(save_inventory, self._inventory_file, inventory))

    def _all_readers_reported(self) -> bool:
        return all(name in self._node_state.newest for name in self._reader_names) and not self._checks.pending()

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
        """Return the rules for the checks: the site's rules, sometimes with the number of GPUs that the job needs.

        This number is added as the expected one if fewer GPUs are visible. If the site's rules already expect a number
        of GPUs, they are returned unchanged.
        """
        data = self._node_state.accelerators()
        visible = len(data.gpus) if data is not None else 0
        if self._rules.expect.gpus is not None or visible >= self._launch.gpus:
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
        except Exception as error:  # the agent's heartbeats must continue
            why = f"the node's health is no longer monitored: {error!r}"
            _log.error("%s", why)
            finding = monitor_finding(self._launch, "watching", why, self.now())
            self._findings = self._findings | {finding.key: finding}
            self._wakeup.set()


def monitor_finding(launch: Launch, detector: str, text: str, now: float) -> Finding:
    """Return a finding with verdict WARN that says what is wrong with the agent's monitoring."""
    evidence = (Evidence("agent", text, now),)
    return Finding(detector, Verdict.WARN, Cause.SOFTWARE, Remedy.NONE, now, evidence, node=launch.node)


def _rules(launch: Launch) -> tuple[Rules, tuple[Finding, ...]]:
    """Return the site's rules; if they are invalid, the default rules and a finding about them."""
    try:
        return load_rules(), ()
    except RulesError as error:
        return Rules(), (monitor_finding(launch, "rules", f"{error}; the default rules are used", time.monotonic()),)


def _is_reported(finding: Finding) -> bool:
    """Return whether a finding is reported: FAIL, WARN, or UNKNOWN about something that this node should report."""
    return finding.verdict is not Verdict.OK and not is_uninformative(finding)
