"""The worker API, through which a trainer, a rollout or any other role takes part in a run.

Every role uses :func:`join`, :meth:`Worker.phase` and :meth:`Worker.progress`. A trainer also uses batches or parts,
commit and publish; a rollout also uses new_weights and work. All calls block. A background thread
(:mod:`rrl.roles.worker.connection`) exchanges the messages, so that heartbeats continue while the role computes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, get_args

from ...core.launch import HEARTBEAT_INTERVAL_ENV, LAUNCH_ENV, Launch, read_launch, read_run_spec
from ...core.log_lines import start_logging
from ...core.phases import BETWEEN, STOPPING
from ...core.run_dir import OwnPath, RunDir
from ...core.run_spec import RolloutSettings, RunSpec
from ...core.shares import checked_share
from ...core.text import exit_invalid_config, shortened
from ...core.types import DataReport, NodeName, ReplicaId, Version
from ...transport.keys import RunKeys
from ...transport.messages import Evaluated, Goodbye, Peers
from ..checkpoints.folders import Digest, as_paths, exact_folder, fresh_folder, share_of, verified
from ..checkpoints.folders import describe as describe_files
from ..launcher.end_report import report_uncaught_exceptions
from ..launcher.process_group import allow_inspection, restore_priority
from ..trajectories.batches import Batch, Part
from ..trajectories.types import A, AwaitBalance, Balance, By, GetCommitted, Item, Kind, LeaseScoring, P, Segment, Share
from . import rendezvous
from .connection import ManagerConnection, Stopping
from .publishing import checked_tensors, copies, publish_part
from .status.episode_status import EpisodeStatus
from .status.external_waits import waiting
from .status.work_status import CurrentPhase, entered_phase
from .step_data import StepData
from .work_items import LeasedTrajectories, NewWeights, PendingAppend, PendingLease, ScoringLease, WorkLease

if TYPE_CHECKING:
    from .episode_work import Episode

STORE_WAIT_S = 1.0
"""Seconds that one request waits at the store before it is repeated, so that the worker notices a stop request."""
LOOPBACK = "127.0.0.1"
"""Address at which a process with agents serves their endpoint. No proxy can reach it."""
_NO_PROXY = ("no_proxy", "NO_PROXY")
"""Variables with the hosts that HTTP clients reach without a proxy. Some clients read only one of them."""
GOODBYE_TIMEOUT_S = 60.0
"""Seconds for which a worker that has finished its work waits for the manager's stop request."""


