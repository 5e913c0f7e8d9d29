"""The changes that a store keeps, and the bases from which it sends deltas, without a network."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from rrl.core.types import Version
from rrl.tests.support.weights.sparse import changed, described, knows_base, publish, publish_parts, versions
from rrl.transport.weights import delta
from rrl.transport.weights.changes import MAX_SHARE
from rrl.transport.weights.manifest import Chunk, Manifest, digest
from rrl.transport.weights.store import StoredVersion, Superseded, WeightStore

SIZE = 2**16 + 2**14 + 7
"""Two chunks, of which the second has an odd size."""
CHUNK = 2**16


@pytest.fixture
def store() -> WeightStore:
    return WeightStore()


def published(store: WeightStore, flats: Sequence[memoryview], incarnation: int = 1) -> list[Manifest]:
    return [publish(store, Version(step, incarnation), flat, CHUNK) for step, flat in enumerate(flats)]


def knows(store: WeightStore, version: Version, base: memoryview) -> bool:
    """Return whether the store knows the changes of all chunks from these bytes to the version."""
    held = store.get(version)
    assert held is not None
    chunks = held.manifest.chunks
    known = {knows_base(store, version, one.offset, digest(bytes_of(one, base))) for one in chunks}
    assert len(known) == 1
    return known.pop()


def bytes_of(chunk: Chunk, flat: memoryview) -> memoryview:
    return flat[chunk.offset : chunk.offset + chunk.nbytes]


def frames(store: WeightStore, version: Version, base: memoryview) -> list[bytes | None]:
    """Return the frame of each chunk for a receiver that has these bytes."""
    held = store.get(version)
    assert held is not None
    return [
        store.frame(version, chunk.offset, digest(bytes_of(chunk, base)), bytes_of(chunk, held.flat))
        for chunk in held.manifest.chunks
    ]


def leads(store: WeightStore, version: Version, base: memoryview, result: memoryview) -> bool:
    """Return whether the store's frames lead from these bytes to the result."""
    held = store.get(version)
    assert held is not None
    made = bytearray(len(result))
    for chunk, frame in zip(held.manifest.chunks, frames(store, version, base), strict=True):
        if frame is None:
            return False
        delta.apply(frame, bytes_of(chunk, base), bytes_of(chunk, memoryview(made)))
    return made == result


def receive(
    store: WeightStore, manifest: Manifest, flat: memoryview, count: int | None = None, deltas: bool = True
) -> None:
    """Receive this many chunks of a version whole; all of them complete it."""
    store.begin(manifest, deltas)
    for index, chunk in enumerate(manifest.chunks[:count]):
        store.span(manifest.version, index)[:] = bytes_of(chunk, flat)
        assert store.accept(manifest.version, index)
    if count is None:
        store.commit(manifest.version)


# ── bases ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_receiver_that_skipped_up_to_eight_versions_gets_a_delta(store: WeightStore) -> None:
    flats = versions(10, SIZE, 0.005)
    published(store, flats)
    newest = Version(9, 1)
    assert all(leads(store, newest, base, flats[-1]) for base in flats[1:-1])
    assert not knows(store, newest, flats[0])
    assert frames(store, newest, flats[0]) == [None, None]


def test_the_older_of_two_versions_in_memory_is_sent_as_a_delta_too(store: WeightStore) -> None:
    flats = versions(4, SIZE)
    published(store, flats)
    assert leads(store, Version(2, 1), flats[0], flats[2])
    assert leads(store, Version(2, 1), flats[1], flats[2])
    assert not knows(store, Version(2, 1), flats[3])


def test_base_of_another_incarnation_counts_if_its_bytes_are_equal(store: WeightStore) -> None:
    flats = versions(3, SIZE)
    published(store, flats, incarnation=2)
    before_restart, _ = described(Version(0, 1), flats[0], chunk=CHUNK)
    receiver = WeightStore()
    receive(receiver, before_restart, flats[0])
    receiver.begin(described(Version(2, 2), flats[2], chunk=CHUNK)[0], deltas=True)
    base = receiver.base(Version(2, 2), 0)
    assert base is not None
    assert knows_base(store, Version(2, 2), 0, base)
    assert leads(store, Version(2, 2), flats[0], flats[2])


