"""The HTTP application. It serves each API of :data:`.forms.FORMS` and a list of models from turns in the store.

A call opens one turn for each answer, and follows the turn until the turn's last token is durable. A client repeats a
call if its connection broke or the server was restarted. Not every client says so, so any call of the same meaning
continues the newest turns whose answers were not delivered. Only if all were delivered does it open further turns: the
agent wants several answers. In an attempt that replays an earlier attempt, a call takes over the turns that were
recorded for the same call. A call waits for tokens for as long as the store or the rollouts are unavailable.
During this time the agent gets white space before the JSON, or comments in a stream, so that its read timeout does not
expire.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from msgspec import Struct, structs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ...config.model_folder import max_length
from ...core.run_spec import EndpointSettings, RunSpec
from ..models.conversation import Chat, ModelChat
from ..trajectories.client import AskStore, Fenced, FencedAttempt, Refused
from ..trajectories.episodes.requests import EndTurn, EpisodeTurns, Follow, MarkAnswer, OpenTurn, Turn
from ..trajectories.types import A, Done, Kind, P
from .calls.call import Call, Policy
from .calls.earlier_responses import EarlierResponses
from .calls.errors import ApiError, wrong
from .forms import FORMS
from .http_messages import EXCEPTION_HANDLERS, Abandoned, bearer_key, check_size, read_body
from .http_server import ON_RESET
from .key import EpisodeKey
from .preparation_processes import PreparationProcesses
from .replies import reply as replies
from .replies.answer import SampledAnswer, answer_format
from .replies.reply import Reply
from .replies.writer import OpenedTurns
from .turns.known_turns import KnownTurns
from .turns.preparation import Preparation, Work
from .turns.turn_context import Context, Paths, branch

_log = logging.getLogger("rrl.endpoint")

FOLLOW_WAIT_S = 5.0
"""Seconds after which a request for further tokens is repeated."""
INLINE_BYTES = 16 * 2**10
"""Size (bytes) of a body up to which a call is prepared in the event loop. This takes up to 30 ms on a slow core."""
_BYTES_PER_TOKEN = 1024
"""Bytes that a body may have for each token of the model's longest context. The longest tokens have 128 bytes, for each
of which JSON may need 6; the rest is markup."""
_MAX_NOTED = 500
"""Maximum number of names of models, keys and kinds of tools that are logged. Agents choose them."""
MODEL = "policy"
"""Name under which the model is listed; requests may use any name."""
_ROOTS = ("/v1", "")
"""Beginnings of the paths: a client may be given a base URL with or without the version."""
_RETRY_HEADER = "x-stainless-retry-count"
"""Header in which OpenAI's clients count the repetitions of a request."""
_RELAY_HEADER = "x-rrl-relay"
"""Header that a relay sends; the relay then gets the position of a stream after each event."""
_TRAIN_HEADER = "x-rrl-train"
"""Header in which an agent says by 0 that an answer must not be trained."""
_CALL_HEADER, _SENT_HEADER = "x-rrl-call", "x-rrl-sent"
"""Headers of a call that a relay repeats: the call's number, and the newest position that the relay received."""


class ServedRun(Struct, frozen=True):
    """The properties of the run that the endpoint needs."""

    run: str
    """Name of the run directory."""
    secret: bytes
    policy: Policy
    max_new: int
    """Maximum number of tokens of an answer."""
    max_length: float
    """Maximum number of tokens of context and answer together."""


def served_run(job: RunSpec, run: str, secret: bytes) -> ServedRun:
    """Return the properties of a run, for an endpoint in one of the run's processes.

    Args:
        job: The job.
        run: Name of the run directory.
        secret: The secret of the run.
    """
    settings, longest = job.endpoint or EndpointSettings(), max_length(job.model.path, job.model.max_length)
    policy = Policy(job.sampling.temperature, settings.foreign, settings.constraints, settings.untrained)
    return ServedRun(run, secret, policy, job.sampling.max_new_tokens, longest)


class _Repeated(Struct, frozen=True):
    """The earlier tries of a request, as its headers report them."""

    repeated: bool = False
    number: int | None = None
    """Number of the call among the calls of the same meaning; None if the client does not know it."""
    sent: str = ""
    """Position that the broken stream had reached; empty if the client does not know it."""


class _Served(Struct):
    """A turn that connections wait for."""

    connections: int = 0
    replies: list[Reply] = []
    """The replies that have the answer."""

    @property
    def is_delivered(self) -> bool:
        return any(reply.is_delivered for reply in self.replies)


