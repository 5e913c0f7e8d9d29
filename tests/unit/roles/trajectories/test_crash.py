"""The store is killed after every byte that it writes.

All acknowledged data is still there, and nothing counts twice.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl.core.types import Incarnation
from rrl.roles.trajectories.durable.log import LogDamaged
from rrl.roles.trajectories.types import Done, PackedPart, PartBound
from rrl.tests.support.examples import examples
from rrl.tests.support.roles.trajectories.crew import MAX_NEW, REWARD, incarnation_of, lease, open_store, score, segment
from rrl.tests.support.roles.trajectories.script import Acknowledged, Script, check, log_in


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Script:
    script = Script(tmp_path_factory.mktemp("script"))
    script.run()
    return script


def _crashed(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / "log.1").write_bytes(content)
    return folder


def _promised_at(script: Script, size: int) -> Acknowledged:
    return [promised for promised in script.promised if promised.size <= size][-1]


def _cuts(script: Script) -> list[int]:
    """Return the sizes (bytes) to which the log is cut, as by a kill of the store.

    They are the sizes just before, at and just after each border of a record and each flush, and some other sizes.
    """
    content = log_in(script.folder).read_bytes()
    start = script.promised[0].size
    frames = [at for at in range(start, len(content)) if content.startswith(b"rrlT", at)]
    sizes = [promised.size for promised in script.promised]
    near = {at + by for at in (*frames, *sizes) for by in (-1, 0, 1) if start <= at + by <= len(content)}
    return sorted(near | set(range(start, len(content), 41)))


def test_log_cut_anywhere_loses_no_acknowledged_token_and_trains_none_twice(script: Script, tmp_path: Path) -> None:
    content = log_in(script.folder).read_bytes()
    cuts = _cuts(script)
    assert len(cuts) > 100
    for cut in cuts:
        check(_crashed(tmp_path / str(cut), content[:cut]), _promised_at(script, cut), to=6)


def test_a_torn_tail_of_any_bytes_is_cut_off(script: Script, tmp_path: Path) -> None:
    content = log_in(script.folder).read_bytes()
    whole = script.promised[-4].size
    content = content[: script.promised[-3].size]
    for name, tail in {
        "zeros": bytes(300),
        "half a frame": content[whole : whole + 11],
        "a frame with a hole": content[whole : whole + 30] + bytes(20) + content[whole + 50 :][:40],
        "noise": bytes(range(256)),
        "an absurd length": content[whole : whole + 8] + b"\xff\xff\xff\xff" + content[whole + 12 :],
    }.items():
        check(_crashed(tmp_path / name, content[:whole] + tail), _promised_at(script, whole), to=6)


def test_repeated_crashes_lose_no_acknowledged_data(script: Script, tmp_path: Path) -> None:
    content = log_in(script.folder).read_bytes()
    for cut in _cuts(script)[::9]:
        folder = _crashed(tmp_path / str(cut), content[:cut])
        for _ in range(3):
            open_store(folder, members=()).close()
        assert len(list(folder.iterdir())) == 1
        check(folder, _promised_at(script, cut), to=6)


def test_damage_before_the_last_flush_is_reported(script: Script, tmp_path: Path) -> None:
    content = bytearray(log_in(script.folder).read_bytes())
    for name, at in (("head", 20), ("middle", len(content) // 2), ("last but one", script.promised[-2].size - 9)):
        damaged = content.copy()
        damaged[at] ^= 0x40
        with pytest.raises(LogDamaged):
            open_store(_crashed(tmp_path / name, bytes(damaged)))


def test_crash_during_a_log_rewrite_leaves_the_old_log_valid(script: Script, tmp_path: Path) -> None:
    content = log_in(script.folder).read_bytes()
    for name, half in (("claimed", None), ("half", 100), ("unnamed", len(content))):
        folder = _crashed(tmp_path / name, content)
        (folder / "log.2").write_bytes(b"")
        if half is not None:
            (folder / "log.2.new").write_bytes(content[:half])
        check(folder, script.promised[-1], to=6)
        assert [path.name for path in folder.iterdir()] == ["log.3"]


def test_crash_after_the_rename_of_a_new_log_and_before_the_removal_of_the_old_one_is_harmless(
    script: Script, tmp_path: Path
) -> None:
    content = log_in(script.folder).read_bytes()
    folder = _crashed(tmp_path / "both", content[: script.promised[3].size])
    (folder / "log.2").write_bytes(content)
    check(folder, script.promised[-1], to=6)


Move = st.tuples(
    st.sampled_from(["lease", "grow", "finish", "score", "drop", "bind", "commit", "restart", "die", "trainer"]),
    st.integers(0, 7),
)


@examples(50, many=1000)
@given(moves=st.lists(Move, max_size=60))
def test_every_trajectory_is_accounted_for_after_any_sequence_of_operations(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    incarnations = {"rollout/0": 1, "rollout/1": 1, "trainer/0": 1, "reward/0": 1}
    store = open_store(folder, [incarnation_of(*each) for each in incarnations.items()])
    held: dict[Incarnation, dict[int, int]] = {}
    batches: dict[int, PackedPart] = {}
    for what, n in moves:
        name = f"rollout/{n % 2}"
        who, trainer = incarnation_of(name, incarnations[name]), incarnation_of("trainer/0", incarnations["trainer/0"])
        hands = held.setdefault(who, {})
        if what == "lease":
            for item in lease(store, who, n, list(hands)):
                hands[item.trajectory] = MAX_NEW - item.max_new
        elif what == "grow" and hands:
            trajectory = sorted(hands)[n % len(hands)]
            if store.append(who, [segment(trajectory, hands[trajectory], (n + 2,))]) == Done():
                hands[trajectory] += 1
                if hands[trajectory] == MAX_NEW:
                    del hands[trajectory]
            else:
                del hands[trajectory]
        elif what == "finish" and hands:
            store.append(who, [], list(hands))
            hands.clear()
        elif what == "score":
            score(store, at_most=n)
        elif what == "drop":
            store.post_scores(REWARD, [], {n: "no scorer"})
        elif what == "bind":
            number = max(batches, default=0) + n % 2
            answer = store.part(trainer, number)
            if isinstance(answer, PartBound):
                assert batches.setdefault(number, answer.part) == answer.part
        elif what == "commit" and batches:
            store.commit(trainer, max(batches) - n % 2, {"n": n}, batches[max(batches)].digest)
        elif what == "restart":
            store.flush()
            store.close()
            store = open_store(folder, [incarnation_of(*each) for each in incarnations.items()])
        elif what in ("die", "trainer"):
            incarnations["trainer/0" if what == "trainer" else name] += 1
            store.update_membership([incarnation_of(*each) for each in incarnations.items()])
    audit = store.audit()
    assert audit.made == audit.trained + sum(audit.dropped.values()) + audit.open
    groups = [group for step in audit.steps.values() for group in step]
    assert len(set(groups)) == len(groups)
    assert {number: batch.groups for number, batch in batches.items()} == audit.steps
    store.close()
    again = open_store(folder)
    assert again.audit() == audit
    again.close()
