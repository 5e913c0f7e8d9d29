"""The ratios that benchmarks/weights.py prints for transfers on one machine."""

from __future__ import annotations

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


def _measured(seconds: dict[str, list[float]]) -> Loopback:
    """Return results with these seconds of each arm in every case, three rounds each."""
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
