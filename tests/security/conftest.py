"""Provides two plain users for tests of attacks: the owner of a run, and another user of the same machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rrl.tests.support.plain_user import PlainUser, temporary_user


@pytest.fixture(scope="session")
def owner() -> Iterator[PlainUser]:
    """Return the user who owns the run, its processes and its files."""
    yield from _made("owner")


@pytest.fixture(scope="session")
def attacker() -> Iterator[PlainUser]:
    """Return another user of the same machine, who has no right to the owner's files and processes."""
    yield from _made("attacker")


def _made(purpose: str) -> Iterator[PlainUser]:
    try:
        with temporary_user(purpose) as user:
            yield user
    except PermissionError as error:
        pytest.skip(str(error))
