from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from rrl.config.job.resolve import resolve
from rrl.config.job.schema import Job
from rrl.core.run_spec import RunSpec
from rrl.core.types import ProbeResult, Version, member_id
from rrl.roles.checkpoints.retention import CommitStatus
from rrl.roles.models.tokenizer import open_tokenizer
from rrl.roles.trajectories import client as client_module
from rrl.roles.trajectories import server as server_module
from rrl.roles.trajectories.batches import decode
from rrl.roles.trajectories.client import Fenced, Refused, TrajectoryClient, store_address
from rrl.roles.trajectories.durable.state import State
from rrl.roles.trajectories.episodes.requests import StoreAnswer as Answer
from rrl.roles.trajectories.server import REQUESTS_CAUSE, Server, answer
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import (
    Append,
    AwaitBalance,
    Balance,
    CommittedState,
    Denied,
    Done,
    FollowVersions,
    GetCommitted,
    GetPart,
    Item,
    Leased,
    LeaseScoring,
    LeaseWork,
    NewestVersion,
    NotReady,
    PackedPart,
    PartBound,
    PostScores,
    Score,
    Segment,
    StepRequest,
)
from rrl.roles.worker.main_thread import ProbeResponder
from rrl.tests.support.roles.trajectories.crew import (
    ALL,
    BATCH,
    GROUP,
    MAX_NEW,
    OTHER,
    REWARD,
    ROLLOUT,
    TRAINER,
    generate,
    incarnation_of,
    lease,
    manifest,
    open_store,
    score,
    segment,
    train,
)
from rrl.tests.support.roles.trajectories.store_process import (
    StoreProcess,
    batch_of,
    lease_scoring,
    open_clients,
    part_of,
)
from rrl.transport.control.endpoints import Dialer, Incoming, Listener
from rrl.transport.control.sockets import Bounds
from rrl.transport.keys import RunKeys
from rrl.transport.messages import Peer, Peers, Probe, ProbeReply

DEADLINE = 60.0
clients = partial(open_clients, DEADLINE)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[StoreProcess]:
    process = StoreProcess(tmp_path)
    yield process
    process.kill()


class Crew:
    """A whole run over sockets, which records all acknowledged data.

    With ``parts`` the trainer requests steps in parts.
    """

    def __init__(self, steps: int, parts: bool = False) -> None:
        self.steps = steps
        self.parts = parts
        self.appended: dict[tuple[int, int], Segment] = {}
        self.batches: dict[int, PackedPart] = {}
        self.done = asyncio.Event()
        self.committed = asyncio.Condition()

    async def roll(self, client: TrajectoryClient, token: int) -> None:
        leased: tuple[Item, ...] = ()
        while not self.done.is_set():
            items = leased or await client.lease(5, wait=0.2)
            for at in range(2):
                segments = [segment(item.trajectory, at, (token + at,)) for item in items if len(item.so_far) <= at]
                finished = [item.trajectory for item in items] if at else []
                lost, leased = await client.append_and_lease(segments, finished, 5 * at)
                self.appended.update({(s.trajectory, s.offset): s for s in segments if s.trajectory not in lost})
                items = tuple(item for item in items if item.trajectory not in lost)

    async def reward(self, client: TrajectoryClient) -> None:
        while not self.done.is_set():
            items = await lease_scoring(client, 5, 0.2)
            await client.ask(PostScores, tuple(Score(item.trajectory, sum(item.tokens), 0.5) for item in items))

    async def train(self, client: TrajectoryClient) -> None:
        for number in range(1, self.steps + 1):
            if self.parts:
                await self.take_parts(client, number)
            batch = None
            while batch is None:
                batch = await batch_of(client, number, 0.5)
            self.batches[number] = batch
            await client.commit(number, manifest(number), batch.digest)
            async with self.committed:
                self.committed.notify_all()
        self.done.set()

    async def take_parts(self, client: TrajectoryClient, number: int) -> None:
        groups: list[int] = []
        index, last = 0, False
        while not last:
            part = await part_of(client, number, index, 0.5)
            if part is not None:
                groups += part.groups
                index, last = index + 1, part.last
        batch = await batch_of(client, number)
        assert batch is not None
        assert (batch.groups, batch.digest) == (tuple(groups), part.digest if part else "")

    async def at(self, number: int) -> None:
        async with self.committed:
            await self.committed.wait_for(lambda: len(self.batches) >= number)


@pytest.mark.parametrize("parts", [False, True])
def test_each_step_is_trained_exactly_once_although_the_store_is_killed_repeatedly(
    process: StoreProcess, parts: bool
) -> None:
    async def run() -> Crew:
        crew = Crew(40, parts)
        process.start(ALL)
        async with clients(process, *ALL) as (first, second, reward, trainer), asyncio.TaskGroup() as group:
            for work in (crew.roll(first, 5), crew.roll(second, 7), crew.reward(reward), crew.train(trainer)):
                group.create_task(work)
            for number in (5, 15, 16, 30):
                await crew.at(number)
                process.kill()
                await asyncio.to_thread(process.start, ALL)
        return crew

    crew = asyncio.run(run())
    process.kill()
    audit = open_store(process.folder).audit()
    assert audit.committed == 40
    assert {number: batch.groups for number, batch in crew.batches.items()} == audit.steps
    assert len(audit.parts) == 40
    groups = [group for step in audit.steps.values() for group in step]
    assert len(set(groups)) == len(groups) == 40 * BATCH
    assert (audit.trained, audit.dropped) == (40 * BATCH * GROUP, {})
    assert audit.made == audit.trained + audit.open
    for batch in crew.batches.values():
        for trajectory in decode(batch).trajectories:
            assert trajectory.reward == sum(trajectory.tokens)
            for offset, token in enumerate(trajectory.tokens):
                acknowledged = crew.appended.get((trajectory.id, offset))
                assert acknowledged is None or acknowledged.tokens == (token,)


