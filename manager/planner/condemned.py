"""What a finding must say to condemn a node: it is against its hardware, and calls for leaving it."""

from __future__ import annotations

from rrl.spec.words import Cause, Finding, Remedy, Verdict

HARDWARE = frozenset({Cause.NODE, Cause.GPU, Cause.FABRIC, Cause.STORAGE})
"""causes for which a node is nobody's to use; what a process did says nothing of its node"""
_LEAVES_THE_NODE = frozenset({Remedy.NONE, Remedy.RESTART})
"""remedies with which a node goes on"""


def condemns(finding: Finding) -> bool:
    """It is against the node, and calls for leaving it."""
    of_node = finding.node is not None and finding.verdict is Verdict.FAIL
    return of_node and finding.cause in HARDWARE and finding.remedy not in _LEAVES_THE_NODE