def test_version_whose_bytes_return_is_a_base_with_its_newest_changes(store: WeightStore) -> None:
    first, second = versions(2, SIZE)
    third = changed(first, 9)
    published(store, [first, second, first, third])
    assert leads(store, Version(3, 1), first, third)
    assert leads(store, Version(3, 1), second, third)
    frame = frames(store, Version(3, 1), first)[0]
    assert frame is not None
    assert len(frame) < 0.035 * CHUNK, "the changes from the second version and back were sent too"


def test_source_without_changes_knows_no_base(store: WeightStore) -> None:
    flats = versions(3, SIZE)
    published(store, flats[:2])
    manifest, _ = described(Version(2, 1), flats[2], chunk=CHUNK)
    store.offer(manifest, flats[2])
    assert not knows(store, Version(2, 1), flats[1])
    assert frames(store, Version(2, 1), flats[1]) == [None, None]
    assert not knows(store_with(manifest, flats[2]), Version(2, 1), flats[1])


def store_with(manifest: Manifest, flat: memoryview) -> WeightStore:
    store = WeightStore()
    receive(store, manifest, flat)
    return store


def test_changes_of_another_version_say_nothing_about_an_unknown_version(store: WeightStore) -> None:
    """A source that does not have the version yet makes the receiver wait, instead of denying the base."""
    flats = versions(2, SIZE)
    published(store, flats)
    assert knows_base(store, Version(5, 1), 0, digest(flats[0][:CHUNK]))


def test_too_many_changes_in_one_chunk_affect_only_this_chunk(store: WeightStore) -> None:
    first = versions(1, SIZE)[0]
    second = memoryview(bytes(changed(first[:CHUNK], 1, 0.6)) + bytes(changed(first[CHUNK:], 1)))
    third = changed(second, 2)
    published(store, [first, second, third])
    assert knows(store, Version(2, 1), first)
    from_first, from_second = frames(store, Version(2, 1), first), frames(store, Version(2, 1), second)
    assert [frame is None for frame in from_first] == [True, False]
    assert [frame is None for frame in from_second] == [False, False]


# ── layouts ────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("name", "chunk", "size"), [("v", CHUNK, SIZE), ("w", CHUNK // 2, SIZE), ("w", CHUNK, SIZE - 1)]
)
def test_version_of_another_layout_is_no_base(store: WeightStore, name: str, chunk: int, size: int) -> None:
    first, second = versions(2, SIZE)
    other = described(Version(1, 1), first[:size], chunk=chunk, name=name)[0]
    receive(store, other, first[:size])
    manifest, _ = described(Version(2, 1), second, chunk=CHUNK)
    receive(store, manifest, second)
    assert not knows_base(store, Version(2, 1), 0, other.chunks[0].digest)
    store = store_with(other, first[:size])
    store.begin(manifest, deltas=True)
    assert store.base(Version(2, 1), 0) is None


def test_publisher_keeps_no_changes_from_a_version_of_another_size(store: WeightStore) -> None:
    first, second = versions(2, SIZE)
    publish(store, Version(1, 1), first[:-4], CHUNK)
    publish(store, Version(2, 1), second, CHUNK)
    assert not knows_base(store, Version(2, 1), 0, digest(first[:CHUNK]))


def test_each_part_of_a_version_is_sent_as_a_delta_by_its_rank() -> None:
    stores = [WeightStore() for _ in range(3)]
    parts = [versions(3, SIZE + rank) for rank in range(3)]
    wholes = [publish_parts(stores, Version(step, 1), [flats[step] for flats in parts], CHUNK) for step in range(3)]
    for rank, store in enumerate(stores):
        place = wholes[2].parts[rank].offset
        for old, new in zip(wholes[0].chunks, wholes[2].chunks, strict=True):
            if wholes[2].part_at(new.offset).rank != rank:
                assert knows_base(store, Version(2, 1), new.offset, old.digest), "another rank is asked, not told"
                continue
            inside = slice(new.offset - place, new.offset - place + new.nbytes)
            frame = store.frame(Version(2, 1), new.offset, old.digest, parts[rank][2][inside])
            assert frame is not None
            made = bytearray(new.nbytes)
            delta.apply(frame, parts[rank][0][inside], memoryview(made))
            assert digest(memoryview(made)) == new.digest


