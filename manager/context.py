"""The objects that all components of a manager share: the run directory, the state, the monitor and connections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..core.run_dir import RunDir
from ..core.types import Incarnation
from ..health.detection.health_monitor import HealthMonitor
from ..transport.control.endpoints import Send
from .model.events import Event
from .model.state import State


@dataclass(frozen=True, slots=True)
class PeerConnections:
    """The connections on which the manager sends messages to the processes of a run."""

    workers: dict[Incarnation, bytes] = field(default_factory=dict)
    """Connection of each incarnation's worker."""
    steps: dict[str, bytes] = field(default_factory=dict)
    """Connection of each step's first process (or agent), by the step's tag."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """The objects that all components of a manager share: data of the run, and functions for events and messages.

    The manager creates the context when it opens the run, and passes it to each component.
    """

    run_dir: RunDir
    """Directory of the run on shared storage."""
    monitor: HealthMonitor
    """Last observations of replicas and nodes, from which the detectors derive findings."""
    state: Callable[[], State]
    """Returns the newest state."""
    record: Callable[[Event], None]
    """Appends an event to the journal and applies it to the state; the event is durable after the next flush."""
    send: Send
    """Sends a message to a connection. With a request id the message is the reply to that request; with None it is
    not."""
    now: Callable[[], float]
    """Returns the manager's time (s), which never goes back."""
    connections: PeerConnections = field(default_factory=PeerConnections)
    """Connections of workers, of the first process of each gang, and of agents."""
