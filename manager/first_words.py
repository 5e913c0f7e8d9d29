"""What was said of a step that left no exit record: by whatever was to start it, and by its first process."""

from __future__ import annotations

from msgspec.structs import replace

from rrl.manager.cluster import NotStarted, RejectReason
from rrl.manager.events import Done, Event
from rrl.manager.state import NEVER_APPEARED
from rrl.spec.last_words import absent, last_lines_of
from rrl.spec.rundir import RunDir


def words_of(run: RunDir, tag: str) -> str:
    """The last lines of the step's own output, which is its first process's and slurmstepd's (that it ran out of
    memory, that an interpreter is not there); else of its srun. Empty if nothing was said."""
    log = run.log_file(f"{tag}.step")
    said = (last_lines_of(log.with_name(f"{log.name}{ending}")) for ending in (".0", "", ".srun"))
    return next(filter(None, said), "")


def explained(run: RunDir, event: Event) -> Event:
    """A step that never appeared, with the reason if there is one on disk."""
    if not isinstance(event, Done) or event.ok or event.reason is not RejectReason.NEVER_APPEARED:
        return event
    words = words_of(run, event.tag)
    if not words:
        return event
    if absent(words):
        return Done(event.tag, False, str(NotStarted(words)), event.unheard, RejectReason.NOT_STARTED)
    return replace(event, detail=f"{NEVER_APPEARED}: {words}")
