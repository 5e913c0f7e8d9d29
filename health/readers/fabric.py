"""Reader of InfiniBand and RoCE ports, from ``/sys/class/infiniband``.

Source: linux Documentation/ABI/stable/sysfs-class-infiniband. A read of a port's ``counters`` makes the driver query
the device. The read may hang if the device has failed, so this reader has a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from .base import NotInstalled, PermissionDenied, ReaderOptions
from .samples import FabricData, FabricPort

_NOT_SUPPORTED = "not supported"
_CHAR_CLASSES = ("infiniband_verbs", "infiniband_mad")
"""Device classes in sysfs: the first contains the devices uverbs*, the second the devices umad* and issm*."""
_IGNORED_DEVICES = ("issm", "abi_version")
"""Device files that may be missing. ``issm`` serves subnet managers, and many sites omit it (NVSentinel does not check
it by default)."""


class FabricReader:
    """Reader of the InfiniBand and RoCE ports of the node."""

    name = "fabric"
    interval_s = 5.0
    timeout_s = 10.0

    def __init__(self, options: ReaderOptions) -> None:
        self._class = f"{options.sysfs}/class"
        self._dev = f"{options.dev}/infiniband"

    def read(self) -> FabricData:
        """Read all ports.

        Raises:
            NotInstalled: The node has no such device.
            PermissionDenied: sysfs is not readable.
        """
        root = f"{self._class}/infiniband"
        try:
            devices = sorted(os.listdir(root))
        except FileNotFoundError:
            devices = []
        except PermissionError:
            raise PermissionDenied(f"{root}: not permitted") from None
        if not devices:
            raise NotInstalled("the node has no InfiniBand or RoCE device")
        ports = [_port(root, device, port) for device in devices for port in _ports(root, device)]
        return FabricData(tuple(ports), tuple(self._missing()))

    def close(self) -> None:
        """Do nothing, since the reader keeps nothing open."""
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
            if value is not None and value.lstrip("-").isdigit():  # skip ``N/A (no PMA)``
                counters[entry] = int(value)
    changes = _carrier_changes(f"{root}/{device}", folder, unread)
    if changes is not None:
        counters["carrier_changes"] = changes
    rate = _text(f"{folder}/rate", "rate", unread)
    return FabricPort(
        device=device,
        port=port,
        state=_state_name(_text(f"{folder}/state", "state", unread)),
        physical=_state_name(_text(f"{folder}/phys_state", "physical", unread)),
        rate=_rate(rate, unread),
        counters=counters,
        unread=unread,
    )


def _carrier_changes(device: str, port: str, unread: dict[str, str]) -> int | None:
    """Return the carrier changes of the port's network interface; None if unknown.

    For RoCE, ``gid_attrs/ndevs`` names the interface. For IPoIB, the interface is found by the device and port number.
    """
    named = _text(f"{port}/gid_attrs/ndevs/0", "", {})
    number = os.path.basename(port)
    port_names = (name for name in _listed(f"{device}/device/net") if _dev_port(device, name) == number)
    names = {named} if named else set(port_names)
    texts = [_text(f"{device}/device/net/{name}/carrier_changes", "carrier_changes", unread) for name in sorted(names)]
    found = [int(text) for text in texts if text is not None and text.isdigit()]
    return sum(found) if found else None


def _dev_port(device: str, interface: str) -> str:
    """Return the number of the interface's port, from 1 (``dev_port`` counts from 0)."""
    text = _text(f"{device}/device/net/{interface}/dev_port", "", {})
    return str(int(text) + 1) if text is not None and text.isdigit() else "1"


def _state_name(text: str | None) -> str | None:
    """Return the name in a state text: ``4: ACTIVE`` → ``ACTIVE``."""
    return None if text is None else text.partition(":")[2].strip() or text


def _rate(text: str | None, unread: dict[str, str]) -> float | None:
    """Return the rate in Gbit/s: ``400 Gb/sec (4X NDR)`` → 400.0."""
    if text is None:
        return None
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        unread["rate"] = f"not a number: {text!r}"
        return None


def _text(path: str, field: str, unread: dict[str, str]) -> str | None:
    """Return the stripped content of a sysfs file; None if unreadable, with the reason in ``unread[field]``."""
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
