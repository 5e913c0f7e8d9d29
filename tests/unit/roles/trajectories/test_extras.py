"""Extras: bytes that rollouts append with tokens, stored and trained with exactly these tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import astuple, replace

from rrl.core.run_spec import MAX_SEGMENT_EXTRAS, ExtraSpec
from rrl.roles.trajectories import client, leases
from rrl.roles.trajectories.batches import decode
from rrl.roles.trajectories.client import TrajectoryClient
from rrl.roles.trajectories.durable.records import encode, pack
from rrl.roles.trajectories.durable.trained_samples import message_bytes
from rrl.roles.trajectories.episodes.requests import EndTurn
from rrl.roles.trajectories.extras import pack_extras
from rrl.roles.trajectories.partition import cut, shares_of
from rrl.roles.trajectories.server import answer
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Append, Denied, Done, PartBound, Segment, Share, Trajectory
from rrl.tests.support.roles.trajectories.agents import AGENTS, ask, episodes, finish, open_agents_store, reopened
from rrl.tests.support.roles.trajectories.crew import (
    ALL,
    BATCH,
    GROUP,
    MARKS,
    OTHER,
    ROLLOUT,
    TRAINER,
    bind,
    generate,
    lease,
    mark,
    open_store,
    score,
    segment,
)

IMAGE = {"image": ExtraSpec(per_trajectory=8)}


def _image(trajectory: int, offset: int, image: bytes, tokens: tuple[int, ...] = (5, 1)) -> Segment:
    return replace(segment(trajectory, offset, tokens), extras={"image": image})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"experts": b"123456", "other": b""}, "extra 'other' is not declared in [sampling.extras]; declared are"),
        ({}, "extra 'experts' is missing; 3 tokens take 6 bytes, 2 each"),
        ({"experts": b"1234"}, "extra 'experts' has 4 bytes; 3 tokens take 6 bytes, 2 each"),
        ({"experts": b"123456", "image": bytes(9)}, "extra 'image' has 9 bytes; [sampling.extras] allows 8"),
        ({"experts": [1, 2, 3]}, "extra 'experts' is of type list; it must be bytes"),
        ({"experts": bytearray(6)}, "extra 'experts' is of type bytearray; it must be bytes"),
        ([b"123456"], "extras is of type list; it must be a dict"),
        (None, "extras is of type NoneType; it must be a dict"),
    ],
)
def test_wrong_extra_is_one_line_that_says_what_would_be_right(given: Any, message: str) -> None:
    declared = {"experts": ExtraSpec(per_token=2), **IMAGE}
    with pytest.raises((TypeError, ValueError)) as refused:
        pack_extras(given, 3, declared)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_extras_of_a_segment_that_exceed_a_message_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"its extras have 32\.0 MiB; a segment may have at most 32 MiB: append several"
    ):
        pack_extras({"big": bytes(MAX_SEGMENT_EXTRAS + 1)}, MAX_SEGMENT_EXTRAS + 1, {"big": ExtraSpec(per_token=1)})


def test_denied_append_of_wrong_extras_stores_nothing(tmp_path: Path) -> None:
    opened = open_store(tmp_path, extras=MARKS)
    lease(opened)
    refused = opened.append(ROLLOUT, [segment(1, marked=True), segment(0)])
    assert isinstance(refused, Denied)
    assert refused.why == "malformed segment: extra 'mark' is missing; 2 tokens take 6 bytes, 3 each"
    opened.update_membership((OTHER,))
    assert all(item.so_far == () for item in lease(opened, OTHER))


@pytest.mark.parametrize("restarted", [False, True])
def test_rollout_that_continues_a_trajectory_adds_its_extras_to_those_of_the_first(
    tmp_path: Path, restarted: bool
) -> None:
    declared = {**MARKS, **IMAGE}
    opened = open_store(tmp_path, extras=declared)
    lease(opened)
    image = {"image": b"seen"}
    first = [segment(number, 0, (5, 6), marked=True) for number in range(BATCH * GROUP)]
    first[0] = replace(first[0], extras=first[0].extras | image)
    assert opened.append(ROLLOUT, first) == Done()
    opened.flush()
    if restarted:
        opened.close()
        opened = open_store(tmp_path, extras=declared, compact_from=1)
    opened.update_membership((OTHER, *ALL[2:]))
    items = lease(opened, OTHER)
    assert [item.so_far for item in items[: len(first)]] == [(one,) for one in first]
    rest = [segment(number, 2, (7, 1), marked=True) for number in range(len(first))]
    assert opened.append(OTHER, rest, [one.trajectory for one in rest]) == Done()
    score(opened)
    for one in bind(opened, 1).trajectories:
        assert one.extras == {"mark": mark(one.id, 0, (5, 6, 7, 1)), **(image if one.id == 0 else {})}


def test_same_segment_again_changes_nothing_and_other_extras_are_refused(tmp_path: Path) -> None:
    opened = open_store(tmp_path, extras=MARKS)
    lease(opened)
    assert opened.append(ROLLOUT, [segment(0, marked=True)]) == Done()
    assert opened.append(ROLLOUT, [segment(0, marked=True)]) == Done()
    other = replace(segment(0), extras={"mark": b"others"})
    refused = opened.append(ROLLOUT, [other])
    assert isinstance(refused, Denied)
    assert refused.lost == (0,)
    opened.update_membership((OTHER,))
    assert lease(opened, OTHER)[0].so_far == (segment(0, marked=True),)


def test_digest_of_a_batch_covers_the_extras(tmp_path: Path) -> None:
    digests = set()
    for image in (b"one", b"two", b""):
        opened = open_store(tmp_path / image.hex(), extras=IMAGE)
        items = lease(opened, at_most=BATCH * GROUP)
        segments = [_image(item.trajectory, 0, image) for item in items]
        assert opened.append(ROLLOUT, segments, [item.trajectory for item in items]) == Done()
        score(opened)
        digests.add(bind(opened, 1).digest)
    assert len(digests) == 3


def test_member_of_a_gang_gets_the_extras_of_its_share_only(tmp_path: Path) -> None:
    opened = open_store(tmp_path, extras=MARKS)
    generate(opened, marked=True)
    score(opened)
    bound = opened.part(TRAINER, 1)
    assert isinstance(bound, PartBound)
    share = Share(1, 3, "sequence")
    mine = shares_of(bound.part, share)[1]
    received = decode(cut(bound.part, share), share).trajectories
    whole = decode(bound.part).trajectories
    assert [one.extras for one in whole] == [{"mark": mark(one.id, 0, one.tokens)} for one in whole]
    assert [index for index, one in enumerate(received) if one.extras] == mine
    assert [received[index].extras for index in mine] == [whole[index].extras for index in mine]


def test_part_is_cut_before_its_extras_exceed_a_message(tmp_path: Path) -> None:
    extras = {"mark": ExtraSpec(per_token=500)}
    opened = open_store(tmp_path, extras=extras, max_part_bytes=3500, groups_per_batch=4)
    items = lease(opened, at_most=4 * GROUP)
    segments = [replace(segment(item.trajectory), extras={"mark": bytes(1000)}) for item in items]
    assert opened.append(ROLLOUT, segments, [item.trajectory for item in items]) == Done()
    score(opened)
    assert isinstance(opened.part(TRAINER, 1), PartBound)
    parts = [opened.part(TRAINER, 1, index) for index in range(4)]
    assert [len(bound.part.groups) for bound in parts if isinstance(bound, PartBound)] == [1, 1, 1, 1]


def test_leases_that_would_exceed_a_message_are_offered_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_store(tmp_path, extras=MARKS)
    lease(opened, at_most=4)
    assert opened.append(ROLLOUT, [segment(number, marked=True) for number in range(4)]) == Done()
    opened.update_membership((OTHER, *ALL[2:]))
    monkeypatch.setattr(leases, "MAX_LEASED_EXTRAS", 13)
    taken = list[int]()
    while items := lease(opened, OTHER, 4, taken):
        assert sum(len(item.so_far) for item in items) <= 2
        taken += [item.trajectory for item in items]
    assert sorted(taken) == list(range(opened._state.next_trajectory))
    assert opened._state.next_trajectory > 4


async def test_segments_that_do_not_fit_into_a_message_are_sent_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_SEGMENT_EXTRAS", 13)
    sent = list[Append]()

    async def send(self: TrajectoryClient, request: Append) -> Done | Denied:
        sent.append(request)
        return Denied("lost", lost=(1,)) if any(one.trajectory == 1 for one in request.segments) else Done()

    monkeypatch.setattr(TrajectoryClient, "_send_until_decided", send)
    appending = object.__new__(TrajectoryClient)
    appending._incarnation, appending._weights = ROLLOUT, lambda: None
    pieces = [segment(number, 2 * place, marked=True) for place in range(2) for number in range(3)]
    assert (await appending.append_and_lease(pieces, (0, 1, 2), 5, (0, 1, 2))).lost == (1,)
    assert [one for request in sent[1:] for one in request.segments] == [one for one in pieces if one.trajectory != 1]
    assert [request.finished for request in sent] == [(), (), (), (0, 2)]
    assert [request.lease is None for request in sent] == [True, True, True, False]


def test_segment_without_extras_is_one_byte_longer_than_one_that_could_have_none() -> None:
    packed = pack(segment(0), {})
    assert len(encode(packed)) == len(encode(astuple(packed)[:-1])) + 1


# ── agents ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def _turn(opened: Store, number: int, tokens: tuple[int, ...], image: bytes | None = None) -> None:
    lease(opened)
    words = segment(number, 0, tokens, marked=True)
    words = replace(words, extras=words.extras | ({} if image is None else {"image": image}))
    assert opened.append(ROLLOUT, [words], (number,)) == Done()


def _samples(opened: Store, episode: int) -> list[Trajectory]:
    for other in episodes(opened):
        _turn(opened, ask(opened, other), (5, 1))
        finish(opened, other)
    return [one for one in bind(opened, 1).trajectories if one.id == episode]


def test_branches_have_the_extras_of_their_sampled_tokens_and_zeros_for_given_ones(tmp_path: Path) -> None:
    declared = {**MARKS, **IMAGE}
    opened = open_agents_store(tmp_path, extras=declared)
    item = episodes(opened, 1)[0]
    root = ask(opened, item, "root", (2, 3))
    _turn(opened, root, (5, 6, 7, 8), b"root")
    assert answer(opened, EndTurn(AGENTS, root, 3)) == Done()
    left, right = (ask(opened, item, name, (9,), root, 5) for name in ("left", "right"))
    _turn(opened, left, (10, 11), b"left")
    _turn(opened, right, (12,))
    opened = reopened(opened, tmp_path, extras=declared)
    finish(opened, item)
    one, other = _samples(opened, item.episode)
    kept = mark(root, 0, (5, 6, 7))
    assert (one.prompt, one.tokens) == ((2, 3), (5, 6, 7, 9, 10, 11))
    assert one.extras == {"mark": kept + bytes(3) + mark(left, 0, (10, 11)), "image": b"left"}
    assert (other.prompt, other.tokens) == ((2, 3, 5, 6, 7, 9), (12,))
    assert other.extras == {"mark": mark(right, 0, (12,)), "image": b"root"}


def test_size_of_a_message_covers_the_extras_of_all_branches(tmp_path: Path) -> None:
    opened = open_agents_store(tmp_path, extras=MARKS, max_new_tokens=400)
    item = episodes(opened, 1)[0]
    root = ask(opened, item, "root", (2,) * 50, max_new=400)
    _turn(opened, root, (5,) * 300)
    for name in range(3):
        _turn(opened, ask(opened, item, str(name), (9,) * 50, root, 350, max_new=400), (10 + name,) * 5)
    finish(opened, item)
    samples = _samples(opened, item.episode)
    assert len(samples) == 3
    group = opened._state.groups[samples[0].group]
    data = sum(8 * len(one.tokens) + len(one.extras["mark"]) for one in samples)
    assert data <= message_bytes(group.trajectories, b"")