async def test_work_of_a_dead_rollout_continues_elsewhere_and_its_own_requests_are_refused(
    process: StoreProcess,
) -> None:
    process.start(ALL)
    async with clients(process, ROLLOUT, OTHER) as (dead, heir):
        (item,) = await dead.lease(1)
        await dead.append([segment(item.trajectory, 0, (5, 6), step=3)])
        process.set_membership({incarnation_of("rollout/0", 2), *ALL[1:]})
        taken: tuple[Item, ...] = ()
        while not taken:  # until the store knows the new membership; before that, the successor holds other items
            taken = tuple(x for x in await heir.lease(9) if x.trajectory == item.trajectory)
        with pytest.raises(Fenced, match="succeeded"):
            await dead.append([segment(item.trajectory, 0, (5, 6), step=3)])
        assert taken[0].so_far == (segment(item.trajectory, 0, (5, 6), step=3),)
        assert taken[0].max_new == MAX_NEW - 2
        with pytest.raises(Fenced):
            await dead.lease(1)


async def test_only_lost_trajectories_of_an_append_are_left_out(process: StoreProcess) -> None:
    process.start(ALL)
    async with clients(process, ROLLOUT, OTHER, REWARD) as (mine, other, reward):
        await mine.lease(1)
        await other.lease(1)
        assert await mine.append([segment(0), segment(1)], [0, 1]) == (1,)
        assert [item.trajectory for item in await lease_scoring(reward, 9)] == [0]
        assert await other.append([segment(1)], [1]) == ()


async def test_superseded_trainer_cannot_commit(process: StoreProcess) -> None:
    process.start(ALL)
    crew = Crew(1)
    async with clients(process, ROLLOUT, REWARD, TRAINER, incarnation_of("trainer/0", 2)) as (
        rollout,
        reward,
        old,
        new,
    ):
        rolling = asyncio.create_task(crew.roll(rollout, 5))
        rewarding = asyncio.create_task(crew.reward(reward))
        batch = await batch_of(old, 1, DEADLINE)
        assert batch is not None
        assert await new.ask(GetCommitted) == CommittedState(None, None)
        with pytest.raises(Fenced):
            await old.commit(1, manifest(1), batch.digest)
        assert await batch_of(new, 1) == batch
        with pytest.raises(Refused, match="bound to"):
            await new.commit(1, manifest(1), "0" * 64)
        await new.commit(1, manifest(1), batch.digest)
        assert await new.ask(GetCommitted) == CommittedState(1, manifest(1))
        crew.done.set()
        await asyncio.gather(rolling, rewarding)


async def test_worker_whose_welcome_came_before_the_stores_membership_is_served(process: StoreProcess) -> None:
    process.start([TRAINER])
    async with clients(process, ROLLOUT) as (rollout,):
        assert await rollout.lease(1, wait=0.0) == ()
        asking = asyncio.create_task(rollout.lease(1, wait=DEADLINE))
        process.set_membership(ALL)
        assert len(await asking) == 1


def test_store_is_found_in_the_membership_and_its_incarnation_is_the_epoch() -> None:
    store = incarnation_of("trajectories/0", 3)
    joining = Peers(1, 1, {store.replica: Peer(store), ROLLOUT.replica: Peer(ROLLOUT, "tcp://elsewhere:1")})
    assert store_address(None) is None
    assert store_address(joining) is None
    found = store_address(Peers(1, 2, {store.replica: Peer(store, "tcp://here:5", joined=True)}))
    assert found is not None
    assert (found.epoch, found.endpoint) == (3, "tcp://here:5")


