"""The versions that the weight store keeps and evicts, without a network.

Other tests are about the errors that a manifest detects.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from functools import partial
from pathlib import Path

import msgspec
import pytest

from rrl.core.types import Version
from rrl.tests.support.weights.source import content, described
from rrl.transport.weights import manifest as manifests
from rrl.transport.weights import store as stores
from rrl.transport.weights.manifest import ALIGN_BYTES, Manifest, ManifestBuilder, describe, layout
from rrl.transport.weights.store import NotReady, Superseded, VersionEvicted, VersionUnknown, WeightStore

SECRET = b"s" * 32
SOON = 30.0
V1, V2, V3 = Version(1, 1), Version(2, 1), Version(3, 1)


@pytest.fixture
def store() -> WeightStore:
    return WeightStore()


def made(version: Version, nbytes: int = 1000, chunk: int = 300) -> tuple[Manifest, memoryview]:
    flat = content(nbytes, seed=version.step)
    return described(version, flat, SECRET, chunk), flat


def fill(store: WeightStore, manifest: Manifest, flat: memoryview, indices: list[int]) -> None:
    for index in indices:
        chunk = manifest.chunks[index]
        store.span(manifest.version, index)[:] = flat[chunk.offset : chunk.offset + chunk.nbytes]
        assert store.accept(manifest.version, index)


# ── manifest ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_tensors_are_aligned_and_contiguous() -> None:
    specs, nbytes = layout([("a", "float32", (5,), 20), ("b", "bfloat16", (64,), 128), ("c", "uint8", (), 1)])
    assert [spec.offset for spec in specs] == [0, ALIGN_BYTES, 3 * ALIGN_BYTES]
    assert nbytes == 3 * ALIGN_BYTES + 1


def test_chunks_cover_the_buffer_and_the_manifest_survives_the_wire() -> None:
    manifest, _ = made(V1)
    assert [chunk.nbytes for chunk in manifest.chunks] == [300, 300, 300, 100]
    assert manifests.decode(manifests.encode(manifest), V1, SECRET) == manifest


@pytest.mark.parametrize("name", ["sha256", "blake2b"])
def test_receiver_verifies_by_the_hash_function_of_the_publisher(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch, name: manifests.HashName
) -> None:
    monkeypatch.setattr(manifests, "fastest_hash", lambda: name)
    manifest, flat = made(V1)
    assert manifest.parts[0].hash == name
    monkeypatch.setattr(manifests, "fastest_hash", lambda: {"sha256": "blake2b", "blake2b": "sha256"}[name])
    fill(store, manifest, flat, store.begin(manifest))
    store.begin(made(V2)[0])
    store.span(V2, 0)[:] = flat[:300]
    assert not store.accept(V2, 0)


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor : 0\nflags\t\t: fpu sha_ni avx2\n", "sha256"),
        ("processor : 0\nFeatures\t: fp asimd sha1 sha2\n", "sha256"),
        ("processor : 0\nflags\t\t: fpu avx2\n", "blake2b"),
        ("model name : sha_ni\n", "blake2b"),
    ],
)
def test_hash_function_is_chosen_by_the_instructions_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, cpuinfo: str, name: str
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: cpuinfo)
    assert manifests.fastest_hash.__wrapped__() == name


def test_buffer_larger_than_its_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="need 20"):
        describe(V1, [("a", "float32", (5,), 20)], content(21), SECRET)


def test_a_manifest_of_another_run_or_version_or_with_a_changed_byte_is_refused() -> None:
    manifest, _ = made(V1)
    data = manifests.encode(manifest)
    with pytest.raises(ValueError, match="not signed"):
        manifests.decode(data, V1, b"t" * 32)
    with pytest.raises(ValueError, match="requested"):
        manifests.decode(data, V2, SECRET)
    for place in range(0, len(data), 7):
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(ValueError):  # noqa: PT011 (unreadable or unsigned: both are correct)
            manifests.decode(changed, V1, SECRET)


def test_digests_of_filled_parts_are_computed_while_the_rest_still_changes() -> None:
    flat = memoryview(bytearray(content(1000)))
    with ManifestBuilder(V1, [("w", "uint8", (1000,), 1000)], flat, SECRET, 300, threads=2) as describing:
        describing.mark_filled(700)
        early = [made.result(SOON) for made in describing._digests]
        assert early == [manifests.digest(flat[:300]), manifests.digest(flat[300:600])]
        flat[700:] = bytes(300)
        manifest = describing.sign()
    assert [chunk.digest for chunk in manifest.chunks[:2]] == early
    assert manifests.decode(manifests.encode(manifest), V1, SECRET) == manifest
    assert manifest == describe(V1, [("w", "uint8", (1000,), 1000)], flat, SECRET, 300)


def test_digests_are_computed_concurrently() -> None:
    """Each of two digests waits until the other one has begun."""
    meeting = threading.Barrier(2)

    def met(data: memoryview) -> bytes:
        meeting.wait(SOON)
        return hashlib.blake2b(data, digest_size=16).digest()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifests, "digest", met)
        with ManifestBuilder(V1, [("w", "uint8", (600,), 600)], content(600), SECRET, 300, threads=2) as describing:
            describing.sign()


@pytest.mark.parametrize("change", ["gap", "short", "outside"])
def test_inconsistent_signed_manifest_is_refused(change: str) -> None:
    manifest, _ = made(V1)
    if change == "gap":
        bad = msgspec.structs.replace(manifest, chunks=manifest.chunks[1:])
    elif change == "short":
        bad = msgspec.structs.replace(manifest, chunks=manifest.chunks[:-1])
    else:
        bad = msgspec.structs.replace(manifest, tensors=(msgspec.structs.replace(manifest.tensors[0], offset=8),))
    signed = msgspec.structs.replace(bad, mac=manifests._mac(bad, SECRET))
    with pytest.raises(ValueError, match=r"chunks|tensor"):
        manifests.decode(manifests.encode(signed), V1, SECRET)


# ── store ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_version_is_visible_only_once_it_is_complete(store: WeightStore) -> None:
    manifest, flat = made(V1)
    assert store.begin(manifest) == [0, 1, 2, 3]
    fill(store, manifest, flat, [0, 2])
    with pytest.raises(ValueError, match="lacks 2 of 4"):
        store.commit(V1)
    assert store.current() is None
    assert store.get(V1) is None
    assert store.begin(manifest) == [1, 3]
    fill(store, manifest, flat, [1, 3])
    assert store.commit(V1) is store.current()
    held = store.get(V1)
    assert held is not None
    assert held.flat == flat
    assert held.flat.readonly
    assert store.begin(manifest) == []


def test_chunk_with_wrong_bytes_is_not_accepted(store: WeightStore) -> None:
    manifest, flat = made(V1)
    store.begin(manifest)
    store.span(V1, 0)[:] = flat[1:301]
    assert not store.accept(V1, 0)
    assert 0 in store.begin(manifest)


def test_incomplete_version_is_dropped_when_another_begins(store: WeightStore) -> None:
    first, flat = made(V1)
    second, second_flat = made(V2)
    store.begin(first)
    fill(store, first, flat, [0, 1])
    assert store.begin(second) == [0, 1, 2, 3]
    assert store.versions() == (V2,)
    for late in (lambda: store.span(V1, 2), lambda: store.accept(V1, 2), lambda: store.commit(V1)):
        with pytest.raises(Superseded):
            late()
    fill(store, second, second_flat, [0, 1, 2, 3])
    store.commit(V2)
    assert store.begin(first) == [0, 1, 2, 3]


def test_at_most_two_versions_are_in_memory_the_arriving_one_included(store: WeightStore) -> None:
    for version in (V1, V2, V3):
        store.offer(*made(version))
    assert store.versions() == (V2, V3)
    assert store.complete_versions() == (V3, V2)
    store.begin(made(Version(4, 1))[0])
    assert store.versions() == (V3, Version(4, 1))
    store.offer(*made(Version(5, 1)))
    assert store.versions() == (Version(5, 1), Version(4, 1))
    store.discard(Version(4, 1))
    assert store.versions() == (Version(5, 1),)


def test_newest_arrived_version_is_current_even_with_a_lower_step(store: WeightStore) -> None:
    store.offer(*made(V3))
    store.offer(*made(Version(2, 2)))
    current = store.current()
    assert current is not None
    assert current.manifest.version == Version(2, 2)


def test_evicted_version_stays_valid_for_its_readers(store: WeightStore) -> None:
    manifest, flat = made(V1)
    store.offer(manifest, memoryview(bytearray(flat)))
    held = store.get(V1)
    store.offer(*made(V2))
    store.offer(*made(V3))
    assert store.get(V1) is None
    assert held is not None
    assert held.flat == flat


# ── reads by other members ─────────────────────────────────────────────────────────────────────────────────────────
def test_each_chunk_of_an_arriving_version_can_be_read_once_it_is_verified(store: WeightStore) -> None:
    manifest, flat = made(V1)
    with store.awaiting(V1):
        with pytest.raises(NotReady):
            store.manifest(V1)
        store.begin(manifest)
        assert store.manifest(V1) == manifest
        store.span(V1, 1)[:] = flat[300:600]
        with pytest.raises(NotReady):
            store.read(V1, range(300, 600), "a")
        assert store.accept(V1, 1)
        read = store.read(V1, range(300, 600), "a")
        assert read == flat[300:600]
        assert read.readonly
        for span in (range(0, 300), range(299, 301), range(599, 601), range(0, 1000)):
            with pytest.raises(NotReady):
                store.read(V1, span, "a")
        with pytest.raises(VersionEvicted):
            store.read(V1, range(900, 1001), "a")


def test_version_that_is_no_longer_pulled_is_evicted(store: WeightStore) -> None:
    manifest, flat = made(V1)
    with store.awaiting(V1):
        store.begin(manifest)
        fill(store, manifest, flat, [0])
    assert store.read(V1, range(300), "a") == flat[:300]
    with pytest.raises(VersionEvicted):
        store.read(V1, range(300, 600), "a")
    store.offer(*made(V2))
    store.begin(made(V3)[0])
    for look in (partial(store.manifest, V1), partial(store.read, V1, range(300), "a")):
        with pytest.raises(VersionEvicted):
            look()


def test_version_newer_than_all_known_ones_is_awaited_and_an_older_one_is_not(store: WeightStore) -> None:
    with pytest.raises(VersionUnknown):
        store.manifest(V1)
    store.offer(*made(V2))
    with pytest.raises(VersionEvicted):
        store.manifest(V1)
    with pytest.raises(VersionUnknown):
        store.read(V3, range(1), "a")


def test_waiting_reader_gets_a_part_as_soon_as_another_thread_has_verified_it(store: WeightStore) -> None:
    manifest, flat = made(V1)

    async def test() -> None:
        with store.awaiting(V1):
            store.begin(manifest)
            waiting = [
                asyncio.create_task(store.wait_until_ready(SOON, partial(store.read, V1, range(300, 600), index)))
                for index in range(3)
            ]
            while len(store._waiting) < 3:
                await asyncio.sleep(0)
            await asyncio.to_thread(fill, store, manifest, flat, [0])  # not what they wait for
            await asyncio.to_thread(fill, store, manifest, flat, [1])
            assert await asyncio.gather(*waiting) == [flat[300:600]] * 3
            with pytest.raises(NotReady):
                await store.wait_until_ready(0.01, partial(store.read, V1, range(600, 900), 0))
        assert store._waiting == {}

    asyncio.run(asyncio.wait_for(test(), SOON))


def test_waiting_reader_fails_when_its_version_is_abandoned(store: WeightStore) -> None:

    async def test() -> None:
        with store.awaiting(V1):
            store.begin(made(V1)[0])
            waiting = asyncio.create_task(store.wait_until_ready(SOON, partial(store.read, V1, range(300), "a")))
            while not store._waiting:
                await asyncio.sleep(0)
        with pytest.raises(VersionEvicted):
            await waiting

    asyncio.run(asyncio.wait_for(test(), SOON))


# ── memory ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("sending", [False, True])
def test_version_that_is_read_or_sent_however_long_that_takes_stays_and_the_next_is_evicted(
    monkeypatch: pytest.MonkeyPatch, sending: bool
) -> None:
    monkeypatch.setattr(stores, "READER_IDLE_TIMEOUT_S", 0.0 if sending else SOON)
    store = WeightStore()
    store.offer(*made(V1))
    store.read(V1, range(300), "slow")
    store.offer(*made(V2))
    store.offer(*made(V3))
    assert store.versions() == (V1, V3)
    if sending:
        store.on_sent("slow")
    else:
        store.read(V1, range(300, 1000), "slow")  # the reader has the whole version now
    store.offer(*made(Version(4, 1)))
    assert store.versions() == (V3, Version(4, 1))


@pytest.mark.parametrize("why", ["left", "idle", "slow"])
def test_reader_that_has_left_or_takes_too_long_retains_no_version(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "READER_IDLE_TIMEOUT_S", 0.0 if why == "idle" else SOON)
    monkeypatch.setattr(stores, "READ_TIMEOUT_S", 0.0 if why == "slow" else SOON)
    store = WeightStore()
    store.offer(*made(V1))
    store.read(V1, range(300), "a")
    if why == "left":
        store.on_reader_left("a")
    if why == "idle":
        store.on_sent("a")
    store.offer(*made(V2))
    store.offer(*made(V3))
    assert store.versions() == (V2, V3)


def address(flat: memoryview) -> int:
    return id(flat.obj)


def test_memory_of_an_abandoned_version_is_reused_unless_a_view_of_it_exists(store: WeightStore) -> None:
    manifest, flat = made(V1)
    for version in (V1, V2):
        manifest, flat = made(version)
        store.begin(manifest)
        fill(store, manifest, flat, [0, 1, 2, 3])
        store.commit(version)
    first, second = (store.get(version) for version in (V1, V2))
    assert first is not None
    assert second is not None
    pages = [address(first.flat), address(second.flat)]
    reading, left = first.flat[10:20], bytes(first.flat)
    del first
    manifest, flat = made(V3)
    store.begin(manifest)  # evicts V1, which is still being read
    fill(store, manifest, flat, [0, 1, 2, 3])
    assert reading == left[10:20]
    store.commit(V3)
    del second
    manifest, flat = made(Version(4, 1))
    store.begin(manifest)  # evicts V2, which no process reads
    fill(store, manifest, flat, [0, 1, 2, 3])
    held = store.commit(Version(4, 1))
    assert address(held.flat) == pages[1]
    assert held.flat == flat


def test_publisher_reuses_the_memory_of_the_oldest_version(store: WeightStore) -> None:
    places = []
    for step in range(1, 7):
        manifest, flat = made(Version(step, 1))
        into = store.allocate(1000)
        into[:] = flat
        places.append(address(into))
        store.offer(manifest, into)
        held = store.current()
        assert held is not None
        assert held.flat == flat
        del held, into
    assert places == [*places[:2]] * 3


def test_memory_of_another_size_is_not_used_again(store: WeightStore) -> None:
    for step in range(1, 4):
        store.offer(described(Version(step, 1), content(1000 + step), SECRET, 300), store.allocate(1000 + step))
    assert store.allocate(10).nbytes == 10


def test_concurrent_threads_that_offer_and_read_never_find_a_third_version(store: WeightStore) -> None:
    many = [made(Version(step, 1)) for step in range(200)]
    counts: list[int] = []

    def read() -> None:
        while (current := store.current()) is None or current.manifest.version.step < 199:
            counts.append(len(store.versions()))

    reader = threading.Thread(target=read)
    reader.start()
    for manifest, flat in many:
        store.offer(manifest, flat)
    reader.join(20)
    assert not reader.is_alive()
    assert set(counts) <= {0, 1, 2}