class Endpoint:
    """The application and the calls that it serves now.

    Args:
        run: The properties of the run.
        chat: Tokenizer and chat template of the model.
        ask: Sends requests to the store.
        on_change: Called whenever ``waiting`` or ``answered`` changes.
        routes: Further routes.
        outlived: True if attempts go on after the end of this process. The store must then know which answers were
            delivered, and not only which were not.
    """

    def __init__(
        self,
        run: ServedRun,
        chat: ModelChat,
        ask: AskStore,
        on_change: Callable[[], None] = lambda: None,
        routes: Sequence[Route] = (),
        outlived: bool = False,
    ) -> None:
        self._run, self._chat, self._store = run, chat, ask
        self._on_change, self._outlived = on_change, outlived
        policy = structs.replace(run.policy, max_length=run.max_length)
        self._preparation = Preparation(chat, policy)
        self._processes = PreparationProcesses(chat.model, policy)
        self._max_body = INLINE_BYTES + _BYTES_PER_TOKEN * run.max_length
        self._earlier = EarlierResponses()
        self._known = KnownTurns(self._ask, chat.tokenizer)
        self._locks: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()
        """The lock of each episode, under which its bodies are read, and its turns opened. It makes equal calls at the
        same time get different turns, and bounds the memory that an episode takes to one body."""
        self._served: dict[tuple[int, str], _Served] = {}
        """The turns that connections wait for, by episode and request."""
        self._closing = False
        self._noted: set[str] = {MODEL}
        """What the log says once: names of models, and what calls have in vain."""
        self._reports: dict[asyncio.Future[list[Done | BaseException]], int] = {}
        """Reports to the store about answers, each with its episode."""
        self.waiting = 0
        """Number of calls that wait for tokens."""
        self.answered = 0
        """Number of answers that were completed."""
        self.application = Starlette(
            routes=[
                *(
                    Route(f"{root}{form.path}", partial(self._answer, wire=wire), methods=["POST"])
                    for wire, form in FORMS.items()
                    for root in _ROOTS
                ),
                *(Route(f"{root}/models", self._models, methods=["GET"]) for root in _ROOTS),
                *(Route(f"{root}/models/{{name:path}}", self._model, methods=["GET"]) for root in _ROOTS),
                *(Route(f"{root}/messages/count_tokens", self._count, methods=["POST"]) for root in _ROOTS),
                *(Route(path, _alive, methods=["HEAD"]) for path in ("/", "/api/hello")),
                *(Route(f"{root}/responses", _no_socket, methods=["GET"]) for root in _ROOTS),
                *routes,
            ],
            exception_handlers=EXCEPTION_HANDLERS,
        )

    async def _models(self, request: Request) -> Response:
        bearer_key(request, self._run.run, self._run.secret)
        listed = {"data": [_model_object(MODEL)], "has_more": False, "first_id": MODEL, "last_id": MODEL}
        return JSONResponse({"object": "list", **listed})

    async def _model(self, request: Request) -> Response:
        bearer_key(request, self._run.run, self._run.secret)
        return JSONResponse(_model_object(request.path_params["name"]))

    async def _count(self, request: Request) -> Response:
        """Return the number of tokens of the context that a call of the same body would have."""
        key = self._episode_key(request)
        async with self._locks.setdefault(key.episode, asyncio.Lock()):
            work = Work(FORMS["messages"].parse, await read_body(request, self._max_body))
            call, chat, episode = await self._read(key, work)
            context = await self._context(key.episode, call, chat, work, _with_path(episode.turns))
        return JSONResponse({"input_tokens": context.length})

    async def _answer(self, request: Request, *, wire: str) -> ASGIApp:
        key = self._episode_key(request)
        repeated, untrained = _repeated(request), _is_untrained(request)
        async with self._locks.setdefault(key.episode, asyncio.Lock()):
            body, asked = await read_body(request, self._max_body), None
            if FORMS[wire].names_earlier:
                body, asked = self._earlier.whole(key, body)
                check_size(body, self._max_body)
            call, opened = await self._open(key, Work(FORMS[wire].parse, body, untrained), repeated)
            writer, relayed = FORMS[wire].writer, _RELAY_HEADER in request.headers
            reply = Reply(call, opened, writer, self._grow, relayed, repeated.sent)
            end, tear = self._begin(key.episode, opened, reply)

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            scope[ON_RESET] = tear
            try:
                events = self._events(reply)
                stream = StreamingResponse(events, media_type="text/event-stream") if call.stream else None
                await (stream or await self._whole(request, reply))(scope, receive, send)
            finally:
                end()
                if asked is not None and reply.output:
                    self._earlier.keep(key, *reply.output, asked)

        return respond

    def _episode_key(self, request: Request) -> EpisodeKey:
        """Return the content of a request's API key, which must be that of an episode. Raises ApiError."""
        key = bearer_key(request, self._run.run, self._run.secret)
        if not key.attempt:
            message = "this is the key of the run; open an episode with POST /rrl/v1/episodes, and use its api_key"
            raise ApiError(403, message, "permission_error", "episode_key_needed")
        return key

    async def _parse(self, work: Work) -> Call:
        """Parse a call: here if the body is small, and otherwise in a process, which keeps the messages."""
        small = len(work.body) <= INLINE_BYTES
        call = self._preparation.parse(work) if small else (await self._processes.prepare(work))[0]
        self._note(call.model, "agents call the model %r; every name means the model that is trained", call.model)
        for key in call.overridden:
            self._note(f"{key} =", "a call of %r asks for %s; it is sampled as the job says", call.model, key)
        for key in call.ignored:
            self._note(f"{key} ?", "a call of %r has %.100s, which is ignored, as in any call", call.model, key)
        return call

    def _note(self, what: str, text: str, *given: str) -> None:
        """Log a text the first time that there is something to say about ``what``."""
        if what not in self._noted and len(self._noted) < _MAX_NOTED:
            self._noted.add(what)
            _log.info(text, *given)

    async def _context(self, episode: int, call: Call, chat: Chat, work: Work, turns: Sequence[Turn]) -> Context:
        """Find the context of a parsed call, where it was parsed."""
        answered = await self._known.newest_answer(episode, call.hashes, turns, chat)
        if len(work.body) <= INLINE_BYTES:
            context = self._preparation.context(call, chat, answered)
        else:
            path, sent = () if answered is None else answered.given + answered.sampled, answered
            if answered is not None and not chat.reads_context:
                sent = structs.replace(answered, given=(), sampled=answered.sampled[-1:])
            left_out = 0 if sent is None else len(path) - len(sent.given + sent.sampled)
            work = structs.replace(work, finds_context=True, answered=sent, left_out=left_out)
            prepared = (await self._processes.prepare(work))[1]
            assert prepared is not None
            context = structs.replace(prepared, tokens=path[: prepared.offset] + prepared.given)
        return branch(context, turns) if context.parent is None else context

    # ── turns ──────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _read(self, key: EpisodeKey, work: Work) -> tuple[Call, Chat, EpisodeTurns]:
        """Parse a call, and read the turns of its attempt. Raises ApiError and FencedAttempt."""
        call = await self._parse(work)
        chat: Chat = self._chat
        if call.tools or call.constraint:
            chat = await asyncio.to_thread(self._preparation.chat_of, call)
            call = await asyncio.to_thread(self._preparation.masked, call, chat)
        if reports := [report for report, episode in self._reports.items() if episode == key.episode]:
            await asyncio.wait(reports)
        episode = await self._known.read(key.episode, call.digest)
        if episode.attempt != key.attempt:
            raise FencedAttempt(f"attempt {key.attempt} of this episode is over: the newest is {episode.attempt}")
        return call, chat, episode

    async def _open(self, key: EpisodeKey, work: Work, repeated: _Repeated) -> tuple[Call, OpenedTurns]:
        """Open the turns of a call, or find the turns that an earlier try or a recorded attempt has opened."""
        call, chat, episode = await self._read(key, work)
        digest = call.digest
        earlier = [turn for turn in episode.turns if turn.request.startswith(f"{digest}/")]
        number = self._joined(key, digest, earlier, episode, repeated)
        if number is None:
            number = 1 + max((_number(turn) for turn in earlier), default=0)
            last = [turn for turn in earlier if _number(turn) == number - 1]
            ended = [turn.id for turn in last if (key.episode, turn.request) not in self._served]
            self._report(key.episode, ended, delivered=True, repeated=True)
        if (known := _known_context(f"{digest}/{number}/", episode)) is not None:
            try:
                return call, await self._open_turns(key, call, chat, number, known)
            except FencedAttempt:
                raise
            except Refused as error:  # for example, a limit has changed since the recorded attempt
                _log.info("a recorded turn is not used again: %s", error)
        turns = _with_path(episode.turns)
        context = await self._context(key.episode, call, chat, work, turns)
        return call, await self._open_turns(key, call, chat, number, context)

    async def _open_turns(self, key: EpisodeKey, call: Call, chat: Chat, number: int, context: Context) -> OpenedTurns:
        """Open a turn for each answer to a call."""
        left = self._run.max_length - context.length
        max_new = int(min(self._run.max_new, left, left if call.max_new is None else max(1, call.max_new)))
        names = _names(call, number)
        self._hold(key.episode, names)
        try:
            opened = [
                await self._ask(
                    OpenTurn,
                    key.episode,
                    key.attempt,
                    name,
                    context.parent,
                    context.offset,
                    context.given,
                    max_new,
                    context.conversation,
                    answer_format(call).encode(),
                    call.sampling,
                    call.model,
                )
                for name in names
            ]
        except BaseException:
            for name in names:
                self._let_go(key.episode, name)
            raise
        return OpenedTurns(number, context.tokens, names, tuple(one.turn for one in opened), chat)

    def _joined(
        self, key: EpisodeKey, digest: str, earlier: Sequence[Turn], episode: EpisodeTurns, repeated: _Repeated
    ) -> int | None:
        """Return the number of the call that a request continues; None if it is a new call.

        ``earlier`` are the turns of all calls of the same meaning. The request continues the call with the number that
        the client names; without it, the newest call whose answers were not delivered, and for which no connection
        waits. If there is none, a request that the client has repeated continues the newest call for which no
        connection waits or, if a connection waits for each, the newest call.
        """
        numbers = sorted({_number(turn) for turn in earlier}, reverse=True)
        if repeated.number in numbers:
            return repeated.number
        free = [number for number in numbers if (key.episode, f"{digest}/{number}/0") not in self._served]
        delivered = {_number(turn) for turn in earlier if turn.id not in episode.undelivered}
        lost = [number for number in free if number not in delivered]
        return next(iter([*lost, *free, *numbers] if repeated.repeated else lost), None)

    async def _grow(self, answer: SampledAnswer) -> AsyncIterator[None]:
        """Add the tokens of a turn to its answer as they become durable, and yield after each addition."""
        offset = 0
        while not answer.finished:
            tokens = await self._ask(Follow, answer.turn, offset, FOLLOW_WAIT_S)
            if tokens is None:
                continue
            offset += len(tokens.tokens)
            if answer.grow(tokens.tokens, tokens.logprobs, tokens.finished):
                await self._ask(EndTurn, answer.turn, answer.length)
            yield
        self.answered += 1
        self._on_change()

    async def _ask(self, kind: Kind[P, A], *arguments: P.args, **named: P.kwargs) -> A:
        """Send a request to the store. Once this process is fenced, every attempt that it serves is over."""
        try:
            return await self._store(kind, *arguments, **named)
        except Fenced as error:
            raise FencedAttempt(str(error)) from error

    def close(self) -> None:
        """Prepare the end of the server: report nothing more to the store, and end the processes beside it."""
        self._closing = True
        self._processes.close()

    # ── replies ────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _whole(self, request: Request, reply: Reply) -> Response:
        """Return a reply that is not a stream; if it takes long, send white space before it."""
        content = asyncio.ensure_future(reply.complete())
        await asyncio.wait([content], timeout=replies.KEEP_ALIVE_S)
        if content.done():
            reply.is_written = not await request.is_disconnected()
            return Response(content.result(), media_type="application/json")

        async def padded() -> AsyncIterator[bytes]:
            try:
                while not content.done():
                    yield b" "
                    await asyncio.wait([content], timeout=replies.KEEP_ALIVE_S)
                yield content.result()
                reply.is_written = True
            except FencedAttempt as error:
                raise Abandoned(str(error)) from None
            finally:
                content.cancel()

        return StreamingResponse(padded(), media_type="application/json")

    async def _events(self, reply: Reply) -> AsyncIterator[bytes]:
        try:
            async for event in reply.events():
                yield event
        except FencedAttempt as error:
            raise Abandoned(str(error)) from None

    def _begin(self, episode: int, opened: OpenedTurns, reply: Reply) -> tuple[Callable[[], None], Callable[[], None]]:
        """Count a call as waiting for tokens. Return a function that ends this, and one for a connection's reset."""
        self.waiting += 1
        self._on_change()
        answers = [
            (self._served[episode, name], turn, name) for name, turn in zip(opened.requests, opened.turns, strict=True)
        ]
        for served, _, _ in answers:
            served.replies.append(reply)

        def end() -> None:
            self.waiting -= 1
            self._on_change()
            for served, turn, name in answers:
                if self._let_go(episode, name) and (self._outlived or not served.is_delivered):
                    self._report(episode, [turn], delivered=served.is_delivered)

        def tear() -> None:
            reply.is_torn = True
            for served, turn, name in answers:
                if (episode, name) not in self._served and not served.is_delivered:
                    self._report(episode, [turn], delivered=False)

        return end, tear

    def _hold(self, episode: int, names: Sequence[str]) -> None:
        """Count a connection for these requests, from before their turns are opened.

        Otherwise, if an earlier connection ended meanwhile, it would report that the answer was not delivered.
        """
        for name in names:
            self._served.setdefault((episode, name), _Served()).connections += 1

    def _let_go(self, episode: int, name: str) -> bool:
        """End the count of a connection for a request, and return whether it was the last one."""
        served = self._served[episode, name]
        served.connections -= 1
        if not served.connections:
            del self._served[episode, name]
        return not served.connections

    def _report(self, episode: int, turns: Sequence[int], *, delivered: bool, repeated: bool = False) -> None:
        """Report to the store what the agent has done with the answers of these turns."""
        if turns and not self._closing:
            reports = [self._ask(MarkAnswer, turn, delivered, repeated) for turn in turns]
            sent = asyncio.gather(*reports, return_exceptions=True)  # the attempt may be over, or the store gone
            self._reports[sent] = episode
            sent.add_done_callback(self._reports.pop)


