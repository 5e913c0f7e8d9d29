"""Declare every phase: what a replica reports that it is doing, and what missing progress means during the phase.

The worker sends the name, detectors use the traits, and views use the colour. A job may change the bounds of a phase
(``[phases.<name>]``, :meth:`rrl.core.run_spec.Limits.phase`). A role may report other phases. A replica that stays in
such a phase for long only gets a warning, unless ``[phases.<name>]`` says how long the phase may last.

The bounds are wide, since a deadline that is too short restarts a healthy replica again and again. A deadline that is
too long only delays the detection of a hang. NVRx waits 3600 s for the first heartbeat and 2700 s for each further
heartbeat (docs/sources.md).
"""

from __future__ import annotations

from math import inf

from msgspec import Struct


class Phase(Struct, frozen=True):
    """Traits of a phase.

    ``shortest`` and ``longest`` (s) bound the adaptive no-progress deadline. Until a first pass of the phase has been
    measured, the deadline is ``longest`` for a replica that is not idle.
    """

    name: str
    progresses: bool = False
    """True if progress (tokens, samples, steps) must be reported during the phase."""
    computes: bool = False
    """True if the GPU must not be idle during the phase."""
    waits_for: str | None = None
    """What the phase waits for: a kind of roles, or a command by its name (``RoleSpec.awaited_as``). A stall is
    attributed to the end of the chain of waiting replicas."""
    idle_cause: str = ""
    """Name, for people, of what a replica in this phase waits for; time in the phase counts as idle. If empty, the
    replica counts as working, unless it reports another replica or role for which it waits."""
    own_work: bool = False
    """True if a replica may also do work of its own in this phase, although the phase waits for a role. Missing
    progress in such a phase is evidence of a failure only after the deadline."""
    uses_storage: bool = False
    """True if the replica reads or writes files during the phase, so that it may have to wait for storage."""
    calls_services: bool = False
    """True if the user's code runs during the phase and may call services outside of the run, such as a judge. A
    replica that does not use its CPU may then be waiting for such a service."""
    useful: bool = False
    """True if the phase counts as effective training time (RobustRL's ETTR counts both rollout and actor update)."""
    shortest: float = 60.0
    longest: float = 900.0
    """Upper bound of the no-progress deadline in seconds. With inf there is no deadline, and only a stall of the whole
    run is a failure."""
    colour: str = "white"


class PhaseSpec(Struct, frozen=True):
    """The settings of a phase in job.toml.

    None keeps the value in :data:`PHASES`; for a phase that is not there, the default of :class:`Phase`.
    """

    shortest: float | None = None
    longest: float | None = None
    progresses: bool | None = None
    waits_for: str | None = None


BETWEEN = "between"
"""Phase of a replica outside of all phases that its role reports: usually short, but it may contain an evaluation."""
STANDBY = "standby"
"""Phase of a standby process until it is promoted: no replica waits for it, and it need not make progress."""
ASLEEP = "asleep"
"""Phase of a guest that has no weights and no cache in the memory of the GPUs, until the trainer lends them."""
LEND = "lend"
"""Phase of a trainer whose GPUs are lent to the guests of its nodes."""
STOPPING = "stopping"
"""Phase of a worker that has left or is leaving the run (Goodbye), while its command may go on."""
WAIT_DATA = "wait_data"
"""Phase of a trainer that requests data from the store until it gets data."""
WAIT_EXTERNAL = "wait_external"
"""Phase of a role that waits for a service outside of the run (``rrl.waiting``)."""
_HOUR = 3600.0

_ALL = (
    Phase("starting", uses_storage=True, longest=600.0, colour="cyan"),
    Phase(BETWEEN, shortest=600.0, longest=6 * _HOUR, colour="bright_black"),
    Phase(
        "loading_weights", waits_for="trainer", idle_cause="weights", own_work=True, uses_storage=True, colour="cyan"
    ),
    Phase("wait_weights", waits_for="trainer", idle_cause="weights", colour="yellow"),
    Phase("wait_work", waits_for="trajectories", idle_cause="work", useful=True, colour="bright_black"),
    Phase(WAIT_DATA, waits_for="rollout", idle_cause="rollouts", useful=True, colour="bright_black"),
    # calls of tools take minutes; a rollout that supports the probe is judged by its reply long before this deadline
    # (health/detection/detectors/probing.py)
    Phase("generate", progresses=True, computes=True, useful=True, shortest=300.0, longest=_HOUR, colour="green"),
    # a step with an evaluation takes far longer than the baseline
    Phase("train", computes=True, useful=True, shortest=600.0, longest=6 * _HOUR, colour="green"),
    # shared storage may stall for minutes
    Phase("checkpoint", uses_storage=True, useful=True, shortest=300.0, longest=_HOUR, colour="blue"),
    Phase("publish", uses_storage=True, useful=True, shortest=300.0, longest=_HOUR, colour="blue"),
    # there may be a backlog, or a slow judge model
    Phase("score", progresses=True, calls_services=True, useful=True, shortest=300.0, longest=_HOUR, colour="green"),
    # code of the user runs, with tools that take minutes; the timeout of an attempt ends code that never returns
    Phase("act", progresses=True, calls_services=True, useful=True, shortest=1500.0, longest=_HOUR, colour="green"),
    Phase("wait_turn", waits_for="rollout", idle_cause="rollouts", useful=True, colour="bright_black"),
    # the role itself reports what it waits for, so only a deadline can detect that the service never answers. Judges
    # that limit the rate of their clients make them wait for up to 14 min, and several such waits may follow each
    # other.
    Phase(WAIT_EXTERNAL, idle_cause="external", useful=True, shortest=_HOUR, longest=_HOUR, colour="yellow"),
    # the store fsyncs to shared storage
    Phase("serve", uses_storage=True, useful=True, shortest=300.0, longest=inf, colour="green"),
    Phase(STANDBY, longest=inf, colour="bright_black"),
    Phase(ASLEEP, longest=inf, colour="bright_black"),
    Phase(LEND, waits_for="rollout", useful=True, colour="blue"),
    Phase(STOPPING, colour="magenta"),
)

PHASES: dict[str, Phase] = {phase.name: phase for phase in _ALL}


def phase(name: str) -> Phase:
    """Return the declared phase, or a phase without traits for an undeclared name."""
    return PHASES.get(name) or Phase(name)


def idle_cause(name: str, waits_for: str | None) -> str:
    """Return the name, for people, of what a replica in phase ``name`` waits for; empty if it works.

    ``waits_for`` is the replica, or what a phase may wait for, that the replica reports; None if it reports nothing.
    """
    if name == LEND:  # its GPUs work, although it waits for the store
        return ""
    return phase(name).idle_cause or (waits_for or "").partition("/")[0]


OTHER_PHASE = "other"
"""Name under which a clock counts the phases beyond :data:`MAX_CLOCK_ENTRIES`."""
MAX_CLOCK_ENTRIES = 32
"""Maximum number of entries in the reading of a clock. A role may use any phase names; rrl's own roles use seven."""


class PhaseTime(Struct, frozen=True, array_like=True):
    """The time that processes spent in one phase, either at work or waiting for one cause."""

    phase: str
    idle_cause: str
    """What the processes waited for; empty for time in which they worked."""
    ns: int


class ClockReading(Struct, frozen=True, array_like=True):
    """The time of one process since it joined, by phase and idle cause. The times add up to its lifetime so far."""

    began: int
    """Time (ns since the node's boot) at which the process joined, which distinguishes the processes of one
    incarnation."""
    done: int
    """Number of units of work that the process has reported as progress."""
    times: tuple[PhaseTime, ...]