class Worker:
    """This process as one incarnation of a replica. Created by :func:`join`; to be used as a context manager."""

    def __init__(self, launch: Launch, run: RunDir, keys: RunKeys) -> None:
        self.run_dir = run
        self.keys = keys
        self.job: RunSpec = read_run_spec(run.run_spec)
        """The whole job with every default: ``me.job.sampling.temperature``, ``me.job.trainer.learning_rate``."""
        role, heartbeat = self.job.role(launch.role), float(os.environ.get(HEARTBEAT_INTERVAL_ENV, "1"))
        self.rollout: RolloutSettings = self.job.rollouts.get(role.name, RolloutSettings())
        """The settings of this process's rollout pool: ``me.rollout.lease``."""
        self.options: Mapping[str, Any] = role.options
        """The ``options`` of this role's ``[commands.NAME]``; empty if the role is not defined there."""
        self._built_in = role.built_in
        self._rendezvous: object = None
        """Torch's store, if this process hosts the one of its gang."""
        self._connection = ManagerConnection(launch, run, keys, heartbeat, self.job.transport, role.traits)
        self._data = StepData(self._connection, self.job.sampling, lambda: self.phase("wait_data"))
        self.uncommitted = self._data.uncommitted
        """The uncommitted steps whose data this trainer has."""
        self._loaded: Version | None = None
        self._leased = LeasedTrajectories(self.job.sampling.extras)
        """Trajectories returned by :meth:`work` or :meth:`lease`."""
        self._committed_fetched = False
        self._committed: int | None = None
        self._manifest: dict[str, Any] | None = None

    def __enter__(self) -> Worker:
        """Wait until the manager has welcomed this incarnation, and set the variables of torch.distributed.

        A standby process waits here, for minutes or days, until it is promoted. A rank waits for its rank 0
        (:mod:`.rendezvous`). If a stop is requested during these waits, this raises SystemExit.
        """
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):  # so a KeyboardInterrupt always comes from the role's code
                signal.signal(number, lambda *_: self.stopping.set())
        allow_inspection()
        started_as_standby = self.launch.standby
        try:
            self._connection.start()
            if started_as_standby:
                restore_priority()
            self._rendezvous = rendezvous.prepare(self._connection, self._built_in)
        except Stopping:
            self._connection.close()
            raise SystemExit(0) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        if kind is None and not (self._data.evaluated_at_end(self.job) or self._connection.stopping.is_set()):
            self._connection.set_phase(STOPPING)
            self._connection.send(Goodbye(self.launch.incarnation))
            self._connection.stopping.wait(GOODBYE_TIMEOUT_S)  # the manager must get the Goodbye before the exit
        self._connection.close()
        self._rendezvous = None
        return kind is not None and issubclass(kind, Stopping)

    # ── every role ─────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def launch(self) -> Launch:
        """The launch of this process: incarnation, tag and node. After a promotion it has the new incarnation."""
        return self._connection.launch

    @property
    def rank(self) -> int:
        """The rank of this process among the ``world`` processes of its replica; valid inside the ``with`` block.

        The manager assigns it; Slurm's variables may differ.
        """
        return self._connection.rank

    @property
    def world(self) -> int:
        """The number of processes of this replica (``ranks`` in job.toml). It is valid inside the ``with`` block."""
        return self._connection.world

    @contextmanager
    def phase(self, name: str, waits_for: str | None = None) -> Iterator[None]:
        """Report what this role is doing inside the block.

        The phase decides how long the role may go without progress (:mod:`rrl.core.phases`).

        Args:
            name: a phase of :mod:`rrl.core.phases`, or a phase that job.toml defines.
            waits_for: what this process waits for: a replica (``role/index``), a kind of roles (``rollout``), or a
                command by its name; None for the phase's default.
        """
        self._connection.faults.trigger()
        self._connection.probes.answer()
        before = self._connection.status.phase
        if before.name == "starting":
            before = CurrentPhase(BETWEEN)  # a role that has entered a phase has finished starting
        self._connection.set_phase(*entered_phase(self.job, name, waits_for))
        try:
            yield
        finally:
            self._connection.set_phase(*before)

    def waiting(self, service: str) -> AbstractContextManager[None]:
        """Report inside the block that this role waits for ``service`` outside of the run; see ``rrl.waiting``."""
        return waiting(service)

    def blocked_on(self, replica: ReplicaId) -> AbstractContextManager[None]:
        """Report that this process waits for ``replica`` inside the block, whatever its phase is.

        For example, only rank 0 of a gang commits. While the store does not respond, the other members wait for rank 0
        and must not be suspected.
        """
        return self._connection.status.blocked_on_replica(replica)

    def idle(self, cause: str) -> AbstractContextManager[None]:
        """Count the time inside the block as idle: this thread waits for ``cause``, one word that ``rrl status`` shows.

        The phase, and what the manager expects of this role, stay the same. The wait is counted only if this thread
        entered the current phase. Waits for the store are counted without this method.
        """
        return self._connection.status.clock.idle(cause)

    def progress(self, units: int = 1) -> None:
        """Report that ``units`` more tokens, samples or steps are finished; a role must always use the same unit."""
        self._connection.progress(units)

    def note(self, text: str) -> None:
        """Show ``text`` beside this replica in ``rrl status`` until the next note; an empty text removes it."""
        self._connection.status.note = text

    def log(self, **values: float) -> None:
        """Report numbers that belong to no training step; metrics and trackers get the newest value of each name."""
        self._connection.status.log(values)

    def report_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Report the result of evaluating a step's weights; may be repeated. Only the store calls this method."""
        self._connection.send(Evaluated(self.launch.incarnation, step, metrics))

    def report_data(self, report: DataReport) -> None:
        """Report for 5 s what the store knows about the data that the trainer needs next. Only the store calls this."""
        self._connection.status.report_data(report)

    def on_probe(self, handler: Callable[[], object]) -> None:
        """Register ``handler``, which answers the probes that the manager sends when it suspects this role.

        The handler does a small piece of real work and returns a short text about it. If the handler raises, or does
        not return in time, the role is restarted. The handler runs in the thread that registers it: at that thread's
        next call of the API (:meth:`phase`, :meth:`progress`, :meth:`new_weights`, :meth:`answer_probe`), or while it
        waits for the store or for its first weights. So a role that hangs elsewhere does not answer.
        """
        self._connection.probes.on_probe(handler)

    @property
    def probed(self) -> bool:
        """Whether a probe waits for :meth:`answer_probe`, for a role whose answer takes more than one call."""
        return self._connection.probes.pending

    def answer_probe(self) -> None:
        """Answer a pending probe. Call this regularly during long work without any other call of the API."""
        self._connection.probes.answer()

    @property
    def stopping(self) -> threading.Event:
        """An event that is set when the manager, or SIGTERM, requests this role to finish its current work and exit."""
        return self._connection.stopping

    @property
    def node(self) -> NodeName:
        """The name of the node on which this process runs."""
        return self._connection.node

    @property
    def host(self) -> str:
        """The address on which services of this process must listen."""
        return self._connection.host

    @property
    def peers(self) -> Peers | None:
        """The newest peer directory, or None if none has arrived yet."""
        return self._connection.peers

    def on_peers(self, callback: Callable[[Peers], None]) -> None:
        """Call ``callback`` with every new peer directory, in the thread of the connection."""
        self._connection.on_peers(callback)

    def announce(self, listens: str) -> None:
        """Publish the address ``tcp://host:port`` of this replica's service in the peer directory."""
        self._connection.announce(listens)

    # ── trainer ────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def committed(self) -> int | None:
        """The number of the newest committed step, or None before the first commit."""
        self._fetch_committed()
        return self._committed

    @property
    def committed_manifest(self) -> dict[str, Any] | None:
        """The manifest of the newest commit: ``folder`` relative to the run directory, ``files`` with their digests."""
        self._fetch_committed()
        return self._manifest

    def committed_files(self, share: tuple[int, int] | None = None) -> dict[str, Path] | None:
        """Return the files of the newest committed checkpoint, or None before the first commit.

        The keys are the paths relative to the checkpoint's folder. With ``share`` = ``(rank, world)`` only the digests
        of this rank's share of the files are compared, about equally many bytes for each rank; all files are returned.

        Raises:
            DamagedCheckpoint: a file is missing or differs from its committed digest.
            ValueError: there is no such share.
        """
        manifest = self.committed_manifest
        return None if manifest is None else self._verified(manifest, share)

    def committed_folder(self, share: tuple[int, int] | None = None) -> Path | None:
        """Return a folder with exactly the files of the newest committed checkpoint, or None before the first commit.

        It is the folder of the checkpoint, or, if this has other files too, a folder of hard links in it. Do not change
        it. ``share`` and the exceptions are those of :meth:`committed_files`.
        """
        if (manifest := self.committed_manifest) is None:
            return None
        folder = exact_folder(self.run_dir.path, manifest)
        self._verified({**manifest, "folder": folder}, share)
        return folder

    def _verified(self, manifest: dict[str, Any], share: tuple[int, int] | None) -> dict[str, Path]:
        return verified(self.run_dir.path, manifest, None if share is None else share_of(manifest["files"], share))

    def batches(
        self, after: int | None = None, share: tuple[int, int] | None = None, by: By = "group"
    ) -> Iterator[Batch]:
        """Yield the batches of the steps after ``after``; ``batch.number`` is the step.

        After a restart, steps that were not committed get the same batches again. The iteration ends after the job's
        last step or when a stop is requested.

        Args:
            after: the step before the first one.
            share: (rank, world), such as ``(me.rank, me.world)``: receive only the tokens of this share, and all other
                values of all trajectories. All ranks must pass the same world, but several may pass the same rank.
            by: what the ranks divide: whole groups, or sequences.

        Raises:
            ValueError: ``share`` or ``by`` is wrong, or another rank has passed another world or ``by``.
        """
        return self._parts(_check_step("batches", after or 0), _checked(share, by), in_parts=False)

    def parts(self, after: int | None = None, share: tuple[int, int] | None = None, by: By = "group") -> Iterator[Part]:
        """Yield the batch of each step after step ``after`` in parts: training begins before the batch is complete.

        With ``[sampling] stream = true``, a part has the groups that are complete when it is requested; otherwise each
        step is one part. ``part.number`` is the step and ``part.index`` the number of the part in it, from 0;
        ``part.last`` is True for the part that completes the step, which must then be committed (:meth:`commit`). Sums
        over the parts of a step are sums over its batch. After a restart, steps that were not committed get the same
        parts again, from part 0. The iteration ends after the job's last step or when a stop is requested.

        The arguments are those of :meth:`batches`. A part may have fewer groups than there are ranks; then some ranks
        get no tokens, unless ``by`` is ``"sequence"``.
        """
        return self._parts(_check_step("parts", after or 0), _checked(share, by), in_parts=True)

    def _parts(self, after: int, share: Share | None, *, in_parts: bool) -> Iterator[Part]:
        number, index = after + 1, 0
        while number <= self.job.steps:
            part = self._data.part(number, index if in_parts else None, share)
            if part is None:
                return
            last = part.last
            yield part
            del part  # before the next one is received
            self.progress(1)
            number, index = (number + 1, 0) if last else (number, index + 1)

    def await_balance(self, number: int, train_s: float, back_s: float, wait: float = 0.0) -> Balance:
        """Return whether step ``number``, of which nothing is trained yet, is balanced; only rrl's trainer calls this.

        With a ``wait`` (s) the trainer has lent its GPUs, and the call returns at balance, at the latest after this
        time. The arguments are those of :class:`.AwaitBalance`. Raises Stopping if a stop is requested meanwhile.
        """
        request = self._connection.store.ask(AwaitBalance, number, train_s, back_s, wait)
        return self._connection.call_store(request)

    def checkpoint_dir(self, number: int) -> Path:
        """Create a new folder for this attempt at step ``number``; no other attempt writes into it."""
        _check_step("checkpoint_dir", number)
        return fresh_folder(self.run_dir.checkpoints, number, self.launch.incarnation.number)

    def digests(self, files: Sequence[Path]) -> dict[str, Digest]:
        """Make files of a checkpoint durable; return their digests by path relative to the checkpoint's folder.

        In a gang each rank calls this for what it has written, and rank 0 gives the digests of all ranks to
        :meth:`commit`, which then reads none of these files. ``files`` and the exceptions are those of :meth:`commit`.
        """
        described: dict[str, Digest] = describe_files(self.run_dir.path, as_paths(files))["files"]
        return described

    def commit(
        self,
        number: int,
        files: Sequence[Path],
        metrics: dict[str, float] | None = None,
        digests: Mapping[str, Digest] | None = None,
    ) -> None:
        """Commit a step: one record makes its checkpoint valid, and marks the batches up to this step as consumed.

        Steps must be committed in order, at least every ``checkpoint_every``-th step (job.toml). For a step without a
        commit of its own, ``me.uncommitted.trained`` adds metrics. Another thread may call this method while
        :meth:`batches` or :meth:`parts` continues. The key ``uncommitted`` of job.toml limits how many finished steps
        may wait for the commit of an earlier step; at the limit, the iteration waits.

        Args:
            number: the step, as in ``batch.number``.
            files: the checkpoint's files and folders, all below one folder that :meth:`checkpoint_dir` returned. All
                files in a folder belong to the checkpoint, at any depth. They are made durable first.
            metrics: metrics of the step. The store adds its own (docs/glossary.md). A metric with the name of one of
                those, such as ``reward``, is reported as ``trainer_reward``.
            digests: results of :meth:`digests`, of files that are already durable.

        Raises:
            ValueError: this is not rank 0, the step or its last part was not returned, or the step is committed; or a
                file is no regular file of the checkpoint's folder.
            Fenced: a newer incarnation has taken over.
        """
        self._connection.faults.trigger(working=True)
        if (me := self.launch.incarnation) != me.gang:
            raise ValueError(f"me.commit({number}, ...) in rank {self.rank}: only rank 0 commits, for all ranks")
        step = self.uncommitted.with_metrics(number, metrics or {})
        manifest = describe_files(self.run_dir.path, as_paths(files), digests or {})
        earlier = self.uncommitted.before(number)
        request = self._connection.store.commit(number, manifest, step.digest, step.metrics, earlier)
        steps = self._connection.call_store(request)
        self._committed, self._manifest = number, manifest
        self.uncommitted.remove_through(number)
        self._connection.on_commit(steps)

    def publish(self, number: int, tensors: Sequence[tuple[str, str, tuple[int, ...], memoryview]]) -> None:
        """Serve weights as the version of step ``number`` until the next version replaces them.

        Args:
            number: the training step that produced the weights.
            tensors: (name, dtype, shape, bytes) of each tensor; :func:`rrl.pack` makes them from a state dict.

        Raises:
            ValueError: this is not rank 0; a tensor has another dtype or shape than in the version before, or the
                version has other tensors; or the step was published with other contents. The previous version stays
                current.
        """
        self.publish_shard(number, tensors, part=0, of=1)

    def publish_shard(
        self, number: int, tensors: Sequence[tuple[str, str, tuple[int, ...], memoryview]], *, part: int, of: int
    ) -> None:
        """Serve one of ``of`` parts of the version of step ``number``; each part is published by another rank.

        A part has whole tensors that no other part has. Rank 0 must publish a part. The call returns once all parts
        are published; only then do rollouts receive the version. They pull each part from its rank or from each other.

        Raises:
            ValueError: as for :meth:`publish`; or the part is published by another rank, ``of`` differs from that of
                another rank, or a tensor is in two parts. Rank 0 raises it, if the ranks contradict each other.
        """
        tensors = checked_tensors(number, tensors)
        described = [(name, dtype, shape, data.nbytes) for name, dtype, shape, data in tensors]
        with nullcontext() if of == 1 else self.phase("publish"):
            publish_part(
                self._connection,
                self.job.transport.chunk,
                number,
                described,
                copies(data for *_, data in tensors),
                part,
                of,
            )

    def publish_each(
        self, number: int, described: Sequence[tuple[str, str, tuple[int, ...], int]], contents: Iterable[memoryview]
    ) -> None:
        """Serve weights like :meth:`publish` without holding all tensors in memory at the same time.

        Args:
            number: the training step that produced the weights.
            described: (name, dtype, shape, size in bytes) of each tensor.
            contents: the tensors' bytes in the same order. Each tensor is copied before the next one is requested.
        """
        publish_part(self._connection, self.job.transport.chunk, number, described, copies(contents))

    def publish_written(
        self,
        number: int,
        described: Sequence[tuple[str, str, tuple[int, ...], int]],
        writes: Iterable[Callable[[memoryview], None]],
    ) -> None:
        """Serve weights like :meth:`publish_each` without copying them.

        ``writes`` has, for each tensor in the same order, a function that writes the tensor into the given memory.
        """
        publish_part(self._connection, self.job.transport.chunk, number, described, writes)

    # ── rollout ────────────────────────────────────────────────────────────────────────────────────────────────────
    def new_weights(self, *, again: bool = False) -> NewWeights | None:
        """Return the newest complete version, or None if the previous call returned it already. Never blocks.

        With ``again`` it is returned in any case, for an engine that has freed its weights.
        """
        self._connection.probes.answer()
        stored = self._connection.weights.current()
        if stored is None or (stored.manifest.version == self._loaded and not again):
            return None
        self._loaded = stored.manifest.version
        return NewWeights(stored)

    def work(self, at_most: int = 64) -> Iterator[WorkLease]:
        """Yield leases of up to ``at_most`` trajectories until a stop is requested.

        Nothing is leased before the first complete weight version has arrived.
        """
        if not self._have_weights():
            return
        while not self.stopping.is_set():
            with self.phase("wait_work"):
                items = self._connection.call_store(self._connection.store.lease(at_most, STORE_WAIT_S))
            if items:
                self._leased.add(items)
                yield WorkLease(self._connection, items, self._leased)

    def lease(self, at_most: int, *, wait: bool = True) -> tuple[Item, ...]:
        """Lease further trajectories, for a rollout that takes new work before it has finished its earlier work.

        Extend them with :meth:`append` until they are complete. Do not mix this with :meth:`work`, which ignores the
        leases of this method. Nothing is leased before the first complete weight version has arrived.

        With ``wait``, the call waits up to :data:`STORE_WAIT_S` for work, in phase ``wait_work``; otherwise it returns
        at once and keeps the phase. Returns an empty tuple if there is no work, or if a stop is requested.
        """
        if not self._have_weights():
            return ()
        with self.phase("wait_work") if wait else nullcontext():
            request = self._connection.store.lease(at_most, STORE_WAIT_S if wait else 0.0, self._leased.ids)
            self._leased.add(items := self._connection.call_store(request))
        return items

    def append(self, segments: Sequence[Segment], finished: Sequence[int] = ()) -> tuple[int, ...]:
        """Add tokens to trajectories that :meth:`lease` returned; see :meth:`WorkLease.append`."""
        return WorkLease(self._connection, (), self._leased).append(segments, finished)

    def hand_over(self, segments: Sequence[Segment], finished: Sequence[int] = ()) -> None:
        """Append like :meth:`append`, and end all leases of this process, so that other rollouts continue the work.

        Only guests call this method. A :class:`PendingAppend` must be finished before. A :class:`PendingLease` that is
        open is answered then; if it has leased anything, this method must be called again.
        """
        PendingAppend(self._connection, self._leased, segments, finished, 0, hands_over=True).finish()

    def start_append(self, segments: Sequence[Segment], finished: Sequence[int] = (), lease: int = 0) -> PendingAppend:
        """Start an append and, with it, a lease of up to ``lease`` trajectories; see :class:`PendingAppend`."""
        return PendingAppend(self._connection, self._leased, segments, finished, lease)

    def start_lease(self, at_most: int) -> PendingLease:
        """Start a lease that waits up to :data:`STORE_WAIT_S` at the store; see :class:`PendingLease`."""
        return PendingLease(self._connection, self._leased, at_most, STORE_WAIT_S)

    def _have_weights(self) -> bool:
        """Wait for the first complete weight version; return False if a stop is requested first.

        Raises RuntimeError outside of the ``with`` block: without a connection no version would ever arrive.
        """
        _ = self._connection.store
        if self._connection.weights.current() is None:
            with self.phase("wait_weights"):
                while self._connection.wait_version(STORE_WAIT_S) is None:
                    self.answer_probe()
                    if self.stopping.is_set():
                        return False
        return True

    # ── reward ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def scoring(self, at_most: int = 256) -> Iterator[ScoringLease]:
        """Yield leases of up to ``at_most`` complete trajectories to score until a stop is requested."""
        while not self.stopping.is_set():
            with self.phase("wait_work"):
                leased = self._connection.call_store(self._connection.store.ask(LeaseScoring, at_most, STORE_WAIT_S))
            if leased is not None and leased.items:
                yield ScoringLease(self._connection, leased.items)

    # ── agents ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def episodes(self, at_most: int | None = None) -> Iterator[Episode]:
        """Yield episodes for agents of this process until a stop is requested.

        Each has ``item``, ``base_url``, ``api_key`` and ``attempt``, and must be ended by its ``finish(reward)`` or
        ``fail(why)``, which any thread may call. While ``at_most`` episodes are not ended, the iteration waits. It
        reports phases and progress meanwhile. The job must have ``[roles.agents] per = "replica"``.

        Args:
            at_most: Maximum number of episodes at the same time; None selects ``concurrency`` of the job.
        """
        from .episode_work import EpisodeWork  # imported here: the packages of the endpoint are optional

        return EpisodeWork(self._connection, self.job, self.episode_status(), self.ask_store, at_most).lease()

    def episode_status(self) -> EpisodeStatus:
        """Return an object that reports phase and progress of a process whose own code makes attempts at episodes."""
        return EpisodeStatus(self.job, self._connection.set_phase, self._connection.count)

    async def ask_store(self, kind: Kind[P, A], *arguments: P.args, **named: P.kwargs) -> A:
        """Send a request to the store (:meth:`.TrajectoryClient.ask`), and wait in the caller's event loop."""
        request = self._connection.store.ask(kind, *arguments, **named)
        return await asyncio.wrap_future(self._connection.submit(request))

    def _fetch_committed(self) -> None:
        if not self._committed_fetched:
            state = self._connection.call_store(self._connection.store.ask(GetCommitted))
            self._committed, self._manifest = state.number, state.manifest
            self._committed_fetched = True
            if state.number is not None:  # the incarnation that committed this step may have died before its report
                self._connection.on_commit_found(state.number)