# ── rounds ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class Script:
    """A listener without a socket, which records requests, replies, and the number of flushes between them."""

    def __init__(self, store: Store) -> None:
        self.arrived: deque[Incoming] = deque()
        self.replies: dict[int | None, Answer] = {}
        self.news = asyncio.Event()
        self.flushes = 0
        self._flush = store.flush
        store.flush = self.flush  # type: ignore[method-assign]

    def flush(self) -> None:
        self._flush()
        self.flushes += 1

    def send_request(self, request: int, message: Any) -> None:
        self.arrived.append(Incoming(b"peer", request, message))
        self.news.set()

    async def receive(self) -> Incoming:
        while not self.arrived:
            self.news.clear()
            await self.news.wait()
        return self.arrived.popleft()

    async def send(self, peer: bytes, message: Answer, request: int | None = None) -> None:
        self.replies[request] = message

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not true():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def _serve(
    tmp_path: Path,
    done: Callable[[int], None] = lambda _: None,
    store: Store | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[tuple[Store, Server, Script]]:
    store = store or open_store(tmp_path)
    script = Script(store)
    server = Server(store, cast(Listener, script), done, note)
    running = asyncio.create_task(server.run())
    yield store, server, script
    server.stop()
    await running


async def test_requests_that_come_together_share_one_flush(tmp_path: Path) -> None:
    async with _serve(tmp_path) as (_, _, script):
        script.send_request(0, LeaseWork(ROLLOUT, 8))
        await script.until(lambda: 0 in script.replies)
        before = script.flushes
        for trajectory in range(8):
            script.send_request(1 + trajectory, Append(ROLLOUT, (segment(trajectory),), (trajectory,)))
        await script.until(lambda: len(script.replies) == 9)
        assert script.flushes - before <= 2
        assert all(script.replies[n] == Done() for n in range(1, 9))


async def test_append_with_a_request_for_work_is_answered_once_and_repeated_without_effect(tmp_path: Path) -> None:
    async with _serve(tmp_path) as (_, _, script):
        script.send_request(0, LeaseWork(ROLLOUT, 2))
        await script.until(lambda: 0 in script.replies)
        before = script.flushes
        request = Append(ROLLOUT, (segment(0), segment(1)), (0,), LeaseWork(ROLLOUT, 2, 0.0, (1,)))
        script.send_request(1, request)
        await script.until(lambda: 1 in script.replies)
        assert script.flushes == before + 1
        first = script.replies[1]
        assert isinstance(first, Done)
        assert [item.trajectory for item in first.leased] == [2, 3], (
            "the rollout was leased an item that it holds or has just finished"
        )
        script.send_request(2, request)
        await script.until(lambda: 2 in script.replies)
        assert script.replies[2] == first, "a repeated request did not get the items of the lost answer"


async def test_denied_append_leases_nothing_until_it_is_sent_without_lost_trajectories(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert len(lease(store, ROLLOUT, 2)) == 2
    store.append(ROLLOUT, [segment(0), segment(1)])
    requests: list[Append] = []

    async def send(request: Append, wait: float) -> Answer:
        requests.append(request)
        return answer(store, request)

    client = TrajectoryClient(RunKeys.make(), ROLLOUT, lambda: None)
    client._send = send  # type: ignore[assignment, method-assign]
    other, next_of_1 = segment(0, tokens=(7, 7)), segment(1, 2, (9,))
    lost, leased = await client.append_and_lease([other, next_of_1], [], 2, (0, 1))
    assert lost == (0,)
    (again, new) = leased
    assert (again.trajectory, again.so_far, new.trajectory) == (0, (segment(0),), 2)

    assert [(len(request.segments), request.lease and request.lease.holding) for request in requests] == [
        (2, (0, 1)),
        (1, (1,)),
    ]
    assert [item.trajectory for item in lease(store, OTHER, 1)] == [3], "not exactly the second request has leased work"


def test_store_is_idle_until_it_is_given_a_request(tmp_path: Path) -> None:
    async def run(store: Store) -> None:
        events: list[str] = []

        @contextmanager
        def idle(cause: str) -> Iterator[None]:
            events.append(cause)
            yield
            events.append("works")

        script = Script(store)
        script._flush = lambda: events.append("flush")
        server = Server(store, cast(Listener, script), idle=idle)
        running = asyncio.create_task(server.run())
        await script.until(lambda: events == [REQUESTS_CAUSE])
        script.send_request(0, LeaseWork(ROLLOUT, 8))
        await script.until(lambda: 0 in script.replies)
        server.stop()
        await running
        assert events[:3] == [REQUESTS_CAUSE, "works", "flush"]

    asyncio.run(run(open_store(tmp_path)))


async def test_answer_that_cannot_be_made_durable_is_not_sent(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    script = Script(store)

    def full() -> None:
        raise OSError(28, "No space left on device")

    script._flush = full
    script.send_request(1, LeaseWork(ROLLOUT, 8))
    durable: list[CommitStatus] = []
    with pytest.raises(OSError, match="No space"):
        await Server(store, cast(Listener, script), on_durable=durable.append).run()
    assert script.replies == {}
    assert durable == [], "a commit that may be lost was reported as durable, after which checkpoints are deleted"


async def test_request_waits_for_its_stated_time_and_is_answered_as_soon_as_possible(tmp_path: Path) -> None:
    async with _serve(tmp_path) as (_, server, script):
        script.send_request(1, GetPart(TRAINER, 1, wait=0.05))
        await script.until(lambda: script.replies.get(1) == NotReady())
        script.send_request(2, LeaseWork(ROLLOUT, 8, wait=DEADLINE))
        script.send_request(3, LeaseWork(OTHER, 8, wait=DEADLINE))
        await script.until(lambda: 2 in script.replies)
        assert 3 not in script.replies
        server.update_membership(frozenset(ALL[1:]))  # ROLLOUT is gone
        await script.until(lambda: 3 in script.replies)
        leased = script.replies[3]
        assert isinstance(leased, Leased)
        assert len(leased.items) == 8


def _ready(tmp_path: Path) -> Store:
    """Return a store with a batch for step 1."""
    store = open_store(tmp_path)
    generate(store)
    score(store)
    return store


@pytest.mark.parametrize("index", [None, 0])
async def test_batch_or_part_requested_by_many_members_is_built_once_per_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int | None
) -> None:
    made: list[int] = []
    make = State.part

    def counted(state: State, number: int, index: int | None) -> PackedPart:
        made.append(number)
        return make(state, number, index)

    monkeypatch.setattr(State, "part", counted)

    async with _serve(tmp_path, store=_ready(tmp_path)) as (store, _, script):
        for ask in range(16):
            member = incarnation_of(member_id(TRAINER.replica, ask))
            script.send_request(ask, GetPart(member, 1, index))
        await script.until(lambda: len(script.replies) == 16)
        assert len(made) < 16 / 2, "the reply was built more often than once per round"
        expected = store.part(TRAINER, 1, index)
        replies = {bytes(cast(msgspec.Raw, reply)) for reply in script.replies.values()}
        assert replies == {msgspec.msgpack.encode(expected)}


def _decoded(reply: Answer) -> Answer:
    """Return the reply that a trainer decodes from an encoded reply."""
    decoded: Answer = msgspec.msgpack.decode(cast(msgspec.Raw, reply), type=Answer)
    return decoded


async def test_request_for_a_part_waits_until_a_group_is_complete(tmp_path: Path) -> None:
    async with _serve(tmp_path) as (store, server, script):
        lease(store)
        script.send_request(1, GetPart(TRAINER, 1, 0, wait=math.inf))
        await script.until(lambda: bool(server._parked))
        assert script.replies == {}
        script.send_request(2, Append(ROLLOUT, tuple(segment(t) for t in range(GROUP)), tuple(range(GROUP))))
        script.send_request(3, LeaseScoring(REWARD, 100))
        await script.until(lambda: 3 in script.replies)
        assert 1 not in script.replies
        script.send_request(4, PostScores(REWARD, tuple(Score(t, 1.0, 1.0) for t in range(GROUP))))
        await script.until(lambda: 1 in script.replies)
        reply = _decoded(script.replies[1])
        assert isinstance(reply, PartBound)
        assert (reply.part.groups, reply.part.last) == ((0,), False)
        script.send_request(5, GetPart(TRAINER, 1, 1, wait=0.0))
        script.send_request(6, GetPart(TRAINER, 1, 2, wait=0.0))
        await script.until(lambda: 6 in script.replies)
        assert script.replies[5] == NotReady()
        assert isinstance(script.replies[6], Denied)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (
            GetPart(TRAINER, 1, 0),
            "the part has 0 MiB, but a message has at most 0 MiB; lower group_size or max_new_tokens in [sampling]",
        ),
        (
            GetPart(TRAINER, 1),
            "the batch has 0 MiB, but a message has at most 0 MiB; lower prompts_per_step, group_size or max_new_tokens"
            " in [sampling], or train in parts (stream = true)",
        ),
    ],
)
async def test_data_larger_than_a_message_is_refused_before_it_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_: StepRequest, why: str
) -> None:
    monkeypatch.setattr(server_module, "CONTROL_BOUNDS", Bounds(2**10, 1000))

    async with _serve(tmp_path, store=_ready(tmp_path)) as (_, _, script):
        script.send_request(1, request_)
        await script.until(lambda: 1 in script.replies)
        denial = script.replies[1]
        assert isinstance(denial, Denied)
        assert denial.why == why