def test_rank_that_publishes_another_part_than_before_keeps_no_changes() -> None:
    """Its two parts may have the same size, but they are not versions of the same tensors."""
    first, second = versions(2, SIZE)
    stores = [WeightStore(), WeightStore()]
    old = publish_parts(stores, Version(0, 1), [first, second], CHUNK)
    new = publish_parts([WeightStore(), WeightStore()], Version(1, 1), [second, first], CHUNK)
    _, changes = described(Version(1, 1), first, first, CHUNK)
    stores[0].offer(new, first, 1, changes)
    place = new.parts[1].offset
    base = next(chunk.digest for chunk in old.chunks if chunk.offset == place)
    assert not knows_base(stores[0], Version(1, 1), place, base)


# ── relays ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_relay_passes_on_the_changes_of_chunks_that_it_received_whole(store: WeightStore) -> None:
    flats = versions(3, SIZE)
    for step, flat in enumerate(flats):
        receive(store, described(Version(step, 1), flat, chunk=CHUNK)[0], flat)
    assert leads(store, Version(2, 1), flats[0], flats[2])
    assert leads(store, Version(2, 1), flats[1], flats[2])


def test_relay_passes_on_the_changes_of_chunks_that_it_received_as_deltas(store: WeightStore) -> None:
    flats, source = versions(3, SIZE), WeightStore()
    manifests = published(source, flats)
    receive(store, manifests[0], flats[0])
    store.begin(manifests[2], deltas=True)
    for index, frame in enumerate(frames(source, Version(2, 1), flats[0])):
        assert store.accept(Version(2, 1), index, frame)
    store.commit(Version(2, 1))
    assert leads(store, Version(2, 1), flats[0], flats[2])
    assert not knows(store, Version(2, 1), flats[1])


def test_changes_of_a_version_that_was_begun_and_dropped_are_never_used(store: WeightStore) -> None:
    flats = versions(3, SIZE)
    manifests = [described(Version(step, 1), flat, chunk=CHUNK)[0] for step, flat in enumerate(flats)]
    receive(store, manifests[0], flats[0])
    receive(store, manifests[1], flats[1], count=1)
    receive(store, manifests[2], flats[2])
    assert not knows_base(store, Version(2, 1), 0, manifests[1].chunks[0].digest)
    assert leads(store, Version(2, 1), flats[0], flats[2])


def test_versions_that_were_dropped_take_no_place_of_the_changes_that_are_kept(store: WeightStore) -> None:
    flats = versions(12, SIZE, 0.002)
    manifests = [described(Version(step, 1), flat, chunk=CHUNK)[0] for step, flat in enumerate(flats)]
    for step in (0, 1):
        receive(store, manifests[step], flats[step])
    for step in range(2, 11):
        receive(store, manifests[step], flats[step], count=1)
    receive(store, manifests[11], flats[11])
    assert leads(store, Version(11, 1), flats[0], flats[11])


def test_version_that_is_begun_again_does_not_use_its_old_changes(store: WeightStore) -> None:
    """A relay dropped the version, received another one, and now receives the version after all."""
    flats = versions(3, SIZE)
    manifests = [described(Version(step, 1), flat, chunk=CHUNK)[0] for step, flat in enumerate(flats)]
    receive(store, manifests[0], flats[0])
    receive(store, manifests[2], flats[2], count=1)
    receive(store, manifests[1], flats[1])
    receive(store, manifests[2], flats[2])
    assert leads(store, Version(2, 1), flats[0], flats[2])
    assert leads(store, Version(2, 1), flats[1], flats[2])


