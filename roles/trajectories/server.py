"""The trajectory store's process: the store behind a socket.

Started as ``python -m rrl.roles.trajectories.server``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import msgspec

import rrl

from ...core.run_dir import write_atomically
from ...core.run_spec import RunSpec
from ...core.types import DataReport, Incarnation
from ...transport.control.endpoints import Incoming, Listener
from ...transport.control.sockets import CONTROL_BOUNDS, STORE_BOUNDS
from ...transport.messages import Peers
from ..checkpoints.retention import CheckpointCleaner, CommitStatus
from ..launcher.end_report import exits_on_invalid_config
from ..models.file_task import FileMix
from ..models.tasks import Task, TaskError, load_evaluation_task, load_task, source_of
from ..models.tokenizer import Tokenizer, open_tokenizer
from .durable.records import AnsweredBy, LogFormatError
from .episodes.followers import TurnFollowers
from .episodes.requests import Follow, LeasedEpisodes, LeaseEpisodes, OpenEpisode
from .episodes.requests import StoreAnswer as Answer
from .episodes.requests import StoreRequest as Request
from .episodes.rules import EpisodeSettings
from .partition import cut
from .prompts import first_item_with_prompt, prompt_encoder
from .sample_writer import SampleWriter
from .steps.evaluations import EvaluationReports, EvaluationSettings
from .store import Store
from .types import (
    Append,
    AwaitBalance,
    Balance,
    Commit,
    Denied,
    Done,
    FollowVersions,
    GetCommitted,
    GetMetrics,
    GetPart,
    Leased,
    LeaseScoring,
    LeaseWork,
    NotReady,
    PartBound,
    PostScores,
    Prompt,
    Scoring,
    Share,
)
from .versions import Followers, report_and_read

_log = logging.getLogger("rrl.trajectories")


def answer(store: Store, request: Request, now: float | None = None, until: float = -math.inf) -> Answer:
    """Pass a request to the store, and return its answer.

    The request is evaluated at ``now`` (s; None if unknown), and may wait until ``until`` (s).
    """
    match request:
        case LeaseWork(incarnation, at_most, _, holding, weights):
            return store.lease(incarnation, at_most, holding, weights, now, until)
        case Append(incarnation, segments, finished, lease, hands_over):
            done = store.append(incarnation, segments, finished, now)
            if hands_over and isinstance(done, Done):
                store.hand_over(incarnation)
            leased = answer(store, lease, now) if lease is not None and isinstance(done, Done) else None
            if isinstance(done, Done) and isinstance(leased, Leased):
                return msgspec.structs.replace(done, leased=leased.items)
            return done
        case LeaseScoring(incarnation, at_most, _, holding):
            return store.lease_scoring(incarnation, at_most, holding)
        case PostScores(incarnation, scores, failed, faulty):
            return store.post_scores(incarnation, scores, failed, faulty)
        case GetPart(incarnation, number, index, _, share):
            return store.part(incarnation, number, index, share)
        case AwaitBalance(incarnation, number, train_s, back_s, wait):
            return store.balance(incarnation, number, train_s, back_s, lent=wait > 0)
        case Commit(incarnation, number, manifest, digest, metrics, earlier):
            return store.commit(incarnation, number, manifest, digest, metrics, earlier)
        case GetMetrics(incarnation, after):
            return store.metrics(incarnation, after)
        case GetCommitted(incarnation):
            return store.committed(incarnation)
        case FollowVersions():
            return report_and_read(store, request)
        case _:
            return store.episodes.answer(request)


_STOP_POLL_S = 0.2
"""Seconds between two checks whether the manager has requested a stop."""


_EMPTY = (NotReady(), Leased(()), Scoring(()), LeasedEpisodes(()))
"""Answers without a result. Such an answer is sent only after the ``wait`` of its request is over."""
_OUTDATED = Leased((), outdated=True)
"""Answer without a result that is sent at once, because the rollout must first receive newer weights."""
_NO_WORK = (*_EMPTY, _OUTDATED)
"""Answers that do not count as progress of the store."""
WEIGHTS_WARNING_AFTER_S = 300.0
"""Seconds for which trainer and rollouts may both wait before a warning reports that newer weights are missing. The
transfer of the largest models takes less time."""


NOTE_AFTER_S = 5.0
"""Seconds for which the trainer waits for a batch or part before `rrl status` shows the reason. Shorter waits are
normal in every step."""
NOTE_INTERVAL_S = 30.0
"""Minimum time (s) between two calls of :class:`Server`'s ``note`` with a text about the same step. The time is long,
because each call adds a record to the manager's journal."""
MAX_HOLDERS_NAMED = 3
"""Maximum number of replicas that a note names as holders of what the trainer waits for."""
REQUESTS_CAUSE = "requests"
"""Idle cause of a store that has answered all requests that it can."""
REPORT_INTERVAL_S = 1.0
"""Minimum time (s) between two reports on the data that the trainer needs: a report looks at all groups that are not
complete."""
UNTAKEN_AFTER_S = 10.0
"""Seconds without a request for data after which the trainer is considered to request no data. A trainer that waits
repeats its request at once. Each request waits for 1 s (5 s by default)."""
_FRAME_OVERHEAD_BYTES = 1024
"""Upper bound of the bytes in a frame that are not part of the answer."""


