"""Which address a host listens at."""

from __future__ import annotations

import re
import socket

import pytest

from rrl.transport import address
from rrl.transport.address import Interface, NoAddress, interface_on, interfaces, own_address

HERE = [Interface("lo", "127.0.0.1"), Interface("eth0", "192.168.1.5"), Interface("ib0", "10.4.0.7"),
        Interface("ib0", "10.5.0.7")]  # fmt: skip


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(address.NETWORK_ENV, raising=False)
    monkeypatch.setattr(address, "interfaces", lambda: HERE)


def test_the_interfaces_of_this_host_are_read_from_the_kernel() -> None:
    assert Interface("lo", "127.0.0.1") in interfaces()


@pytest.mark.parametrize(
    ("wanted", "taken"), [("ib0", HERE[2]), ("10.5.0.0/16", HERE[3]), ("192.168.1.0/24", HERE[1]), ("lo", HERE[0])]
)
def test_an_interface_is_taken_by_its_name_or_by_a_network_that_any_of_its_addresses_is_in(
    host: None, wanted: str, taken: Interface
) -> None:
    assert interface_on(wanted) == taken
    assert own_address(wanted) == taken.address


def test_what_the_job_says_wins_over_the_environment(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(address.NETWORK_ENV, "192.168.0.0/16")
    assert own_address() == "192.168.1.5"
    assert own_address("ib0") == "10.4.0.7"


def test_a_network_that_no_interface_is_in_is_told_with_what_there_is(host: None) -> None:
    there = "; there are lo 127.0.0.1, eth0 192.168.1.5, ib0 10.4.0.7, ib0 10.5.0.7"
    with pytest.raises(NoAddress, match=re.escape(f"no interface with an address in 203.0.113.0/24{there}")):
        own_address("203.0.113.0/24")
    with pytest.raises(NoAddress, match=re.escape(f"no interface hsn0 with an IPv4 address{there}")):
        own_address("hsn0")


def test_a_host_name_that_resolves_to_loopback_is_not_believed(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    monkeypatch.setattr(address, "_of_default_route", lambda: "10.1.2.3")
    assert own_address() == "10.1.2.3"


def test_a_host_name_that_resolves_to_an_address_is_believed(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "10.1.2.4")
    assert own_address() == "10.1.2.4"


@pytest.mark.parametrize("route", [None, "127.0.0.1"])
def test_loopback_is_never_published_unless_it_is_asked_for(
    host: None, monkeypatch: pytest.MonkeyPatch, route: str | None
) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    monkeypatch.setattr(address, "_of_default_route", lambda: route)
    with pytest.raises(NoAddress, match=r"set \[transport\] network"):
        own_address()
    assert own_address("127.0.0.0/8") == "127.0.0.1"
