"""The members of a gang form a process group, without processes of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rrl.core.types import Incarnation, ReplicaId
from rrl.roles.trainer import process_group as gang_module
from rrl.roles.trainer.process_group import Gang, is_lost_member
from rrl.roles.worker.connection import Stopping
from rrl.transport.messages import Peer, Peers

pytestmark = pytest.mark.torch

FIRST = Incarnation(ReplicaId("trainer/0"), 3)
SECOND = Incarnation(ReplicaId("trainer/0.1"), 3)


def _answers(*peers: Peer) -> Peers:
    return Peers(1, 1, {peer.incarnation.replica: peer for peer in peers})


def _older(incarnation: Incarnation) -> Incarnation:
    return Incarnation(incarnation.replica, incarnation.number - 1)


def _await_members(directory: Peers) -> None:
    """Wait as the second of two members, which gets ``directory``, and then to stop."""
    stopping = SimpleNamespace(is_set=lambda: True)
    me: Any = SimpleNamespace(world=2, on_peers=lambda callback: callback(directory), stopping=stopping)
    gang_module._await_members(me, FIRST)


def test_member_connects_once_all_members_of_its_own_incarnation_have_joined() -> None:
    _await_members(_answers(Peer(FIRST, joined=True), Peer(SECOND, joined=True)))


@pytest.mark.parametrize(
    "directory",
    [
        pytest.param(_answers(Peer(_older(FIRST), None, True), Peer(SECOND, joined=True)), id="the gang before"),
        pytest.param(_answers(Peer(FIRST, None, True), Peer(SECOND)), id="a member has not joined"),
        pytest.param(_answers(Peer(FIRST, None, True), Peer(_older(SECOND), None, True)), id="a member of before"),
        pytest.param(_answers(Peer(FIRST, None, True)), id="a member is missing"),
    ],
)
def test_member_waits_until_all_have_joined_and_leaves_on_a_stop_request(directory: Peers) -> None:
    with pytest.raises(Stopping):
        _await_members(directory)


def test_key_prefixes_of_gangs_are_unique_across_runs_and_incarnations() -> None:
    names = [
        gang_module._store_prefix(secret, incarnation)
        for secret in (b"a", b"b")
        for incarnation in (FIRST, _older(FIRST))
    ]
    assert len(set(names)) == 4


def test_loss_of_a_member_is_distinguished_from_an_own_error() -> None:
    assert is_lost_member(RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3"))
    assert not is_lost_member(RuntimeError("The total norm of order 2.0 for gradients is non-finite"))
    assert not is_lost_member(OSError("Connection reset by peer"))


def test_gang_of_one_rank_needs_no_process_group() -> None:
    gang = Gang()
    assert (gang.rank, gang.world, gang.sum([1.5]), gang.gather("x", str)) == (0, 1, [1.5], ["x"])
    model = torch.nn.Linear(2, 2)
    assert gang.shard(model) is model
    assert not torch.distributed.is_initialized()
