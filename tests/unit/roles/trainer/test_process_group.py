"""The members of a gang form a process group, without processes of their own."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rrl.core.types import Incarnation, ReplicaId
from rrl.roles.trainer import process_group as gang_module
from rrl.roles.trainer.process_group import Gang, is_lost_member
from rrl.roles.worker.connection import Stopping
from rrl.transport.address import NoAddress
from rrl.transport.messages import Peer, Peers

pytestmark = pytest.mark.torch

FIRST = Incarnation(ReplicaId("trainer/0"), 3)
SECOND = Incarnation(ReplicaId("trainer/0.1"), 3)
_LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp (proc(5))."""


class Member(SimpleNamespace):
    """A member that waits for the addresses of the others.

    It receives the peer directories ``says`` in this order.
    """

    def __init__(self, *says: Peers) -> None:
        super().__init__(host="127.0.0.1", world=2, launch=SimpleNamespace(incarnation=SECOND))
        self.offers = says
        self.requests = 0
        self.announced = ""
        self.stopping = SimpleNamespace(is_set=lambda: True)

    def on_peers(self, callback: Any) -> None:
        for peers in self.offers:
            callback(peers)

    def announce(self, listens: str) -> None:
        self.announced = listens


def _answers(*peers: Peer) -> Peers:
    return Peers(1, 1, {peer.incarnation.replica: peer for peer in peers})


def _older(incarnation: Incarnation) -> Incarnation:
    return Incarnation(incarnation.replica, incarnation.number - 1)


def _place(*says: Peers) -> str:
    me: Any = Member(*says)
    return gang_module._await_members(me, FIRST)


def test_member_connects_to_the_address_of_rank_0_of_its_own_incarnation() -> None:
    here, second = Peer(FIRST, "tcp://h:1", joined=True), Peer(SECOND, joined=True)
    assert _place(_answers(here, second)) == "tcp://h:1"


@pytest.mark.parametrize(
    "expected_text",
    [
        pytest.param(_answers(Peer(_older(FIRST), "tcp://h:1", True), Peer(SECOND, joined=True)), id="the gang before"),
        pytest.param(_answers(Peer(FIRST, None, True), Peer(SECOND, joined=True)), id="no place yet"),
        pytest.param(_answers(Peer(FIRST, "tcp://h:1", True), Peer(SECOND)), id="a member has not joined"),
        pytest.param(
            _answers(Peer(FIRST, "tcp://h:1", True), Peer(_older(SECOND), None, True)), id="a member of before"
        ),
        pytest.param(_answers(Peer(FIRST, "tcp://h:1", True)), id="a member is missing"),
    ],
)
def test_member_waits_until_all_have_joined_and_leaves_on_a_stop_request(expected_text: Peers) -> None:
    with pytest.raises(Stopping):
        _place(expected_text)


def test_process_group_uses_the_interface_of_the_runs_address_or_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # so that the monkeypatch removes the variables after the test
        monkeypatch.delenv(name)
    with pytest.raises(NoAddress, match=r"no interface of this node has the address 203\.0\.113\.1"):
        gang_module._bind_to_address("203.0.113.1")
    gang_module._bind_to_address("127.0.0.1")
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")


def test_store_listens_only_at_the_address_of_the_run() -> None:
    me: Any = Member()
    store = gang_module._open_store(me)
    host, _, port = me.announced.removeprefix("tcp://").partition(":")
    assert host == "127.0.0.1"
    listening = [
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == _LISTENS and line.split()[1].endswith(f":{int(port):04X}")
    ]
    assert listening == [f"0100007F:{int(port):04X}"]
    assert isinstance(gang_module._connect_store(me.announced), TCPStore)
    del store


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
