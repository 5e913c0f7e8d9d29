"""The built-in rollout: load new weights, lease work, sample, append the segments. Run by ``python -m``."""

from __future__ import annotations

import gc

gc.disable()  # garbage collections would search a million objects of the imports, none of which can be freed

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

import rrl

from ...config.import_paths import ENGINES
from ...config.model_folder import why_unsupported
from ...core.types import slot_of
from ..launcher.end_report import exits_on_invalid_config
from ..lending.baton import GuestBaton
from ..models.policy import compute_dtype, skeleton
from ..models.tensors import unpack
from ..models.tokenizer import open_tokenizer
from ..trajectories.types import Segment
from ..worker.work_items import PendingAppend, PendingLease
from .engine import Engine, load_engine

gc.freeze()  # saves a third of the 4.2 s of processor time for imports and exit
gc.enable()

_log = logging.getLogger("rrl.rollout")

LOG_EVERY_VERSIONS = 10
"""Number of versions between two lines in the log."""
APPEND_INTERVAL_S = 0.1
"""Minimum time (s) between two appends while the engine has no free slots. Each append, however few tokens it contains,
costs the store a flush of 1 to 4 ms (measured), during which the store serves no other process. Besides the tokens of
unfinished segments, a crash loses at most the tokens of this interval."""
LEASE_POLL_S = 0.005
"""Seconds between two looks of a guest whether it got work or is asked for the GPUs."""
WEIGHTS_POLL_S = 0.1
"""Seconds between two looks of a guest for the first weights."""


def main() -> None:
    """Run the built-in rollout until the manager stops it."""
    me = rrl.join()
    build = _builder(me)  # first, so that an invalid configuration is found before the rollout joins
    with me:
        if me.launch.guest:
            generate_when_lent(me, build)
            return
        engine = build()  # built while the first weights are being received
        run(me, engine)
        engine.close()


def run(me: rrl.Worker, engine: Engine, baton: GuestBaton | None = None) -> None:
    """Generate until the manager requests a stop or, with ``baton``, until the trainer asks for it back.

    All generated tokens are durable on return, so that other rollouts can continue the trajectories. With ``baton`` the
    leases have ended, too, and the engine, which has just woken, gets the newest weights first.
    """
    ended = me.stopping.is_set if baton is None else lambda: me.stopping.is_set() or baton.back_requested
    probe, leases = _EngineProbe(engine), _Leases(me, engine, ended, polls=baton is not None)
    appends = _Appends(me, engine, leases)
    me.on_probe(probe.answer)
    if baton is not None:
        _update_weights(me, engine, probe, again=True)
        baton.ready()
    while not ended():
        leases.wait()
        _update_weights(me, engine, probe)
        if engine.has_work:
            with me.phase("generate"):
                _generate(me, engine, probe, appends, leases, ended)
    if baton is not None:
        appends.hand_over()
        leases.hand_over()
        return
    appends.add(*engine.flush())
    appends.send()
    appends.receive()


def generate_when_lent(me: rrl.Worker, build: Callable[[], Engine]) -> None:
    """Generate as a guest: whenever the trainer lends the GPUs of this slot, until the manager requests a stop.

    The engine is built when the GPUs are lent for the first time; before, this process has nothing on a GPU. Weights
    are received at all times. An exception of the engine ends the process, and with it what it holds.
    """
    engine: Engine | None = None
    baton: GuestBaton | None = None

    def stopping() -> bool:
        me.answer_probe()
        return me.stopping.is_set()

    while True:
        me.on_probe(lambda: "the guest waits for the trainer to lend the GPUs")
        with me.phase("asleep"):
            while baton is None and not stopping():
                if me.new_weights(again=True) is None:
                    time.sleep(WEIGHTS_POLL_S)
                else:  # from now on the guest can generate
                    slot = slot_of(me.launch.incarnation.replica)
                    baton = GuestBaton(me.run_dir.id, me.node, slot, me.keys.secret, me.launch.incarnation)
            if baton is None or not baton.wait_until_ours(stopping):
                break
        if engine is None:
            with me.phase("starting"):
                engine = build()
                _update_weights(me, engine, _EngineProbe(engine), again=True)
                engine.sleep()  # an engine that does not survive this must not get work
        with me.phase("loading_weights"):
            engine.wake()
        run(me, engine, baton)
        engine.sleep()
        baton.give_back()
    if engine is not None:
        engine.close()
    if baton is not None:
        baton.close()


def _generate(
    me: rrl.Worker, engine: Engine, probe: _EngineProbe, appends: _Appends, leases: _Leases, ended: Callable[[], bool]
) -> None:
    """Generate until no work is left or the end is requested; lease more work as soon as there are free slots."""
    while engine.has_work and not ended():
        appends.add(*engine.step())
        appends.advance()
        leases.advance()
        _update_weights(me, engine, probe)  # after the lease request, which states the newest received weights


