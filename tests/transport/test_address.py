"""Which address a host listens at."""

from __future__ import annotations

import socket

import pytest

from rrl.transport import address


def test_the_address_in_the_named_network_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(address.NETWORK_ENV, "127.0.0.0/8")
    assert address.own_address() == "127.0.0.1"


def test_a_network_that_no_interface_is_in_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(address.NETWORK_ENV, "203.0.113.0/24")
    with pytest.raises(OSError, match=r"no interface with an address in RRL_NETWORK=203\.0\.113\.0/24$"):
        address.own_address()


def test_a_host_name_that_resolves_to_loopback_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(address.NETWORK_ENV, raising=False)
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    monkeypatch.setattr(address, "_of_default_route", lambda: "10.1.2.3")
    assert address.own_address() == "10.1.2.3"


def test_a_host_name_that_resolves_to_an_address_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(address.NETWORK_ENV, raising=False)
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "10.1.2.4")
    assert address.own_address() == "10.1.2.4"
