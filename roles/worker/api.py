"""The worker API: what a trainer, a rollout, or any other role needs to take part in a run.

A role that does nothing special needs :func:`join`, :meth:`Worker.phase` and :meth:`Worker.progress`. A trainer adds
batches, commit and publish; a rollout adds new_weights and work. Everything here blocks; a thread of its own does the
talking (:mod:`rrl.roles.worker.connection`), so that beats go on while the role computes.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from ...core.launch import HEARTBEAT_INTERVAL_ENV, LAUNCH_ENV, Launch, read_launch
from ...core.log_lines import start_logging
from ...core.phases import phase as phase_named
from ...core.run_dir import RunDir
from ...core.text import exit_invalid_config
from ...core.types import NodeName, ReplicaId, Version, replica_id
from ...transport.keys import RunKeys
from ...transport.messages import Goodbye, Peers
from ...transport.weights.manifest import ManifestBuilder, TensorSpec, layout
from ...transport.weights.store import StoredVersion
from ..launcher.process_group import allow_inspection, restore_priority
from ..trajectories.batches import decode
from ..trajectories.types import Batch, Item, PackedBatch, Score, Segment, ToScore
from .checkpoint_files import Digest, fresh_folder, make_durable, verified
from .checkpoint_files import describe as describe_files
from .connection import ManagerConnection, Stopping

STORE_WAIT_S = 1.0
"""s that one question waits at the store before it is asked again, so that a stop is noticed"""
GOODBYE_TIMEOUT_S = 60.0
"""s that a worker which has done its work waits to be told to leave"""
_COPY_SLICE_BYTES = 8 * 2**20
"""bytes; a copy keeps every other thread from running, the one that beats too. 1 GiB, measured: 0.36 s in such slices,
and no thread waited for more than 9 ms; in one go up to 1.4 s, all of it a wait"""


class WeightUpdate:
    """A complete version. Keep this object while you read ``flat`` (read-only; tensors lie where the specs say)."""

    def __init__(self, stored: StoredVersion) -> None:
        self._stored = stored
        self.version: Version = stored.manifest.version
        self.manifest = stored.manifest
        self.tensors: tuple[TensorSpec, ...] = stored.manifest.tensors
        self.flat: memoryview = stored.flat


class WorkLease:
    """Leased trajectories: each a prompt and what was already made of it. Give them back grown."""

    def __init__(self, connection: ManagerConnection, items: tuple[Item, ...]) -> None:
        self._connection = connection
        self.items = items

    def append(self, segments: Sequence[Segment], finished: Sequence[int] = ()) -> tuple[int, ...]:
        """Add tokens to trajectories; ``finished`` are complete now. Durable when it returns; that is the progress.

        Returns the trajectories that are no longer this life's: stop working on them."""
        lost = self._connection.call_store(self._connection.store.append(segments, finished))
        self._connection.progress(sum(len(segment.tokens) for segment in segments))
        return lost


class ScoringLease:
    """Complete trajectories leased for scoring. Where that takes long, call :meth:`Worker.progress` after each."""

    def __init__(self, connection: ManagerConnection, items: tuple[ToScore, ...]) -> None:
        self._connection = connection
        self.items = items
        self._done_before = connection.done
        self._posted = 0

    def post(self, scores: Sequence[Score], failed: dict[int, str] | None = None) -> None:
        """Durable when it returns. ``failed``: trajectories that cannot be scored, and why; they are dropped, never
        scored zero. What has not been told as progress since the lease counts as progress now."""
        self._connection.call_store(self._connection.store.post_scores(scores, failed))
        self._posted += len(scores) + len(failed or {})
        reported = self._connection.done - self._done_before
        self._connection.progress(max(0, self._posted - reported))


class _UncommittedBatch(msgspec.Struct, frozen=True):
    """What a commit needs of a batch."""

    digest: str
    metrics: dict[str, float]
    """what the batch itself tells: ``reward``, how old its tokens are, and where that is limited what it cost"""


