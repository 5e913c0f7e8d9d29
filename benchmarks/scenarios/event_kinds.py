"""The kinds of events in a scenario: their names, targets and keys. scenarios.md describes them."""

from __future__ import annotations

from typing import Literal, get_args

Target = Literal["process", "node", "manager"]

PROCESS_EVENTS = Literal[
    "crash",
    "exit",
    "vanish",
    "goodbye",
    "hang",
    "wedge",
    "freeze",
    "false_progress",
    "quiet",
    "stretch",
    "slow",
    "late_heartbeats",
    "disconnect",
    "busy",
    "restart",
    "start_takes",
    "waits_outside",
]
NODE_EVENTS = Literal[
    "node_dies",
    "node_down",
    "agent_dies",
    "agent_freezes",
    "cut",
    "suspend",
    "drain",
    "unknown",
    "flap",
    "xid",
    "gpu",
    "gpu_lost",
    "gpu_gone",
    "port",
    "hca_gone",
    "mount",
    "host",
    "kernel",
    "dcgm",
    "reader",
]
MANAGER_EVENTS = Literal["manager_restart", "manager_pause", "cluster_away", "clock_jumps"]

_LOADS = ("cpu", "gpu_use", "tensor")
KEYS: dict[str, tuple[str, ...]] = {
    "crash": ("signal", "last_line", "phase"),
    "exit": ("code", "last_line", "phase"),
    "vanish": ("phase",),
    "goodbye": ("phase",),
    "hang": ("phase", "for", "process_state", *_LOADS),
    "wedge": ("phase", "for", "answer", *_LOADS),
    "freeze": ("phase", "for", "process_state"),
    "false_progress": ("phase", "for", "cpu", "gpu_use"),
    "quiet": ("phase", "for", "answers_after", *_LOADS),
    "stretch": ("phase", "for", *_LOADS),
    "slow": ("phase", "factor", "for"),
    "late_heartbeats": ("phase", "by", "for"),
    "disconnect": ("phase", "for"),
    "busy": ("phase", "answers_after", "for"),
    "restart": ("phase",),
    "start_takes": ("for",),
    "waits_outside": ("for",),
    "node_dies": ("phase", "down_after"),
    "node_down": ("phase", "text"),
    "agent_dies": ("phase", "back_after"),
    "agent_freezes": ("phase", "for"),
    "cut": ("phase", "for"),
    "suspend": ("phase", "for"),
    "drain": ("for",),
    "unknown": ("for",),
    "flap": ("times", "every"),
    "xid": ("gpu", "xid", "text", "times", "every", "by", "age"),
    "gpu": ("gpu", "link", "set", "grow", "unread", "for"),
    "gpu_lost": ("gpu", "text"),
    "gpu_gone": ("gpu", "for"),
    "port": ("port", "set", "grow", "unread", "for"),
    "hca_gone": ("port", "for"),
    "mount": ("path", "set", "grow", "for"),
    "host": ("set", "grow", "unread", "for"),
    "kernel": ("kind", "text", "path", "exists", "times", "every", "age"),
    "dcgm": ("gpu", "system", "incident", "severity", "text", "source", "for"),
    "reader": ("reader", "state", "text", "for"),
    "manager_restart": ("for",),
    "manager_pause": ("for",),
    "cluster_away": ("for",),
    "clock_jumps": ("forward", "back"),
}
"""For each key of the file, the kinds of events that may have it. All kinds may have ``at``, ``after``, ``do``, ``who``
and ``name``."""
PROCESS_STATES = {"hang": ("S", "D"), "freeze": ("T", "t")}
"""For each event, the states in /proc/PID/stat that its process may have. The first one is the default."""
NEEDED: dict[str, str] = {
    "stretch": "for",
    "slow": "factor",
    "late_heartbeats": "by",
    "busy": "answers_after",
    "start_takes": "for",
    "xid": "xid",
}
"""The key that each kind of event requires."""
CHANGES = frozenset({"gpu", "port", "mount", "host"})
"""Kinds of events that need ``set``, ``grow`` or ``unread``."""

HARDWARE = frozenset(
    {"xid", "gpu", "gpu_lost", "gpu_gone", "port", "hca_gone", "mount", "host", "kernel", "dcgm", "reader"}
)
"""Kinds of events that the node's readers observe."""


def target_of(kind: str) -> Target:
    if kind in get_args(PROCESS_EVENTS):
        return "process"
    return "node" if kind in get_args(NODE_EVENTS) else "manager"
