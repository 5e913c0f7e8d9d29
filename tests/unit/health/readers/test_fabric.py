"""InfiniBand and RoCE ports in a fake sysfs with the layout of mlx5."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rrl.health.readers.base import NotInstalled, PermissionDenied, ReaderOptions
from rrl.health.readers.fabric import FabricReader

_COUNTERS = {"symbol_error": "7", "link_downed": "1", "port_rcv_errors": "0", "port_xmit_wait": "N/A (no PMA)"}
_HW = {"rnr_nak_retry_err": "2", "roce_slow_restart": "30", "local_ack_timeout_err": "0", "lifespan": "12"}


def plant(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text + "\n")


def device(root: Path, name: str, *, state: str = "4: ACTIVE", net: str = "") -> None:
    port = f"sys/class/infiniband/{name}/ports/1"
    plant(
        root,
        {
            f"{port}/state": state,
            f"{port}/phys_state": "5: LinkUp",
            f"{port}/rate": "400 Gb/sec (4X NDR)",
            **{f"{port}/counters/{file}": text for file, text in _COUNTERS.items()},
            **{f"{port}/hw_counters/{file}": text for file, text in _HW.items()},
        },
    )
    if net:
        plant(
            root,
            {f"{port}/gid_attrs/ndevs/0": net, f"sys/class/infiniband/{name}/device/net/{net}/carrier_changes": "3"},
        )


def reader(root: Path) -> FabricReader:
    return FabricReader(ReaderOptions(sysfs=str(root / "sys"), dev=str(root / "dev")))


def test_port_reading_has_all_counters(tmp_path: Path) -> None:
    device(tmp_path, "mlx5_0")
    (port,) = reader(tmp_path).read().ports
    assert (port.device, port.port, port.state, port.physical) == ("mlx5_0", 1, "ACTIVE", "LinkUp")
    assert port.rate == 400.0
    assert port.counters["symbol_error"] == 7
    assert port.counters["rnr_nak_retry_err"] == 2
    assert "port_xmit_wait" not in port.counters  # the device has no such counter
    assert "carrier_changes" not in port.counters
    assert port.unread == {}


def test_roce_port_has_the_carrier_changes_of_its_interface(tmp_path: Path) -> None:
    device(tmp_path, "mlx5_2", net="ens1f0np0")
    (port,) = reader(tmp_path).read().ports
    assert port.counters["carrier_changes"] == 3


def test_each_of_two_ports_has_the_interface_with_its_own_number(tmp_path: Path) -> None:
    for number, changes in ((1, "5"), (2, "9")):
        port = f"sys/class/infiniband/mlx4_0/ports/{number}"
        net = f"sys/class/infiniband/mlx4_0/device/net/ib{number}"
        plant(
            tmp_path,
            {f"{port}/state": "4: ACTIVE", f"{net}/dev_port": str(number - 1), f"{net}/carrier_changes": changes},
        )
    first, second = reader(tmp_path).read().ports
    assert (first.counters["carrier_changes"], second.counters["carrier_changes"]) == (5, 9)


def test_port_that_is_down_is_reported_as_down(tmp_path: Path) -> None:
    device(tmp_path, "mlx5_1", state="1: DOWN")
    assert reader(tmp_path).read().ports[0].state == "DOWN"


def test_value_that_a_device_does_not_report_is_unread_with_its_reason(tmp_path: Path) -> None:
    plant(tmp_path, {"sys/class/infiniband/efa_0/ports/1/rate": "unknown"})
    (port,) = reader(tmp_path).read().ports
    assert (port.state, port.rate, port.counters) == (None, None, {})
    assert port.unread["state"] == port.unread["hw_counters"] == "not supported"
    assert port.unread["rate"] == "not a number: 'unknown'"


def test_unreadable_counter_is_unread_and_the_others_are_read(tmp_path: Path) -> None:
    device(tmp_path, "mlx5_0")
    bad = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters/link_downed"
    bad.unlink()
    bad.symlink_to("/proc/self/mem")  # reads of its first bytes fail with EIO, like those of a dead device
    (port,) = reader(tmp_path).read().ports
    assert "link_downed" not in port.counters
    assert port.unread["link_downed"] == "Input/output error"
    assert port.counters["symbol_error"] == 7


def test_missing_character_devices_are_named_except_those_of_the_subnet_manager(tmp_path: Path) -> None:
    device(tmp_path, "mlx5_0")
    for name in (
        "infiniband_verbs/uverbs0",
        "infiniband_verbs/uverbs1",
        "infiniband_mad/umad0",
        "infiniband_mad/issm0",
    ):
        (tmp_path / "sys/class" / name).mkdir(parents=True)
    (tmp_path / "sys/class/infiniband_verbs/abi_version").write_text("6\n")
    plant(tmp_path, {"dev/infiniband/uverbs0": "", "dev/infiniband/umad0": ""})
    assert reader(tmp_path).read().missing_char_devices == ("uverbs1",)


@pytest.mark.parametrize("there", [True, False])
def test_node_without_an_infiniband_device_is_absent(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "sys/class/infiniband").mkdir(parents=True)
    with pytest.raises(NotInstalled, match="no InfiniBand or RoCE device"):
        reader(tmp_path).read()


def test_unreadable_sysfs_is_reported_as_permission_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: str) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refused)  # root may list everything
    with pytest.raises(PermissionDenied, match="not permitted"):
        reader(tmp_path).read()