async def _alive(_: Request) -> Response:
    """Answer a client that asks only whether there is a server."""
    return Response()


def _model_object(name: str) -> dict[str, Any]:
    """Return a model as OpenAI's and Anthropic's clients expect it; every name means the model that is trained."""
    dates = {"created": 0, "created_at": "1970-01-01T00:00:00Z"}
    kind = {"object": "model", "type": "model", "lifecycle": "active", "owned_by": "rrl"}
    return {"id": name, "display_name": name, **kind, **dates}


async def _no_socket(request: Request) -> Response:
    """Refuse a WebSocket with the status at which Codex uses HTTP at once."""
    if "upgrade" not in request.headers:
        raise HTTPException(405, "Method Not Allowed")
    raise ApiError(426, "responses are served over HTTP")


def _known_context(name: str, episode: EpisodeTurns) -> Context | None:
    """Return the context of a call that has a turn in this attempt or a recorded turn; None if it has neither.

    ``name`` is the beginning of the names of the requests that open the call's turns.
    """
    turns = *episode.turns, *episode.recorded
    for turn in turns:
        if turn.request.startswith(name):
            tokens = Paths(turns).before(turn.parent, turn.offset, turn.given)
            return Context(turn.parent, turn.offset, turn.given, turn.conversation, tokens)
    return None


