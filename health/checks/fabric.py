"""Checks of InfiniBand and RoCE ports: are they there, up as they were, and without errors."""

from __future__ import annotations

from collections.abc import Iterator

from ...config.health_rules import FabricRules, Rules
from ...core.types import Cause, Remedy
from ..readers.samples import FabricData
from .base import Bad, Check, Said, Unknown, fail, warn
from .node_state import Seen

_HOUR, _MINUTE, _SPELL = 3600.0, 60.0, 30.0
"""s; rates "a second" are taken over a spell, so that one burst is no rate"""
_DOWNED = "link_downed"
_FATAL = ("excessive_buffer_overrun_errors", "local_link_integrity_errors")
"""counters that must not rise at all (NVSentinel; of its others, link_downed may once, and rnr_nak_retry_err counts
receivers that were not ready and answered when asked again: what programs do to each other)"""


def _data(seen: Seen) -> FabricData:
    data = seen.data("fabric")
    return data if isinstance(data, FabricData) else FabricData()


def _used(seen: Seen, rules: Rules) -> set[str]:
    """Ports that matter; a cable may come and go at any other."""
    return set(rules.expect.ports) | seen.ports_up


def _count(seen: Seen, rules: Rules, now: float) -> Iterator[Said]:
    there = {port.device for port in _data(seen).ports}
    if gone := sorted(seen.hcas - there):
        for device in gone:
            yield fail(Cause.FABRIC, Remedy.EXCLUDE, f"{device} is no longer there", part=device)
    elif rules.expect.hcas is not None and len(there) != rules.expect.hcas:
        text = f"there are {len(there)} InfiniBand or RoCE devices, {rules.expect.hcas} are expected"
        yield fail(Cause.FABRIC, Remedy.EXCLUDE, text)


def _state(seen: Seen, rules: Rules, now: float) -> Iterator[Said]:
    """Against what is expected, else against the ports that were up when we first looked."""
    ports = {f"{port.device}/{port.port}": port for port in _data(seen).ports}
    for name in sorted(_used(seen, rules)):
        port = ports.get(name)
        if port is None:
            if name in rules.expect.ports:
                yield fail(Cause.FABRIC, Remedy.EXCLUDE, f"port {name} is not there", part=name)
        elif port.state is None:
            yield Unknown(f"{name}: {port.unread.get('state', 'not read')}", parts=(name,))
        elif port.state != "ACTIVE":
            physical = f", physically {port.physical}" if port.physical else ""
            yield fail(Cause.FABRIC, Remedy.EXCLUDE, f"port {name} is {port.state}{physical}", part=name)
        elif port.rate and port.rate < (best := seen.rates.get(name, port.rate)):
            text = f"port {name} runs at {port.rate:g} Gbit/s, and ran at {best:g}"
            yield warn(Cause.FABRIC, Remedy.SUPPORT, text, part=name, needs=rules.hysteresis.bad)


def _devices(seen: Seen, rules: Rules, now: float) -> Iterator[Said]:
    for name in _data(seen).missing_char_devices:
        if not name.startswith("issm"):  # its absence is usual on some machines (NVSentinel: GB300)
            yield fail(Cause.FABRIC, Remedy.EXCLUDE, f"/dev/infiniband/{name} is missing", part=name)


def _fatal(seen: Seen, rules: Rules, now: float) -> Iterator[Said]:
    for name in sorted(_used(seen, rules)):
        risen = [counter for counter in _FATAL if _rise(seen, name, counter, _HOUR)]
        downs = _rise(seen, name, _DOWNED, _HOUR)
        if downs >= rules.fabric.link_downs:
            risen.insert(0, _DOWNED)
        if _rise(seen, name, "symbol_error", _HOUR) > rules.fabric.symbol_errors_hour:
            risen.append(f"symbol_error (more than {rules.fabric.symbol_errors_hour} an hour)")
        if risen:
            text = f"port {name}: fatal errors within an hour: {', '.join(risen)}"
            yield fail(Cause.FABRIC, Remedy.EXCLUDE, text, part=name, needs=1)
        elif downs:
            yield warn(Cause.FABRIC, Remedy.NONE, f"port {name}: {_DOWNED} rose within an hour", part=name)


def _degraded(seen: Seen, rules: Rules, now: float) -> Iterator[Bad]:
    for name in sorted(_used(seen, rules)):
        if risen := list(_rates(seen, name, rules.fabric)):
            yield warn(Cause.FABRIC, Remedy.SUPPORT, f"port {name}: {', '.join(risen)}", part=name)


def _rates(seen: Seen, name: str, limits: FabricRules) -> Iterator[str]:
    for counter, most in (
        ("symbol_error", limits.symbol_errors), ("port_rcv_errors", limits.receive_errors),
        ("local_ack_timeout_err", limits.ack_timeouts), ("port_xmit_discards", limits.discards),
        ("roce_slow_restart", limits.slow_restarts),
    ):  # fmt: skip
        if _rise(seen, name, counter, _SPELL) > most * _SPELL:
            yield f"{counter} above {most:g} a second"
    if _rise(seen, name, "link_error_recovery", _MINUTE) > limits.recoveries:
        yield f"link_error_recovery above {limits.recoveries:g} a minute"
    if _rise(seen, name, "carrier_changes", _HOUR) > limits.carrier_changes:
        yield f"more than {limits.carrier_changes} carrier changes an hour"


def _rise(seen: Seen, name: str, counter: str, window: float) -> int:
    trail = seen.trail("port", name, counter)
    return trail.within(window, seen.at("fabric")) if trail is not None and trail.rise else 0


_FABRIC = ("fabric",)
CHECKS = (
    Check("hca_count", _FABRIC, _count, "InfiniBand and RoCE devices, against expect.hcas and what was there before",
          "another number, or one is gone: FAIL, exclude", "gcm, NVSentinel"),
    Check("fabric_port", _FABRIC, _state, "state and rate of the ports of expect.ports, and of those that were ACTIVE",
          "not ACTIVE: FAIL, exclude; slower than it was: WARN, support", "NVRx"),
    Check("fabric_devices", _FABRIC, _devices, "uverbs and umad devices that the kernel lists",
          "missing: FAIL, exclude", "NVSentinel"),
    Check("fabric_errors", _FABRIC, _fatal, "link_downed, buffer overruns, link integrity, symbol errors of ports that"
          " are or were ACTIVE", "any within an hour (symbol errors: fabric.symbol_errors_hour; link_downed:"
          " fabric.link_downs): FAIL, exclude; link_downed before that: WARN", "NVSentinel"),
    Check("fabric_degraded", _FABRIC, _degraded, "rates of symbol, receive and ack errors, recoveries, discards,"
          " restarts, carrier changes", "above those of [fabric]: WARN, support", "NVSentinel"),
)  # fmt: skip
