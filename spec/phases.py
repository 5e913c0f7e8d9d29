"""Every phase, declared once: what a replica says that it is doing, and what silence then means.

The worker sends the name, detectors read the traits, views read the colour. A role may use names of its own: they are
shown, and silence in them is judged as in a neutral phase.
"""

from __future__ import annotations

from math import inf

from msgspec import Struct


class Phase(Struct, frozen=True):
    """Traits of a phase. ``shortest``/``longest`` (s) bound the adaptive no-progress deadline."""

    name: str
    progresses: bool = False
    """progress (tokens, samples, steps) must be seen while in it"""
    computes: bool = False
    """the GPU must not idle in it"""
    waits_for: str | None = None
    """the role that it waits for: a stall here is charged to the end of the chain"""
    useful: bool = False
    """counts as effective training time (RobustRL's ETTR: rollout and actor update both count)"""
    shortest: float = 60.0
    longest: float = 900.0
    """inf: it may last for ever, and only a standstill of the whole run can speak against it"""
    colour: str = "white"


_ALL = (
    Phase("starting", longest=600.0, colour="cyan"),
    Phase("between", longest=900.0, colour="bright_black"),  # outside of every phase that the role names
    Phase("loading_weights", waits_for="trainer", colour="cyan"),
    Phase("wait_weights", waits_for="trainer", colour="yellow"),
    Phase("wait_work", waits_for="trajectories", useful=True, colour="bright_black"),
    Phase("wait_data", waits_for="rollout", useful=True, colour="bright_black"),
    Phase("generate", progresses=True, computes=True, useful=True, shortest=60.0, longest=900.0, colour="green"),
    Phase("train", progresses=False, computes=True, useful=True, shortest=300.0, longest=1800.0, colour="green"),
    Phase("checkpoint", useful=True, shortest=60.0, longest=600.0, colour="blue"),
    Phase("publish", useful=True, shortest=60.0, longest=600.0, colour="blue"),
    Phase("score", progresses=True, useful=True, colour="green"),
    Phase("serve", useful=True, longest=inf, colour="green"),
    Phase("stopping", colour="magenta"),
)

PHASES: dict[str, Phase] = {phase.name: phase for phase in _ALL}


def phase(name: str) -> Phase:
    """The declared phase, or a neutral one for a name that a newer or foreign worker sends."""
    return PHASES.get(name) or Phase(name)
