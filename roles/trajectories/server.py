"""The trajectory store as a process: the store's rules behind a socket. ``python -m rrl.roles.trajectories.server``"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import msgspec

import rrl
from rrl.roles.tasks import load_task
from rrl.roles.tokenizer import Tokenizer
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import (
    Answer,
    Append,
    Commit,
    GetBatch,
    GetCommitted,
    Leased,
    LeaseScoring,
    LeaseWork,
    NotYet,
    PostScores,
    Prompt,
    Request,
    Scoring,
)
from rrl.spec.words import Life
from rrl.transport.control import Incoming, Listener
from rrl.transport.messages import Peers


def answer(store: Store, request: Request) -> Answer:
    match request:
        case LeaseWork(life, at_most, _, holding):
            return store.lease_work(life, at_most, holding)
        case Append(life, segments, finished):
            return store.append(life, segments, finished)
        case LeaseScoring(life, at_most, _, holding):
            return store.lease_scoring(life, at_most, holding)
        case PostScores(life, scores, failed):
            return store.post_scores(life, scores, failed)
        case GetBatch(life, number):
            return store.batch(life, number)
        case Commit(life, number, manifest, digest):
            return store.commit(life, number, manifest, digest)
        case GetCommitted(life):
            return store.committed(life)


class _Parked(msgspec.Struct):
    """A request that could not be served yet, and until when it waits."""

    incoming: Incoming
    until: float


class Server:
    """Serves ``store`` at ``listener``. All methods belong to one asyncio loop.

    ``done`` is told after each round how many requests were answered in all.
    """

    def __init__(self, store: Store, listener: Listener, done: Callable[[int], None] = lambda _: None) -> None:
        self._store = store
        self._listener = listener
        self._done = done
        self._answered = 0
        self._arrived: list[Incoming] = []
        self._parked: list[_Parked] = []
        self._woken = asyncio.Event()
        self._stopping = False

    def peers(self, living: frozenset[Life]) -> None:
        """Who lives, from the manager; durable with the next round, before any later answer."""
        self._store.peers(living)
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
            self._arrived.append(await self._listener.receive())
            self._woken.set()

    async def _wait(self, reading: asyncio.Task[None]) -> None:
        now = asyncio.get_running_loop().time()
        left = min((parked.until - now for parked in self._parked), default=None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left):
                await self._woken.wait()
        self._woken.clear()
        await asyncio.sleep(0)  # whoever came at the same time is read now, and shares our flush
        if reading.done():
            reading.result()

    async def _round(self) -> None:
        """Answer all that is here, make it durable by one flush, and only then tell."""
        now = asyncio.get_running_loop().time()
        here = self._parked + [_Parked(each, now + getattr(each.message, "wait", 0.0)) for each in self._arrived]
        self._arrived, self._parked = [], []
        answers: list[tuple[Incoming, Answer]] = []
        for each in here:
            said = answer(self._store, each.incoming.message)
            if now < each.until and said in (NotYet(), Leased(()), Scoring(())):
                self._parked.append(each)
            else:
                answers.append((each.incoming, said))
        self._store.flush()
        for incoming, said in answers:
            await self._listener.send(incoming.peer, said, incoming.ask)
        self._answered += len(answers)
        self._done(self._answered)


def _living(peers: Peers) -> frozenset[Life]:
    return frozenset(peer.life for peer in peers.peers.values())


def _prompts(job: dict[str, Any]) -> Callable[[int], Prompt]:
    tokenizer = Tokenizer.of(job["model"]["tokenizer"])
    task = load_task(job["task"], job["run"]["seed"], tokenizer)
    return lambda index: Prompt(index, tokenizer.encode(task.prompt(index)))


def _open_store(me: rrl.Worker) -> Store:
    sampling = me.job["sampling"]
    return Store(
        me.run_dir.store,
        group_size=sampling["group_size"],
        groups_per_batch=sampling["prompts_per_step"],
        max_ahead_batches=sampling["ahead"],
        max_new_tokens=sampling["max_new_tokens"],
        next_prompt=_prompts(me.job),
    )


async def _serve(me: rrl.Worker, store: Store) -> None:
    loop = asyncio.get_running_loop()
    listener = await Listener.open(me.keys, Request, epoch=me.launch.life.incarnation, host=me.host)
    server = Server(store, listener, me.progress)

    def in_loop(call: Callable[..., None], *words: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody is served any more
            loop.call_soon_threadsafe(call, *words)

    def wait_for_stop() -> None:
        me.stopping.wait()
        in_loop(server.stop)

    try:
        me.on_peers(lambda peers: in_loop(server.peers, _living(peers)))
        if me.peers is not None:
            server.peers(_living(me.peers))
        threading.Thread(target=wait_for_stop, daemon=True).start()
        me.announce(listens=listener.endpoint)
        await server.run()
    finally:
        await listener.close()


def main() -> None:
    with rrl.join() as me:
        store = _open_store(me)
        with me.phase("serve"):
            asyncio.run(_serve(me, store))
        if store.state.committed >= me.job["run"]["steps"]:
            store.end("the run is complete")
        (me.run_dir.store / "audit.json").write_bytes(msgspec.json.encode(store.audit()))
        store.close()


if __name__ == "__main__":
    main()
