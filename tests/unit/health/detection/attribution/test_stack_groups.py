"""Parsing and grouping of py-spy dumps, and the choice of outliers."""

from __future__ import annotations

from collections.abc import Sequence

from rrl.core.types import Incarnation, ReplicaId
from rrl.health.detection.attribution.stack_groups import (
    GroupedStacks,
    Stack,
    group,
    main_thread,
    main_threads_only,
    parse,
    sample,
    summary_lines,
)

DUMP = """Process 7: /opt/venv/bin/python -m rrl.roles.rollout.main --token=secret
Python v3.11.2 (/usr/bin/python3.11)

Thread 7 (idle): "MainThread"
    wait (threading.py:320)
    strike (rrl/roles/main_thread.py:69)
    roll (rrl/roles/rollout/main.py:51)
    <module> (<string>:5)
Thread 9 (active+gil): "rrl-link"
    select (selectors.py:468)
    _run_once (asyncio/base_events.py:1884)
"""
WAITS = ("wait_for (store.py:10)", "all_reduce (distributed_c10d.py:2211)", "step (train.py:40)", "main (train.py:9)")
STUCK = ("read (loader.py:77)", "__next__ (loader.py:31)", "step (train.py:38)", "main (train.py:9)")


def dump(stack: Sequence[str]) -> str:
    return 'Thread 0x7F11 (idle): "MainThread"\n' + "".join(f"    {frame}\n" for frame in stack)


def rank(number: int) -> Incarnation:
    return Incarnation(ReplicaId("trainer/0" + (f".{number}" if number else "")), 2)


def gang(*stacks: Stack) -> dict[Incarnation, dict[int, str]]:
    return {rank(number): {100 + number: dump(stack)} for number, stack in enumerate(stacks)}


def test_dump_is_parsed_into_threads_with_innermost_frame_first() -> None:
    main, link = parse(DUMP)
    assert [str(frame) for frame in main.frames] == [
        "wait (threading.py:320)",
        "strike (main_thread.py:69)",
        "roll (main.py:51)",
        "<module> (<string>:5)",
    ]
    assert (main.state, link.name, link.state) == ("idle", "rrl-link", "active+gil")
    assert main_thread(DUMP) == main


def test_last_thread_is_the_main_one_if_threads_have_no_names() -> None:
    nameless = "Thread 12 (idle)\n    pool (a.py:1)\nThread 7 (active)\n    main (b.py:2)\n"
    main = main_thread(nameless)
    assert main is not None
    assert main.id == "7"


def test_text_that_is_not_a_dump_gives_no_threads() -> None:
    for text in ("", "Error: Failed to find python version", "    lost (frame.py:1)", "Thread", "\0" * 50):
        assert parse(text) == []
    assert summary_lines(group({rank(0): {1: "garbage"}})) == ("trainer/0#2: no stack",)
    assert group({}) == GroupedStacks()


def test_rank_that_waits_elsewhere_is_the_outlier_and_named_first() -> None:
    found = group(gang(WAITS, WAITS, STUCK, WAITS))
    assert found.outliers == (rank(2),)
    assert [one.incarnations for one in found.groups] == [(rank(0), rank(1), rank(3)), (rank(2),)]
    first, second = summary_lines(found)
    assert first.startswith("outlier trainer/0.2#2: read (loader.py:77) < __next__ (loader.py:31)")
    assert second.startswith("3 of 4 alike: wait_for (store.py:10)")


def test_addresses_and_folders_do_not_distinguish_ranks() -> None:
    here = ("call (/node1/env/a.py:3)", "<lambda at 0x7f00> (b.py:1)")
    there = ("call (/node2/env/a.py:3)", "<lambda at 0x8e11> (b.py:1)")
    assert len(group(gang(here, there, here)).groups) == 1


def test_ranks_at_different_lines_of_a_loop_are_one_group() -> None:
    loop = [(f"forward (net.py:{line})", "main (train.py:9)") for line in range(4)]
    found = group(gang(*loop))
    assert len(found.groups) == 1
    assert found.outliers == ()


def test_rank_at_another_line_than_all_others_is_an_outlier() -> None:
    gather = ("all_gather (c10d.py:90)", "step (train.py:41)")
    later = ("all_gather (c10d.py:90)", "step (train.py:57)")
    assert group(gang(gather, gather, gather, later)).outliers == (rank(3),)


def test_two_stages_of_equal_size_have_no_outlier() -> None:
    found = group(gang(WAITS, WAITS, STUCK, STUCK))
    assert len(found.groups) == 2
    assert found.outliers == ()


def test_ranks_all_in_different_places_have_no_outlier() -> None:
    found = group(gang(WAITS, STUCK))
    assert (len(found.groups), found.outliers) == (2, ())


def test_rank_with_a_hung_loader_process_is_the_outlier() -> None:
    dumps = gang(WAITS, WAITS, WAITS)
    loaders = dump(("get (queue.py:1)", "_worker_loop (worker.py:2)"))
    for number, theirs in enumerate(dumps.values()):
        theirs[200 + number] = theirs[300 + number] = loaders
    dumps[rank(1)][201] = dump(("open (tar.py:5)", "_worker_loop (worker.py:2)"))
    found = group(dumps)
    assert found.outliers == (rank(1),)
    assert summary_lines(found)[0].startswith("outlier trainer/0.1#2: open (tar.py:5)")


def test_unreadable_process_is_described_by_its_kernel_function() -> None:
    text = "Process 5: python\nno Python stack: denied\nstate D (disk sleep); kernel: nfs_wait_bit_killable\n"
    found = group({rank(0): {5: text}})
    assert summary_lines(found) == ("trainer/0#2: kernel (nfs_wait_bit_killable)",)


def test_evidence_has_five_lines_at_most() -> None:
    many = gang(*[(f"f{number} (a.py:1)",) for number in range(9)], WAITS, WAITS)
    lines = summary_lines(group(many))
    assert len(lines) == 5
    assert lines[-1] == "and 6 more groups"


def test_main_threads_group_like_whole_dumps() -> None:
    whole = {**gang(WAITS, STUCK, WAITS), rank(3): {1: "state D (disk sleep); kernel: rpc_wait\n"}}
    short = {incarnation: main_threads_only(dumps) for incarnation, dumps in whole.items()}
    assert group(short) == group(whole)
    assert "rrl-link" not in main_threads_only({7: DUMP})[7]


# ── samples ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_sample_of_ranks_shows_whether_they_are_at_one_line() -> None:
    later = ("wait_for (store.py:11)", *WAITS[1:])
    at_one_line, apart = gang(WAITS, WAITS, WAITS), gang(WAITS, WAITS, later)
    first, second = sample(at_one_line, list(at_one_line)), sample(apart, list(apart))
    assert first is not None
    assert second is not None
    assert (first.alike, second.alike) == (True, False)
    assert first.stacks != second.stacks, "a rank has moved to another line"
    assert first.functions == second.functions


def test_sample_without_the_stack_of_a_rank_is_unknown() -> None:
    dumps = gang(WAITS, WAITS)
    assert sample(dumps, [*dumps, rank(2)]) is None
    assert sample({}, [rank(0), rank(1)]) is None
    assert sample({rank(0): {100: ""}, rank(1): {101: ""}}, [rank(0), rank(1)]) is None
