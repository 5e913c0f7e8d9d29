"""What is held, what is given up, and what a manifest proves. No network here."""

from __future__ import annotations

import threading

import msgspec
import pytest

from rrl.spec.words import Version
from rrl.tests.transport.weights.source import content, described
from rrl.transport.weights import manifest as manifests
from rrl.transport.weights.manifest import ALIGN, Manifest, describe, layout
from rrl.transport.weights.store import Superseded, WeightStore

SECRET = b"s" * 32
V1, V2, V3 = Version(1, 1), Version(2, 1), Version(3, 1)


def made(version: Version, nbytes: int = 1000, chunk: int = 300) -> tuple[Manifest, memoryview]:
    flat = content(nbytes, seed=version.step)
    return described(version, flat, SECRET, chunk), flat


def fill(store: WeightStore, manifest: Manifest, flat: memoryview, indices: list[int]) -> None:
    for index in indices:
        chunk = manifest.chunks[index]
        store.span(manifest.version, index)[:] = flat[chunk.offset : chunk.offset + chunk.nbytes]
        assert store.accept(manifest.version, index)


# ── manifest ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_tensors_lie_aligned_and_back_to_back() -> None:
    specs, nbytes = layout([("a", "float32", (5,), 20), ("b", "bfloat16", (64,), 128), ("c", "uint8", (), 1)])
    assert [spec.offset for spec in specs] == [0, ALIGN, 3 * ALIGN]
    assert nbytes == 3 * ALIGN + 1


def test_chunks_cover_the_buffer_and_the_manifest_survives_the_wire() -> None:
    manifest, _ = made(V1)
    assert [chunk.nbytes for chunk in manifest.chunks] == [300, 300, 300, 100]
    assert manifests.decode(manifests.encode(manifest), V1, SECRET) == manifest


def test_a_buffer_that_its_tensors_do_not_fill_is_refused() -> None:
    with pytest.raises(ValueError, match="need 20"):
        describe(V1, [("a", "float32", (5,), 20)], content(21), SECRET)


def test_a_manifest_of_another_run_or_version_or_with_a_changed_byte_is_refused() -> None:
    manifest, _ = made(V1)
    data = manifests.encode(manifest)
    with pytest.raises(ValueError, match="not signed"):
        manifests.decode(data, V1, b"t" * 32)
    with pytest.raises(ValueError, match="asked for"):
        manifests.decode(data, V2, SECRET)
    for place in range(0, len(data), 7):
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(ValueError):  # noqa: PT011 (unreadable or unsigned: both are right)
            manifests.decode(changed, V1, SECRET)


@pytest.mark.parametrize("change", ["gap", "short", "outside"])
def test_a_signed_manifest_that_does_not_fit_together_is_refused(change: str) -> None:
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
def test_a_version_is_visible_only_once_it_is_complete() -> None:
    store = WeightStore()
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


def test_wrong_bytes_are_not_accepted() -> None:
    store = WeightStore()
    manifest, flat = made(V1)
    store.begin(manifest)
    store.span(V1, 0)[:] = flat[1:301]
    assert not store.accept(V1, 0)
    assert 0 in store.begin(manifest)


def test_a_half_received_version_is_dropped_when_another_begins() -> None:
    store = WeightStore()
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


def test_at_most_two_versions_are_in_memory_the_arriving_one_included() -> None:
    store = WeightStore()
    for version in (V1, V2, V3):
        store.offer(*made(version))
    assert store.versions() == (V2, V3)
    store.begin(made(Version(4, 1))[0])
    assert store.versions() == (V3, Version(4, 1))
    store.offer(*made(Version(5, 1)))
    assert store.versions() == (Version(5, 1), Version(4, 1))
    store.discard(Version(4, 1))
    assert store.versions() == (Version(5, 1),)


def test_the_version_that_came_last_is_current_even_if_it_counts_lower() -> None:
    store = WeightStore()
    store.offer(*made(V3))
    store.offer(*made(Version(2, 2)))
    current = store.current()
    assert current is not None
    assert current.manifest.version == Version(2, 2)


def test_an_evicted_version_stays_valid_for_who_reads_it() -> None:
    store = WeightStore()
    manifest, flat = made(V1)
    store.offer(manifest, memoryview(bytearray(flat)))
    held = store.get(V1)
    store.offer(*made(V2))
    store.offer(*made(V3))
    assert store.get(V1) is None
    assert held is not None
    assert held.flat == flat


def test_threads_offer_and_read_without_ever_seeing_a_third_version() -> None:
    store = WeightStore()
    many = [made(Version(step, 1)) for step in range(200)]
    seen: list[int] = []

    def read() -> None:
        while (current := store.current()) is None or current.manifest.version.step < 199:
            seen.append(len(store.versions()))

    reader = threading.Thread(target=read)
    reader.start()
    for manifest, flat in many:
        store.offer(manifest, flat)
    reader.join(20)
    assert not reader.is_alive()
    assert set(seen) <= {0, 1, 2}
