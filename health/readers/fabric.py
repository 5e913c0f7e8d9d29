"""InfiniBand and RoCE ports, from ``/sys/class/infiniband`` (linux Documentation/ABI/stable/sysfs-class-infiniband).

Reading a port's ``counters`` makes the driver ask the device; a device that is gone may hang there, for which this
reader has a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from .base import NotInstalled, PermissionDenied, ReaderOptions
from .samples import FabricData, FabricPort

_NOT_SUPPORTED = "not supported"
_CHAR_CLASSES = ("infiniband_verbs", "infiniband_mad")
"""uverbs*; umad* and issm*"""
_IGNORED_DEVICES = ("issm", "abi_version")
"""``issm`` is for subnet managers: many sites leave it out (NVSentinel turns its check off by default)"""


class FabricReader:
    name = "fabric"
    interval_s = 5.0
    timeout_s = 10.0

    def __init__(self, options: ReaderOptions) -> None:
        self._class = f"{options.sysfs}/class"
        self._dev = f"{options.dev}/infiniband"

    def read(self) -> FabricData:
        """Raises Absent without any device, Denied where sysfs is kept from us."""
        root = f"{self._class}/infiniband"
        try:
            devices = sorted(os.listdir(root))
        except FileNotFoundError:
            devices = []
        except PermissionError:
            raise PermissionDenied(f"{root}: not permitted") from None
        if not devices:
            raise NotInstalled("there is no InfiniBand or RoCE device")
        ports = [_port(root, device, port) for device in devices for port in _ports(root, device)]
        return FabricData(tuple(ports), tuple(self._missing()))

    def close(self) -> None:
        pass

    def _missing(self) -> Iterator[str]:
        for name in _CHAR_CLASSES:
            for entry in sorted(_listed(f"{self._class}/{name}")):
                if not entry.startswith(_IGNORED_DEVICES) and not os.path.exists(f"{self._dev}/{entry}"):
                    yield entry


def _ports(root: str, device: str) -> list[int]:
    return sorted(int(entry) for entry in _listed(f"{root}/{device}/ports") if entry.isdigit())


def _port(root: str, device: str, port: int) -> FabricPort:
    folder = f"{root}/{device}/ports/{port}"
    unread: dict[str, str] = {}
    counters: dict[str, int] = {}
    for name in ("counters", "hw_counters"):
        try:
            entries = sorted(os.listdir(f"{folder}/{name}"))
        except OSError as error:
            unread[name] = _why(error)
            continue
        for entry in entries:
            value = _text(f"{folder}/{name}/{entry}", entry, unread)
            if value is not None and value.lstrip("-").isdigit():  # ``N/A (no PMA)`` is none; lifespan is in ms
                counters[entry] = int(value)
    changes = _carrier_changes(f"{root}/{device}", folder, unread)
    if changes is not None:
        counters["carrier_changes"] = changes
    rate = _text(f"{folder}/rate", "rate", unread)
    return FabricPort(
        device=device, port=port, state=_state_name(_text(f"{folder}/state", "state", unread)),
        physical=_state_name(_text(f"{folder}/phys_state", "physical", unread)), rate=_rate(rate, unread),
        link_layer=_text(f"{folder}/link_layer", "link_layer", unread) or "", counters=counters, unread=unread,
    )  # fmt: skip


def _carrier_changes(device: str, port: str, unread: dict[str, str]) -> int | None:
    """Of the network interface of this port: RoCE names it in ``gid_attrs/ndevs``, IPoIB's is the device's."""
    named = _text(f"{port}/gid_attrs/ndevs/0", "", {})
    number = os.path.basename(port)
    port_names = (name for name in _listed(f"{device}/device/net") if _dev_port(device, name) == number)
    names = {named} if named else set(port_names)
    texts = [_text(f"{device}/device/net/{name}/carrier_changes", "carrier_changes", unread) for name in sorted(names)]
    found = [int(text) for text in texts if text is not None and text.isdigit()]
    return sum(found) if found else None


def _dev_port(device: str, interface: str) -> str:
    """Number of the port that an interface belongs to, from 1 (``dev_port`` counts from 0)."""
    text = _text(f"{device}/device/net/{interface}/dev_port", "", {})
    return str(int(text) + 1) if text is not None and text.isdigit() else "1"


def _state_name(text: str | None) -> str | None:
    """``4: ACTIVE`` → ``ACTIVE``"""
    return None if text is None else text.partition(":")[2].strip() or text


def _rate(text: str | None, unread: dict[str, str]) -> float | None:
    """``400 Gb/sec (4X NDR)`` → 400.0"""
    if text is None:
        return None
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        unread["rate"] = f"no number: {text!r}"
        return None


def _text(path: str, field: str, unread: dict[str, str]) -> str | None:
    """Content of a sysfs file without its end; None with the reason noted under ``field``."""
    try:
        with open(path, "rb") as file:
            return file.read(4096).decode(errors="replace").strip()
    except OSError as error:
        unread[field] = _why(error)
        return None


def _why(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return _NOT_SUPPORTED
    if isinstance(error, PermissionError):
        return "not permitted"
    return os.strerror(error.errno or 0)


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