def test_discarded_version_is_no_longer_sent_as_a_delta(store: WeightStore) -> None:
    flats = versions(2, SIZE)
    published(store, flats)
    store.discard(Version(1, 1))
    manifest, _ = described(Version(1, 1), flats[1], chunk=CHUNK)
    store.offer(manifest, flats[1])
    assert not knows(store, Version(1, 1), flats[0])


def test_chunk_that_arrives_gets_a_delta_as_soon_as_it_is_verified(store: WeightStore) -> None:
    flats = versions(2, SIZE)
    manifests = [described(Version(step, 1), flat, chunk=CHUNK)[0] for step, flat in enumerate(flats)]
    receive(store, manifests[0], flats[0])
    receive(store, manifests[1], flats[1], count=1)
    first, second = ((chunk.offset, chunk.digest) for chunk in manifests[0].chunks)
    frame = store.frame(Version(1, 1), *first, store.read(Version(1, 1), range(CHUNK), "a"))
    assert frame is not None
    assert store.frame(Version(1, 1), *second, flats[1][CHUNK:]) is None


# ── receiving ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_wrong_or_malformed_frame_is_not_accepted_and_the_whole_chunk_is(store: WeightStore) -> None:
    flats, source = versions(2, SIZE), WeightStore()
    manifests = published(source, flats)
    receive(store, manifests[0], flats[0])
    store.begin(manifests[1], deltas=True)
    right = frames(source, Version(1, 1), flats[0])[0]
    assert right is not None
    for wrong in (right[:-1] + bytes([right[-1] ^ 1]), right[:-2], right + b"ab", right[:5], delta.UNCHANGED):
        assert not store.accept(Version(1, 1), 0, wrong)
        assert 0 in store.begin(manifests[1], deltas=True)
    assert store.accept(Version(1, 1), 0, right)
    store.span(Version(1, 1), 1)[:] = flats[1][CHUNK:]
    assert store.accept(Version(1, 1), 1)
    assert store.commit(Version(1, 1)).flat == flats[1]


def test_right_chunk_from_a_wrong_base_is_accepted(store: WeightStore) -> None:
    """What counts is the result, not the way to it: the words that differ are all among the changed ones."""
    flats, source = versions(2, SIZE), WeightStore()
    manifests = published(source, flats)
    receive(store, manifests[0], flats[0])
    held = store.current()
    assert held is not None
    word = int(np.flatnonzero(np.frombuffer(flats[0][:CHUNK], "<u2") != np.frombuffer(flats[1][:CHUNK], "<u2"))[0])
    corrupt(held, 2 * word)
    store.begin(manifests[1], deltas=True)
    assert store.accept(Version(1, 1), 0, frames(source, Version(1, 1), flats[0])[0])


def corrupt(held: StoredVersion, place: int) -> None:
    """Flip a bit of a version in memory."""
    memoryview(held.flat.obj).cast("B")[place] ^= 1


def test_base_that_is_evicted_while_a_version_arrives_is_kept_until_it_is_complete(store: WeightStore) -> None:
    flats, source = versions(3, SIZE), WeightStore()
    manifests = published(source, flats[:2])
    receive(store, manifests[0], flats[0])
    store.begin(manifests[1], deltas=True)
    newer, _ = described(Version(2, 1), flats[2], chunk=CHUNK)
    into = store.allocate(SIZE)
    into[:] = flats[2]
    store.offer(newer, into)  # evicts the base
    assert store.get(Version(0, 1)) is None
    store.allocate(SIZE)[:] = bytes(SIZE)  # not the memory of the base
    for index, frame in enumerate(frames(source, Version(1, 1), flats[0])):
        assert store.accept(Version(1, 1), index, frame)
    assert store.commit(Version(1, 1)).flat == flats[1]


