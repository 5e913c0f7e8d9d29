"""The choice of the address on which the processes of a host listen."""

from __future__ import annotations

import re
import socket

import pytest

from rrl.transport import address
from rrl.transport.address import Interface, ListenAddress, NoAddress, interface_on, interfaces, own_address, resolve

HERE = [
    Interface("lo", "127.0.0.1"),
    Interface("eth0", "192.168.1.5"),
    Interface("ib0", "10.4.0.7"),
    Interface("ib0", "10.5.0.7"),
]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(address.NETWORK_ENV, raising=False)
    monkeypatch.setattr(address, "interfaces", lambda: HERE)


def test_the_interfaces_of_this_host_are_read_from_the_kernel() -> None:
    assert Interface("lo", "127.0.0.1") in interfaces()


@pytest.mark.parametrize(
    ("wanted", "taken"), [("ib0", HERE[2]), ("10.5.0.0/16", HERE[3]), ("192.168.1.0/24", HERE[1]), ("lo", HERE[0])]
)
def test_interface_is_selected_by_its_name_or_by_a_network_of_any_of_its_addresses(
    host: None, wanted: str, taken: Interface
) -> None:
    assert interface_on(wanted) == taken
    assert own_address(wanted) == taken.address


def test_job_setting_takes_precedence_over_the_environment(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(address.NETWORK_ENV, "192.168.0.0/16")
    assert own_address() == "192.168.1.5"
    assert own_address("ib0") == "10.4.0.7"


def test_network_without_interface_is_reported_with_the_existing_ones(host: None) -> None:
    there = "; there are lo 127.0.0.1, eth0 192.168.1.5, ib0 10.4.0.7, ib0 10.5.0.7"
    with pytest.raises(NoAddress, match=re.escape(f"no interface with an address in 203.0.113.0/24{there}")):
        own_address("203.0.113.0/24")
    with pytest.raises(NoAddress, match=re.escape(f"no interface hsn0 with an IPv4 address{there}")):
        own_address("hsn0")


def reached_by(monkeypatch: pytest.MonkeyPatch, named: str, route: str | None) -> None:
    """Let the host name resolve to ``named``, and the default route have the source address ``route``."""
    monkeypatch.setattr(socket, "gethostbyname", lambda _: named)
    monkeypatch.setattr(address, "_of_default_route", lambda: route)


@pytest.mark.parametrize(
    ("named", "route", "taken"),
    [
        ("10.4.0.7", "192.168.1.5", "10.4.0.7"),
        ("127.0.1.1", "10.4.0.7", "10.4.0.7"),  # Debian's /etc/hosts
        ("10.9.9.9", "192.168.1.5", "192.168.1.5"),  # an outdated entry of /etc/hosts
    ],
)
def test_address_of_the_host_name_precedes_that_of_the_default_route(
    host: None, monkeypatch: pytest.MonkeyPatch, named: str, route: str, taken: str
) -> None:
    reached_by(monkeypatch, named, route)
    assert own_address() == taken


@pytest.mark.parametrize("named", ["127.0.1.1", "10.9.9.9"])
def test_the_only_address_of_a_host_without_a_default_route_is_taken(
    host: None, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setattr(address, "interfaces", lambda: HERE[:2])
    reached_by(monkeypatch, named, None)
    assert own_address() == "192.168.1.5"


def test_several_addresses_without_a_default_route_are_refused_and_listed(
    host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached_by(monkeypatch, "127.0.1.1", None)
    with pytest.raises(
        NoAddress, match=r"there are lo 127\.0\.0\.1, eth0 .*; set `network` in \[transport\] to the one"
    ):
        own_address()


@pytest.mark.parametrize("route", [None, "127.0.0.1"])
def test_loopback_is_never_published_without_a_request(
    host: None, monkeypatch: pytest.MonkeyPatch, route: str | None
) -> None:
    monkeypatch.setattr(address, "interfaces", lambda: HERE[:1])
    reached_by(monkeypatch, "127.0.1.1", route)
    with pytest.raises(NoAddress, match=r"set `network` in \[transport\]"):
        own_address()
    assert own_address("127.0.0.0/8") == "127.0.0.1"


def test_listen_address_is_resolved_with_its_port() -> None:
    assert resolve("127.0.0.1:9090") == ListenAddress("127.0.0.1", socket.AF_INET, ("127.0.0.1", 9090))
    assert resolve("[::1]:0") == ListenAddress("::1", socket.AF_INET6, ("::1", 0, 0, 0))