def join() -> Worker:
    """Take part in the run that started this process.

    Use the result as a context manager::

        me = rrl.join()
        with me:
            ...

    With ``[roles.trainer] warm = true`` in job.toml, a standby process of the trainer is started before it is needed
    and waits at ``with``. The code before ``with`` (imports, building the model) then runs in advance. Before ``with``,
    ``me.launch.standby`` tells whether this process is a standby: its code must not use a GPU there, since the process
    gets its GPUs at its promotion.

    Outside of a run, this prints one line and ends the process with exit code 2.
    """
    path = os.environ.get(LAUNCH_ENV)
    if path is None:
        exit_invalid_config(f"{LAUNCH_ENV} is not set: rrl.join() works only in a command that a run of rrl started")
    start_logging(stamped=False)
    _bypass_proxies(LOOPBACK)
    launch = read_launch(OwnPath(path))
    report_uncaught_exceptions(launch)
    run = RunDir(Path(launch.run_dir))
    return Worker(launch, run, RunKeys.load(run.keys))


def _bypass_proxies(host: str) -> None:
    """Except a host from the HTTP proxies that the environment names for this process and its children."""
    given = [each.strip() for name in _NO_PROXY for each in os.environ.get(name, "").split(",")]
    value = "*" if "*" in given else ",".join(dict.fromkeys([*filter(None, given), host]))
    os.environ.update(dict.fromkeys(_NO_PROXY, value))


def _check_step(call: str, number: int) -> int:
    """Return the number of a step unchanged. A request with anything else would be dropped by the store."""
    if type(number) is not int or number < 0:
        raise ValueError(f"me.{call}: {shortened(number)} is not the number of a step, such as batch.number")
    return number


def _checked(share: tuple[int, int] | None, by: By) -> Share | None:
    if by not in get_args(By):
        raise ValueError(f"by={by!r}: expected one of {', '.join(map(repr, get_args(By)))}")
    return None if share is None else Share(*checked_share(share), by)