def test_version_that_is_dropped_accepts_no_frame(store: WeightStore) -> None:
    flats, source = versions(3, SIZE), WeightStore()
    manifests = published(source, flats)
    receive(store, manifests[0], flats[0])
    store.begin(manifests[1], deltas=True)
    store.begin(manifests[2], deltas=True)
    for late in (lambda: store.base(Version(1, 1), 0), lambda: store.accept(Version(1, 1), 0, delta.UNCHANGED)):
        with pytest.raises(Superseded):
            late()


def test_without_deltas_no_base_is_named_and_no_change_is_kept(store: WeightStore) -> None:
    flats = versions(2, SIZE)
    manifests = [described(Version(step, 1), flat, chunk=CHUNK)[0] for step, flat in enumerate(flats)]
    receive(store, manifests[0], flats[0], deltas=False)
    store.begin(manifests[1])
    assert store.base(Version(1, 1), 0) is None
    receive(store, manifests[1], flats[1], deltas=False)
    assert not knows(store, Version(1, 1), flats[0])


# ── memory and work ────────────────────────────────────────────────────────────────────────────────────────────────
def test_changes_of_all_versions_but_the_newest_take_a_tenth_of_a_version(store: WeightStore) -> None:
    flats = versions(7, SIZE, 0.06)
    for count, flat in enumerate(flats):
        publish(store, Version(count, 1), flat, CHUNK)
        *older, newest = [step.nbytes for step in store._changes._steps.values()] or [0]
        assert sum(older) <= MAX_SHARE * SIZE
        assert newest <= 0.2 * SIZE
    known = [knows(store, Version(6, 1), base) for base in flats[:-1]]
    assert known == [False, False, True, True, True, True], "3 % of gaps a version: three older ones have room"


def test_newest_changes_are_kept_however_many_they_are(store: WeightStore) -> None:
    flats = versions(3, SIZE, 0.35)
    published(store, flats)
    assert knows(store, Version(2, 1), flats[1])
    assert not knows(store, Version(2, 1), flats[0])


def test_each_chunk_is_encoded_once_for_each_base(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []

    def counted(gaps: bytes, chunk: delta.Buffer) -> bytes | None:
        encoded.append(len(chunk))
        return encode(gaps, chunk)

    encode = delta.encode
    monkeypatch.setattr(delta, "encode", counted)
    flats = versions(3, SIZE, 0.005)
    published(store, flats)
    for base in (flats[1], flats[0]):
        first = frames(store, Version(2, 1), base)
        assert all(frames(store, Version(2, 1), base) == first for _ in range(3))
    assert encoded == [CHUNK, SIZE - CHUNK] * 2


def test_frames_that_are_kept_take_a_tenth_of_a_version_and_the_rest_is_encoded_again(store: WeightStore) -> None:
    flats = versions(6, SIZE, 0.02)
    published(store, flats)
    for base in flats[1:-1]:
        assert leads(store, Version(5, 1), base, flats[5])
        assert leads(store, Version(5, 1), base, flats[5])
    kept = sum(map(len, store._changes._frames.values()))
    assert 0 < kept <= MAX_SHARE * SIZE
    publish(store, Version(6, 1), changed(flats[5], 6), CHUNK)
    assert store._changes._frames == {}


def test_frames_are_right_while_versions_are_published_at_the_same_time(store: WeightStore) -> None:
    flats = versions(40, SIZE, 0.002)
    publish(store, Version(0, 1), flats[0], CHUNK)
    done, wrong, right = threading.Event(), list[int](), list[int]()

    def read() -> None:
        choose = random.Random(0)
        while not done.is_set() or not right:
            held = store.current()
            assert held is not None
            step = held.manifest.version.step
            base = flats[choose.randint(max(0, step - 9), max(0, step - 1))]
            frame = store.frame(held.manifest.version, 0, digest(base[:CHUNK]), held.flat[:CHUNK])
            if frame is not None:
                made = bytearray(CHUNK)
                delta.apply(frame, base[:CHUNK], memoryview(made))
                (right if made == flats[step][:CHUNK] else wrong).append(step)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for step, flat in enumerate(flats[1:], 1):
        publish(store, Version(step, 1), flat, CHUNK)
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong
