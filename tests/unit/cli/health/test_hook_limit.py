"""The limit on drains that the prolog and the HealthCheckProgram share."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from rrl.cli.health.hook_drains import HookDrain, over_limit
from rrl.config.health_rules import HookRules

RULES = HookRules()


def drains(count: int, at: float = 1000.0) -> list[HookDrain]:
    return [HookDrain(at, f"n{index:03}") for index in range(count)]


def test_a_fifth_of_the_nodes_may_be_drained_within_ten_minutes() -> None:
    standing = drains(19)
    assert over_limit(HookDrain(1300.0, "m"), standing, 100, RULES) == ""
    assert "20 of 100 nodes within 600 s" in over_limit(HookDrain(1300.0, "m"), drains(20), 100, RULES)
    assert over_limit(HookDrain(1601.0, "m"), drains(20), 100, RULES) == "", (
        "drains of long ago count against the limit"
    )


def test_one_node_may_be_drained_in_a_cluster_of_any_size() -> None:
    assert over_limit(HookDrain(1000.0, "m"), [], 1, RULES) == ""
    assert over_limit(HookDrain(1000.0, "m"), [], 3, RULES) == ""
    assert over_limit(HookDrain(1001.0, "m"), drains(1), 3, RULES) != ""


def test_at_most_a_quarter_of_the_nodes_are_drained_at_the_same_time() -> None:
    assert over_limit(HookDrain(9000.0, "m"), drains(24), 100, RULES) == ""
    assert "25 of 100 nodes are still drained" in over_limit(HookDrain(9000.0, "m"), drains(25), 100, RULES)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99)), min_size=1, unique_by=lambda each: each[1]),
    st.integers(1, 100),
    st.randoms(),
)
def test_concurrent_drains_leave_as_many_as_the_limit_permits(
    made: list[tuple[int, int]], nodes: int, order: Random
) -> None:
    """Each node takes its drain back if it ranks beyond the limit.

    It may read the drains of other nodes before or after these nodes have taken their drains back.
    """
    nodes = max(nodes, len(made))
    standing = {HookDrain(1000.0 + at, f"n{index:03}") for at, index in made}
    readers = sorted(standing, key=lambda drain: (drain.at, drain.node))
    order.shuffle(readers)
    for own in readers:
        if over_limit(own, standing, nodes, RULES):
            standing.discard(own)
    assert len(standing) == min(len(made), max(1, int(RULES.share * nodes)))