async def test_fenced_member_is_denied_a_batch_that_others_get(tmp_path: Path) -> None:
    async with _serve(tmp_path, store=_ready(tmp_path)) as (_, _, script):
        script.send_request(1, GetPart(incarnation_of("trainer/0", 2), 1))
        script.send_request(2, GetPart(TRAINER, 1))
        await script.until(lambda: len(script.replies) == 2)
        assert isinstance(script.replies[1], msgspec.Raw)
        assert isinstance(script.replies[2], Denied)


async def test_request_repeated_while_it_waits_is_answered_once(tmp_path: Path) -> None:
    answers_sent: list[int | None] = []

    async with _serve(tmp_path) as (store, server, script):
        send = script.send

        async def counted(peer: bytes, message: Answer, request: int | None = None) -> None:
            answers_sent.append(request)
            await send(peer, message, request)

        script.send = counted  # type: ignore[method-assign]
        script.send_request(1, GetPart(TRAINER, 1, wait=DEADLINE))
        await script.until(lambda: bool(server._parked))
        for _ in range(3):
            script.send_request(1, GetPart(TRAINER, 1, wait=DEADLINE))
        generate(store)
        score(store)
        script.send_request(2, LeaseWork(ROLLOUT, 0, 0.0))
        await script.until(lambda: {1, 2} <= script.replies.keys())
        assert answers_sent.count(1) == 1


async def test_slow_reply_is_accepted_although_the_request_was_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this rule, no reply of a store that needs longer than the resend interval would be accepted."""
    monkeypatch.setattr(client_module, "_RESEND_AFTER_S", 0.05)
    keys = RunKeys.make()

    async with asyncio.timeout(DEADLINE):
        listener = await Listener.open(keys, StepRequest, epoch=1)
        client = TrajectoryClient(keys, TRAINER, lambda: listener.address)
        running = asyncio.create_task(client.run())
        asked = asyncio.create_task(batch_of(client, 1, 0.0))
        first = await listener.receive()
        for _ in range(2):
            await listener.receive()
        await listener.send(first.peer, NotReady(), first.request_id)
        assert await asked is None
        await client.close()
        await running
        await listener.close()


# ── prompts ────────────────────────────────────────────────────────────────────────────────────────────────────────
class Digits:
    """A task whose prompts grow with the item's number."""

    def __init__(self, seed: int) -> None:
        del seed

    def prompt(self, i: int) -> str:
        return "7" * i

    def answer(self, i: int) -> str:
        return ""

    def score(self, i: int, answer: str) -> tuple[float, float]:
        return 0.0, 0.0


