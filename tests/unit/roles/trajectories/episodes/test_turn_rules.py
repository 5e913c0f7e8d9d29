"""Turns that end at a stop text, turns of a foreign policy, and turns that a reader of an episode already has."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from rrl.core.types import Incarnation, Version
from rrl.roles.trajectories.episodes import turn_rules
from rrl.roles.trajectories.episodes.requests import (
    EndTurn,
    EpisodeItem,
    FinishEpisode,
    Follow,
    MarkAnswer,
    OpenTurn,
    TurnOpened,
)
from rrl.roles.trajectories.episodes.rules import NO_ANSWER, EpisodeSettings
from rrl.roles.trajectories.server import answer
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import (
    NOT_SAMPLED,
    Denied,
    Done,
    PathDigest,
    Sampling,
    Scoring,
    Segment,
    ToScore,
    Trajectory,
)
from rrl.tests.support.roles.trajectories.agents import (
    AGENTS,
    CREW,
    OTHER_AGENTS,
    ask,
    episodes,
    fail,
    finish,
    follow,
    is_over,
    open_agents_store,
    reopened,
    sample,
    turn,
    turns_of,
)
from rrl.tests.support.roles.trajectories.crew import (
    BATCH,
    GROUP,
    REWARD,
    ROLLOUT,
    bind,
    commit,
    incarnation_of,
    lease,
    score,
    segment,
)

HOT = Sampling(temperature=1.5, seed=7)


@pytest.fixture
def item(store: Store) -> EpisodeItem:
    return episodes(store, 1)[0]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_agents_store(tmp_path)


def _end(store: Store, number: int, length: int, who: Incarnation = AGENTS) -> object:
    return answer(store, EndTurn(who, number, length))


def _foreign(store: Store, item: EpisodeItem, parent: int | None, offset: int, tokens: tuple[int, ...]) -> int:
    request = f"foreign {parent} {offset}"
    opened = answer(store, OpenTurn(AGENTS, item.episode, item.attempt, request, parent, offset, (9,), 4, "", "", HOT))
    assert isinstance(opened, TurnOpened), opened
    sample(store, opened.turn, tokens)
    return opened.turn


def _samples(store: Store, item: EpisodeItem) -> tuple[Trajectory, ...]:
    """Finish all episodes of the first batch, this one included, and commit the batch. Return the episode's samples."""
    finish(store, item, 0.5)
    for other in episodes(store, BATCH * GROUP - 1):
        turn(store, other, (2,), (5, 1))
        finish(store, other, 0.25)
    batch = bind(store, 1)
    commit(store, batch)
    return tuple(one for one in batch.trajectories if one.id == item.episode)


# ── ends of turns ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_answer_ends_where_the_endpoint_says_and_its_rollout_loses_it(
    store: Store, tmp_path: Path, item: EpisodeItem
) -> None:
    number = ask(store, item)
    lease(store)
    store.append(ROLLOUT, [segment(number, 0, (5, 6)), segment(number, 2, (7,), 1)])
    assert _end(store, number, 1) == Done()
    assert _end(store, number, 1) == Done(), "a repeated request was refused"
    late = store.append(ROLLOUT, [segment(number, 3, (8,))])
    assert isinstance(late, Denied)
    assert late.lost == (number,)
    store = reopened(store, tmp_path)
    assert _end(store, number, 1) == Done()
    assert (follow(store, number).tokens, follow(store, number).finished) == ((5,), True)
    second = turn(store, item, (4,), (6, 1), number, 3)
    (one,) = _samples(store, item)
    assert one.tokens == (5, 4, 6, 1)
    assert second > number
    assert store.audit().ages[0] == 3 + 2 * 3


def test_complete_answer_may_still_end_earlier_but_not_later(store: Store, item: EpisodeItem) -> None:
    number = turn(store, item, (2, 3), (5, 6, 1))
    refused = _end(store, number, 4)
    assert isinstance(refused, Denied)
    assert "give 1 to 3" in refused.why
    assert isinstance(_end(store, number, 0), Denied)
    assert _end(store, number, 3) == Done()
    assert _end(store, number, 2) == Done()
    assert follow(store, number).tokens == (5, 6)


