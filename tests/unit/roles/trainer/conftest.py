"""A server from which trainer processes are forked, for all modules that one process of pytest runs."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.context import ForkServerContext

import pytest

from rrl.tests.support.roles.trainer.stage import nursery


@pytest.fixture(scope="session")
def processes() -> Iterator[ForkServerContext]:
    """Import torch once: a process that is forked from there starts in a second instead of six."""
    with nursery() as context:
        yield context