class Worker:
    """One life of one replica. Made by :func:`join`, used as a context manager."""

    def __init__(self, launch: Launch, run: RunDir, keys: RunKeys) -> None:
        self.run_dir = run
        self.keys = keys
        self.job: dict[str, Any] = msgspec.json.decode(run.resolved.read_bytes())["job"]
        """the resolved job spec"""
        self.settings: dict[str, Any] = self._table(launch.role)
        """this role's part of it: ``[commands.NAME]`` or ``[roles.NAME]``"""
        self._connection = ManagerConnection(
            launch, run, keys, float(os.environ.get(HEARTBEAT_INTERVAL_ENV, "1")), self.job["transport"]
        )
        self._uncommitted: dict[int, _UncommittedBatch] = {}
        """the steps given by :meth:`batches` and not committed"""
        self._loaded: Version | None = None
        self._leased: set[int] = set()
        """trajectories given by :meth:`lease` that are not complete and not lost: the store gives others again"""
        self._committed_fetched = False
        self._committed: int | None = None
        self._manifest: dict[str, Any] | None = None

    def __enter__(self) -> Worker:
        """Returns once the manager has welcomed this life. A process that is kept warm waits here, for minutes or for
        days, until it is needed; one that is asked to leave before ends here, by SystemExit."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self.stopping.set())
        allow_inspection()
        warm = self.launch.standby
        try:
            self._connection.start()
        except Stopping:
            self._connection.close()
            raise SystemExit(0) from None
        if warm:
            restore_priority()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        if kind is None and not self._connection.stopping.is_set():
            self._connection.set_phase("stopping")
            self._connection.send(Goodbye(self.launch.incarnation))
            self._connection.stopping.wait(GOODBYE_TIMEOUT_S)  # its last words are heard before its end is
        self._connection.close()
        return kind is not None and issubclass(kind, Stopping)

    # ── every role ─────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def launch(self) -> Launch:
        """Which life this is, and under which tag; of a process that is kept warm, inside ``with`` what it became."""
        return self._connection.launch

    @property
    def rank(self) -> int:
        """Of this process among the ``world`` that its replica consists of (``ranks`` in job.toml): only the manager
        knows, whatever Slurm's variables say. Inside ``with``."""
        return self._connection.rank

    @property
    def world(self) -> int:
        return self._connection.world

    @contextmanager
    def phase(self, name: str, waits_for: str | None = None) -> Iterator[None]:
        """Say what this role is doing: it decides what silence means (:mod:`rrl.core.phases`)."""
        self._connection.faults.trigger()
        self._connection.probes.answer()
        before = self._connection.phase
        if before[0] == "starting":
            before = ("between", None)  # whoever has been in a phase has started
        self._connection.set_phase(name, self._target(waits_for or phase_named(name).waits_for))
        try:
            yield
        finally:
            self._connection.set_phase(*before)

    @contextmanager
    def blocked_on(self, replica: ReplicaId) -> Iterator[None]:
        """Say that inside it is ``whom`` that this process waits for, whatever its phase: in a gang the first member
        asks the store for all, and while the store is away none of the others is to be suspected."""
        self._connection.blocked_on = replica
        try:
            yield
        finally:
            self._connection.blocked_on = None

    def _target(self, waits_for: str | None) -> ReplicaId | None:
        """The replica meant by ``role`` or ``role/index``; None where a role has several and none is named."""
        if waits_for is None or "/" in waits_for:
            return None if waits_for is None else ReplicaId(waits_for)
        return replica_id(waits_for, 0) if self._table(waits_for).get("replicas") == 1 else None

    def _table(self, role: str) -> dict[str, Any]:
        """What job.toml says of a role, with every default."""
        table: dict[str, Any] = self.job.get("commands", {}).get(role) or self.job["roles"].get(role, {})
        return table

    def progress(self, units: int = 1) -> None:
        """So much more work is done (tokens, samples, steps: any unit, always the same)."""
        self._connection.progress(units)

    def note(self, text: str) -> None:
        """Show ``text`` beside this replica in ``rrl status`` until the next note; empty: nothing. Only for people."""
        self._connection.note = text

    def on_probe(self, handler: Callable[[], object]) -> None:
        """Have ``handler`` do a bit of real work whenever the run suspects this role, and return in a few words what it
        did; what it raises is the reason for a restart, and so is no answer in time. It runs in the thread that calls
        this, at that thread's next call of the API (:meth:`phase`, :meth:`progress`, :meth:`new_weights`,
        :meth:`answer_probe`, or while it waits for the store): a role that is stuck elsewhere does not answer."""
        self._connection.probes.on_probe(handler)

    def answer_probe(self) -> None:
        """For a long stretch of work without any other call of the API."""
        self._connection.probes.answer()

    @property
    def stopping(self) -> threading.Event:
        """Set once this role is asked (by the manager, or by SIGTERM) to finish what is in hand and leave."""
        return self._connection.stopping

    @property
    def node(self) -> NodeName:
        """Where this process runs."""
        return self._connection.node

    @property
    def host(self) -> str:
        """The address to listen at."""
        return self._connection.host

    @property
    def peers(self) -> Peers | None:
        return self._connection.peers

    def on_peers(self, callback: Callable[[Peers], None]) -> None:
        """Call back (in the link's thread) whenever it changes who is believed."""
        self._connection.on_peers(callback)

    def announce(self, listens: str) -> None:
        """Tell everybody that this replica offers a service at ``tcp://host:port``."""
        self._connection.announce(listens)

    # ── trainer ────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def committed(self) -> int | None:
        """The newest committed step, or None: a fresh model."""
        self._fetch_committed()
        return self._committed

    @property
    def committed_manifest(self) -> dict[str, Any] | None:
        """What was committed with it: ``folder`` relative to the run directory, ``files`` with their digests."""
        self._fetch_committed()
        return self._manifest

    def committed_files(self) -> dict[str, Path] | None:
        """The files committed with it, by name, each compared with its digest; None: a fresh model. Raises
        DamagedCheckpoint."""
        manifest = self.committed_manifest
        return None if manifest is None else verified(self.run_dir.path, manifest)

    def batches(self, after: int | None = None) -> Iterator[Batch]:
        """The batches of the steps after ``after``, each numbered by its step; after a restart the same ones again.

        Ends after the job's last step, or when asked to stop."""
        for number in range((after or 0) + 1, self.job["run"]["steps"] + 1):
            packed = self.packed_batch(number)
            if packed is None:
                return
            batch = decode(packed)
            del packed
            yield batch
            self.progress(1)

    def packed_batch(self, number: int) -> PackedBatch | None:
        """What :meth:`batches` gives for one step, as it came: 8 bytes a token, for who hands it on. None when asked to
        stop."""
        batch = None
        with self.phase("wait_data"):
            while batch is None:
                if self.stopping.is_set():
                    return None
                try:
                    batch = self._connection.call_store(self._connection.store.batch(number, STORE_WAIT_S))
                except Stopping:  # what is done and not committed is still in its hands
                    return None
        self._uncommitted[number] = _UncommittedBatch(
            batch.digest, _batch_metrics(batch, self.job["sampling"].get("staleness"))
        )
        return batch

    def checkpoint_dir(self, number: int) -> Path:
        """A fresh folder for this attempt at step ``number``: no attempt ever writes into another's."""
        return fresh_folder(self.run_dir.checkpoints, number, self.launch.incarnation.number)

    def commit(
        self, number: int, files: Sequence[Path], metrics: dict[str, float] | None = None,
        digests: Mapping[str, Digest] | None = None,
    ) -> None:  # fmt: skip
        """From here the step counts: one record commits the checkpoint and the batch's consumption.

        ``files`` are made durable first, but for those in ``digests`` (by name), which are durable and known: in a gang
        each member writes its own, and only the first one commits. May be called in another thread while
        :meth:`batches` goes on, in the order of the steps: so many may be done and not committed as ``uncommitted`` in
        job.toml says, then there is no next batch. Raises Fenced when a newer life has taken over."""
        self._connection.faults.trigger(working=True)
        bound = self._uncommitted.get(number)
        if bound is None:
            raise ValueError(
                f"step {number} is committed without its batch; batches() gave {sorted(self._uncommitted)}"
            )
        known = digests or {}
        make_durable([path for path in files if path.name not in known])
        manifest = describe_files(self.run_dir.path, files, known)
        reported_metrics = {**bound.metrics, **(metrics or {})}
        self._connection.call_store(self._connection.store.commit(number, manifest, bound.digest, reported_metrics))
        self._committed, self._manifest = number, manifest
        for old in [each for each in list(self._uncommitted) if each <= number]:
            self._uncommitted.pop(old)
        self._connection.on_commit(number, reported_metrics)

    def publish(self, number: int, tensors: Sequence[tuple[str, str, tuple[int, ...], memoryview]]) -> None:
        """Serve these weights as the version of step ``number`` until replaced. ``tensors``: name, dtype, shape, bytes
        (:func:`rrl.roles.models.tensors.pack` makes them of a state dict)."""
        described = [(name, dtype, shape, data.nbytes) for name, dtype, shape, data in tensors]
        self.publish_each(number, described, (data for *_, data in tensors))

    def publish_each(
        self, number: int, described: Sequence[tuple[str, str, tuple[int, ...], int]], contents: Iterable[memoryview]
    ) -> None:
        """As :meth:`publish`, for weights that are not all here at once: ``described`` says name, dtype, shape and
        bytes of each; ``contents`` gives them in this order, and each is copied before the next one is asked for."""
        specs, nbytes = layout(described)
        flat = self._connection.weights.allocate(nbytes)
        version = Version(number, self.launch.incarnation.number)
        chunk = int(self.job["transport"]["chunk"])
        with ManifestBuilder(version, described, flat, self.keys.secret, chunk) as describing:
            for spec, data in zip(specs, contents, strict=True):
                _copy(flat[spec.offset : spec.offset + spec.nbytes], data.cast("B") if data.format != "B" else data)
                describing.mark_filled(spec.offset + spec.nbytes)
            manifest = describing.sign()
        self._connection.weights.offer(manifest, flat)
        self._connection.announce_version(version)

    # ── rollout ────────────────────────────────────────────────────────────────────────────────────────────────────
    def new_weights(self) -> WeightUpdate | None:
        """The newest complete version if it is not the one you got last; never blocks."""
        self._connection.probes.answer()
        held = self._connection.weights.current()
        if held is None or held.manifest.version == self._loaded:
            return None
        self._loaded = held.manifest.version
        return WeightUpdate(held)

    def work(self, at_most: int = 64) -> Iterator[WorkLease]:
        """Leased trajectories, again and again; ends when asked to stop. Weights come first: nothing is leased before
        a complete version is here."""
        if not self._have_weights():
            return
        while not self.stopping.is_set():
            with self.phase("wait_work"):
                items = self._connection.call_store(self._connection.store.lease(at_most, STORE_WAIT_S))
            if items:
                yield WorkLease(self._connection, items)

    def lease(self, at_most: int, *, wait: bool = True) -> tuple[Item, ...]:
        """For a rollout that takes work while it has some: up to ``at_most`` further trajectories, to be given to
        :meth:`append` until they are complete. None where there are none: with ``wait`` within :data:`PATIENCE` s, in
        phase ``wait_work``; else right away, and the phase stays what it is. Weights come first, as in :meth:`work`,
        which is not for the same program: it leases without regard to what this one gave."""
        if not self._have_weights():
            return ()
        with self.phase("wait_work") if wait else nullcontext():
            asked = self._connection.store.lease(at_most, STORE_WAIT_S if wait else 0.0, sorted(self._leased))
            items = self._connection.call_store(asked)
        self._leased.update(item.trajectory for item in items)
        return items

    def append(self, segments: Sequence[Segment], finished: Sequence[int] = ()) -> tuple[int, ...]:
        """As :meth:`Work.append`, for what :meth:`lease` gave."""
        lost = WorkLease(self._connection, ()).append(segments, finished)
        self._leased.difference_update(finished, lost)
        return lost

    def _have_weights(self) -> bool:
        """Waits for the first complete version; False when asked to stop before."""
        if self._connection.weights.current() is None:
            with self.phase("wait_weights"):
                while self._connection.wait_version(STORE_WAIT_S) is None:
                    if self.stopping.is_set():
                        return False
        return True

    # ── reward ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def scoring(self, at_most: int = 256) -> Iterator[ScoringLease]:
        """Complete trajectories to score, again and again; ends when asked to stop."""
        while not self.stopping.is_set():
            with self.phase("wait_work"):
                items = self._connection.call_store(self._connection.store.lease_scoring(at_most, STORE_WAIT_S))
            if items:
                yield ScoringLease(self._connection, items)

    def _fetch_committed(self) -> None:
        if not self._committed_fetched:
            state = self._connection.call_store(self._connection.store.committed())
            self._committed, self._manifest = state.number, state.manifest
            self._committed_fetched = True
            if state.number is not None:  # whoever committed it may have died before the manager heard of it
                self._connection.on_commit_found(state.number)


