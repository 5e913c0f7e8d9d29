from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest

from rrl.core.run_spec import TrainerSettings
from rrl.core.types import Incarnation, NodeName, ReplicaId
from rrl.roles.snapshots.format import Damaged, SnapshotError, SnapshotInfo
from rrl.roles.trainer.async_saver import SnapshotMeta
from rrl.roles.trainer.process_group import Gang
from rrl.roles.trainer.restore import Commit, RestorePoint, agree_on_restore_point, candidates, check_same
from rrl.transport.messages import Peers

pytestmark = pytest.mark.torch

GANG = ReplicaId("trainer/0")


def commit(number: int, incarnation: int) -> Commit:
    return Commit(number, {"folder": f"checkpoints/step-{number}.{incarnation}.0", "files": {}})


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        pytest.param({(4, 2), (5, 2), (3, 2)}, [(5, 2), (4, 2)], id="the next step before the committed one"),
        pytest.param({(6, 2)}, [], id="a step that cannot be committed yet"),
        pytest.param({(4, 1), (4, 3)}, [], id="the committed step, of incarnations that did not commit it"),
        pytest.param({(5, 1)}, [], id="the next step, of an incarnation older than that of the commit"),
        pytest.param({(5, 2), (5, 3)}, [(5, 3), (5, 2)], id="the later incarnation first"),
    ],
)
def test_snapshot_must_descend_from_the_committed_step(
    names: set[tuple[int, int]], expected: list[tuple[int, int]]
) -> None:
    assert candidates(names, commit(4, 2), next_checkpoint=5) == expected


def test_before_the_first_commit_only_a_snapshot_of_step_1_is_a_candidate() -> None:
    assert candidates({(1, 1), (2, 1)}, Commit(0, None), next_checkpoint=1) == [(1, 1)]


def test_snapshots_up_to_the_next_checkpoint_are_candidates() -> None:
    names = {(4, 2), (5, 2), (5, 3), (6, 2), (7, 2), (6, 1)}
    assert candidates(names, commit(4, 2), next_checkpoint=6) == [(6, 2), (5, 3), (5, 2), (4, 2)]


@pytest.mark.parametrize(
    ("every", "committed", "expected"),
    [(1, 0, 1), (1, 9, 10), (3, 0, 3), (3, 3, 6), (3, 4, 6), (3, 5, 6), (3, 9, 10), (20, 0, 10)],
)
def test_next_checkpoint_is_the_next_multiple_or_the_last_step(every: int, committed: int, expected: int) -> None:
    assert TrainerSettings(checkpoint_every=every).next_checkpoint_step(committed, steps=10) == expected


class Client:
    """The snapshots that agents store, by address.

    The address None stands for the own node. Snapshots at ``spoiled`` addresses are damaged.
    """

    def __init__(self, stored: dict[str | None, list[SnapshotInfo]], spoiled: tuple[str | None, ...] = ()) -> None:
        self._stored, self._spoiled = stored, spoiled
        self.requests: list[str | None] = []

    def list_snapshots(self, address: str | None = None) -> list[SnapshotInfo]:
        if address not in self._stored:
            raise SnapshotError("nobody is there")
        return self._stored[address]

    def read(self, found_snapshot: SnapshotInfo) -> tuple[bytes, memoryview]:
        return self.fetch(None, found_snapshot)

    def fetch(self, address: str | None, found_snapshot: SnapshotInfo) -> tuple[bytes, memoryview]:
        self.requests.append(address)
        if address in self._spoiled:
            raise Damaged("the content does not match its digest")
        note = SnapshotMeta(found_snapshot.step, 1, "layout", b"", "digest", {})
        return msgspec.msgpack.encode(note), memoryview(str(address).encode())


def stored_snapshot(step: int, incarnation: int = 1, rank: int = 0) -> SnapshotInfo:
    return SnapshotInfo(GANG, rank, step, incarnation, 4, b"", own=True)


