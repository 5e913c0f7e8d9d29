"""The requests of the endpoint to the trajectory store."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from ...trajectories.client import Fenced, FencedAttempt, TrajectoryClient

_Answer = TypeVar("_Answer")


class AskStore(Protocol):
    """Sends a request to the store, and returns the store's answer to the event loop of the caller."""

    async def __call__(self, request: Callable[[TrajectoryClient], Coroutine[Any, Any, _Answer]]) -> _Answer:
        """Send the request that the function ``request`` makes."""
        ...


def store_requests(ask: AskStore) -> TrajectoryClient:
    """Return an object whose methods send the requests of a client of the store.

    The event loop of the caller awaits each answer. Once this process is fenced, every request raises FencedAttempt.

    Args:
        ask: Sends a request: :meth:`rrl.Worker.ask_store`.
    """
    requests: Any = _Requests(ask)
    return requests  # type: ignore[no-any-return]


class _Requests:
    def __init__(self, ask: AskStore) -> None:
        self._ask = ask

    def __getattr__(self, name: str) -> Any:
        async def send(*arguments: Any) -> Any:
            try:
                return await self._ask(lambda store: getattr(store, name)(*arguments))
            except Fenced as error:
                raise FencedAttempt(str(error)) from error

        return send
