"""The version and the sources from which a rollout pulls: addresses of the manager, versions of the store."""

from __future__ import annotations

from rrl.core.types import Incarnation, Version, member_id
from rrl.roles.trajectories.types import NewestVersion
from rrl.roles.worker.connection import WeightSources
from rrl.tests.support.roles.trajectories.crew import OTHER, ROLLOUT, TRAINER, incarnation_of
from rrl.transport.messages import Peer, Peers
from rrl.transport.weights.pull import WeightSource

NEXT_TRAINER = incarnation_of("trainer/0", 2)
V5 = Version(5, 1)


def serving(*incarnations: Incarnation) -> Peers:
    return Peers(1, 1, {of.replica: Peer(of, weight_address=f"tcp://{of}") for of in incarnations})


def weight_source(of: Incarnation, *versions: Version) -> WeightSource:
    return WeightSource(of, f"tcp://{of}", versions)


def test_no_version_is_pulled_without_any_report() -> None:
    known = WeightSources()
    assert known.newest is None
    assert known.sources() == ()
    known.on_newest_version(NewestVersion(V5, (((V5,), (TRAINER,)),)))
    assert known.newest is None, "no address is known"


def test_all_processes_are_listed_with_the_version_that_they_reported() -> None:
    known, member = WeightSources(), incarnation_of(member_id(TRAINER.replica, 1))
    known.on_peers(serving(TRAINER, member, ROLLOUT))
    assert known.sources() == (weight_source(TRAINER), weight_source(member), weight_source(ROLLOUT))
    known.on_newest_version(NewestVersion(V5, (((V5,), (TRAINER,)),)))
    assert known.newest == V5
    assert known.sources() == (weight_source(TRAINER, V5), weight_source(member), weight_source(ROLLOUT))


def test_sources_have_all_versions_that_they_reported() -> None:
    known, v4 = WeightSources(), Version(4, 1)
    known.on_peers(serving(TRAINER, ROLLOUT, OTHER))
    known.on_newest_version(
        NewestVersion(V5, (((V5,), (TRAINER,)), ((V5, v4), (ROLLOUT, incarnation_of("rollout/9")))))
    )
    assert known.newest == V5
    assert known.sources() == (weight_source(TRAINER, V5), weight_source(ROLLOUT, V5, v4), weight_source(OTHER))


def test_version_whose_only_source_is_fenced_is_not_pulled() -> None:
    """The trainer died right after it had published version 5, which no replica has. The others keep version 4."""
    known = WeightSources()
    known.on_peers(serving(TRAINER, OTHER))
    known.on_newest_version(NewestVersion(V5, (((V5,), (TRAINER,)),)))
    known.on_peers(serving(NEXT_TRAINER, OTHER))
    assert known.newest is None
    assert known.sources() == (weight_source(NEXT_TRAINER), weight_source(OTHER))
    known.on_newest_version(NewestVersion(Version(4, 1), (((Version(4, 1),), (OTHER,)),)))
    assert known.newest == Version(4, 1)
    known.on_newest_version(NewestVersion(Version(3, 2), (((Version(3, 2),), (NEXT_TRAINER,)),)))
    assert known.newest == Version(3, 2)


def test_empty_report_of_a_restarted_store_changes_nothing() -> None:
    known = WeightSources()
    known.on_peers(serving(TRAINER))
    known.on_newest_version(NewestVersion(V5, (((V5,), (TRAINER,)),)))
    known.on_newest_version(None)
    assert known.newest == V5
