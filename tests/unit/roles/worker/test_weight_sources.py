"""The version and the sources from which a rollout pulls when manager and store report different ones."""

from __future__ import annotations

import pytest

from rrl.core.types import Incarnation, Version
from rrl.roles.trajectories.types import NewestVersion
from rrl.roles.worker.weight_sources import WeightSources
from rrl.tests.support.roles.trajectories.crew import OTHER, ROLLOUT, TRAINER, incarnation_of
from rrl.transport.messages import Peer, Peers, WeightSource

NEXT_TRAINER = incarnation_of("trainer/0", 2)


@pytest.fixture
def known() -> WeightSources:
    return WeightSources()


def weight_source(of: Incarnation, step: int, incarnation: int = 1) -> WeightSource:
    return WeightSource(of, f"tcp://{of}", Version(step, incarnation))


def peers(*incarnations: Incarnation, newest: Version | None, holders: tuple[WeightSource, ...]) -> Peers:
    return Peers(1, 1, {incarnation.replica: Peer(incarnation) for incarnation in incarnations}, newest, holders)


def newest_version(*holders: WeightSource) -> NewestVersion:
    assert holders[0].version is not None
    return NewestVersion(holders[0].version, holders)


def test_no_version_is_pulled_without_any_report(known: WeightSources) -> None:
    assert known.newest is None
    assert known.sources() == ()


def test_newer_version_of_the_store_keeps_the_managers_relays(known: WeightSources) -> None:
    relay = weight_source(OTHER, 4)
    known.on_peers(peers(TRAINER, OTHER, newest=Version(4, 1), holders=(weight_source(TRAINER, 4), relay)))
    known.on_newest_version(newest_version(weight_source(TRAINER, 5)))
    assert known.newest == Version(5, 1)
    assert known.sources() == (weight_source(TRAINER, 5), relay)


def test_version_of_the_store_is_outdated_by_a_newer_one_of_the_manager(known: WeightSources) -> None:
    known.on_newest_version(newest_version(weight_source(TRAINER, 4), weight_source(OTHER, 4)))
    known.on_peers(
        peers(TRAINER, OTHER, newest=Version(6, 1), holders=(weight_source(TRAINER, 6), weight_source(OTHER, 5)))
    )
    assert known.newest == Version(6, 1)
    assert known.sources() == (weight_source(TRAINER, 6), weight_source(OTHER, 5))


def test_trainer_known_to_the_store_only_replaces_its_predecessor(known: WeightSources) -> None:
    known.on_peers(
        peers(TRAINER, OTHER, newest=Version(4, 1), holders=(weight_source(TRAINER, 4), weight_source(OTHER, 3)))
    )
    known.on_newest_version(newest_version(weight_source(NEXT_TRAINER, 5, 2)))
    assert known.newest == Version(5, 2)
    assert known.sources() == (weight_source(NEXT_TRAINER, 5, 2), weight_source(OTHER, 3))


def test_version_of_a_restarted_trainer_replaces_a_later_step_that_it_discarded(known: WeightSources) -> None:
    known.on_peers(peers(TRAINER, OTHER, newest=Version(8, 1), holders=(weight_source(OTHER, 8),)))
    known.on_newest_version(newest_version(weight_source(NEXT_TRAINER, 5, 2)))
    assert known.newest == Version(5, 2)
    assert known.sources() == (weight_source(OTHER, 8), weight_source(NEXT_TRAINER, 5, 2))


def test_version_whose_only_source_is_fenced_is_not_pulled(known: WeightSources) -> None:
    """The trainer died right after it had published version 5, which no replica has. The others keep version 4."""
    known.on_peers(peers(TRAINER, OTHER, ROLLOUT, newest=Version(4, 1), holders=(weight_source(TRAINER, 4),)))
    known.on_newest_version(newest_version(weight_source(TRAINER, 5)))
    known.on_peers(peers(OTHER, ROLLOUT, newest=Version(4, 1), holders=(weight_source(OTHER, 4),)))
    assert known.newest == Version(4, 1)
    assert known.sources() == (weight_source(OTHER, 4),)
    known.on_newest_version(newest_version(weight_source(OTHER, 5)))
    assert known.newest == Version(5, 1)


def test_empty_report_of_a_restarted_store_changes_nothing(known: WeightSources) -> None:
    known.on_newest_version(newest_version(weight_source(TRAINER, 5)))
    known.on_newest_version(None)
    assert known.newest == Version(5, 1)
