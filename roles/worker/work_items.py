"""The objects that the worker API hands to a role: weight versions, leased work and leased scoring."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from ...core.run_spec import ExtraSpec
from ...core.text import shortened
from ...core.types import Version
from ...transport.weights.manifest import TensorSpec
from ...transport.weights.store import StoredVersion
from ..launcher.end_report import Misuse
from ..trajectories.client import Appended
from ..trajectories.durable.records import pack
from ..trajectories.types import Item, PostScores, Score, Segment, ToScore
from .connection import ManagerConnection

_MAX_ENDED = 65_536
"""Maximum number of ended trajectories of this process that are remembered. They are remembered because a rollout may
append to a trajectory once more before it reads that the trajectory is lost, which is no mistake. A remembered
trajectory takes about 100 bytes."""
_MAX_NAMED = 5
"""Maximum number of trajectories that an error message names."""


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


class _Leased(Struct):
    """A trajectory leased to this process."""

    group: int
    length: int
    """Number of tokens after the prompt, including the tokens that earlier incarnations appended."""
    limit: int
    """Maximum value of ``length``."""
    segments: dict[int, int]
    """Hash of the tokens of each segment so far, by the offset of the segment."""
    extras: set[str]
    """Names of the extras that the segments so far have."""


class LeasedTrajectories:
    """The trajectories leased to this process, and how far it has extended each of them.

    This class also checks what a role appends to the trajectories, because the store cannot tell a mistake in the
    role's code from a segment that arrives too late, after another rollout has continued its trajectory. In both cases
    the store only answers that the trajectory is not leased to the sender.

    Args:
        extras: The extras that the job declares (``[sampling.extras]``).
    """

    def __init__(self, extras: Mapping[str, ExtraSpec]) -> None:
        self._extras = extras
        self._leased: dict[int, _Leased] = {}
        self._ended: dict[int, bool] = {}
        """The newest ended trajectories, in the order of their end. The value is True if this process has listed the
        trajectory as complete, False if it is lost or has the maximum number of tokens."""

    @property
    def ids(self) -> list[int]:
        """The trajectories that are neither complete nor lost, in order."""
        return sorted(self._leased)

    def add_new(self, items: Iterable[Item]) -> tuple[Item, ...]:
        """Add trajectories that were leased, and return those that this process does not have yet.

        A trajectory can arrive twice: while a :class:`PendingLease` waits, the answer to a :class:`PendingAppend` may
        contain trajectories that the store has just leased to the :class:`PendingLease`.
        """
        new = tuple(item for item in items if item.trajectory not in self._leased)
        self.add(new)
        return new

    def add(self, items: Iterable[Item]) -> None:
        """Add trajectories that were leased, perhaps again."""
        for item in items:
            length = sum(len(segment.tokens) for segment in item.so_far)
            segments = {segment.offset: hash(tuple(segment.tokens)) for segment in item.so_far}
            extras = {name for segment in item.so_far for name in segment.extras}
            self._leased[item.trajectory] = _Leased(item.group, length, length + item.max_new, segments, extras)
            self._ended.pop(item.trajectory, None)

    def check(self, segments: Sequence[Segment], finished: Sequence[int]) -> None:
        """Check what a role wants to append.

        Segments that were appended before, and segments of lost trajectories, are not checked: the store handles them.

        Raises:
            Misuse: a segment is malformed or does not continue its trajectory; a trajectory was never leased to this
                process, or is complete already; a trajectory without tokens is listed as complete.
        """
        lengths: dict[int, int] = {}
        once: set[tuple[int, str]] = set()
        for segment in segments:
            leased = self._find(segment.trajectory, "a segment")
            name = f"segment of trajectory {segment.trajectory}"
            try:
                pack(segment, self._extras)
            except (TypeError, ValueError, OverflowError, AttributeError) as error:
                raise Misuse(f"{name}: {error}") from error
            if isinstance(segment.offset, float | str | None):
                raise Misuse(f"{name}: its offset is {shortened(segment.offset)}, which is not an int")
            if leased is None:
                continue
            name, count = f"{name} (group {leased.group})", len(segment.tokens)
            length = lengths.get(segment.trajectory, leased.length)
            if not count:
                raise Misuse(f"{name}: it has no tokens")
            if segment.offset != length:
                if leased.segments.get(segment.offset) == hash(tuple(segment.tokens)):
                    continue
                raise Misuse(
                    f"{name}: its offset is {segment.offset}, expected {length}, the number of tokens that the"
                    " trajectory has: those of item.so_far, and those appended since"
                )
            if length + count > leased.limit:
                raise Misuse(
                    f"{name}: it has {count} tokens, but only {leased.limit - length} may still be appended"
                    " (item.max_new less the tokens appended since the lease)"
                )
            lengths[segment.trajectory] = length + count
            for key in (key for key in segment.extras if self._extras[key].per_trajectory is not None):
                if key in leased.extras or (segment.trajectory, key) in once:
                    raise Misuse(f"{name}: extra {key!r} is in an earlier segment; a trajectory has it once")
                once.add((segment.trajectory, key))
        for trajectory in finished:
            leased = self._find(trajectory, "finished")
            if leased is not None and not lengths.get(trajectory, leased.length):
                raise Misuse(f"finished: trajectory {trajectory} (group {leased.group}) has no tokens; append one")

    def appended(self, segments: Sequence[Segment], finished: Sequence[int], lost: Sequence[int]) -> None:
        """Record the appended segments, and the trajectories that have become complete or lost."""
        ended = dict.fromkeys(finished, True) | dict.fromkeys(lost, False)
        for segment in segments:
            leased = self._leased.get(segment.trajectory)
            if leased is not None and segment.offset == leased.length:
                leased.length += len(segment.tokens)
                leased.segments[segment.offset] = hash(tuple(segment.tokens))
                leased.extras.update(segment.extras)
                if leased.length == leased.limit:
                    ended.setdefault(segment.trajectory, False)
        for trajectory in ended:
            self._leased.pop(trajectory, None)
        self._ended |= ended
        while len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def _find(self, trajectory: int, where: str) -> _Leased | None:
        """Return a leased trajectory, or None if it is lost or full. Raises Misuse if it is complete or not leased."""
        if isinstance(trajectory, int) and (trajectory in self._leased or trajectory in self._ended):
            if self._ended.get(trajectory, False):
                raise Misuse(
                    f"{where}: trajectory {trajectory} is complete already: an earlier append listed it in finished"
                )
            return self._leased.get(trajectory)
        named = ", ".join(map(str, self.ids[:_MAX_NAMED])) + (", ..." if len(self._leased) > _MAX_NAMED else "")
        leased = f"the leased trajectories are {named}" if named else "no trajectory is leased"
        raise Misuse(
            f"{where}: {shortened(trajectory)} is not the id of a trajectory that was leased to this process"
            f" (item.trajectory); {leased}"
        )


class WorkLease:
    """Trajectories leased to this rollout: each is a prompt and the tokens that were already generated for it."""

    def __init__(self, connection: ManagerConnection, items: tuple[Item, ...], leased: LeasedTrajectories) -> None:
        self._connection = connection
        self._leased = leased
        self.items = items

    def append(self, segments: Sequence[Segment], finished: Sequence[int] = ()) -> tuple[int, ...]:
        """Add tokens to trajectories, durably, and count them as progress.

        Args:
            segments: the new tokens, each under the weight version that generated them.
            finished: ids of the trajectories that are complete with these tokens.

        Returns:
            The ids of trajectories that are no longer leased to this incarnation; stop working on them.

        Raises:
            ValueError: a segment is malformed, or its offset is not the number of tokens that its trajectory has;
                a trajectory was never leased to this process.
        """
        return PendingAppend(self._connection, self._leased, segments, finished, 0).finish().lost


class PendingAppend:
    """An append that the store answers while the rollout continues to generate; created by ``me.start_append``.

    A rollout must call :meth:`finish` before it starts the next append. So tokens are appended in their order, and no
    tokens are appended to a trajectory that is lost.

    Raises:
        ValueError: as for :meth:`WorkLease.append`.
    """

    def __init__(
        self,
        connection: ManagerConnection,
        leased: LeasedTrajectories,
        segments: Sequence[Segment],
        finished: Sequence[int],
        at_most: int,
        *,
        hands_over: bool = False,
    ) -> None:
        leased.check(segments, finished)
        leased.appended(segments, finished, leased.ids if hands_over else ())
        self._connection, self._leased = connection, leased
        self._tokens = sum(len(segment.tokens) for segment in segments)
        request = connection.store.append_and_lease(segments, finished, at_most, leased.ids, hands_over=hands_over)
        self._answer = connection.submit(request)

    @property
    def answered(self) -> bool:
        """True if :meth:`finish` does not wait."""
        return self._answer.done()

    def finish(self) -> Appended:
        """Wait until the tokens are durable, count them as progress, and return what is lost and what is leased.

        To be called once. If a trajectory is lost, tokens that were generated for it since this append must not be
        appended. A lost trajectory may also be among the leased ones, with another prefix.
        """
        appended = self._connection.await_store(self._answer)
        self._leased.appended((), (), appended.lost)
        leased = self._leased.add_new(appended.leased)
        self._connection.progress(self._tokens)
        return Appended(appended.lost, leased)


class PendingLease:
    """A request for work that waits at the store while the rollout generates; created by ``me.start_lease``.

    It serves a rollout that has free places for work that may appear at any moment, such as turns of agents.
    ``at_most`` is the number of trajectories that it requests. Appends may lease other trajectories meanwhile.
    """

    def __init__(self, connection: ManagerConnection, leased: LeasedTrajectories, at_most: int, wait_s: float) -> None:
        self.at_most = at_most
        self._connection, self._leased = connection, leased
        self._answer = connection.submit(connection.store.lease(at_most, wait_s, None))

    @property
    def answered(self) -> bool:
        """True if :meth:`finish` does not wait."""
        return self._answer.done()

    def finish(self) -> tuple[Item, ...]:
        """Wait for the answer, and return what is leased; empty if there was no work in time. To be called once."""
        items = self._connection.await_store(self._answer)
        return self._leased.add_new(items)


class ScoringLease:
    """Complete trajectories leased for scoring. If scoring is slow, call :meth:`Worker.progress` after each score."""

    def __init__(self, connection: ManagerConnection, items: tuple[ToScore, ...]) -> None:
        self._connection = connection
        self.items = items
        self._done_before = connection.status.done
        self._posted = 0

    def post(self, scores: Sequence[Score], failed: dict[int, str] | None = None, faulty: Sequence[int] = ()) -> int:
        """Record scores durably, and count as progress all scores that the role has not reported as progress itself.

        Args:
            scores: one score per trajectory.
            failed: for each trajectory that cannot be scored, the reason. The group of such a trajectory is dropped;
                the trajectory is not scored zero.
            faulty: trajectories in ``failed`` for which the code of the scorer is at fault, not a service that it uses.

        Returns:
            0 normally. If ``faulty`` is not empty, and faults of the scorer's code have dropped more than half of the
            run's newest groups, the number of these dropped groups. The role should then end.

        Raises:
            ValueError: a score is malformed.
        """
        _check_scores(scores)
        request = self._connection.store.ask(PostScores, tuple(scores), failed or {}, tuple(faulty))
        faulty_groups = self._connection.call_store(request).faulty_groups
        self._posted += len(scores) + len(failed or {})
        reported = self._connection.status.done - self._done_before
        self._connection.progress(max(0, self._posted - reported))
        return faulty_groups


def _check_scores(scores: Sequence[Score]) -> None:
    """Raise Misuse if a score is malformed. The store would drop the request, which would be repeated forever."""
    for one in scores:
        if _is_malformed(one):
            expected = "rrl.Score(trajectory, reward, training) with an int and two numbers; parts has numbers"
            raise Misuse(f"a score is {shortened(one)}; expected {expected}")


def _is_malformed(score: Score) -> bool:
    if isinstance(score.trajectory, float | str | None) or not isinstance(score.parts, dict):
        return True
    numbers = (score.reward, score.training, *score.parts.values())  # scalars of numpy are sent as numbers
    return any(isinstance(each, str | bytes | None) for each in numbers) or not all(
        isinstance(name, str) for name in score.parts
    )
