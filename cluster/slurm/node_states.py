"""What Slurm's states and flags of a node mean: for a role on the node, for a new role, and for ``rrl check``.

``node_states.csv`` has each mark by its names in Slurm 22.05 to 26.05 (``node_state_flags``, ``node_state_string`` and
``node_state_string_compact`` in src/common/slurm_protocol_defs.c). scontrol prints a base state and every flag
(``MIXED+DRAIN``), sinfo only one word with at most one suffix (``draining@``). ``rrl.docs.make_node_states`` writes the
table into docs/sites.md.
"""

from __future__ import annotations

import csv
import functools
import logging
import re
from pathlib import Path

import msgspec
from msgspec import Struct

from ..base import NodeState

_log = logging.getLogger("rrl.manager")


class Mark(Struct, frozen=True):
    """A base state or flag of a node."""

    names: tuple[str, ...]
    """The name that scontrol prints, and sinfo's other names, long and compact."""
    note: str = ""
    suffix: str = ""
    """Character that sinfo appends for this mark."""
    state: NodeState | None = None
    """State of a node with this mark; None if the mark says nothing about whether the node works."""
    while_used: NodeState | None = None
    """State of a node with this mark that runs jobs, if it differs."""
    takes_jobs: bool = True
    """Whether Slurm starts a job on such a node, now or later, without a person's help."""


with Path(__file__).with_name("node_states.csv").open(newline="") as _file:
    MARKS = tuple(
        msgspec.convert(
            {key: text for key, text in row.items() if text} | {"names": row["names"].split()}, Mark, strict=False
        )
        for row in csv.DictReader(_file)
    )
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
    found = [_BY_NAME.get(word) or _unknown(word) for word in words]
    states = [(mark.while_used if used else None) or mark.state for mark in found]
    return max((state for state in states if state is not None), key=_SEVERITY.index, default=NodeState.UNKNOWN)


def marks(text: str) -> set[str]:
    """Return the names by which scontrol prints the marks of a node, without those that rrl does not know."""
    return {_BY_NAME[word].names[0] for word in _words(text) if word in _BY_NAME}


def takes_jobs(text: str) -> bool:
    """Return whether Slurm starts a job on such a node, now or later, without a person's help."""
    words = _words(text)
    return words <= _BY_NAME.keys() and all(_BY_NAME[word].takes_jobs for word in words)


@functools.cache
def _unknown(word: str) -> Mark:
    """Say once that rrl does not know this word, and return what it means until then."""
    _log.warning("Slurm reports the node state %s, which rrl does not know; it counts as neither up nor down", word)
    return Mark((word,), state=NodeState.UNKNOWN)


def _words(text: str) -> set[str]:
    """Split a state into its words; a suffix (``+`` only at the end) counts as the word that it stands for."""
    parts = re.findall(r"\w+|[^\w+]|\+$", text.upper())
    return {_BY_SUFFIX[part].names[0] if part in _BY_SUFFIX else part for part in parts}