def test_turn_that_continues_a_discarded_token_keeps_it_as_given(
    store: Store, tmp_path: Path, item: EpisodeItem
) -> None:
    number = turn(store, item, (2, 3), (5, 6, 7))
    child = turn(store, item, (9,), (8, 1), number, 5)
    branch = turn(store, item, (4,), (6, 1), number, 3)
    assert _end(store, number, 1) == Done()
    for _ in range(2):
        by_id = {each.id: each for each in turns_of(store, item.episode).turns}
        assert (by_id[child].offset, by_id[child].given) == (3, (6, 7, 9))
        assert (by_id[branch].offset, by_id[branch].given) == (3, (4,))
        store = reopened(store, tmp_path)
    samples = _samples(store, item)
    assert [one.prompt + one.tokens for one in samples] == [(2, 3, 5, 6, 7, 9, 8, 1), (2, 3, 5, 4, 6, 1)]
    assert samples[0].masked == ((1, 3),)
    assert store.audit().ages == {0: 5 + 2 * 3}


def test_answer_of_an_episode_that_has_ended_does_not_change(store: Store, item: EpisodeItem) -> None:
    number = turn(store, item, (2, 3), (5, 6))
    finish(store, item)
    assert is_over(_end(store, number, 1))
    assert _end(store, number, 2) == Done()
    (other,) = episodes(store, 1)
    number = turn(store, other, (2, 3), (5, 6))
    fail(store, other)
    assert is_over(_end(store, number, 1))
    stranger = _end(store, number, 1, incarnation_of("agents/0", 0))
    assert isinstance(stranger, Denied)
    assert stranger.fenced


# ── foreign turns ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_foreign_turn_is_leased_with_its_sampling_and_is_context_of_later_turns(
    store: Store, tmp_path: Path, item: EpisodeItem
) -> None:
    first = turn(store, item, (2, 3), (5, 6))
    opened = answer(store, OpenTurn(AGENTS, item.episode, 1, "hot", first, 4, (9,), 4, "", "{}", HOT))
    assert isinstance(opened, TurnOpened)
    store = reopened(store, tmp_path)
    (work,) = lease(store)
    assert (work.trajectory, work.sampling) == (opened.turn, HOT)
    store.append(ROLLOUT, [segment(opened.turn, 0, (8, 7))], (opened.turn,))
    shown = turns_of(store, item.episode).turns[-1]
    assert (shown.sampling, shown.options) == (HOT, "{}")
    turn(store, item, (4,), (1,), opened.turn, 7)
    (one,) = _samples(store, item)
    assert one.tokens == (5, 6, 9, 8, 7, 4, 1)
    assert one.masked == ((2, 1), (3, 2), (5, 1))
    assert one.versions[2:6] == (Version(*NOT_SAMPLED),) * 4
    assert one.logprobs == (-0.5, -0.5, 0.0, 0.0, 0.0, 0.0, -0.5)
    audit = store.audit()
    assert audit.ages == {0: 3 + 2 * 3}
    assert (audit.episodes["untrained_turns"], audit.episodes["turns"]) == (1, 2 + 1 + 3)


def test_foreign_answer_is_not_trained_but_may_be_scored_as_the_last_answer(store: Store, item: EpisodeItem) -> None:
    first = turn(store, item, (2, 3), (5, 6))
    _foreign(store, item, first, 4, (8, 7))
    finish(store, item, None)
    assert store.lease_scoring(REWARD, 9) == Scoring((ToScore(item.episode, item.item, (8, 7)),))


def test_attempt_with_foreign_turns_only_counts_as_failed(tmp_path: Path) -> None:
    store = open_agents_store(tmp_path, episodes=EpisodeSettings(retries=0))
    (item,) = episodes(store, 1)
    _foreign(store, item, None, 0, (8, 7))
    assert answer(store, FinishEpisode(AGENTS, item.episode, 1, 1.0)) == Done()
    assert store.audit().dropped == {NO_ANSWER: GROUP}
    assert store.audit().episodes["episodes_dropped"] == GROUP


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (Sampling(temperature=-0.1), "temperature is -0.1; it must be 0, or 1e-30 to 1e30"),
        (Sampling(temperature=1e-40), "temperature is 1e-40"),
        (Sampling(temperature=1e39), "temperature is 1e+39"),
        (Sampling(temperature=float("nan")), "temperature is nan"),
        (Sampling(top_p=0.0), "top_p is 0.0; it must be 1e-30 to 1"),
        (Sampling(top_p=1e-300), "top_p is 1e-300"),
        (Sampling(top_k=-2), "top_k is -2"),
        (Sampling(min_p=1.5), "min_p is 1.5; it must be 0 to 1"),
        (Sampling(presence_penalty=3.0), "presence_penalty is 3.0; it must be -2 to 2"),
        (Sampling(frequency_penalty=-3.0), "frequency_penalty is -3.0"),
        (Sampling(repetition_penalty=0.0), "repetition_penalty is 0.0; it must be 1e-3 to 1e3"),
        (Sampling(repetition_penalty=1e-40), "repetition_penalty is 1e-40"),
    ],
)
def test_sampling_that_would_end_an_engine_is_refused(
    store: Store, sampling: Sampling, words: str, item: EpisodeItem
) -> None:
    refused = answer(store, OpenTurn(AGENTS, item.episode, 1, "x", None, 0, (2,), 4, "", "", sampling))
    assert isinstance(refused, Denied)
    assert words in refused.why


