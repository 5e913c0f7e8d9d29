"""The samples that are trained of an episode: one for each leaf, with each sampled token once, and no given token."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from rrl.core.types import Version
from rrl.roles.trajectories.batches import decode
from rrl.roles.trajectories.durable.trained_samples import message_bytes
from rrl.roles.trajectories.episodes.requests import EpisodeItem
from rrl.roles.trajectories.partition import cut
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import NOT_SAMPLED, Done, PartBound, Share, Trajectory
from rrl.tests.support.roles.trajectories.agents import ask, episodes, finish, open_agents_store, sample, turn
from rrl.tests.support.roles.trajectories.crew import BATCH, GROUP, ROLLOUT, TRAINER, bind, commit, lease, segment

GIVEN = Version(*NOT_SAMPLED)


@pytest.fixture
def item(store: Store) -> EpisodeItem:
    return episodes(store, 1)[0]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_agents_store(tmp_path)


def _complete(store: Store, item: EpisodeItem) -> tuple[Trajectory, ...]:
    """Finish an episode, and all others of the first batch with one turn each. Return the samples of the episode."""
    finish(store, item, 0.5)
    for other in episodes(store, BATCH * GROUP - 1):
        turn(store, other, (2,), (5, 1))
        finish(store, other, 0.25)
    return tuple(one for one in bind(store, 1).trajectories if one.id == item.episode)


def _trained(one: Trajectory) -> list[int]:
    masked = {start + place for start, count in one.masked for place in range(count)}
    return [token for place, token in enumerate(one.tokens) if place not in masked]


def test_consecutive_turns_are_one_sample_that_masks_the_given_tokens(store: Store, item: EpisodeItem) -> None:
    first = turn(store, item, (2, 3), (5, 6), step=0)
    turn(store, item, (7,), (8,), first, 4, step=1)
    (one,) = _complete(store, item)
    assert one.prompt == (2, 3)
    assert one.tokens == (5, 6, 7, 8)
    assert one.masked == ((2, 1),)
    assert one.versions == (Version(0, 1), Version(0, 1), GIVEN, Version(1, 1))
    assert one.logprobs == (-0.5, -0.5, 0.0, -0.5)
    assert (one.reward, one.training) == (0.5, 0.5)


def test_second_branch_has_the_trained_tokens_of_the_first_as_its_prompt(store: Store, item: EpisodeItem) -> None:
    root = turn(store, item, (2, 3), (5, 6))
    turn(store, item, (7,), (8,), root, 4)
    turn(store, item, (9,), (10, 11), root, 4)
    one, other = _complete(store, item)
    assert (one.prompt, one.tokens, _trained(one)) == ((2, 3), (5, 6, 7, 8), [5, 6, 8])
    assert (other.prompt, other.tokens, _trained(other)) == ((2, 3, 5, 6, 9), (10, 11), [10, 11])


def test_answer_of_which_a_later_turn_keeps_only_the_beginning_is_a_separate_sample(
    store: Store, item: EpisodeItem
) -> None:
    root = turn(store, item, (2, 3), (5, 6, 7))
    turn(store, item, (9,), (8,), root, 3)  # keeps only the 5
    one, other = _complete(store, item)
    assert (one.prompt + one.tokens, _trained(one)) == ((2, 3, 5, 6, 7), [5, 6, 7])
    assert (other.prompt + other.tokens, _trained(other)) == ((2, 3, 5, 9, 8), [8])


def test_turn_that_branches_before_the_tokens_of_its_parent_does_not_contain_them(
    store: Store, item: EpisodeItem
) -> None:
    root = turn(store, item, (2, 3), (5,))
    second = turn(store, item, (4,), (6,), root, 3)
    turn(store, item, (9,), (8,), second, 1)  # a branch that keeps only one of the root's given tokens
    one, other = _complete(store, item)
    assert one.prompt + one.tokens == (2, 3, 5, 4, 6)
    assert (other.prompt, other.tokens) == ((2, 9), (8,))


def test_answer_cut_off_by_a_later_request_counts_as_far_as_it_was_used(store: Store, item: EpisodeItem) -> None:
    root = ask(store, item, "root", (2,))
    lease(store)
    assert store.append(ROLLOUT, [segment(root, 0, (5, 6, 7))]) == Done()  # still running
    last = ask(store, item, "last", (9,), root, 3)
    sample(store, last, (8, 1))
    (one,) = _complete(store, item)
    assert (one.prompt, one.tokens, _trained(one)) == ((2,), (5, 6, 9, 8, 1), [5, 6, 8, 1])


def test_answer_without_a_token_adds_nothing(store: Store, item: EpisodeItem) -> None:
    root = turn(store, item, (2,), (5,))
    empty = ask(store, item, "empty", (3,), root, 2)
    lease(store)
    assert store.append(ROLLOUT, (), (empty,)) == Done()
    (one,) = _complete(store, item)
    assert one.prompt + one.tokens == (2, 5)


def test_digest_depends_on_given_tokens_their_place_and_sampled_tokens(tmp_path: Path) -> None:
    digests = set()
    for number, (given, tokens, reward) in enumerate(
        [
            ((2, 3), (5, 1), 1.0),
            ((2, 4), (5, 1), 1.0),
            ((2, 3), (6, 1), 1.0),
            ((2, 3), (5, 1), 0.5),
            ((2,), (5, 1), 1.0),
        ]
    ):
        store = open_agents_store(tmp_path / str(number))
        for item in episodes(store, BATCH * GROUP):
            turn(store, item, given, tokens)
            finish(store, item, reward)
        digests.add(bind(store, 1).digest)
    assert len(digests) == 5


def test_shard_of_a_gang_member_has_lengths_and_masks_of_all_and_its_own_tokens(store: Store) -> None:
    for item in episodes(store, BATCH * GROUP):
        first = turn(store, item, (2, 3), (5, 6))
        turn(store, item, (7,), (8,), first, 4)
        finish(store, item)
    bound = store.part(TRAINER, 1)
    assert isinstance(bound, PartBound)
    whole = decode(bound.part).trajectories
    mine = decode(cut(bound.part, Share(0, 2))).trajectories
    for place in (0, 1):
        assert mine[place] == whole[place]
    for place in (2, 3):
        assert (len(mine[place].tokens), mine[place].masked) == (4, whole[place].masked)
        assert tuple(mine[place].versions) == whole[place].versions
        with pytest.raises(LookupError):
            mine[place].tokens[0]
        assert len(mine[place].prompt) == len(whole[place].prompt) == 2


@pytest.mark.parametrize("seed", range(20))
def test_random_trees_train_each_used_token_once_in_the_context_it_was_sampled_in(tmp_path: Path, seed: int) -> None:
    """Each token has a number by which it can be found again, and its context is recorded when it is sampled."""
    draw = random.Random(seed)
    store = open_agents_store(tmp_path, max_new_tokens=9, compact_from=2000)
    contexts: dict[int, tuple[int, ...]] = {}
    steps: dict[int, int] = {}
    finished: set[int] = set()
    number = 100
    for item in episodes(store, BATCH * GROUP):
        paths: dict[int, tuple[int, ...]] = {}
        for request in range(draw.randint(1, 8)):
            parent = draw.choice([None, *paths])
            length = len(paths[parent]) if parent is not None else 0
            offset = draw.choice([length, draw.randint(0, length)])
            given = tuple(range(number, number + draw.randint(0 if offset else 1, 3)))
            sampled = tuple(range(number + 10, number + 10 + draw.randint(1, 5)))
            number += 20
            opened = ask(store, item, str(request), given, parent, offset, max_new=9)
            path = ((paths[parent] if parent is not None else ())[:offset]) + given
            lease(store)
            cut = draw.randint(0, len(sampled))
            segments = [segment(opened, 0, sampled[:cut], -1), segment(opened, cut, sampled[cut:], 0)]
            ends = draw.random() < 0.8 or not request
            done = store.append(ROLLOUT, [one for one in segments if one.tokens], (opened,) if ends else ())
            assert done == Done()
            for place, token in enumerate(sampled):
                contexts[token] = path + sampled[:place]
                steps[token] = -1 if place < cut else 0
            if ends:
                finished.update(sampled)
            paths[opened] = path + sampled
        finish(store, item)
    store.flush()
    store.close()
    store = open_agents_store(tmp_path, max_new_tokens=9)
    batch = bind(store, 1)
    trained: Counter[int] = Counter()
    ages: Counter[int] = Counter()
    for one in batch.trajectories:
        path, tokens = one.prompt + one.tokens, _trained(one)
        assert tokens, "a sample has no trained token"
        for token in tokens:
            assert path[: path.index(token)] == contexts[token]
            assert one.versions[one.tokens.index(token)] == Version(steps[token], 1)
            ages[-steps[token]] += 1
        trained.update(tokens)
    assert set(trained.values()) == {1}
    assert trained.keys() >= finished, "a token of a complete answer was not trained"
    bound = store.part(TRAINER, 1)
    assert isinstance(bound, PartBound)
    assert decode(bound.part) == batch
    for group in bound.part.groups:
        tracks = store._state.groups[group].trajectories
        size = sum(len(msgspec.msgpack.encode(one)) for one in bound.part.trajectories if one.group == group)
        assert size <= message_bytes(tracks, b"")
    commit(store, batch)
    assert store.audit().ages == dict(sorted(ages.items()))
