"""An asyncio loop whose time is its own: a sleep costs nothing, and two runs of the same thing are the same."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """Where a loop would wait for ``timeout`` s, its clock goes on by so much."""

    passed = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("everything waits, and nothing is going to happen")
        self.passed += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.passed

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """What would run in a thread runs at once: nothing else is to happen meanwhile."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class Clock:
    """Takes the place of the module ``time`` where a virtual loop runs."""

    @staticmethod
    def monotonic() -> float:
        return asyncio.get_running_loop().time()

    @staticmethod
    def time() -> float:
        return 1_000_000.0 + asyncio.get_running_loop().time()


def run(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
