"""The objects that the worker API hands to a role: weight versions, leased work and leased scoring."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.types import Version
from ...transport.weights.manifest import TensorSpec
from ...transport.weights.store import StoredVersion
from ..trajectories.types import Item, Score, Segment, ToScore
from .connection import ManagerConnection


class NewWeights:
    """A complete weight version.

    ``flat`` is read-only memory that holds the tensors at the offsets in ``tensors``. It stays valid as long as this
    object is referenced.
    """

    def __init__(self, stored: StoredVersion) -> None:
        self._stored = stored
        self.version: Version = stored.manifest.version
        self.manifest = stored.manifest
        self.tensors: tuple[TensorSpec, ...] = stored.manifest.tensors
        self.flat: memoryview = stored.flat


class WorkLease:
    """Trajectories leased to this rollout: each is a prompt and the tokens that were already generated for it."""

    def __init__(self, connection: ManagerConnection, items: tuple[Item, ...]) -> None:
        self._connection = connection
        self.items = items

    def append(self, segments: Sequence[Segment], finished: Sequence[int] = ()) -> tuple[int, ...]:
        """Add tokens to trajectories, durably, and count them as progress.

        Args:
            segments: the new tokens, each under the weight version that generated them.
            finished: ids of the trajectories that are complete with these tokens.

        Returns:
            The ids of trajectories that are no longer leased to this incarnation; stop working on them.
        """
        lost = self._connection.call_store(self._connection.store.append(segments, finished))
        self._connection.progress(sum(len(segment.tokens) for segment in segments))
        return lost


class ScoringLease:
    """Complete trajectories leased for scoring. If scoring is slow, call :meth:`Worker.progress` after each score."""

    def __init__(self, connection: ManagerConnection, items: tuple[ToScore, ...]) -> None:
        self._connection = connection
        self.items = items
        self._done_before = connection.status.done
        self._posted = 0

    def post(self, scores: Sequence[Score], failed: dict[int, str] | None = None) -> None:
        """Record scores durably, and report them as progress unless the role has already reported it itself.

        Args:
            scores: one score per trajectory.
            failed: for each trajectory that cannot be scored, the reason. The group of such a trajectory is dropped;
                the trajectory is not scored zero.
        """
        self._connection.call_store(self._connection.store.post_scores(scores, failed))
        self._posted += len(scores) + len(failed or {})
        reported = self._connection.status.done - self._done_before
        self._connection.progress(max(0, self._posted - reported))
