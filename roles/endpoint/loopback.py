"""The endpoint for the agents of one process, on the loopback address and in a thread of that process.

Agents and endpoint share their fate, so no address ever changes under an agent.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from ...core.run_spec import RunSpec
from ..models.chat import ModelChat
from ..trajectories.episodes.requests import EpisodeItem
from .application import Endpoint, served_run
from .http_server import EndpointServer
from .key import EpisodeKey, encode_key
from .turns.store_turns import AskStore, StoreTurns


class LoopbackEndpoint:
    """An endpoint of this process; to be used as a context manager, in which it serves.

    Args:
        job: The job.
        run: Name of the run directory.
        secret: The secret of the run.
        chat: Tokenizer and chat template.
        ask: How requests to the store are sent.
        on_change: Called in the thread of the endpoint whenever :attr:`waiting` or :attr:`answered` has changed.
    """

    def __init__(
        self, job: RunSpec, run: str, secret: bytes, chat: ModelChat, ask: AskStore, on_change: Callable[[], None]
    ) -> None:
        self._run, self._secret = run, secret
        self._endpoint = Endpoint(served_run(job, run, secret), chat, StoreTurns(ask), on_change)
        self._server = EndpointServer(self._endpoint.application)

    def __enter__(self) -> LoopbackEndpoint:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop()

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI's clients."""
        return self._server.base_url

    @property
    def waiting(self) -> int:
        """Number of calls that wait for tokens."""
        return self._endpoint.waiting

    @property
    def answered(self) -> int:
        """Number of answers that were completed."""
        return self._endpoint.answered

    def api_key(self, item: EpisodeItem) -> str:
        """Return the key of an attempt."""
        return encode_key(EpisodeKey(self._run, item.episode, item.attempt), self._secret)