class _Leases:
    """The requests of a rollout for work, except those that its appends contain.

    New turns of agents appear while the engine samples other turns. So while the engine has free slots, a request waits
    at the store. Without this request, a new turn would wait until the next append, which is up to a segment of tokens
    later. In a job without agents all work exists before a rollout requests it, so no request waits while the engine
    has work.

    With ``polls`` the rollout waits for work only until ``ended`` returns True.
    """

    def __init__(self, me: rrl.Worker, engine: Engine, ended: Callable[[], bool], *, polls: bool) -> None:
        self._me, self._engine, self._ended, self._polls = me, engine, ended, polls
        self._work_appears = me.job.agents is not None or me.job.endpoint is not None
        self._open: PendingLease | None = None

    @property
    def requested(self) -> int:
        """The number of free slots for which the open request asks the store; 0 without an open request."""
        return 0 if self._open is None else self._open.at_most

    def wait(self) -> None:
        """Wait for work, and give it to the engine."""
        if self._open is None and not self._polls:
            self._engine.add(self._me.lease(self._engine.free_slots))
            return
        with self._me.phase("wait_work"):
            if self._open is None:
                self._open = self._me.start_lease(self._engine.free_slots)
            while self._polls and not self._open.answered:
                if self._ended():
                    return
                self._me.answer_probe()
                time.sleep(LEASE_POLL_S)
            self._receive(self._open)

    def advance(self) -> None:
        """Give the leased work to the engine, and request more if there are free slots; called between two steps."""
        if self._open is not None and self._open.answered:
            self._receive(self._open)
        if self._work_appears and self._open is None and self._engine.free_slots:
            self._open = self._me.start_lease(self._engine.free_slots)

    def hand_over(self) -> None:
        """Give back what the open request has leased meanwhile."""
        if self._open is not None and self._open.finish():
            self._me.hand_over(())
        self._open = None

    def _receive(self, answer: PendingLease) -> None:
        self._open = None
        self._engine.add(answer.finish())


class _Appends:
    """The appends of a rollout, each with a request for work if the engine has free slots.

    The engine continues to generate while the store makes an append durable. But if the engine has free slots, the
    engine waits for the store's answer, because a slot that stays empty for a step can cost more than a round trip to
    the store. At most one append is open, so the store gets the tokens of a trajectory in their order.
    """

    def __init__(self, me: rrl.Worker, engine: Engine, leases: _Leases) -> None:
        self._me, self._engine, self._leases = me, engine, leases
        self._segments: list[Segment] = []
        """Segments that were not sent yet."""
        self._finished: list[int] = []
        """Complete trajectories that were not reported yet."""
        self._open: PendingAppend | None = None
        self._sent_at = time.monotonic()

    def add(self, segments: Iterable[Segment], finished: Iterable[int]) -> None:
        """Add the segments that a step of the engine returned."""
        self._segments += segments
        self._finished += finished

    def advance(self) -> None:
        """Send the appends that are due, and pass answers on to the engine; called between two steps."""
        if self._open is not None and self._open.answered:
            self.receive()
        if not self._segments and not self._finished:
            return
        if self._engine.free_slots or time.monotonic() >= self._sent_at + APPEND_INTERVAL_S:
            self.send()
            if self._engine.free_slots:
                self.receive()

    def send(self) -> None:
        """Append the added segments, once the previous append was answered."""
        self.receive()
        if self._segments or self._finished:
            lease = 0 if self._me.stopping.is_set() else max(0, self._engine.free_slots - self._leases.requested)
            self._open = self._me.start_append(self._segments, self._finished, lease)
            self._segments, self._finished = [], []
            self._sent_at = time.monotonic()

    def hand_over(self) -> None:
        """Append everything that was generated, and end all leases; called instead of a last :meth:`send`."""
        self.receive()
        self.add(*self._engine.flush())
        self._me.hand_over(self._segments, self._finished)
        self._segments, self._finished = [], []

    def receive(self) -> None:
        """Wait for the answer to the open append, if there is one, and pass it on to the engine."""
        if self._open is None:
            return
        lost, leased = self._open.finish()
        self._open = None
        self._segments = [segment for segment in self._segments if segment.trajectory not in lost]
        self._finished = [trajectory for trajectory in self._finished if trajectory not in lost]
        self._engine.abort(lost)
        self._engine.add(leased)


def _update_weights(me: rrl.Worker, engine: Engine, probe: _EngineProbe, *, again: bool = False) -> None:
    """Load new weights, if there are any; running trajectories continue with them.

    With ``again`` the newest weights are loaded even if they were loaded before.
    """
    if new := me.new_weights(again=True) if again else me.new_weights():
        with me.phase("loading_weights"):
            engine.load(new.version, unpack(new.tensors, new.flat))
            engine.probe()
        probe.loaded = True
        if new.version.step % LOG_EVERY_VERSIONS == 0:
            _log.info("loaded weights %s", new.version)


class _EngineProbe:
    """Answers the manager's probe by generating a token.

    :meth:`answer` is called between two steps and while the rollout waits for work, always in the engine's thread. So
    if this thread hangs, the probe remains unanswered.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.loaded = False

    def answer(self) -> str:
        """Generate a token, if weights are loaded, and return a text for people about the result."""
        if not self.loaded:
            return "no weights have been loaded yet"
        self._engine.probe()
        return "the engine generated a token"


def _builder(me: rrl.Worker) -> Callable[[], Engine]:
    """Return the function that builds the engine.

    Ends the process with exit code 2 and a message of one line if the configuration is invalid.
    """
    torch.set_num_threads(me.rollout.threads)
    with exits_on_invalid_config():
        spec, tokenizer = me.job.model, open_tokenizer(me.job.model)
        row, path = ENGINES.get(me.rollout.engine), spec.path
        needed = path is None or why_unsupported(Path(path)) is None or (row is not None and row.builds_model)
        model = skeleton(spec, tokenizer.size, compute_dtype(spec)) if needed else None
    return load_engine(me, model, tokenizer)


if __name__ == "__main__":
    main()