def _with_path(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return the turns without those whose path leads through a recorded turn that is not taken over yet."""
    whole: dict[int, Turn] = {}
    for turn in turns:
        if turn.parent is None or turn.parent in whole:
            whole[turn.id] = turn
    return tuple(whole.values())


def _names(call: Call, number: int) -> tuple[str, ...]:
    """Return, for each answer to a call, the name of the request that opens its turn."""
    return tuple(f"{call.digest}/{number}/{choice}" for choice in range(call.choices))


def _number(turn: Turn) -> int:
    """Return the number of the call that opened a turn, as counted among the calls of the same meaning."""
    return int(turn.request.split("/")[1])


def _is_untrained(request: Request) -> bool:
    """Return whether the agent says that the answer must not be trained. Raises ApiError."""
    train = request.headers.get(_TRAIN_HEADER, "1")
    if train not in ("0", "1"):
        raise wrong(_TRAIN_HEADER, "must be 0 (the answer is never trained) or 1")
    return train == "0"


def _repeated(request: Request) -> _Repeated:
    number = request.headers.get(_CALL_HEADER, "")
    known = number.isascii() and number.isdecimal() and len(number) < 10
    return _Repeated(
        request.headers.get(_RETRY_HEADER, "0") != "0" or known,
        int(number) if known else None,
        request.headers.get(_SENT_HEADER, "") if known else "",
    )
