"""The trajectory store as a process: the store's rules behind a socket. ``python -m rrl.roles.trajectories.server``"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import rrl

from ...config.model_folder import max_length
from ...core.run_dir import write_atomically
from ...core.text import exits_on_invalid_config
from ...core.types import Incarnation
from ...transport.control.endpoints import Incoming, Listener
from ...transport.control.sockets import CONTROL_BOUNDS, STORE_BOUNDS
from ...transport.messages import Peers, WeightSource
from ..models.tasks import TaskError, load_task
from ..models.tokenizer import open_tokenizer
from .store import Store
from .types import (
    Answer,
    Append,
    Commit,
    Denied,
    FollowVersions,
    GetBatch,
    GetCommitted,
    GetMetrics,
    Leased,
    LeaseScoring,
    LeaseWork,
    NewestVersion,
    NotReady,
    PostScores,
    Prompt,
    Request,
    Scoring,
)

_log = logging.getLogger("rrl.trajectories")


def answer(store: Store, request: Request) -> Answer:
    match request:
        case LeaseWork(incarnation, at_most, _, holding, weights):
            return store.lease(incarnation, at_most, holding, weights)
        case Append(incarnation, segments, finished):
            return store.append(incarnation, segments, finished)
        case LeaseScoring(incarnation, at_most, _, holding):
            return store.lease_scoring(incarnation, at_most, holding)
        case PostScores(incarnation, scores, failed):
            return store.post_scores(incarnation, scores, failed)
        case GetBatch(incarnation, number):
            return store.batch(incarnation, number)
        case Commit(incarnation, number, manifest, digest, metrics):
            return store.commit(incarnation, number, manifest, digest, metrics)
        case GetMetrics(incarnation, after):
            return store.metrics(incarnation, after)
        case GetCommitted(incarnation):
            return store.committed(incarnation)
        case FollowVersions():
            return report_and_read(store, request)


def report_and_read(store: Store, request: FollowVersions) -> NewestVersion | NotReady | Denied:
    """Report what the asker serves, and return the newest version that is known then."""
    source = WeightSource(
        request.incarnation, request.weight_address or "", request.weight_version if request.weight_address else None
    )
    return store.report_version(source) or store.newest_version or NotReady()


_STOP_POLL_S = 0.2
"""s between two looks whether the manager asked us to stop"""


_EMPTY = (NotReady(), Leased(()), Scoring(()))
"""Answers that give nothing: a request waits before it gets one"""
_OUTDATED = Leased((), outdated=True)
"""Told at once: whoever must get newer weights first asks again with those"""
_NO_WORK = (*_EMPTY, _OUTDATED)
"""Answers that are no work done"""
WEIGHTS_WARNING_AFTER_S = 300.0
"""s that newer weights may be on their way while nothing else happens before it is said that they are waited for:
longer than the largest models take"""


NOTE_AFTER_S = 5.0
"""s that the trainer waits for a batch before `rrl status` says for what: shorter waits are part of every step"""
NOTE_INTERVAL_S = 30.0
"""s between two notes on the same step: each is a record in the manager's journal"""
_FRAME_OVERHEAD_BYTES = 1024
"""bytes of a frame that are not the answer, and more"""


class _Parked(msgspec.Struct):
    """A request that could not be served yet, and until when it waits."""

    incoming: Incoming
    until: float


class _Following(msgspec.Struct):
    """An open request for newer versions than the asker knows, and until when it waits (loop time, s)."""

    incoming: Incoming
    until: float