class _Parked(msgspec.Struct):
    """A request that could not be served yet, and the loop time (s) until which it waits."""

    incoming: Incoming
    until: float


class Server:
    """Serves ``store`` at ``listener``. All methods must be called in one asyncio loop.

    Args:
        store: The store.
        listener: The socket.
        on_served: Called after each round with the number of requests served. Requests that are denied or answered
            without a result do not count: a store that cannot serve any request makes no progress.
        note: Called with a text for people if the trainer has waited for a batch or part for ``NOTE_AFTER_S``. The text
            says why. Called with an empty text once the batch or part is bound.
        on_durable: Called after each flush with :attr:`.store.Store.commit_status`.
        idle: Called with an idle cause; returns the context in which the server waits (:meth:`rrl.Worker.idle`).
    """

    def __init__(
        self,
        store: Store,
        listener: Listener,
        on_served: Callable[[int], None] = lambda _: None,
        note: Callable[[str], None] = lambda _: None,
        on_durable: Callable[[CommitStatus], None] = lambda _: None,
        idle: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._store = store
        self._listener = listener
        self._on_served = on_served
        self._note = note
        self._on_durable = on_durable
        self._idle = idle
        self._unbound: tuple[int, int | None] | None = None
        """Step and part (None for the whole step) that the trainer has requested and that is not bound yet."""
        self._note_at = 0.0
        """Loop time (s) of the next note on the unbound step or part."""
        self._next_note_at = 0.0
        """Loop time (s) before which no further note is made."""
        self._lent = False
        """Whether the trainer has lent its GPUs for the time of this wait, or considers it."""
        self._noted = False
        self._arrived: list[Incoming] = []
        self._parked: list[_Parked] = []
        self._followers = Followers(store)
        self._turn_followers = TurnFollowers(store.episodes, store.changed_turns)
        self._woken = asyncio.Event()
        self._stopping = False
        self._data_requested_at = -math.inf
        """Loop time (s) of the newest round in which a request of the current trainer for data was open."""
        self._unbound_since = 0.0
        """Loop time (s) since which the trainer has waited for it."""
        self._weights_missing_since: float | None = None
        """Loop time (s) since which trainer and rollouts wait only for newer weights. It is inf once a warning has
        reported this wait, and None if they do not wait."""

    def update_membership(self, current: frozenset[Incarnation]) -> None:
        """Replace the current incarnations; the change is durable before any later answer is sent."""
        self._store.update_membership(current)
        self._followers.membership_changed()
        self._turn_followers.membership_changed()
        self._woken.set()

    def stop(self) -> None:
        """End :meth:`run` after the current round."""
        self._stopping = True
        self._woken.set()

    def data_report(self) -> DataReport:
        """Return what the store knows about the data that the trainer needs next."""
        now = asyncio.get_running_loop().time()
        if now - self._data_requested_at >= UNTAKEN_AFTER_S and self._store.has_data():
            return DataReport(untaken=True)
        if self._unbound is None or now < self._unbound_since + NOTE_AFTER_S:
            return DataReport()
        parked = [parked.incoming.message for parked in self._parked]
        opens = any(isinstance(message, OpenEpisode) and not message.evaluation for message in parked)
        return self._store.data_report(*self._unbound, now, now - self._unbound_since, opens)

    async def run(self) -> None:
        """Serve until stopped.

        Raises:
            OSError: Records cannot be made durable.
            Superseded: Another process has opened the store.
        """
        reading = asyncio.create_task(self._read())
        try:
            while not self._stopping:
                await self._wait(reading)
                await self._round()
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading

    async def _read(self) -> None:
        while True:
            incoming = await self._listener.receive()  # before self._arrived is read: a round replaces it
            self._arrived.append(incoming)
            self._woken.set()

    async def _wait(self, reading: asyncio.Task[None]) -> None:
        now = asyncio.get_running_loop().time()
        due = min((parked.until for parked in self._parked), default=math.inf)
        due = min(due, self._followers.due, self._turn_followers.due, self._store.episodes.due)
        left = max(0.0, due - now)
        with contextlib.suppress(TimeoutError), self._idle(REQUESTS_CAUSE):
            async with asyncio.timeout(left if left < math.inf else None):
                await self._woken.wait()
        self._woken.clear()
        await asyncio.sleep(0)  # requests that arrived at the same time are read now and share one flush
        if reading.done():
            reading.result()

    async def _round(self) -> None:
        """Evaluate all requests, make the answers durable with one flush, and only then send them."""
        now = asyncio.get_running_loop().time()
        self._store.episodes.expire(now)
        waiting = self._parked
        for incoming in self._arrived:
            if isinstance(incoming.message, FollowVersions):
                self._followers.add(incoming, now)
            elif isinstance(incoming.message, Follow):
                self._turn_followers.add(incoming, now)
            else:
                waiting.append(_Parked(incoming, now + getattr(incoming.message, "wait", 0.0)))
        self._arrived, self._parked = [], []
        answers: list[tuple[Incoming, Answer | msgspec.Raw]] = []
        parts = _Parts(self._store)
        messages = [parked.incoming.message for parked in waiting]
        idle = {message.incarnation for message in messages if isinstance(message, Append) and message.hands_over}
        for parked in _once(sorted(waiting, key=_precedence)):
            message = parked.incoming.message
            if isinstance(message, LeaseWork) and message.incarnation in idle:  # the rollout hands everything over
                answers.append((parked.incoming, Leased(())))
                continue
            reply = self._answer(parked, parts, now)
            if now < parked.until and (reply in _EMPTY or _is_unbalanced(reply)):
                self._parked.append(parked)
            else:
                answers.append((parked.incoming, reply))
        answers += self._turn_followers.answers(now)
        version_answers = self._followers.answers(now)  # not counted as served: answers about versions are not progress
        self._store.flush()
        self._on_durable(self._store.commit_status)
        for incoming, reply in (*answers, *version_answers):
            await self._listener.send(incoming.peer, reply, incoming.request_id)
        served = sum(
            reply not in _NO_WORK and not isinstance(reply, Denied) and not _is_unbalanced(reply)
            for _, reply in answers
        )
        self._on_served(served)
        self._warn_missing_weights(now, served, [reply for _, reply in answers])
        self._note_wait(now)
        if warning := self._store.warning():
            _log.warning("%s", warning)

    def _answer(self, parked: _Parked, parts: _Parts, now: float) -> Answer | msgspec.Raw:
        request: Request = parked.incoming.message
        if isinstance(request, AwaitBalance):
            reply = answer(self._store, request, now)
            if not isinstance(reply, Denied):
                self._data_requested_at = now
                self._await_part((request.number, 0) if _is_unbalanced(reply) else None, now, lent=True)
            return reply
        if not isinstance(request, GetPart):
            return answer(self._store, request, now, parked.until)
        wanted = request.number, request.index
        rejection = self._store.bind(request.incarnation, *wanted, request.share)
        if not isinstance(rejection, Denied):
            self._data_requested_at = now
        if rejection is not None:
            if isinstance(rejection, NotReady):
                self._await_part(wanted, now, lent=False)
            return rejection
        if self._unbound is not None and request.number >= self._unbound[0]:
            self._unbound = None
        return parts.encoded(*wanted, request.share)

    def _await_part(self, wanted: tuple[int, int | None] | None, now: float, *, lent: bool) -> None:
        """Record that the trainer waits for the step and part ``wanted``; None if it no longer waits."""
        if wanted is not None and (self._unbound, self._lent) != (wanted, lent):
            self._unbound_since = now
            self._note_at = max(now + NOTE_AFTER_S, self._next_note_at)
        self._unbound, self._lent = wanted, lent

    def _note_wait(self, now: float) -> None:
        """Pass to ``note``, at intervals, a text that says what the trainer waits for, or "" when the wait is over.

        While the GPUs of a trainer are lent, it waits for nothing that would need an explanation.
        """
        noted = None if self._lent else self._unbound
        if noted is None and self._noted:
            self._noted = False
            self._note("")
        elif noted is not None and now >= self._note_at:
            self._noted, self._note_at, self._next_note_at = True, now + NOTE_INTERVAL_S, now + NOTE_INTERVAL_S
            reason = self._store.wait_reason(*noted) or ""
            holders = sorted(self.data_report().holders)
            named = [*holders[:MAX_HOLDERS_NAMED], *(["others"] if holders[MAX_HOLDERS_NAMED:] else [])]
            self._note(f"{reason}, which {' and '.join(named)} hold" if reason and named else reason)

    def _warn_missing_weights(self, now: float, served: int, answers: Sequence[Answer | msgspec.Raw]) -> None:
        """Log a warning if the trainer waits for a batch while the rollouts wait for newer weights from it."""
        if served:
            self._weights_missing_since = None
        elif _OUTDATED in answers and any(
            isinstance(parked.incoming.message, GetPart | AwaitBalance) for parked in self._parked
        ):
            if self._weights_missing_since is None:
                self._weights_missing_since = now
            elif now - self._weights_missing_since >= WEIGHTS_WARNING_AFTER_S:
                self._weights_missing_since = math.inf
                _log.warning(
                    "the trainer waits for a batch, and the rollouts wait for newer weights: with [sampling]"
                    " staleness = N the trainer must publish at least once in N + 1 steps"
                )


def _is_unbalanced(reply: object) -> bool:
    return isinstance(reply, Balance) and reply.short_s > 0


def _precedence(parked: _Parked) -> int:
    """Return the rank of a request in its round: a request comes first if other requests may succeed because of it.

    A part is then bound in the round in which its last score arrives, and new work is leased in the same round.
    """
    match parked.incoming.message:
        case LeaseWork() | LeaseScoring() | LeaseEpisodes() | OpenEpisode():
            return 2
        case GetPart() | AwaitBalance():
            return 1
        case _:
            return 0


def _once(waiting: Iterable[_Parked]) -> Iterator[_Parked]:
    """Yield each request once: a peer that repeats a waiting request receives one answer."""
    answered: set[tuple[bytes, int]] = set()
    for parked in waiting:
        peer, request_id = parked.incoming.peer, parked.incoming.request_id
        if request_id is not None and (peer, request_id) in answered:
            continue
        if request_id is not None:
            answered.add((peer, request_id))
        yield parked


class _Parts:
    """The parts of one round: many ranks request a part, or a share of it, so each is built and encoded only once."""

    def __init__(self, store: Store) -> None:
        self._whole = cache(store.bound)
        self._encoded: dict[tuple[int, int | None, Share | None], msgspec.Raw | Denied] = {}

    def encoded(self, number: int, index: int | None, share: Share | None) -> msgspec.Raw | Denied:
        """Return a share of a bound part, encoded; or a denial if it does not fit into one message."""
        if (wanted := (number, index, share)) not in self._encoded:
            self._encoded[wanted] = self._encode(*wanted)
        return self._encoded[wanted]

    def _encode(self, number: int, index: int | None, share: Share | None) -> msgspec.Raw | Denied:
        data = msgspec.msgpack.encode(PartBound(cut(self._whole(number, index), share)))
        if len(data) + _FRAME_OVERHEAD_BYTES <= CONTROL_BOUNDS.max_frame_bytes:
            return msgspec.Raw(data)
        name, remedy = ("batch", "lower prompts_per_step,") if index is None else ("part", "lower")
        return Denied(
            f"the {name} has {len(data) >> 20} MiB, but a message has at most"
            f" {CONTROL_BOUNDS.max_frame_bytes >> 20} MiB; {remedy} group_size or max_new_tokens in [sampling]"
            f"{', or train in parts (stream = true)' if index is None else ''}"
        )


def _current_incarnations(peers: Peers) -> frozenset[Incarnation]:
    return frozenset(peer.incarnation for peer in peers.peers.values())


def _prompts_and_evaluations(
    job: RunSpec, tokenizer: Tokenizer, folder: Path
) -> tuple[Callable[[int], Prompt], EvaluationSettings | None]:
    """Return the function that makes the prompt of an item, and the settings of evaluations (None without evaluations).

    Ends the process if a task is invalid, or if the first items have no prompts. The returned function
    raises ValueError for a prompt that is empty or too long for an answer to follow, and any exception that the task
    raises.

    Args:
        job: The run spec.
        tokenizer: The model's tokenizer.
        folder: The job's folder, for the files of its tasks.
    """
    if _episode_settings(job) is not None:  # agents make the prompts themselves
        source = FileMix(job.task.files).source if job.task.files else lambda item: ""
        return _unprompted(source), _evaluated_episodes(job, folder) if job.eval is not None else None
    with exits_on_invalid_config(TaskError):
        task = load_task(job.task, job.seed, tokenizer, folder)
    prompts = _checked_prompts(job, tokenizer, task)
    return prompts, _evaluations(job, tokenizer, folder) if job.eval is not None else None


def _unprompted(source: Callable[[int], str]) -> Callable[[int], Prompt]:
    """Return the function that makes the items of agents, which have no tokens but a source."""
    return lambda item: Prompt(item, (), source(item))


def _evaluated_episodes(job: RunSpec, folder: Path) -> EvaluationSettings:
    """Return the settings of the evaluations of a job with agents. Ends the process if their task is invalid."""
    assert job.eval is not None
    with exits_on_invalid_config(TaskError):
        task, count = load_evaluation_task(job, None, folder)
    agents: AnsweredBy = "own" if job.agents is not None else "outside"
    items = _unprompted(lambda item: source_of(task, item))
    return EvaluationSettings(job.eval, job.steps, job.seed, count, items, job.sampling.max_new_tokens, agents)


def _checked_prompts(job: RunSpec, tokenizer: Tokenizer, task: Task) -> Callable[[int], Prompt]:
    """Return the function that makes the prompt of an item of a task; see :func:`_prompts_and_evaluations`."""
    encode = prompt_encoder(job, tokenizer)

    def prompt(item: int) -> Prompt:
        return msgspec.structs.replace(encode(item, task.prompt(item)), source=source_of(task, item))

    with exits_on_invalid_config():  # for example, the vocabulary lacks a character of every prompt
        first_item_with_prompt(prompt)
    return prompt


def _evaluations(job: RunSpec, tokenizer: Tokenizer, folder: Path) -> EvaluationSettings:
    """Return the settings of the job's evaluations. Ends the process if their task is invalid."""
    assert job.eval is not None
    with exits_on_invalid_config(TaskError):
        task, count = load_evaluation_task(job, tokenizer, folder)
    prompt = _checked_prompts(job, tokenizer, task)
    return EvaluationSettings(job.eval, job.steps, job.seed, count, prompt, job.sampling.max_new_tokens)


def _open_store(
    me: rrl.Worker, prompts: Callable[[int], Prompt], evaluations: EvaluationSettings | None, end_tokens: frozenset[int]
) -> Store:
    sampling = me.job.sampling
    return Store(
        me.run_dir.store,
        group_size=sampling.group_size,
        groups_per_batch=sampling.prompts_per_step,
        max_ahead_batches=sampling.ahead,
        fleet_varies=me.job.fleet_varies,
        max_new_tokens=sampling.max_new_tokens,
        next_prompt=prompts,
        keep_uncommitted=me.job.trainer.uncommitted,
        checkpoint_every=me.job.trainer.checkpoint_every,
        staleness=sampling.staleness,
        wait_for_late=sampling.late == "wait",
        window=sampling.window,
        max_part_bytes=CONTROL_BOUNDS.max_frame_bytes - 2 * _FRAME_OVERHEAD_BYTES,
        retained_commits=me.job.trainer.keep_checkpoints,
        extras=sampling.extras,
        episodes=_episode_settings(me.job),
        evaluations=evaluations,
        rollout_roles=frozenset(role.name for role in me.job.kind("rollout")),
        end_tokens=end_tokens,
        refill_limit=sampling.refill_limit if sampling.refill else None,
        ignores_truncated=me.job.trainer.truncated == "drop",
        samples=SampleWriter(me.run_dir.samples, me.job) if me.job.samples.per_step else None,
    )


def _episode_settings(job: RunSpec) -> EpisodeSettings | None:
    """Return the settings of the job's agents, or of its endpoint if it has no agents; None if it has neither."""
    settings = job.agents or job.endpoint
    if settings is None:
        return None
    episodes = EpisodeSettings(
        settings.retries,
        "replay" if job.agents is None else job.agents.on_death,
        settings.timeout,
        job.agents is not None,
    )
    if settings.reward_timeout is None:
        return episodes
    return msgspec.structs.replace(episodes, reward_timeout=settings.reward_timeout)


async def _serve(me: rrl.Worker, store: Store, cleaner: CheckpointCleaner) -> None:
    loop = asyncio.get_running_loop()
    epoch = me.launch.incarnation.number
    listener = await Listener.open(me.keys, Request, epoch=epoch, host=me.host, bounds=STORE_BOUNDS)
    server = Server(store, listener, me.progress, me.note, cleaner.update, me.idle)
    store.flush()  # opening the store may have recorded the result of an evaluation
    reports = EvaluationReports(store.evaluations, me.report_evaluation)

    def on_peers(peers: Peers) -> None:
        with contextlib.suppress(RuntimeError):  # raised if the loop has ended
            loop.call_soon_threadsafe(server.update_membership, _current_incarnations(peers))

    async def watch() -> None:
        report_at = 0.0
        while not me.stopping.is_set():
            await asyncio.sleep(_STOP_POLL_S)
            me.answer_probe()
            if me.peers is not None:
                reports.send(me.peers.evaluated, loop.time())
            if loop.time() >= report_at:
                report_at = loop.time() + REPORT_INTERVAL_S
                me.report_data(server.data_report())
        server.stop()

    me.on_probe(lambda: store.warning() or "the store's loop is running")  # called in its thread
    watching = asyncio.create_task(watch())
    try:
        if me.peers is not None:
            server.update_membership(_current_incarnations(me.peers))
        me.on_peers(on_peers)
        me.announce(listens=listener.endpoint)
        await server.run()
    finally:
        watching.cancel()
        await listener.close()


def main() -> None:
    """Run the trajectory store until the manager stops it, then write the audit."""
    me = rrl.join()
    with exits_on_invalid_config():
        tokenizer = open_tokenizer(me.job.model)
    prompts, evaluations = _prompts_and_evaluations(me.job, tokenizer, Path(me.launch.cwd))
    with me:
        with exits_on_invalid_config(LogFormatError):
            store = _open_store(me, prompts, evaluations, tokenizer.stop_tokens)
        with CheckpointCleaner(me.run_dir.checkpoints, me.job.trainer.keep_checkpoints) as cleaner:
            with me.phase("serve"):
                asyncio.run(_serve(me, store, cleaner))
            if store.commit_status.committed >= me.job.steps:  # no further step trains groups
                store.drop_uncommitted("the run is complete")
            write_atomically(me.run_dir.audit, msgspec.json.encode(store.audit()))
            store.close()


if __name__ == "__main__":
    main()
