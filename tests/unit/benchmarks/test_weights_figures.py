"""The figures of benchmarks/weights.py, and of gloo as the standard of comparison."""

from __future__ import annotations

import pytest

from rrl.benchmarks import _weights_gloo, _weights_namespaces
from rrl.benchmarks._weights_gloo import BroadcastDone, FillBuffer
from rrl.benchmarks._weights_loopback import (
    AFTER,
    BESIDE,
    GLOO,
    KINDS,
    LAYOUTS,
    RECEIVERS,
    Loopback,
    report,
    with_publishing,
)
from rrl.benchmarks._weights_namespaces import Nics
from rrl.core.types import Version
from rrl.tests.support.weights.sparse_content import sparse_content
from rrl.transport.weights.manifest import CHUNK_BYTES, digest


def _measured(seconds: dict[str, list[float]]) -> Loopback:
    """Return results with these seconds of each arm in every case, in three rounds."""
    results = Loopback()
    for case in [(receivers, layout) for receivers in RECEIVERS for layout in LAYOUTS]:
        for arm, values in seconds.items():
            results.seconds[arm, case] = values
            results.cpu[arm, case] = values
    results.seconds["memcpy", (1, "flat")] = [0.1]
    return results


def test_ours_is_compared_with_raw_gloo_and_with_the_faster_way_to_digest() -> None:
    ours = {kind: [1.0, 2.0, 2.2] for kind in KINDS} | {with_publishing(kind): [3.0, 3.0, 3.0] for kind in KINDS}
    figures = report(_measured(ours | {GLOO: [1.0, 1.0, 1.0], AFTER: [5.0, 5.0, 5.0], BESIDE: [2.0, 2.0, 2.0]}))
    assert figures["ours_over_raw_gloo_1"] == 2.0
    assert figures["ours_over_gloo_1"] == 1.0
    assert figures["published_over_gloo_1"] == 1.5
    assert figures["published_over_raw_gloo_1"] == 3.0
    ranges = figures["loopback_ranges"]
    assert isinstance(ranges, dict)
    assert ranges["ours_over_gloo_1"] == [0.5, 1.1]


def test_the_slower_of_both_transports_is_shown() -> None:
    ours = {"ucx": [1.0], "tcp": [4.0]} | {with_publishing(kind): [5.0] for kind in KINDS}
    figures = report(_measured(ours | {arm: [1.0] for arm in (GLOO, AFTER, BESIDE)}))
    assert (figures["ours_over_gloo_1"], figures["ucx_over_gloo_1"]) == (4.0, 1.0)


class FakeTorch:
    """The part of torch that a rank uses. A tensor is a view of the rank's buffer."""

    uint8 = "uint8"

    def frombuffer(self, buffer: memoryview, dtype: str) -> memoryview:
        return buffer


class FakeDist:
    """A broadcast that returns at once, with the content of a version."""

    def __init__(self, version: Version, nbytes: int) -> None:
        self._content = sparse_content(version, nbytes)
        self.sizes: list[int] = []

    def broadcast(self, tensor: memoryview, source: int, group: object) -> None:
        start = sum(self.sizes)
        tensor[:] = self._content[start : start + tensor.nbytes]
        self.sizes.append(tensor.nbytes)

    def barrier(self, group: object) -> None:
        """Return at once, because there is no other rank."""


@pytest.mark.parametrize(
    ("beside", "sizes"), [(False, [8_390_656, 8_390_720]), (True, [CHUNK_BYTES, 2_048, CHUNK_BYTES - 2_048, 4_160])]
)
def test_rank_of_gloo_digests_every_chunk_once(beside: bool, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes, version = 2 * CHUNK_BYTES + 4_160, Version(3, 1)
    digested: list[bytes] = []
    monkeypatch.setattr(_weights_gloo, "digest", lambda chunk: digested.append(digest(chunk)))
    flat, dist = memoryview(bytearray(nbytes)), FakeDist(version, nbytes)
    done = _weights_gloo._broadcast(dist, FakeTorch(), flat, FillBuffer(version, nbytes, 2), None, 1, beside)
    assert isinstance(done, BroadcastDone)
    assert done.is_correct
    assert dist.sizes == sizes
    chunks = [flat[start : start + CHUNK_BYTES] for start in range(0, nbytes, CHUNK_BYTES)]
    assert sorted(digested) == sorted(map(digest, chunks))


def test_chain_is_compared_with_one_copy_and_with_the_cores_of_the_machine() -> None:
    results = Nics(ideal_s=2.0)
    for arm in ("one", "chain", "star", "fault", "gloo, digests beside"):
        results.seconds[arm] = [2.2, 2.4, 2.6]
    results.seconds["chain"] = [2.4, 2.6, 3.4]
    results.source_free_s["chain"], results.source_copies["chain"] = [2.1, 2.2, 2.3], [1.0, 1.0, 1.0]
    results.cpu_s["chain"], results.busy_cores["chain"] = [3.0, 3.0, 3.0], [0.1, 0.2, 1000.0]
    results.slowdowns = [1.0, 1.5, 1.1]
    results.pairs = [(1, 2, 2.5)] * 3
    figures = _weights_namespaces.report(results)
    assert (figures["chain_over_ideal"], figures["chain_over_ideal_range"]) == (1.3, [1.2, 1.7])
    assert (figures["source_free_over_copy"], figures["source_free_over_copy_range"]) == (1.1, [1.05, 1.15])
    assert (figures["chain_cores_needed"], figures["limited_by_cores"]) == (1.5, False)
