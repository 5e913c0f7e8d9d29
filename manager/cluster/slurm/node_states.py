"""What Slurm's states and flags of a node mean: for a role on the node, for a new role, and for ``rrl check``. Pure.

The names are from ``node_state_string``, ``node_state_string_compact`` and ``node_state_flags`` of Slurm 22.05 to 26.05
(src/common/slurm_protocol_defs.c). scontrol prints a base state and every flag (``MIXED+DRAIN``), sinfo only one word
with at most one suffix (``draining@``). ``rrl.docs.make_node_states`` writes the table into docs/sites.md.
"""

from __future__ import annotations

from msgspec import Struct

from ..base import NodeState


class Mark(Struct, frozen=True):
    """A base state or flag of a node."""

    names: tuple[str, ...]
    """The name that scontrol prints, and sinfo's other names, long and compact."""
    state: NodeState | None
    """State of a node with this mark; None if the mark says nothing about whether the node works."""
    note: str
    suffix: str = ""
    """Character that sinfo appends for this mark."""
    while_used: NodeState | None = None
    """State of a node with this mark that runs jobs, if it differs."""
    takes_jobs: bool = True
    """Whether Slurm starts a job on such a node, now or later, without a person's help."""


MARKS = (
    Mark(("IDLE",), NodeState.UP, ""),
    Mark(("ALLOCATED", "ALLOC"), NodeState.UP, ""),
    Mark(("MIXED", "MIX"), NodeState.UP, ""),
    Mark(("COMPLETING", "COMP"), NodeState.UP, "a job is ending there", "+"),
    Mark(("PLANNED", "PLND"), NodeState.UP, "kept for a pending job", "-"),
    Mark(("RESERVED", "RESV"), NodeState.UP, "in a reservation"),
    Mark(("MAINTENANCE", "MAINT", "PLANNED_MAINT"), NodeState.UP, "in a reservation for maintenance", "$"),
    Mark(("BLOCKED", "BLOCK"), NodeState.UP, "kept free beside a job with exclusive topology"),
    Mark(("PERFCTRS", "NPC"), NodeState.UP, "a job uses its network counters"),
    Mark(("CLOUD",), None, "comes from a cloud"),
    Mark(("DYNAMIC_FUTURE",), None, "was added while Slurm ran"),
    Mark(("DYNAMIC_NORM",), None, "was added while Slurm ran"),
    Mark(("RESUME", "RESM"), None, "is resumed after its reboot"),
    Mark(("UNDRAIN",), None, "a drain is being removed"),
    Mark(("CANCEL_REBOOT", "CANC_R"), None, "a reboot is being cancelled"),
    Mark(("REBOOT_REQUESTED", "REBOOT", "BOOT"), NodeState.LEAVING, "reboots once it is idle", "@", takes_jobs=False),
    Mark(("POWER_DOWN", "POW_DN"), NodeState.LEAVING, "is switched off once it is idle", "!", takes_jobs=False),
    Mark(("POWERING_DOWN", "POWRING_DN"), NodeState.DOWN, "is being switched off", "%", NodeState.LEAVING, False),
    Mark(("POWERED_DOWN", "POWERED_DN"), NodeState.DOWN, "is off; Slurm starts it for a job", "~", NodeState.UNKNOWN),
    Mark(("REBOOT_ISSUED",), NodeState.DOWN, "reboots; with a job: boots for this job", "^", NodeState.UNKNOWN, False),
    Mark(("POWERING_UP",), NodeState.UNKNOWN, "boots", "#", takes_jobs=False),
    Mark(("POWER_UP", "POW_UP"), NodeState.UNKNOWN, "is to be switched on", takes_jobs=False),
    Mark(("NOT_RESPONDING", "NO_RESPOND"), NodeState.UNKNOWN, "DOWN follows after SlurmdTimeout", "*",
         takes_jobs=False),
    Mark(("UNKNOWN", "UNK"), NodeState.UNKNOWN, "has not registered yet", takes_jobs=False),
    Mark(("FUTURE", "FUTR"), NodeState.UNKNOWN, "does not exist yet", takes_jobs=False),
    Mark(("EXTERNAL", "EXT"), NodeState.UNKNOWN, "has no slurmd", takes_jobs=False),
    Mark(("DRAIN", "DRAINED", "DRAINING", "DRNG"), NodeState.DRAINING, "", takes_jobs=False),
    Mark(("FAIL", "FAILING", "FAILG"), NodeState.DRAINING, "a person expects it to fail", takes_jobs=False),
    Mark(("INVALID_REG", "INVAL"), NodeState.DRAINING, "registered with less than is configured", takes_jobs=False),
    Mark(("DOWN",), NodeState.DOWN, "", takes_jobs=False),
    Mark(("ERROR",), NodeState.DOWN, "not used any more", takes_jobs=False),
)  # fmt: skip
DRAIN, RESERVATIONS = "DRAIN", frozenset({"RESERVED", "MAINTENANCE"})
_USED = frozenset({"ALLOCATED", "ALLOC", "MIXED", "MIX", "DRAINING", "DRNG", "FAILING", "FAILG"})
"""Words for a node that runs jobs."""
_BY_NAME = {name: mark for mark in MARKS for name in mark.names}
_BY_SUFFIX = {mark.suffix: mark for mark in MARKS if mark.suffix}
_SEVERITY = (NodeState.UP, NodeState.UNKNOWN, NodeState.LEAVING, NodeState.DRAINING, NodeState.DOWN)


def node_state(text: str) -> NodeState:
    """Return the worst state that the marks of a node (``MIXED+DRAIN``, ``DOWN*``, ``idle~``) indicate.

    DOWN is a proof, so only Slurm's word for a present loss means it. A word that rrl does not know means UNKNOWN.
    """
    words = _words(text)
    used = not words.isdisjoint(_USED)
    found = [_BY_NAME.get(word, Mark((word,), NodeState.UNKNOWN, "")) for word in words]
    states = [(mark.while_used if used else None) or mark.state for mark in found]
    return max((state for state in states if state is not None), key=_SEVERITY.index, default=NodeState.UNKNOWN)


def marks(text: str) -> set[str]:
    """Return the names by which scontrol prints the marks of a node, without those that rrl does not know."""
    return {_BY_NAME[word].names[0] for word in _words(text) if word in _BY_NAME}


def unknown_words(text: str) -> tuple[str, ...]:
    """Return the words in the state of a node that rrl does not know."""
    return tuple(sorted(_words(text) - _BY_NAME.keys()))


def takes_jobs(text: str) -> bool:
    """Return whether Slurm starts a job on such a node, now or later, without a person's help."""
    words = _words(text)
    return words <= _BY_NAME.keys() and all(_BY_NAME[word].takes_jobs for word in words)


def _words(text: str) -> set[str]:
    """Split a state into its words; a suffix counts as the word that it stands for."""
    words: set[str] = set()
    for part in text.upper().split("+"):
        word = part.rstrip("".join(_BY_SUFFIX))
        words |= {word, *(_BY_SUFFIX[suffix].names[0] for suffix in part[len(word) :])}
    if "" in words:  # sinfo's "alloc+"
        words = words - {""} | {_BY_SUFFIX["+"].names[0]}
    return words
