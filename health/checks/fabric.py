"""Checks of InfiniBand and RoCE ports: presence, state, rate and error counters."""

from __future__ import annotations

from collections.abc import Iterator

from ...config.health_rules import FabricRules, Rules
from ...core.types import Cause, Remedy
from ..readers.samples import FabricData
from .base import Check, CheckResult, Problem, Unknown, fail, warn
from .node_state import NodeState

_HOUR_S, _MINUTE_S, _RATE_WINDOW_S = 3600.0, 60.0, 30.0
"""Windows in seconds. A limit per second applies to the average over `_RATE_WINDOW_S`, so that a short burst does not
exceed the limit."""
_LINK_DOWNED = "link_downed"
_FATAL_COUNTERS = ("excessive_buffer_overrun_errors", "local_link_integrity_errors")
"""Counters of which any increase is fatal according to NVSentinel. Two further counters of NVSentinel are left out:
link_downed has its own limit (``rules.fabric.link_downs``), and rnr_nak_retry_err increases whenever a program is not
ready to receive."""


def _data(state: NodeState) -> FabricData:
    data = state.data("fabric")
    return data if isinstance(data, FabricData) else FabricData()


def _used(state: NodeState, rules: Rules) -> set[str]:
    """Return the ports to check: the expected ports, and the ports that were ACTIVE at some time.

    Other ports are not checked, because their cables may be plugged in and out.
    """
    return set(rules.expect.ports) | state.ports_up


def _count(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    devices = {port.device for port in _data(state).ports}
    if gone := sorted(state.hcas - devices):
        for device in gone:
            yield fail(Cause.FABRIC, Remedy.EXCLUDE, f"{device} is missing; it was present before", component=device)
    elif rules.expect.hcas is not None and len(devices) != rules.expect.hcas:
        text = f"the node has {len(devices)} InfiniBand or RoCE devices, {rules.expect.hcas} are expected"
        yield fail(Cause.FABRIC, Remedy.EXCLUDE, text)


def _state(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    """Report ports that are missing, not ACTIVE, or slower than they were."""
    ports = {f"{port.device}/{port.port}": port for port in _data(state).ports}
    for name in sorted(_used(state, rules)):
        port = ports.get(name)
        if port is None:
            if name in rules.expect.ports:
                yield fail(Cause.FABRIC, Remedy.EXCLUDE, f"port {name} is missing", component=name)
        elif port.state is None:
            yield Unknown(f"{name}: {port.unread.get('state', 'not read')}", components=(name,))
        elif port.state != "ACTIVE":
            physical = f", physically {port.physical}" if port.physical else ""
            yield fail(Cause.FABRIC, Remedy.EXCLUDE, f"port {name} is {port.state}{physical}", component=name)
        elif port.rate and port.rate < (best := state.max_port_rates.get(name, port.rate)):
            text = f"port {name} runs at {port.rate:g} Gbit/s; it ran at {best:g} Gbit/s before"
            yield warn(Cause.FABRIC, Remedy.SUPPORT, text, component=name, failures_to_raise=rules.hysteresis.bad)


def _devices(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    for name in _data(state).missing_char_devices:
        if not name.startswith("issm"):  # some machines have no issm device (NVSentinel: GB300)
            yield fail(Cause.FABRIC, Remedy.EXCLUDE, f"/dev/infiniband/{name} is missing", component=name)


def _fatal(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    for name in sorted(_used(state, rules)):
        risen = [counter for counter in _FATAL_COUNTERS if _increase(state, name, counter, _HOUR_S)]
        downs = _increase(state, name, _LINK_DOWNED, _HOUR_S)
        if downs >= rules.fabric.link_downs:
            risen.insert(0, _LINK_DOWNED)
        if _increase(state, name, "symbol_error", _HOUR_S) > rules.fabric.symbol_errors_hour:
            risen.append(f"symbol_error (more than {rules.fabric.symbol_errors_hour} an hour)")
        if risen:
            text = f"port {name}: fatal errors within an hour: {', '.join(risen)}"
            yield fail(Cause.FABRIC, Remedy.EXCLUDE, text, component=name, failures_to_raise=1)
        elif downs:
            yield warn(
                Cause.FABRIC, Remedy.NONE, f"port {name}: {_LINK_DOWNED} increased within an hour", component=name
            )


def _degraded(state: NodeState, rules: Rules, now: float) -> Iterator[Problem]:
    for name in sorted(_used(state, rules)):
        if risen := list(_exceeded_rates(state, name, rules.fabric)):
            yield warn(Cause.FABRIC, Remedy.SUPPORT, f"port {name}: {', '.join(risen)}", component=name)


def _exceeded_rates(state: NodeState, name: str, limits: FabricRules) -> Iterator[str]:
    """Yield a text for each counter of the port that increases faster than its limit."""
    for counter, limit in (
        ("symbol_error", limits.symbol_errors),
        ("port_rcv_errors", limits.receive_errors),
        ("local_ack_timeout_err", limits.ack_timeouts),
        ("port_xmit_discards", limits.discards),
        ("roce_slow_restart", limits.slow_restarts),
    ):
        if _increase(state, name, counter, _RATE_WINDOW_S) > limit * _RATE_WINDOW_S:
            yield f"{counter} above {limit:g} a second"
    if _increase(state, name, "link_error_recovery", _MINUTE_S) > limits.recoveries:
        yield f"link_error_recovery above {limits.recoveries:g} a minute"
    if _increase(state, name, "carrier_changes", _HOUR_S) > limits.carrier_changes:
        yield f"more than {limits.carrier_changes} carrier changes an hour"


def _increase(state: NodeState, name: str, counter: str, window: float) -> int:
    """Return the increase of a port's counter in the last ``window`` s; 0 if the counter was never read."""
    history = state.counter("port", name, counter)
    if history is None or not history.increase:
        return 0
    return history.increase_within(window, state.reading_at("fabric"))


_FABRIC = ("fabric",)
CHECKS = (
    Check(
        "hca_count",
        _FABRIC,
        _count,
        "InfiniBand and RoCE devices, compared with expect.hcas and with the devices that were present before",
        "another number, or a missing device: FAIL, exclude",
        "gcm, NVSentinel",
    ),
    Check(
        "fabric_port",
        _FABRIC,
        _state,
        "state and rate of the ports in expect.ports, and of ports that were ACTIVE before",
        "not ACTIVE: FAIL, exclude; slower than before: WARN, support",
        "NVRx",
    ),
    Check(
        "fabric_devices",
        _FABRIC,
        _devices,
        "whether /dev/infiniband has the uverbs and umad devices that the kernel lists",
        "a device is missing: FAIL, exclude",
        "NVSentinel",
    ),
    Check(
        "fabric_errors",
        _FABRIC,
        _fatal,
        "link_downed, buffer overruns, link integrity and symbol errors of ports that are expected or were ACTIVE",
        "an increase within an hour (symbol errors: by more than fabric.symbol_errors_hour; link_downed: by"
        " fabric.link_downs): FAIL, exclude; a smaller increase of link_downed: WARN",
        "NVSentinel",
    ),
    Check(
        "fabric_degraded",
        _FABRIC,
        _degraded,
        "rates of symbol, receive and ack errors, recoveries, discards, restarts, carrier changes",
        "above the limits in [fabric]: WARN, support",
        "NVSentinel",
    ),
)
