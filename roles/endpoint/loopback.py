"""The endpoint for the agents of one process, on the loopback address and in a thread of that process.

The endpoint exists as long as the agents of its process, so its address never changes for an agent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType

from ...core.run_spec import RunSpec
from ..models.conversation import ModelChat
from ..trajectories.client import AskStore
from ..trajectories.episodes.requests import EpisodeItem
from .application import Endpoint, served_run
from .http_server import EndpointServer, Probed
from .key import EpisodeKey, encode_key


class LoopbackEndpoint:
    """An endpoint of this process: a context manager that serves while its block runs.

    Args:
        job: The job.
        run: Name of the run directory.
        secret: The secret of the run.
        chat: Tokenizer and chat template.
        ask: Sends requests to the store.
        on_change: Called in the thread of the endpoint when one of its arguments has changed: the number of calls that
            wait for tokens, and the number of calls answered so far.
        me: As for :meth:`EndpointServer.start`.
        ready: As for :meth:`EndpointServer.start`.
    """

    def __init__(
        self,
        job: RunSpec,
        run: str,
        secret: bytes,
        chat: ModelChat,
        ask: AskStore,
        on_change: Callable[[int, int], None],
        me: Probed | None = None,
        ready: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._run, self._secret, self._on_change = run, secret, on_change
        self._endpoint = Endpoint(served_run(job, run, secret), chat, ask, self._changed)
        self._server, self._me, self._ready = EndpointServer(self._endpoint.application), me, ready

    def __enter__(self) -> LoopbackEndpoint:
        self._server.start(self._me, self._ready)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Close all connections, which breaks the calls that wait.

        May be called again, and in any thread except the endpoint's own.
        """
        self._endpoint.close()
        self._server.stop()

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI's clients."""
        return self._server.base_url

    def api_key(self, item: EpisodeItem) -> str:
        """Return the key of an attempt."""
        return encode_key(EpisodeKey(self._run, item.episode, item.attempt), self._secret)

    def _changed(self) -> None:
        self._on_change(self._endpoint.waiting, self._endpoint.answered)