def find_restore_point(client: Client | None, committed: Commit) -> RestorePoint:
    server_nodes = {NodeName("here"): "tcp://here:1", NodeName("b"): "tcp://b:1", NodeName("c"): "tcp://c:1"}
    me: Any = SimpleNamespace(
        committed=committed.number or None,
        committed_manifest=committed.manifest,
        node=NodeName("here"),
        job=SimpleNamespace(trainer=TrainerSettings(), steps=9),
        peers=Peers(1, 1, {}, snapshot_servers=server_nodes),
    )
    return agree_on_restore_point(me, Gang(), client)  # type: ignore[arg-type]


def test_snapshot_of_the_own_node_is_preferred_to_a_copy() -> None:
    client = Client({None: [stored_snapshot(5)], "tcp://b:1": [stored_snapshot(5)], "tcp://c:1": []})
    found = find_restore_point(client, commit(4, 1))
    assert found.meta is not None
    assert found.uncommitted is found.meta
    assert (found.meta.number, bytes(found.data)) == (5, b"None")
    assert client.requests == [None]


def test_damaged_snapshot_falls_back_to_a_copy_then_to_an_older_one() -> None:
    shelves: dict[str | None, list[SnapshotInfo]] = {
        None: [stored_snapshot(5), stored_snapshot(4)],
        "tcp://b:1": [],
        "tcp://c:1": [stored_snapshot(5)],
    }
    assert bytes(find_restore_point(Client(shelves, spoiled=(None,)), commit(4, 1)).data) == b"tcp://c:1"
    client = Client({None: [stored_snapshot(5)], "tcp://b:1": [stored_snapshot(4)]}, spoiled=(None,))
    found = find_restore_point(client, commit(4, 1))
    assert found.meta is not None
    assert (found.meta.number, bytes(found.data), found.uncommitted) == (4, b"tcp://b:1", None)


def test_snapshot_of_another_rank_is_not_used() -> None:
    assert find_restore_point(Client({None: [stored_snapshot(5, rank=1)]}), commit(4, 1)).meta is None


@pytest.mark.parametrize("client", [None, Client({}), Client({None: [stored_snapshot(9)]})])
def test_without_a_usable_snapshot_the_commit_is_restored(client: Client | None) -> None:
    found = find_restore_point(client, commit(4, 1))
    assert found.meta is None
    assert not found.fresh
    assert str(found) == "the commit of step 4"
    assert find_restore_point(client, Commit(0, None)).fresh


def test_member_reports_waiting_for_rank_0_during_store_requests() -> None:
    waits: list[str] = []

    @contextmanager
    def held_up_by(whom: str) -> Iterator[None]:
        waits.append(whom)
        yield
        waits.pop()

    class Second(Gang):
        asked: ClassVar[list[list[str]]] = []

        def gather(self, mine: Any, kind: Any) -> list[Any]:
            self.asked.append(list(waits))
            return [mine]

        def broadcast_from_rank0(self, do: Any, kind: Any) -> Any:
            self.asked.append(list(waits))
            return commit(4, 1)

    incarnation = Incarnation(ReplicaId("trainer/0.1"), 1)
    me: Any = SimpleNamespace(
        blocked_on=held_up_by,
        launch=SimpleNamespace(incarnation=incarnation),
        node=NodeName("here"),
        peers=None,
        job=SimpleNamespace(trainer=TrainerSettings(), steps=9),
    )
    assert agree_on_restore_point(me, Second(1, 2), None).commit.number == 4
    assert Second.asked[0] == ["trainer/0"]
    assert not any(Second.asked[1:])


def test_different_states_of_members_are_listed_by_rank() -> None:
    check_same([(4, "snapshot of batch x")] * 3)
    with pytest.raises(RuntimeError, match="loaded different states: rank 0: step 4, a; rank 1: step 5, a"):
        check_same([(4, "a"), (5, "a")])
    with pytest.raises(RuntimeError, match="rank 1: step 4, b"):
        check_same([(4, "a"), (4, "b")])