# ── contexts of the engine ───────────────────────────────────────────────────────────────────────────────────────────
def _digested(part: Segment, prompt: tuple[int, ...]) -> Segment:
    """Return a segment with the digest of an engine that had ``prompt`` and all tokens before the segment."""
    path = PathDigest()
    path.add((*prompt, *part.tokens))
    return replace(part, digest=path.value())


def test_context_digest_of_the_engine_matches_in_every_branch(store: Store, tmp_path: Path, item: EpisodeItem) -> None:
    first = ask(store, item)
    (work,) = lease(store)
    store.append(ROLLOUT, [_digested(segment(first, 0, (5, 6)), work.prompt)])
    store.append(ROLLOUT, [_digested(segment(first, 2, (7,)), (*work.prompt, 5, 6))], (first,))
    for place in (0, 1):
        number = ask(store, item, f"branch {place}", (9, place), first, 3 + place)
        (work,) = lease(store)
        store.append(ROLLOUT, [_digested(segment(number, 0, (8, 1)), work.prompt)], (number,))
    store = reopened(store, tmp_path)
    finish(store, item)
    counted = store.audit().episodes
    assert (counted["token_drift"], counted["branches"], counted["turns"]) == (0, 3, 3)
    assert counted["given_tokens"] == 2 + 2 + 2


@pytest.mark.parametrize("wrong", [(2, 4), (2,), (2, 3, 3)])
def test_trained_tokens_whose_context_the_engine_did_not_have_are_counted(
    store: Store, wrong: tuple[int, ...], item: EpisodeItem
) -> None:
    first = ask(store, item)
    lease(store)
    store.append(ROLLOUT, [_digested(segment(first, 0, (5, 6)), (2, 3))])
    store.append(ROLLOUT, [_digested(segment(first, 2, (7,)), (*wrong, 5, 6))], (first,))
    finish(store, item)
    assert store.audit().episodes["token_drift"] == 1


def test_segment_that_is_cut_at_an_end_is_not_compared(store: Store, item: EpisodeItem) -> None:
    first = ask(store, item)
    lease(store)
    store.append(ROLLOUT, [_digested(segment(first, 0, (5, 6)), (2, 3)), _digested(segment(first, 2, (7, 8)), (0,))])
    assert _end(store, first, 3) == Done()
    finish(store, item)
    assert store.audit().episodes["token_drift"] == 0


# ── readers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_turns_that_the_reader_already_has_are_not_sent(store: Store, item: EpisodeItem) -> None:
    first = turn(store, item, (2, 3), (5, 6))
    second = ask(store, item, "2", (7,), first, 4)
    assert [each.id for each in turns_of(store, item.episode, holding=(first,)).turns] == [second]
    assert [each.id for each in turns_of(store, item.episode, holding=(first, second, 99)).turns] == []


def test_episode_figures_are_in_the_commit_and_survive_a_rewritten_log(tmp_path: Path) -> None:
    store = open_agents_store(tmp_path, compact_from=1)
    metrics = []
    for number in (1, 2, 3):
        for item in episodes(store, BATCH * GROUP):
            first = turn(store, item, (2, 3), (5, 6))
            turn(store, item, (7,), (1,), first, 4)
            finish(store, item, 0.5)
        batch = bind(store, number)
        done = store.commit(incarnation_of("trainer/0"), number, {}, batch.digest)
        assert isinstance(done, Done)
        metrics.append(done.metrics)
        store = reopened(store, tmp_path)
    each = BATCH * GROUP
    for number, found in enumerate(metrics, start=1):
        assert found["episodes_finished"] == found["branches"] == each * number
        assert (found["turns"], found["given_tokens"]) == (2 * each * number, 3 * each * number)
        assert found["episodes_dropped"] == found["untrained_turns"] == found["token_drift"] == 0
    assert store.audit().episodes == {name: metrics[-1][name] for name in store.audit().episodes}


def test_follower_of_a_turn_that_ends_without_further_tokens_reads_its_end(store: Store, item: EpisodeItem) -> None:
    number = ask(store, item)
    lease(store)
    store.append(ROLLOUT, [segment(number, 0, (5, 6))])
    _end(store, number, 2)
    ended = follow(store, number, 2)
    assert (ended.tokens, ended.finished) == ((), True)
    assert isinstance(answer(store, Follow(AGENTS, number, 3)), Denied)


