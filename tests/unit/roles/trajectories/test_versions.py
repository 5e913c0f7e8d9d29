"""The weight version that the store names as the newest, and the reports that it accepts.

Other tests are about the time at which the store answers a waiting rollout.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rrl.core.types import Incarnation, Version, member_id
from rrl.roles.trajectories.episodes.requests import StoreAnswer as Answer
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Denied, FollowVersions, NewestVersion, NotReady
from rrl.roles.trajectories.versions import Followers
from rrl.tests.support.roles.trajectories.crew import ALL, OTHER, REWARD, ROLLOUT, TRAINER, incarnation_of, open_store
from rrl.transport.control.endpoints import Incoming

NEXT_TRAINER = incarnation_of("trainer/0", 2)
WAIT = 10.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_store(tmp_path / "trajectories")
    yield store
    store.close()


def newest(store: Store) -> tuple[Version, list[Incarnation]] | None:
    named = store.newest_version
    return None if named is None else (named.version, [one for _, sources in named.sources for one in sources])


def serving(version: Version, *sources: Incarnation) -> NewestVersion:
    """Return the answer if the sources serve no other version."""
    return NewestVersion(version, (((version,), sources),))


# ── accepted reports ───────────────────────────────────────────────────────────────────────────────────────────────
def test_trainer_announces_the_newest_version_and_rollouts_that_serve_it_become_sources(store: Store) -> None:
    assert newest(store) is None
    assert store.report_versions(TRAINER, (Version(4, 1),)) is None
    assert store.report_versions(ROLLOUT, (Version(4, 1),)) is None
    # it serves an older version, so that no rollout should pull from it
    assert store.report_versions(OTHER, (Version(3, 1),)) is None
    assert newest(store) == (Version(4, 1), [TRAINER, ROLLOUT])
    assert store.report_versions(TRAINER, (Version(5, 1),)) is None
    assert newest(store) == (Version(5, 1), [TRAINER])


def test_rollouts_name_the_newest_version_to_a_restarted_store_whose_trainer_is_dead(store: Store) -> None:
    assert store.report_versions(OTHER, (Version(7, 1),)) is None
    assert store.report_versions(ROLLOUT, (Version(8, 1),)) is None
    assert newest(store) == (Version(8, 1), [ROLLOUT])
    assert store.report_versions(NEXT_TRAINER, (Version(5, 2),)) is None
    assert newest(store) == (Version(5, 2), [NEXT_TRAINER])


def test_superseded_trainer_cannot_announce_a_version(store: Store) -> None:
    store.report_versions(TRAINER, (Version(8, 1),))
    assert store.report_versions(NEXT_TRAINER, (Version(5, 2),)) is None  # the trainer restarted from an earlier step
    assert newest(store) == (Version(5, 2), [NEXT_TRAINER])
    refused = store.report_versions(TRAINER, (Version(9, 1),))
    assert isinstance(refused, Denied)
    assert refused.fenced
    assert newest(store) == (Version(5, 2), [NEXT_TRAINER])


def test_later_version_of_a_dead_trainer_reported_by_a_rollout_does_not_replace_its_successors(store: Store) -> None:
    store.report_versions(TRAINER, (Version(8, 1),))
    store.report_versions(NEXT_TRAINER, (Version(5, 2),))
    store.report_versions(ROLLOUT, (Version(8, 1),))
    assert newest(store) == (Version(5, 2), [NEXT_TRAINER])


def test_trainer_cannot_announce_a_version_of_another_incarnation(store: Store) -> None:
    assert isinstance(store.report_versions(TRAINER, (Version(4, 2),)), Denied)
    assert newest(store) is None


def test_only_rank_0_of_a_gang_announces_versions(store: Store) -> None:
    second = incarnation_of(member_id(TRAINER.replica, 1))
    assert isinstance(store.report_versions(second, (Version(4, 1),)), Denied)
    assert newest(store) is None


def test_unreported_rollout_is_answered_not_ready(store: Store) -> None:
    store.report_versions(TRAINER, (Version(4, 1),))
    late = incarnation_of("rollout/7")
    assert store.report_versions(late, (Version(4, 1),)) == NotReady()
    store.update_membership([*ALL, late])
    assert store.report_versions(late, (Version(4, 1),)) is None
    assert newest(store) == (Version(4, 1), [TRAINER, late])


def test_version_whose_last_source_is_fenced_gives_way_to_an_older_one(store: Store) -> None:
    store.report_versions(OTHER, (Version(3, 1),))
    store.report_versions(TRAINER, (Version(4, 1),))
    store.report_versions(ROLLOUT, (Version(4, 1),))
    store.update_membership([ROLLOUT, OTHER, REWARD])
    assert newest(store) == (Version(4, 1), [ROLLOUT])
    store.update_membership([OTHER, REWARD])
    assert newest(store) == (Version(3, 1), [OTHER])
    store.update_membership([REWARD, NEXT_TRAINER])
    assert newest(store) is None
    store.report_versions(NEXT_TRAINER, (Version(3, 2),))
    assert newest(store) == (Version(3, 2), [NEXT_TRAINER])


def test_sources_are_named_with_their_other_versions_in_groups(store: Store) -> None:
    v3, v4, v5 = (Version(step, 1) for step in (3, 4, 5))
    for source, held in ((TRAINER, (v5,)), (ROLLOUT, (v4, v3)), (OTHER, (v5, v4))):
        assert store.report_versions(source, held) is None
    assert store.newest_version == NewestVersion(v5, (((v5,), (TRAINER,)), ((v5, v4), (OTHER,))))
    assert store.report_versions(ROLLOUT, (v5, v4)) is None
    assert store.newest_version == NewestVersion(v5, (((v5,), (TRAINER,)), ((v5, v4), (OTHER, ROLLOUT))))
    assert store.report_versions(OTHER, (v5,)) is None, "it has evicted version 4"
    assert store.newest_version == NewestVersion(v5, (((v5,), (TRAINER, OTHER)), ((v5, v4), (ROLLOUT,))))


def test_version_that_only_the_second_newest_of_a_source_gives_way_to_is_served_by_it(store: Store) -> None:
    store.report_versions(OTHER, (Version(4, 1), Version(3, 1)))
    store.report_versions(ROLLOUT, (Version(3, 1),))
    store.update_membership([ROLLOUT, REWARD])
    assert newest(store) == (Version(3, 1), [ROLLOUT])


def test_trainer_cannot_announce_an_older_version_of_another_incarnation(store: Store) -> None:
    assert isinstance(store.report_versions(NEXT_TRAINER, (Version(5, 2), Version(4, 1))), Denied)
    assert newest(store) is None


# ── waiting rollouts ───────────────────────────────────────────────────────────────────────────────────────────────
class StoreFollowers:
    """The open requests for newer weight versions at one store; the test sets the time."""

    def __init__(self, store: Store) -> None:
        self.followers = Followers(store)
        self.now = 100.0
        self.polls = 0

    def poll(self, of: Incarnation, known: Version | None = None, *held: Version) -> dict[int, Answer]:
        self.polls += 1
        request = FollowVersions(of, held, known, WAIT)
        self.followers.add(Incoming(b"peer", self.polls, request), self.now)
        return self.answers()

    def answers(self, after: float = 0.0) -> dict[int, Answer]:
        self.now += after
        return {incoming.request_id or 0: answer for incoming, answer in self.followers.answers(self.now)}


def test_waiting_rollout_receives_a_version_once_it_is_published(store: Store) -> None:
    asking = StoreFollowers(store)
    assert asking.poll(ROLLOUT) == {}
    answer_sent = asking.poll(TRAINER, Version(4, 1), Version(4, 1))
    assert answer_sent == {1: serving(Version(4, 1), TRAINER)}
    assert asking.poll(ROLLOUT, Version(4, 1), Version(4, 1)) == {}
    answer_sent = asking.poll(TRAINER, Version(5, 1), Version(5, 1))
    assert answer_sent == {3: serving(Version(5, 1), TRAINER)}


def test_wait_without_a_new_version_returns_the_current_sources(store: Store) -> None:
    asking = StoreFollowers(store)
    asking.poll(TRAINER, Version(4, 1), Version(4, 1))
    asking.poll(ROLLOUT, Version(4, 1))
    assert asking.poll(OTHER, Version(4, 1), Version(4, 1)) == {}
    assert asking.answers(WAIT / 2) == {}
    holders = (TRAINER, OTHER)
    assert asking.answers(WAIT / 2)[2] == serving(Version(4, 1), *holders)
    assert asking.followers.due > 1e9, "a request still waits"


def test_rollout_that_pulls_a_version_learns_of_its_sources_as_soon_as_one_is_fenced(store: Store) -> None:
    asking = StoreFollowers(store)
    asking.poll(TRAINER, Version(4, 1), Version(4, 1))
    assert asking.poll(ROLLOUT, Version(4, 1), Version(4, 1)) == {}
    assert asking.poll(OTHER, Version(4, 1), Version(3, 1)) == {}
    store.update_membership([ROLLOUT, OTHER, REWARD])
    asking.followers.membership_changed()
    answer_sent = asking.answers()
    assert answer_sent.pop(3) == serving(Version(4, 1), ROLLOUT)
    assert [type(answer) for answer in answer_sent.values()] == [Denied], "a rollout that has the version was answered"


def test_only_the_latest_request_of_an_incarnation_is_answered(store: Store) -> None:
    asking = StoreFollowers(store)
    asking.poll(ROLLOUT)
    asking.poll(ROLLOUT)
    assert asking.poll(TRAINER, Version(4, 1), Version(4, 1)).keys() == {2}


def test_wait_without_a_known_version_ends_without_one(store: Store) -> None:
    asking = StoreFollowers(store)
    assert asking.poll(ROLLOUT) == {}
    assert asking.answers(WAIT) == {1: NotReady()}


def test_waiting_trainer_that_is_superseded_is_refused_at_once(store: Store) -> None:
    asking = StoreFollowers(store)
    asking.poll(TRAINER, Version(4, 1), Version(4, 1))
    answer_sent = asking.poll(NEXT_TRAINER, Version(2, 2), Version(2, 2))
    assert isinstance(answer_sent[1], Denied)
    assert answer_sent[1].fenced


def test_rollout_gets_the_version_once_the_manager_has_reported_it(store: Store) -> None:
    asking, late = StoreFollowers(store), incarnation_of("rollout/7")
    asking.poll(TRAINER, Version(4, 1), Version(4, 1))
    assert asking.poll(late) == {}
    store.update_membership([*ALL, late])
    asking.followers.membership_changed()
    assert asking.answers()[2] == serving(Version(4, 1), TRAINER)