class Followers:
    """The open ``FollowVersions`` requests at ``store``: one of each trainer and rollout, nearly all of the time.

    They are kept apart from the requests that wait for work or batches: those are judged anew in every round of the
    store, these only when the newest version or the membership changed, or when their wait is over. ``now`` is the
    time of the server's loop, in seconds.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[Incarnation, _Following] = {}
        self._arrived: set[Incarnation] = set()
        self._answered_version: NewestVersion | None = None
        """the newest version when all requests were judged last"""
        self._judge_all = False

    def add(self, incoming: Incoming, now: float) -> None:
        """Take in a request. An earlier one of the same life is dropped: its asker waits for this one."""
        incarnation = incoming.message.incarnation
        self._waiting[incarnation] = _Following(incoming, now + incoming.message.wait)
        self._arrived.add(incarnation)

    def membership_changed(self) -> None:
        """Judge every request anew: a life that was unknown may be current by now, another one fenced."""
        self._judge_all = True

    @property
    def due(self) -> float:
        """When the first wait is over; inf: nobody waits."""
        return min((waiting.until for waiting in self._waiting.values()), default=math.inf)

    def answers(self, now: float) -> list[tuple[Incoming, Answer]]:
        """Return the answers that can be given now; their requests do not wait any more."""
        for incarnation in self._arrived:
            report_and_read(self._store, self._waiting[incarnation].incoming.message)
        changed = self._store.newest_version is not self._answered_version
        self._answered_version = self._store.newest_version
        incarnations = list(self._waiting) if changed or self._judge_all or self.due <= now else list(self._arrived)
        self._judge_all = False
        self._arrived.clear()
        answers: list[tuple[Incoming, Answer]] = []
        for incarnation in incarnations:
            waiting = self._waiting[incarnation]
            answer = report_and_read(self._store, waiting.incoming.message)
            known = waiting.incoming.message.known
            is_news = isinstance(answer, Denied) or (isinstance(answer, NewestVersion) and answer.version != known)
            if is_news or waiting.until <= now:
                answers.append((waiting.incoming, answer))
                del self._waiting[incarnation]
        return answers


class Server:
    """Serves ``store`` at ``listener``. All methods belong to one asyncio loop.

    ``done`` is told after each round how many requests it served. Those that wait in vain are not served: a store that
    only says so stands still, however often it is asked. ``note`` is given what a trainer that has waited for
    ``NOTE_AFTER_S`` waits for, in words for people, and an empty text once it has its batch.
    """

    def __init__(
        self, store: Store, listener: Listener, on_served: Callable[[int], None] = lambda _: None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._store = store
        self._listener = listener
        self._on_served = on_served
        self._note = note
        self._unbound: int | None = None
        """step of the batch that the trainer asks for and that is not bound yet"""
        self._note_at = 0.0
        """loop time (s) of the next note on it"""
        self._noted = False
        self._arrived: list[Incoming] = []
        self._parked: list[_Parked] = []
        self._followers = Followers(store)
        self._woken = asyncio.Event()
        self._stopping = False
        self._weights_missing_since: float | None = None
        """since when nothing but newer weights has been waited for, also by the trainer; inf: that was said"""

    def update_membership(self, current: frozenset[Incarnation]) -> None:
        """Who lives, from the manager; durable with the next round, before any later answer."""
        self._store.update_membership(current)
        self._followers.membership_changed()
        self._woken.set()

    def stop(self) -> None:
        self._stopping = True
        self._woken.set()

    async def run(self) -> None:
        """Serve until stopped. Raises OSError or Superseded when nothing can be made durable here any more."""
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
            incoming = await self._listener.receive()  # first: the list may be another one after the wait
            self._arrived.append(incoming)
            self._woken.set()

    async def _wait(self, reading: asyncio.Task[None]) -> None:
        now = asyncio.get_running_loop().time()
        due = min((parked.until for parked in self._parked), default=math.inf)
        left = max(0.0, min(due, self._followers.due) - now)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left if left < math.inf else None):
                await self._woken.wait()
        self._woken.clear()
        await asyncio.sleep(0)  # whoever came at the same time is read now, and shares our flush
        if reading.done():
            reading.result()

    async def _round(self) -> None:
        """Answer all that is here, make it durable by one flush, and only then tell."""
        now = asyncio.get_running_loop().time()
        waiting = self._parked
        for incoming in self._arrived:
            if isinstance(incoming.message, FollowVersions):
                self._followers.add(incoming, now)
            else:
                waiting.append(_Parked(incoming, now + getattr(incoming.message, "wait", 0.0)))
        self._arrived, self._parked = [], []
        answers: list[tuple[Incoming, Answer | msgspec.Raw]] = []
        batches: dict[int, msgspec.Raw | Denied] = {}
        for each in _once(waiting):
            reply = self._answer(each.incoming.message, batches, now)
            if now < each.until and reply in _EMPTY:
                self._parked.append(each)
            else:
                answers.append((each.incoming, reply))
        version_answers = self._followers.answers(now)  # no work done: a store that tells of versions only stands still
        self._store.flush()
        for incoming, reply in (*answers, *version_answers):
            await self._listener.send(incoming.peer, reply, incoming.request_id)
        served = sum(reply not in _NO_WORK and not isinstance(reply, Denied) for _, reply in answers)
        self._on_served(served)
        self._warn_missing_weights(now, served, [reply for _, reply in answers])
        self._note_wait(now)
        if warning := self._store.warning():
            _log.warning("%s", warning)

    def _answer(
        self, request: Request, batches: dict[int, msgspec.Raw | Denied], now: float
    ) -> Answer | msgspec.Raw:  # fmt: skip
        """A batch, of which every member of a trainer may want its own copy, is made and encoded once a round."""
        if not isinstance(request, GetBatch):
            return answer(self._store, request)
        if no := self._store.bind(request.incarnation, request.number):
            if isinstance(no, NotReady) and self._unbound != request.number:
                self._unbound, self._note_at = request.number, now + NOTE_AFTER_S
            return no
        if request.number == self._unbound:
            self._unbound = None
        if request.number not in batches:
            batches[request.number] = _encoded(self._store.batch(request.incarnation, request.number))
        return batches[request.number]

    def _note_wait(self, now: float) -> None:
        """Say what the trainer waits for, once in a while, and that it waits no more."""
        if self._unbound is None and self._noted:
            self._noted = False
            self._note("")
        elif self._unbound is not None and now >= self._note_at:
            self._noted, self._note_at = True, now + NOTE_INTERVAL_S
            self._note(self._store.wait_reason(self._unbound) or "")

    def _warn_missing_weights(self, now: float, served: int, answers: Sequence[Answer | msgspec.Raw]) -> None:
        """A trainer that waits for a batch has published, or should have, what the rollouts wait for."""
        if served:
            self._weights_missing_since = None
        elif _OUTDATED in answers and any(isinstance(one.incoming.message, GetBatch) for one in self._parked):
            if self._weights_missing_since is None:
                self._weights_missing_since = now
            elif now - self._weights_missing_since >= WEIGHTS_WARNING_AFTER_S:
                self._weights_missing_since = math.inf
                _log.warning(
                    "the trainer waits for a batch, and the rollouts for newer weights than they have: with [sampling]"
                    " staleness = N a trainer must publish at least once in N + 1 steps"
                )


def _once(waiting: Iterable[_Parked]) -> Iterator[_Parked]:
    """Whoever says the same again while he waits is answered once."""
    answered: set[tuple[bytes, int]] = set()
    for each in waiting:
        peer, ask = each.incoming.peer, each.incoming.request_id
        if ask is not None and (peer, ask) in answered:
            continue
        if ask is not None:
            answered.add((peer, ask))
        yield each


def _encoded(batch: Answer) -> msgspec.Raw | Denied:
    data = msgspec.msgpack.encode(batch)
    if len(data) + _FRAME_OVERHEAD_BYTES <= CONTROL_BOUNDS.max_frame_bytes:
        return msgspec.Raw(data)
    return Denied(f"the batch is {len(data) >> 20} MiB, more than the {CONTROL_BOUNDS.max_frame_bytes >> 20} MiB of one message; lower"
                  " prompts_per_step, group_size or max_new_tokens in [sampling]")  # fmt: skip


def _current_incarnations(peers: Peers) -> frozenset[Incarnation]:
    return frozenset(peer.incarnation for peer in peers.peers.values())


def _prompts(me: rrl.Worker) -> Callable[[int], Prompt]:
    """Ends the process where model or task can never work. Called, it raises ValueError for a prompt that cannot be
    written in tokens, or leaves no room for an answer, and whatever the task does."""
    with exits_on_invalid_config():
        tokenizer = open_tokenizer(me.job["model"])
    with exits_on_invalid_config(TaskError):
        task = load_task(me.job["task"], me.job["run"]["seed"], tokenizer, Path(me.launch.cwd))
    answer = me.job["sampling"]["max_new_tokens"]
    longest = _longest(me.job)

    def prompt(index: int) -> Prompt:
        tokens = tokenizer.prompt(task.prompt(index))
        if not tokens:
            raise ValueError(f"item {index} of [task] is a prompt of no tokens")
        if len(tokens) + answer > longest:
            raise ValueError(f"item {index} of [task] is a prompt of {len(tokens)} tokens: with max_new_tokens ="
                             f" {answer} that is more than the model takes (max_length = {longest:g})")  # fmt: skip
        return Prompt(index, tokens)

    return prompt


def _longest(job: Mapping[str, Any]) -> float:
    """Tokens of prompt and answer that the model takes; inf where [model] is but the tokenizer of a user's own one."""
    model, roles = job["model"], job["roles"]
    built_in = roles["trainer"]["command"] is None or roles["rollout"]["command"] is None
    return max_length(model) if built_in or model.get("path") is not None else math.inf