# ── answers that were not used ───────────────────────────────────────────────────────────────────────────────────────
def _mark(store: Store, number: int, *, undelivered: bool = False, who: Incarnation = AGENTS) -> None:
    """Report that an answer was not delivered or, by default, that the agent has asked for it again."""
    assert answer(store, MarkAnswer(who, number, not undelivered, not undelivered)) == Done()


def test_unused_answer_is_counted_and_neither_trained_nor_scored(
    store: Store, tmp_path: Path, item: EpisodeItem
) -> None:
    first = turn(store, item, (2, 3), (5, 1))
    unused = turn(store, item, (4,), (6, 1), first, 4)
    _mark(store, unused)
    store = reopened(store, tmp_path)
    assert answer(store, FinishEpisode(AGENTS, item.episode, 1)) == Done()
    leased = store.lease_scoring(REWARD, 9)
    assert isinstance(leased, Scoring)
    assert [each.tokens for each in leased.items] == [(5, 1)], "the scored answer is not the last one that was used"
    score(store)
    store = reopened(store, tmp_path)
    (one,) = _samples(store, item)
    assert (one.prompt, one.tokens) == ((2, 3), (5, 1))
    counts = store.audit().episodes
    assert (counts["turns"], counts["untrained_turns"]) == (2 + BATCH * GROUP - 1, 1)
    assert store.audit().ages[0] == 2 * BATCH * GROUP, "the audit counts the tokens of the unused answer"


@pytest.mark.parametrize("keeps", [True, False])
def test_marked_answer_is_trained_only_if_another_turn_keeps_one_of_its_tokens(
    store: Store, keeps: bool, item: EpisodeItem
) -> None:
    first = turn(store, item, (2, 3), (5, 6, 1))
    _mark(store, first, undelivered=True)
    second = turn(store, item, (7,), (8, 1), first, 3 if keeps else 2)
    _mark(store, second)
    turn(store, item, (9,), (4, 1), second, 3 if keeps else 2)  # does not continue the second answer
    trained = [
        token
        for one in _samples(store, item)
        for token, version in zip(one.tokens, one.versions, strict=True)
        if version != Version(*NOT_SAMPLED)
    ]
    assert trained.count(5) == trained.count(6) == keeps
    assert store.audit().episodes["untrained_turns"] == (1 if keeps else 2)
    assert 8 not in trained
    assert 4 in trained


def test_answer_that_is_asked_for_again_counts_as_used(store: Store, tmp_path: Path, item: EpisodeItem) -> None:
    number = turn(store, item, (2,), (5, 1))
    _mark(store, number, undelivered=True)
    assert ask(store, item, "(2,) None 0", (2,)) == number
    _mark(store, number, undelivered=True)
    assert ask(store, item, "(2,) None 0", (2,), who=OTHER_AGENTS) == number  # through another endpoint
    _mark(store, number, undelivered=True)  # the first endpoint notices the end of its connection late
    store = reopened(store, tmp_path)
    assert [one.tokens for one in _samples(store, item)] == [(5, 1)]


def test_recorded_answer_that_was_not_used_counts_as_used_in_the_attempt_that_takes_it_over(
    store: Store, item: EpisodeItem
) -> None:
    number = turn(store, item, (2,), (5, 1))
    _mark(store, number)
    store.update_membership([member for member in CREW if member != AGENTS])
    (again,) = episodes(store, 1, OTHER_AGENTS)
    assert ask(store, again, "(2,) None 0", (2,), who=OTHER_AGENTS) == number
    finish(store, again, 0.5, OTHER_AGENTS)
    counts = store.audit().episodes
    assert (counts["episodes_finished"], counts["untrained_turns"]) == (1, 0)


def test_episode_whose_only_answer_was_not_used_has_no_answer(tmp_path: Path) -> None:
    store = open_agents_store(tmp_path, episodes=EpisodeSettings(retries=0))
    (item,) = episodes(store, 1)
    _mark(store, turn(store, item, (2,), (5, 1)), undelivered=True)
    finish(store, item)
    assert store.audit().dropped == {NO_ANSWER: GROUP}
    refused = answer(store, MarkAnswer(AGENTS, 2**40, False))
    assert is_over(refused)


def test_an_attempt_has_a_maximum_number_of_answers(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_rules, "MAX_TURNS", 2)
    (item,) = episodes(store, 1)
    first = [ask(store, item, str(number)) for number in range(2)]
    refused = answer(store, OpenTurn(AGENTS, item.episode, 1, "3", None, 0, (2,), 4))
    assert isinstance(refused, Denied)
    assert "at most 2 answers" in refused.why
    assert ask(store, item, "1") == first[1], "a repeated request was refused"
