"""The settings given to UCX: its TCP transport stays off unless an address is trusted.

This does not depend on the environment.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.transport.address import Interface
from rrl.transport.weights.ucx_settings import (
    Resource,
    active_rdma_ports,
    rdma_resources,
    resources,
    ucx_limits,
    without_tcp,
)

INTERFACES = (Interface("lo", "127.0.0.1"), Interface("eth0", "10.0.0.2"), Interface("ib0", "10.4.0.2"))


@pytest.mark.parametrize(
    ("requested", "expected_text"),
    [
        ("", "^tcp"),
        ("all", "^tcp"),
        ("rc,all", "^tcp"),
        ("tcp,cma,self", "cma,self"),
        ("\\tcp,posix", "posix"),
        ("rc,cma,self", "rc,cma,self"),
        ("^cma", "^cma,tcp"),
    ],
)
def test_tcp_is_removed_from_any_choice_of_transports(requested: str, expected_text: str) -> None:
    assert without_tcp(requested) == expected_text
    assert ucx_limits({"UCX_TLS": requested}, ("mlx5_0:1",), INTERFACES, None) == {"UCX_TLS": expected_text}


def test_a_choice_of_nothing_but_tcp_is_refused() -> None:
    with pytest.raises(ValueError, match="UCX_TLS=tcp allows only TCP"):
        without_tcp("tcp")


@pytest.mark.parametrize(
    ("environment", "rdma_ports", "expected_text"),
    [
        ({}, (), "eth0"),
        ({"UCX_NET_DEVICES": "ib0,lo"}, (), "eth0"),
        ({"UCX_NET_DEVICES": "mlx5_0:1,ib0"}, ("mlx5_0:1", "mlx5_1:1"), "mlx5_0:1,eth0"),
        ({"UCX_NET_DEVICES": "all"}, ("mlx5_0:1", "mlx5_1:1"), "mlx5_0:1,mlx5_1:1,eth0"),
    ],
)
def test_a_trusted_ucx_gets_one_network_interface(
    environment: dict[str, str], rdma_ports: tuple[str, ...], expected_text: str
) -> None:
    assert ucx_limits(environment, rdma_ports, INTERFACES, "10.0.0.2") == {"UCX_NET_DEVICES": expected_text}


def test_an_address_of_no_interface_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no interface of this machine has the address 10\.9\.9\.9"):
        ucx_limits({}, (), INTERFACES, "10.9.9.9")


def test_only_active_rdma_ports_count(tmp_path: Path) -> None:
    for device, port, state in (("mlx5_0", 1, "4: ACTIVE\n"), ("mlx5_0", 2, "1: DOWN\n"), ("mlx5_1", 1, "2: INIT\n")):
        folder = tmp_path / device / "ports" / str(port)
        folder.mkdir(parents=True)
        (folder / "state").write_text(state)
    assert active_rdma_ports(tmp_path) == ("mlx5_0:1",)
    assert active_rdma_ports(tmp_path / "none") == ()


def test_the_transports_of_a_started_ucx_are_read_from_its_table() -> None:
    table = """
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 1  :  md 1  dev 1  flags -- rc_mlx5/mlx5_0:1
#      resource 2  :  md 1  dev 1  flags -- tcp/lo
"""
    found = resources(table)
    assert found == (Resource("self", "memory"), Resource("rc_mlx5", "mlx5_0:1"), Resource("tcp", "lo"))
    assert rdma_resources(found, ("mlx5_0:1",)) == (Resource("rc_mlx5", "mlx5_0:1"),)
    assert rdma_resources(found, ("mlx5_1:1",)) == ()