def _open_store(me: rrl.Worker, prompts: Callable[[int], Prompt]) -> Store:
    sampling = me.job["sampling"]
    staleness = sampling.get("staleness")  # of a run that an earlier rrl began: None, or no such key
    return Store(
        me.run_dir.store,
        group_size=sampling["group_size"],
        groups_per_batch=sampling["prompts_per_step"],
        max_ahead_batches=sampling["ahead"],
        max_new_tokens=sampling["max_new_tokens"],
        next_prompt=prompts,
        keep_uncommitted=me.job["roles"]["trainer"]["uncommitted"],
        staleness=staleness if isinstance(staleness, int) else None,
        wait_for_late=sampling.get("late", "wait") == "wait",
    )


async def _serve(me: rrl.Worker, store: Store) -> None:
    loop = asyncio.get_running_loop()
    epoch = me.launch.incarnation.number
    listener = await Listener.open(me.keys, Request, epoch=epoch, host=me.host, bounds=STORE_BOUNDS)
    server = Server(store, listener, me.progress, me.note)

    def on_peers(peers: Peers) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody is served any more
            loop.call_soon_threadsafe(server.update_membership, _current_incarnations(peers))

    async def watch() -> None:
        while not me.stopping.is_set():
            await asyncio.sleep(_STOP_POLL_S)
            me.answer_probe()
        server.stop()

    me.on_probe(lambda: store.warning() or "its loop goes round")  # in the thread that this loop needs
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
    me = rrl.join()
    prompts = _prompts(me)
    with me:
        store = _open_store(me, prompts)
        with me.phase("serve"):
            asyncio.run(_serve(me, store))
        if store.audit().committed >= me.job["run"]["steps"]:
            store.drop_uncommitted("the run is complete")
        write_atomically(me.run_dir.store / "audit.json", msgspec.json.encode(store.audit()))
        store.close()


if __name__ == "__main__":
    main()
