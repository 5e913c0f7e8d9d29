"""A check, for all tests of the manager, that ``rrl explain`` can explain every decision of their virtual runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rrl.manager.model.events import Stamped
from rrl.tests.support.cli.explained import assert_explained
from rrl.tests.support.manager.site import Site
from rrl.tests.support.manager.world import World


@pytest.fixture(autouse=True)
def _every_decision_is_explained(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Explain the decisions of all virtual clusters and sites that the test has made (``rrl explain``)."""
    made: list[World | Site] = []
    for kind in (World, Site):
        monkeypatch.setattr(kind, "__init__", _remembered(kind.__init__, made))
    yield
    for run in made:
        if isinstance(run, World):
            assert_explained(run.events, run.actions)
        else:
            assert_explained(_durable(run.records))


def _durable(records: list[Stamped]) -> list[Stamped]:
    """Return the records that are in the journal: a killed manager may have lost its newest ones."""
    kept: list[Stamped] = []
    for stamped in records:
        while kept and kept[-1].seq >= stamped.seq:
            kept.pop()
        kept.append(stamped)
    return kept


def _remembered(construct: Any, made: list[World | Site]) -> Any:
    def construct_and_remember(self: Any, *given: Any, **named: Any) -> None:
        construct(self, *given, **named)
        made.append(self)

    return construct_and_remember