def _digits_job(pieces: str = "0123456789", **tables: Any) -> RunSpec:
    table = {
        "run": {"name": "test", "steps": 1},
        "model": {"max_length": 20, "tokenizer": {"pieces": pieces}},
        "task": {"function": f"{__name__}:Digits"},
        "sampling": {"max_new_tokens": 8},
        **tables,
    }
    return resolve(Job.model_validate(table), "python")


def _prompts(tmp_path: Path, pieces: str = "0123456789", **roles: Any) -> Callable[[int], Any]:
    job = _digits_job(pieces, roles=roles)
    return server_module._prompts_and_evaluations(job, open_tokenizer(job.model), tmp_path)[0]


def test_prompt_too_long_for_an_answer_is_refused_for_a_built_model(tmp_path: Path) -> None:
    prompts = _prompts(tmp_path)
    assert len(prompts(12).tokens) == 12
    with pytest.raises(ValueError, match=r"13 tokens; .* exceeds max_length = 20"):
        prompts(13)
    with pytest.raises(ValueError, match="has no tokens"):
        prompts(0)


def test_vocabulary_that_fits_no_prompt_ends_the_store_before_it_joins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        _prompts(tmp_path, pieces="ab")
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("rrl: 32 consecutive items of [task], up to item 31, have no prompt; the last error: no")
    assert message.endswith("add '7' to `pieces` or to `ignore`\n")


def test_prompt_of_any_length_is_accepted_if_the_model_is_the_users_own(tmp_path: Path) -> None:
    own = {"command": ["true"]}
    assert len(_prompts(tmp_path, trainer=own, rollout=own)(100).tokens) == 100


@pytest.mark.parametrize("agents", [{}, {"agents": {"command": ["agent"]}}])
def test_prompts_name_the_file_that_they_are_from(tmp_path: Path, agents: dict[str, Any]) -> None:
    files = [{"path": str(tmp_path / f"{name}.jsonl"), "name": name} for name in ("even", "odd")]
    for file in files:
        Path(file["path"]).write_text('{"question": "1", "answer": "2"}\n')
    held_out = [{"path": str(tmp_path / "held_out.jsonl"), "name": "new"}]
    Path(held_out[0]["path"]).write_text('{"question": "3", "answer": "4"}\n')
    pieces = {"pieces": "0123456789", "chat": {"user": "{content}", "assistant": "{content}"}}
    model = {"max_length": 20, "tokenizer": pieces}
    evaluation = {"every": 1, "task": {"files": held_out}}
    job = _digits_job(task={"files": files}, roles=agents, model=model, eval=evaluation)
    prompts, evaluations = server_module._prompts_and_evaluations(job, open_tokenizer(job.model), tmp_path)
    assert [prompts(item).source for item in range(4)] == ["even", "odd", "even", "odd"]
    assert evaluations is not None
    assert evaluations.prompt(0).source == "new"