def _batch_metrics(batch: PackedBatch, staleness: int | str | None) -> dict[str, float]:
    """The metrics of a batch. Ages are in weight versions: 0 for a token of the newest weights when it was bound."""
    rewards = [trajectory.reward for trajectory in batch.trajectories]
    tokens = Counter[int]()
    for trajectory in batch.trajectories:
        for count, step, _ in trajectory.runs:
            tokens[max(0, batch.number - 1 - step)] += count
    metrics = {"reward": sum(rewards) / max(1, len(rewards)), "token_age_run_max": float(batch.max_age)}
    if tokens:
        metrics["token_age_p50"], metrics["token_age_max"] = float(_median(tokens)), float(max(tokens))
    if isinstance(staleness, int):
        metrics["stale_groups"] = float(batch.stale)
        metrics["stale_share"] = batch.stale / (batch.stale + batch.number * len(batch.groups))
    return metrics


def _median(counts: Counter[int]) -> int:
    """The (lower) median of the keys, each counted so often."""
    before, half = 0, counts.total() / 2
    for value in sorted(counts):
        before += counts[value]
        if before >= half:
            return value
    raise ValueError("nothing is counted")


def _copy(into: memoryview, data: memoryview) -> None:
    """In slices, between which other threads run."""
    for start in range(0, len(into), _COPY_SLICE_BYTES):
        part = slice(start, start + _COPY_SLICE_BYTES)
        into[part] = data[part]


def join() -> Worker:
    """Take part in the run that started this process::

        with rrl.join() as me:
            ...

    Where the job keeps processes warm (``warm`` in job.toml), a trainer or a rollout is started before it is needed and
    waits at ``with``: whatever comes before it (imports, building the model or the engine) is then done in advance. A
    trainer must not touch a GPU before it: which one is this process's is known only then; a rollout has its own from
    the start. ``me.launch.standby`` says before ``with`` whether this is such a process. Outside of a run this ends the
    process with exit code 2 and says so."""
    path = os.environ.get(LAUNCH_ENV)
    if path is None:
        exit_invalid_config(f"{LAUNCH_ENV} is not set: this program is a role's command; rrl submit starts it")
    start_logging(stamped=False)
    launch = read_launch(Path(path))
    run = RunDir(Path(launch.run_dir))
    return Worker(launch, run, RunKeys.load(run.keys))
