"""Every phase, declared once: what a replica says that it is doing, and what silence then means.

The worker sends the name, detectors read the traits, views read the colour. A job may move the bounds of a phase
(``[phases.<name>]``, :meth:`rrl.core.run_spec.Limits.phase`). A role may use names of its own: they are shown, who is
silent in them is lost as in any phase, and who stays in them for long is warned of; it is restarted for that only where
``[phases.<name>]`` says how long the phase may last.

The bounds are wide because the two mistakes cost unequally: who is killed at healthy work is killed again at the same
place, a hang costs its deadline once. NVRx waits 3600 s for a first heartbeat and 2700 s for each further one
(docs/sources.md).
"""

from __future__ import annotations

from math import inf

from msgspec import Struct


class Phase(Struct, frozen=True):
    """Traits of a phase. ``shortest``/``longest`` (s) bound the adaptive no-progress deadline; ``longest`` also holds
    as long as nothing usual is known."""

    name: str
    progresses: bool = False
    """progress (tokens, samples, steps) must be seen while in it"""
    computes: bool = False
    """the GPU must not idle in it"""
    waits_for: str | None = None
    """the role that it waits for: a stall here is charged to the end of the chain"""
    own_work: bool = False
    """though it waits, it may as well be at work itself: that it stands says nothing before its deadline"""
    useful: bool = False
    """counts as effective training time (RobustRL's ETTR: rollout and actor update both count)"""
    shortest: float = 60.0
    longest: float = 900.0
    """inf: it may last for ever, and only a standstill of the whole run can speak against it"""
    colour: str = "white"


STANDBY = "standby"
"""what a shadow is in until it becomes something: nobody waits for it, and it is not judged for doing nothing"""
_HOUR = 3600.0

_ALL = (
    Phase("starting", longest=600.0, colour="cyan"),
    # outside of every phase that the role names: mostly nothing, but an evaluation may be there
    Phase("between", shortest=600.0, longest=6 * _HOUR, colour="bright_black"),
    Phase("loading_weights", waits_for="trainer", own_work=True, colour="cyan"),
    Phase("wait_weights", waits_for="trainer", colour="yellow"),
    Phase("wait_work", waits_for="trajectories", useful=True, colour="bright_black"),
    Phase("wait_data", waits_for="rollout", useful=True, colour="bright_black"),
    # tools take minutes. Who can be asked for a token is judged by its answer long before this
    # (health/detection/detectors/probing.py)
    Phase("generate", progresses=True, computes=True, useful=True, shortest=300.0, longest=_HOUR, colour="green"),
    # a usual step is no measure of one with an evaluation in it
    Phase("train", computes=True, useful=True, shortest=600.0, longest=6 * _HOUR, colour="green"),
    # shared storage stalls for minutes
    Phase("checkpoint", useful=True, shortest=300.0, longest=_HOUR, colour="blue"),
    Phase("publish", useful=True, shortest=300.0, longest=_HOUR, colour="blue"),
    # a backlog, a judge model that is slow to answer
    Phase("score", progresses=True, useful=True, shortest=300.0, longest=_HOUR, colour="green"),
    Phase("serve", useful=True, shortest=300.0, longest=inf, colour="green"),  # the store fsyncs to shared storage
    Phase(STANDBY, longest=inf, colour="bright_black"),
    Phase("stopping", colour="magenta"),
)

PHASES: dict[str, Phase] = {phase.name: phase for phase in _ALL}


def phase(name: str) -> Phase:
    """The declared phase, or a neutral one for a name that a newer or foreign worker sends."""
    return PHASES.get(name) or Phase(name)