class InThisProcess:
    """A dialer to a store in this process, which records the requests in ``calls``."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.calls: list[Any] = []

    async def request(self, request: Any, timeout: float, resend_after: float) -> Answer:
        self.calls.append(request)
        return answer(self.store, request)


async def test_a_rollout_whose_weights_are_too_old_gets_work_as_soon_as_it_has_newer_ones(tmp_path: Path) -> None:
    store = open_store(tmp_path, staleness=0)
    train(store, 1, at_most=BATCH * GROUP, weights=0)
    here = [0]
    client = TrajectoryClient(RunKeys.make(), ROLLOUT, lambda: None, weights=lambda: here[0])
    dialer = InThisProcess(store)
    client._dialer = cast(Dialer, dialer)
    assert await client.lease(8, wait=0.0) == ()
    waiting = asyncio.create_task(client.lease(8, wait=DEADLINE))
    while len(dialer.calls) < 2:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.1)
    assert len(dialer.calls) == 2, "the request was repeated although nothing had changed"
    here[0] = 1
    assert len(await waiting) == BATCH * GROUP
    assert [request.weights for request in dialer.calls] == [0, 0, 1]


async def test_outdated_answer_is_sent_at_once_and_is_not_counted_as_served(tmp_path: Path) -> None:
    served: list[int] = []

    store = open_store(tmp_path, staleness=0)
    train(store, 1, at_most=BATCH * GROUP, weights=0)
    async with _serve(tmp_path, served.append, store) as (_, _, script):
        script.send_request(0, LeaseWork(ROLLOUT, 8, wait=DEADLINE, weights=0))
        await script.until(lambda: 0 in script.replies)
        assert script.replies[0] == Leased((), outdated=True)
    assert sum(served) == 0


@pytest.mark.parametrize("request_of", [GetPart(TRAINER, 2, None, DEADLINE), GetPart(TRAINER, 2, 0, DEADLINE)])
async def test_missing_newer_weights_are_warned_about_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, request_of: StepRequest
) -> None:
    monkeypatch.setattr(server_module, "WEIGHTS_WARNING_AFTER_S", 0.0)

    store = open_store(tmp_path, staleness=0)
    train(store, 1, at_most=BATCH * GROUP, weights=0)
    async with _serve(tmp_path, store=store) as (_, _, script):
        script.send_request(
            0, LeaseWork(ROLLOUT, 8, weights=0)
        )  # the trainer is in its step, so that old weights are normal
        script.send_request(1, LeaseWork(ROLLOUT, 8, weights=0))
        await script.until(lambda: len(script.replies) == 2)
        assert "for newer weights" not in caplog.text
        script.send_request(9, request_of)
        for ask in (2, 3, 4, 5):
            script.send_request(ask, LeaseWork(ROLLOUT, 8, weights=0))
            await script.until(partial(script.replies.__contains__, ask))
    assert caplog.text.count("the trainer waits for a batch, and the rollouts wait for newer weights") == 1


async def test_note_gives_the_wait_reason_and_is_cleared_with_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "NOTE_AFTER_S", 0.0)
    monkeypatch.setattr(server_module, "NOTE_INTERVAL_S", 0.0)
    notes: list[str] = []

    async with _serve(tmp_path, store=open_store(tmp_path, staleness=0), note=notes.append) as (_, _, script):
        script.send_request(0, LeaseWork(ROLLOUT, BATCH * GROUP, weights=0))
        script.send_request(1, GetPart(TRAINER, 1, wait=0.0))
        await script.until(lambda: bool(notes))
        assert (
            notes[-1] == f"the trainer waits for group 0 ({ROLLOUT}) and 1 more: step 1 is the last that may train them"
        )
        last = BATCH * GROUP - 1
        script.send_request(2, Append(ROLLOUT, tuple(segment(t) for t in range(last + 1)), tuple(range(last))))
        script.send_request(3, LeaseScoring(REWARD, 100))
        await script.until(lambda: 3 in script.replies)
        script.send_request(4, PostScores(REWARD, tuple(Score(t, 1.0, 1.0) for t in range(last))))
        script.send_request(5, GetPart(TRAINER, 1, wait=0.0))
        await script.until(lambda: notes[-1].endswith("step 1 is the last that may train it"))
        assert notes[-1] == f"the trainer waits for group {BATCH - 1} ({ROLLOUT}): step 1 is the last that may train it"
        script.send_request(6, Append(ROLLOUT, (), (last,)))
        script.send_request(7, PostScores(REWARD, (Score(last, 1.0, 1.0),)))
        script.send_request(8, GetPart(TRAINER, 1))
        await script.until(lambda: notes[-1] == "")
        assert isinstance(script.replies[8], msgspec.Raw)


async def test_note_on_a_waiting_part_is_cleared_when_a_batch_is_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "NOTE_AFTER_S", 0.0)
    monkeypatch.setattr(server_module, "NOTE_INTERVAL_S", 0.0)
    notes: list[str] = []

    async with _serve(tmp_path, note=notes.append) as (store, _, script):
        script.send_request(0, GetPart(TRAINER, 1, 0, wait=0.0))
        await script.until(lambda: bool(notes))
        assert notes[-1] == (
            "the trainer waits for answers, and the rollouts wait for its first weights: me.publish(step, tensors) has"
            " not been called; call it before the first batch"
        )
        generate(store, at_most=GROUP)
        score(store)
        script.send_request(1, GetPart(TRAINER, 1, 0, wait=0.0))
        await script.until(lambda: notes[-1] == "")
        script.send_request(2, GetPart(TRAINER, 1, 1, wait=0.0))
        await script.until(
            lambda: notes[-1] == "the trainer waits for 1 more of the 2 groups of step 1 (bound already: 1)"
        )
        generate(store)
        score(store)
        script.send_request(3, GetPart(TRAINER, 1, wait=0.0))
        await script.until(lambda: notes[-1] == "")
        assert isinstance(script.replies[3], msgspec.Raw)


async def test_negative_replies_do_not_count_as_work_of_the_store(tmp_path: Path) -> None:
    served: list[int] = []

    async with _serve(tmp_path, served.append) as (_, _, script):
        script.send_request(0, LeaseWork(ROLLOUT, 1000))
        await script.until(lambda: 0 in script.replies)
        assert sum(served) == 1
        vain = GetPart(TRAINER, 1, None, 0.0), LeaseWork(OTHER, 8, 0.0), LeaseScoring(REWARD, 8, 0.0)
        for ask, request in enumerate(vain, 1):
            script.send_request(ask, request)
        script.send_request(4, LeaseWork(incarnation_of("rollout/0", 0), 8))
        await script.until(lambda: len(script.replies) == 5)
        assert isinstance(script.replies[4], Denied)
        script.send_request(5, Append(ROLLOUT, (segment(0),), (0,)))
        script.send_request(6, LeaseScoring(REWARD, 8))
        await script.until(lambda: len(script.replies) == 7)
        await script.until(lambda: sum(served) >= 3)
    assert sum(served) == 3


async def test_answers_about_weight_versions_do_not_count_as_work_of_the_store(tmp_path: Path) -> None:
    """Every rollout requests weight versions every few seconds.

    If the answers counted, a store that serves no work would never count as hung.
    """
    served: list[int] = []

    async with _serve(tmp_path, served.append) as (_, server, script):
        script.send_request(0, FollowVersions(ROLLOUT, wait=DEADLINE))
        await script.until(lambda: server._followers.due < math.inf)
        version = Version(4, 1)
        script.send_request(1, FollowVersions(TRAINER, (version,), version, wait=0.0))
        await script.until(lambda: len(script.replies) == 2)
        assert script.replies[0] == script.replies[1] == NewestVersion(version, (((version,), (TRAINER,)),))
    assert sum(served) == 0


async def test_rollout_gets_versions_once_the_manager_has_reported_it(tmp_path: Path) -> None:
    async with _serve(tmp_path) as (_, server, script):
        late, version = incarnation_of("rollout/7"), Version(4, 1)
        script.send_request(0, FollowVersions(late, wait=DEADLINE))
        script.send_request(1, FollowVersions(TRAINER, (version,), version, wait=0.0))
        await script.until(lambda: 1 in script.replies)
        assert 0 not in script.replies
        server.update_membership(frozenset((*ALL, late)))
        await script.until(lambda: 0 in script.replies)
        assert isinstance(script.replies[0], NewestVersion)


async def test_probe_of_the_store_is_answered_by_its_own_event_loop(tmp_path: Path) -> None:
    answers: list[ProbeReply] = []
    probes, stopping, announced = ProbeResponder(answers.append), threading.Event(), asyncio.Event()
    me = SimpleNamespace(
        launch=SimpleNamespace(incarnation=incarnation_of("trajectories/0")),
        keys=RunKeys.make(),
        host="127.0.0.1",
        peers=None,
        stopping=stopping,
        progress=lambda units: None,
        on_peers=lambda callback: None,
        announce=lambda listens: announced.set(),
        on_probe=probes.on_probe,
        answer_probe=probes.answer,
        note=lambda text: None,
        idle=nullcontext,
        report_evaluation=lambda result: None,
        report_data=lambda data: None,
    )
    cleaner = SimpleNamespace(update=lambda status: None)
    serving = asyncio.create_task(server_module._serve(cast(Any, me), open_store(tmp_path), cast(Any, cleaner)))
    async with asyncio.timeout(DEADLINE):
        await announced.wait()
        probes.on_request(Probe(me.launch.incarnation, 3), me.launch.incarnation)
        while not answers:
            await asyncio.sleep(0.01)
        stopping.set()
        await serving
    assert answers == [ProbeReply(me.launch.incarnation, 3, ProbeResult.WORKS, "the store's loop is running")]


# ── data that the trainer does not take ──────────────────────────────────────────────────────────────────────────────
async def test_data_are_untaken_while_the_trainer_does_not_request_a_complete_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _serve(tmp_path) as (store, server, script):
        assert not server.data_report().untaken, "data counts as untaken although no step is complete"
        generate(store)
        score(store)
        assert server.data_report().untaken
        script.send_request(0, GetPart(TRAINER, 1))
        await script.until(lambda: 0 in script.replies)
        assert not server.data_report().untaken, "data counts as untaken although the trainer has just taken it"
        monkeypatch.setattr(server_module, "UNTAKEN_AFTER_S", 0.0)
        assert server.data_report().untaken, (
            "the trainer neither commits nor requests data, and the data does not count as untaken"
        )


async def test_data_are_not_untaken_while_a_request_for_the_next_step_is_open(tmp_path: Path) -> None:
    async with _serve(tmp_path, store=_ready(tmp_path)) as (store, server, script):
        while not server._parked:
            server._data_requested_at, step = -math.inf, len(script.replies) + 1
            script.send_request(step, GetPart(TRAINER, step, wait=DEADLINE))
            await script.until(lambda step=step: bool(server._parked) or step in script.replies)  # type: ignore[misc]
        assert store.has_data(), "the store has no data, though the steps before are not committed"
        assert not server.data_report().untaken


async def test_requests_of_a_fenced_trainer_do_not_hide_untaken_data(tmp_path: Path) -> None:
    async with _serve(tmp_path, store=_ready(tmp_path)) as (_, server, script):
        script.send_request(0, GetPart(incarnation_of("trainer/0", 0), 1))
        await script.until(lambda: 0 in script.replies)
        assert server.data_report().untaken


def test_groups_held_back_by_the_staleness_limit_are_no_untaken_data(tmp_path: Path) -> None:
    store = open_store(tmp_path, staleness=0)
    store.lease(ROLLOUT, BATCH * GROUP, weights=0)
    last = BATCH * GROUP - 1
    store.append(ROLLOUT, tuple(segment(t) for t in range(last + 1)), tuple(range(last)))
    score(store)
    assert not store.has_data(), f"the step counts as complete without group {BATCH - 1}, which no later step may train"
    store.append(ROLLOUT, (), (last,))
    score(store)
    assert store.has_data()
    store.close()


# ── a trainer that lends its GPUs ────────────────────────────────────────────────────────────────────────────────────
GUEST = incarnation_of("guest/n1")
SHORT = Balance(math.inf, math.inf)
BALANCED = Balance(0.0, math.inf)
COLOCATED = (GUEST, REWARD, TRAINER)


async def _make_step(script: Script, first: int) -> None:
    """Make the groups of a step as a guest and the reward role, with requests from number ``first`` on."""
    script.send_request(first, LeaseWork(GUEST, BATCH * GROUP))
    await script.until(lambda: first in script.replies)
    leased = cast(Leased, script.replies[first]).items
    made = tuple(item.trajectory for item in leased)
    script.send_request(first + 1, Append(GUEST, tuple(segment(t) for t in made), made))
    script.send_request(first + 2, LeaseScoring(REWARD, 100))
    await script.until(lambda: first + 2 in script.replies)
    script.send_request(first + 3, PostScores(REWARD, tuple(Score(t, 1.0, 1.0) for t in made)))


async def test_balance_is_answered_at_once_at_balance_or_after_its_wait(tmp_path: Path) -> None:
    served: list[int] = []
    async with _serve(tmp_path, served.append, open_store(tmp_path, COLOCATED)) as (_, server, script):
        script.send_request(0, AwaitBalance(TRAINER, 1, 0.0, 0.0))
        script.send_request(1, AwaitBalance(TRAINER, 1, 0.0, 0.0, wait=0.05))
        await script.until(lambda: len(script.replies) == 2)
        assert [script.replies[0], script.replies[1]] == [SHORT, SHORT]
        assert sum(served) == 0, "a step that stays short counts as progress of the store"
        script.send_request(2, AwaitBalance(TRAINER, 1, 0.0, 0.0, wait=DEADLINE))
        script.send_request(3, AwaitBalance(incarnation_of("trainer/0", 0), 1, 0.0, 0.0, wait=DEADLINE))
        script.send_request(4, AwaitBalance(TRAINER, 7, 0.0, 0.0, wait=DEADLINE))
        await script.until(lambda: 4 in script.replies)
        assert isinstance(script.replies[3], Denied)
        assert isinstance(script.replies[4], Denied)
        await script.until(lambda: bool(server._parked))
        assert 2 not in script.replies
        await _make_step(script, 10)
        await script.until(lambda: 2 in script.replies)
        assert script.replies[2] == BALANCED


async def test_trainer_that_has_lent_its_gpus_leaves_no_data_and_has_no_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "NOTE_AFTER_S", 0.0)
    monkeypatch.setattr(server_module, "NOTE_INTERVAL_S", 0.0)
    notes: list[str] = []
    store = open_store(tmp_path, (*ALL, GUEST))
    assert store.report_versions(TRAINER, (Version(0, TRAINER.number),)) is None
    async with _serve(tmp_path, store=store, note=notes.append) as (_, server, script):
        script.send_request(0, LeaseWork(GUEST, BATCH * GROUP))
        script.send_request(1, AwaitBalance(TRAINER, 1, 0.0, 0.0, wait=DEADLINE))
        await script.until(lambda: bool(server._parked))
        assert not notes
        report = server.data_report()
        assert not report.untaken
        assert report.holders == {GUEST.replica}, "who holds what a lent trainer lacks is not known"
        script.send_request(2, GetPart(TRAINER, 1, 0, wait=0.0))
        await script.until(lambda: bool(notes) and notes[-1] != "")
        script.send_request(3, AwaitBalance(TRAINER, 1, 0.0, 0.0))
        await script.until(lambda: notes[-1] == "")


async def test_data_are_not_untaken_while_the_trainer_has_lent_its_gpus(tmp_path: Path) -> None:
    """As in a colocated run whose last groups of the step have just become complete."""
    async with _serve(tmp_path, store=_ready(tmp_path)) as (_, server, script):
        assert server.data_report().untaken
        script.send_request(0, AwaitBalance(TRAINER, 1, 0.0, 0.0, wait=1.0))
        await script.until(lambda: 0 in script.replies)
        assert not server.data_report().untaken


async def test_hand_over_frees_all_work_of_a_guest_and_answers_its_waiting_request(tmp_path: Path) -> None:
    store = open_store(tmp_path, (*ALL, GUEST))
    async with _serve(tmp_path, store=store) as (_, server, script):
        script.send_request(0, LeaseWork(GUEST, 1000))
        script.send_request(1, LeaseWork(GUEST, 8, wait=DEADLINE, holding=None))
        script.send_request(2, LeaseWork(ROLLOUT, 1000, wait=DEADLINE))
        await script.until(lambda: 0 in script.replies and len(server._parked) == 2)
        held = cast(Leased, script.replies[0]).items
        request = Append(GUEST, tuple(segment(item.trajectory) for item in held), hands_over=True)
        script.send_request(3, request)
        await script.until(lambda: len(script.replies) == 4)
        assert script.replies[1] == Leased(()), "a guest that hands over was leased work"
        assert script.replies[3] == Done()
        taken = cast(Leased, script.replies[2]).items
        assert [item.trajectory for item in taken] == [item.trajectory for item in held]
        assert all(item.so_far for item in taken)
        script.send_request(4, request)
        await script.until(lambda: 4 in script.replies)
        repeated = script.replies[4]
        assert isinstance(repeated, Denied)
        assert set(repeated.lost) == {item.trajectory for item in held}
        assert store._work.leases.leased_to(ROLLOUT) == {item.trajectory for item in held}


async def test_trainer_waits_for_balance_and_a_guest_hands_over_across_restarts_of_the_store(
    process: StoreProcess,
) -> None:
    members = (GUEST, OTHER, REWARD, TRAINER)
    process.start(members[:1] + members[2:])
    async with clients(process, GUEST, REWARD, TRAINER) as (guest, reward, trainer):
        held = await guest.lease(BATCH * GROUP)
        waiting = asyncio.create_task(trainer.ask(AwaitBalance, 1, 0.0, 0.0, DEADLINE))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        process.kill()
        process.start(members)  # beside a rollout now, which can continue
        appended = await guest.append_and_lease([segment(i.trajectory, 0, (5,)) for i in held], (), 0, hands_over=True)
        assert appended.lost == ()
        async with clients(process, OTHER) as (other,):
            taken = await other.lease(BATCH * GROUP)
            assert [item.trajectory for item in taken] == [item.trajectory for item in held]
            segments = [segment(item.trajectory, 1, (5,)) for item in taken]
            await other.append(segments, [item.trajectory for item in taken])
            leased = await lease_scoring(reward, 100)
            await reward.ask(PostScores, tuple(Score(item.trajectory, 1.0, 1.0) for item in leased))
            assert (await waiting).short_s == 0.0, "the request that a dead store had was not repeated"
