"""``rrl health drain-node`` and ``undrain-node``: the drains of the site's hooks.

The node remembers what slurmctld last reported about its drain. So the HealthCheckProgram of a node that was not
drained does not query slurmctld. After a boot this check memory is empty, and the first check queries slurmctld.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from ...core.drains import DrainOwner
from ...core.types import Verdict
from ...health.check_memory import memory_path, read_memory, update_memory
from ...health.node_check import EXIT_CODES
from .check import site_rules, this_node
from .node_drains import SlurmUnavailable, drain_by_hook, undrain_by_hook

_MAX_REASON_LENGTH = 150
"""Maximum number of characters of a hook's text in a drain's reason."""


def drain_node(why: str, node: str | None, config: Path | None) -> int:
    """Drain a node that failed its check, for the hooks in examples/health.

    Returns 0 if the node is drained, no matter by whom, 1 if the site's limit on drains by hooks prevented it, 3 if
    Slurm did not answer or refused. The reason for 1 or 3 is printed. Raises UsageError for a mistake in the site's
    rules.
    """
    named = node or this_node()
    reason, rules = " ".join(why.split())[:_MAX_REASON_LENGTH], site_rules(config).hooks
    _remember(named, "unknown")
    try:
        result = drain_by_hook(named, reason, rules)
    except SlurmUnavailable as error:
        print(f"not drained: {error}", flush=True)
        return EXIT_CODES[Verdict.UNKNOWN]
    if result.held_back_reason:
        print(f"held back: {result.held_back_reason}", flush=True)
        return 1
    if result.owner is not None:
        _remember(named, "by hook" if result.owner is DrainOwner.HOOK else "no")
    return 0


def undrain_node(node: str | None) -> int:
    """Take back any drain of a node by the hooks, after the node has passed its check again.

    Returns 0 if no drain by the hooks is left, 3 if Slurm did not answer or refused; the reason is printed. A drain by
    anybody else stays. Slurm is not queried if the node remembers that the hooks have not drained it.
    """
    named = node or this_node()
    if named == this_node() and read_memory(memory_path(this_node())).drained == "no":
        return 0
    try:
        undrained = undrain_by_hook(named)
    except SlurmUnavailable as error:
        print(f"not undrained: {error}", flush=True)
        return EXIT_CODES[Verdict.UNKNOWN]
    _remember(named, "no")
    if undrained:
        print("undrained", flush=True)
    return 0


def _remember(node: str, drained: Literal["unknown", "no", "by hook"]) -> None:
    """Remember whether the hooks have drained ``node``, if it is this node; for another node, do nothing."""
    if node == this_node():
        with contextlib.suppress(OSError):  # if nothing can be stored, Slurm is queried again
            update_memory(memory_path(this_node()), lambda memory: replace(memory, drained=drained))
