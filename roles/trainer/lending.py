"""Lending: while the trainer would wait for data, the rollouts on its own nodes (guests) use its GPUs.

The trainer lends only before the first part of a step. Rank 0 asks the store by how much the step lacks data
(:class:`.AwaitBalance`), and all members follow its decision. They drop what they have on the GPUs, whose contents the
host copy of the last step has, and the first member of each node (its *leader*) gives the baton of each slot
(:mod:`..lending.baton`) to the guest that sleeps there. When the step is balanced, the leaders take the batons back,
and all members copy the state back. A member has tensors on its GPU only while all batons are held by leaders: the
members wait for each other after the drop, and again before the restore.

Whatever fails while the GPUs are lent ends the process, as any error of the trainer does; the kernel then ends the
connections to the guests, and the leaders of the next incarnation take the batons before they use a GPU.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from statistics import median

import msgspec
import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import rrl

from ...core.phases import LEND, WAIT_DATA
from ...core.types import STORE, Incarnation
from ..lending.baton import LeaderBaton, Taken
from ..snapshots.mapping import Pinning, anonymous_memory
from ..trajectories.batches import Part
from ..trajectories.types import Balance
from ..worker.connection import Stopping
from .async_saver import AsyncSaver
from .host_buffers import Layout, shard_of
from .learner import Learner
from .process_group import Gang, blocked_on_rank0, parts

_log = logging.getLogger("rrl.trainer")

_POLL_S = 1.0
"""Seconds that a request of rank 0 waits for the balance of a step. Then the members compare their stop requests."""
_LEARNED_OVER = 5
"""Number of steps, and of hand-overs, whose median is the learned time."""
_JUDGED_AFTER = 3
"""Number of hand-overs that are not judged, so that a slow one among the first does not end the lending."""
_WORTH = 2.0
"""A step lends if it lacks data for more than this multiple of a hand-over. In simulations 1, 2 and 4 were alike for
hand-overs up to 5 % of a step; with longer ones, 4 lost half of the gain and 1 gained nothing."""
_FREE_TIMEOUT_S = 60.0
"""Seconds to wait for the memory of a process that has ended: 0.4 to 26 s after a SIGKILL were reported, 26 s with
243 GB of pinned host memory (sglang issue 32829)."""
_FREE_POLL_S = 0.1
_GUEST_POLL_S = 0.2
"""Seconds between two questions whether a guest has started, while nothing else generates."""
_ASLEEP_BYTES = 8 * 2**30
"""Memory that a guest which sleeps may keep on a GPU, together with this process's context: 0.8 to 7 GiB were reported
(vLLM issue 47654)."""
_FREE_TOLERANCE_BYTES = 256 * 2**20
"""By how much less memory counts as the same: the driver's own use varies."""
_LOWER_KEY = "[roles.rollout] vllm.gpu_memory_utilization"
"""The key by which guests use less memory."""


class Learned(Struct, frozen=True):
    """What rank 0 has measured so far; times are in seconds."""

    train_s: float = 0.0
    """Time of a step without waits for data; 0 before the first step."""
    back_s: float = 0.0
    """Time from the request for the GPUs until the trainer can train; 0 before the first hand-over."""
    cost_s: float | None = None
    """Time of a hand-over in both directions; None if there were too few."""
    build_s: float = 0.0
    """Time by which a guest without an engine prolongs the hand-over; 0 before the first."""


class Wish(Struct, frozen=True):
    """What rank 0 wants to do before a step."""

    balanced: bool = False
    """The step can be trained without a wait, as far as the store knows."""
    built: bool = False
    """Lend to guests that have an engine."""
    unbuilt: bool = False
    """Lend to guests that would first have to build their engine."""
    patient: bool = False
    """Wait until there is a guest: without one, nothing may generate."""

    def __bool__(self) -> bool:
        return self.built or self.unbuilt


def judge(balance: Balance, learned: Learned) -> Wish:
    """Decide whether lending gains.

    It does not if the rollouts alone are as fast as the trainer: then they work ahead, and what the step lacks now is
    chance. The first hand-overs are not judged, since their cost is unknown; the very first, in which guests build
    their engines, happens while nothing can be trained yet. Without other rollouts, guests are needed whatever they
    cost.
    """
    short, needed = balance.short_s, balance.alone_s == inf
    if short <= 0 or balance.alone_s <= learned.train_s:
        return Wish(balanced=short <= 0)
    if learned.cost_s is None or needed:
        return Wish(built=True, unbuilt=True, patient=needed)
    built, unbuilt = learned.cost_s, learned.cost_s + learned.build_s
    return Wish(built=short > _WORTH * built, unbuilt=short > _WORTH * unbuilt)


class Batons:
    """The batons of this process's node, if it is the node's leader; none otherwise."""

    def __init__(self, me: rrl.Worker) -> None:
        self._me = me
        self._batons: list[LeaderBaton] = []
        self._lent: list[LeaderBaton] = []
        self.clean = True
        """Whether all processes that had a baton since :meth:`claim` or the first :meth:`lend` said that they sleep."""
        self.builds = False
        """Whether a guest had to build its engine since then."""
        self.wake_s = 0.0
        """Longest time (s) that a guest needed to wake since then."""

    def claim(self, leader: bool) -> None:
        """Take the batons of the node, if this process is its ``leader``; to be called before any use of a GPU.

        Raises:
            Stopping: A stop was requested before the batons were free.
        """
        if leader:
            me = self._me
            slots = range(me.job.guests_on_node)
            self._batons = [LeaderBaton(me.run_dir.id, me.node, slot, me.keys.secret) for slot in slots]
            self._lent = list(self._batons)
            if not self.take():
                raise Stopping

    @property
    def lent(self) -> bool:
        """Whether a guest of this node has its baton, and lives."""
        return any(baton.lent_to is not None for baton in self._lent)

    def sleeping(self) -> tuple[bool, bool]:
        """Return whether guests sleep that have an engine, and whether some do that have none."""
        ready = [baton.guest_has_engine for baton in self._held() if self._is_current(baton.guest)]
        return True in ready, False in ready

    def lend(self, wish: Wish, *, again: bool = False) -> None:
        """Give each baton that is held to the guest that sleeps there, as far as ``wish`` says.

        With ``again``, batons are lent already; that of a guest that has ended is taken first.
        """
        if not again:
            self.clean, self.builds, self.wake_s = True, False, 0.0
        self._take([baton for baton in self._lent if baton.lent_to is None])
        for baton in self._held():
            builds = not baton.guest_has_engine
            if not (wish.unbuilt if builds else wish.built):
                continue
            if baton.lend(self._me.launch.incarnation, self._is_current) is not None:
                self._lent.append(baton)
                self.builds = self.builds or builds

    def take(self) -> bool:
        """Take back all batons that are lent; return False if a stop was requested before all of them are held."""
        self._take(list(self._lent))
        return not self._lent

    def _held(self) -> list[LeaderBaton]:
        return [baton for baton in self._batons if baton not in self._lent]

    def _take(self, batons: Sequence[LeaderBaton]) -> None:
        """Take batons side by side, so that all guests hear it at once."""
        if not batons:
            return

        def take(baton: LeaderBaton) -> Taken:
            return baton.take(self._me.job.tags.handback, self._me.stopping.is_set)

        with ThreadPoolExecutor(len(batons)) as threads:
            for baton, taken in zip(batons, threads.map(take, batons), strict=True):
                if taken.held:
                    self._lent.remove(baton)
                self.clean = self.clean and taken.clean
                self.wake_s = max(self.wake_s, taken.wake_s or 0.0)

    def _is_current(self, guest: Incarnation | None) -> bool:
        """Return whether the guest is current, as far as this process knows."""
        peers = self._me.peers
        peer = None if guest is None or peers is None else peers.peers.get(guest.replica)
        return peer is not None and peer.incarnation == guest


class DeviceState:
    """What this member has on its device, and can do without before a step.

    These are the tensors of the learner, which a host copy has, its gradients, and the frozen weights: the reference
    model, or the base of adapters. The optimizer's step counts and the buffers of the model stay. The tensors' storages
    stay the same objects, of size 0 while they are dropped, so that the views of FSDP remain valid.

    Args:
        learner: The learner, with its reference model if it has one.
        device: The device.
        layout: Positions of the learner's tensors in a host copy.
        pinning: Page-locks the host copy of the frozen weights, if the device is a GPU.
    """

    def __init__(self, learner: Learner, device: torch.device, layout: Layout, pinning: Pinning | None = None) -> None:
        self._learner, self._device, self._layout, self._pinning = learner, device, layout, pinning
        self._tensors = learner.tensors()
        self._models = [learner.model, *filter(None, [learner.reference])]
        frozen = (each for model in self._models for each in model.parameters() if not each.requires_grad)
        self._frozen: dict[str, Tensor] = {str(index): tensor for index, tensor in enumerate(frozen)}
        self._frozen_layout = Layout(self._frozen)
        self._frozen_copy: memoryview | None = None
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []
        self._free_bytes = 0
        """Free memory of the GPU after the last :meth:`drop`."""
        self._reported = False

    def drop(self) -> None:
        """Free the memory; the caller must have a host copy of the learner's tensors."""
        if self._frozen_copy is None and self._frozen:
            self._frozen_copy = anonymous_memory(self._frozen_layout.nbytes)
            if self._pinning is not None:
                self._pinning.pin(self._frozen_copy)
            self._frozen_layout.fill(self._frozen_copy, self._frozen)
        self._learner.discard_gradients()
        for model in self._models:
            _reshard(model)
        held = (*self._tensors.values(), *self._frozen.values())
        for storage in _storages(each for each in held if each.device == self._device):
            self._dropped.append((storage, storage.nbytes()))
            storage.resize_(0)
        if self._device.type == "cuda":
            gc.collect()
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            self._free_bytes = torch.cuda.mem_get_info(self._device)[0]

    def restore(self, copy: memoryview) -> None:
        """Allocate the memory again, and copy the learner's tensors from their host copy."""
        for storage, nbytes in self._dropped:
            storage.resize_(nbytes)
        self._dropped.clear()
        self._layout.load(copy, self._tensors)
        if self._frozen_copy is not None:
            self._frozen_layout.load(self._frozen_copy, self._frozen)

    def await_memory(self) -> None:
        """Wait until as much memory of the GPU is free as after the last :meth:`drop`."""
        await_memory(self._device, self._free_bytes)

    def report_shortage(self) -> None:
        """Report once if there is less memory than the trainer used before it lent the GPU; the trainer goes on."""
        if self._device.type == "cuda" and not self._reported:
            free = torch.cuda.mem_get_info(self._device)[0] + torch.cuda.memory_reserved(self._device)
            needed = torch.cuda.max_memory_reserved(self._device)
            if free < needed:
                self._reported = True
                _log.warning("%s", shortage(free, needed))


def await_memory(device: torch.device, free_bytes: int | None = None) -> None:
    """Wait until ``free_bytes`` of a GPU are free, or all that no guest needs that sleeps; at most a minute.

    A process that was killed may have tensors on the GPU for some time.
    """
    if device.type != "cuda":
        return
    deadline = time.monotonic() + _FREE_TIMEOUT_S
    while time.monotonic() < deadline:
        free, total = torch.cuda.mem_get_info(device)
        if free >= (total - _ASLEEP_BYTES if free_bytes is None else free_bytes - _FREE_TOLERANCE_BYTES):
            return
        time.sleep(_FREE_POLL_S)
    _log.warning("after %g s only %.1f of %.1f GiB of the GPU are free", _FREE_TIMEOUT_S, free / 2**30, total / 2**30)


def shortage(free: int, needed: int) -> str:
    """Return the message about guests that leave ``free`` bytes to a trainer that needs ``needed``."""
    return (
        f"the guests leave {free / 2**30:.1f} GiB of the GPU to the trainer, which used up to {needed / 2**30:.1f} GiB:"
        f" it may run out of memory; lower {_LOWER_KEY}"
    )


def _reshard(model: nn.Module) -> None:
    """Free the gathered parameters; the root module keeps them after a forward pass without gradients."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of the shards of ``tensors``, each once."""
    storages = (shard_of(tensor).untyped_storage() for tensor in tensors)
    return list({storage._cdata: storage for storage in storages}.values())


class _Report(Struct, frozen=True):
    """What a member tells the others before each decision. Only rank 0 has a wish."""

    stop: bool
    wish: Wish = Wish()
    sleeping: tuple[bool, bool] = (False, False)
    """What :meth:`Batons.sleeping` returns."""
    lent: bool = False


class _HandOver(Struct, frozen=True):
    """How one hand-over went in one member; times are in seconds."""

    held: bool
    clean: bool
    builds: bool
    out_s: float
    """From the decision until the guests were told."""
    wake_s: float
    back_s: float = 0.0
    """From the request for the GPUs until the state is back, without the time in which a guest still woke."""


class Lender:
    """Lends the GPUs of all members before a step, if it gains. All members must call each method at the same time.

    Args:
        me: The worker.
        gang: The members of the trainer.
        batons: The batons of this member's node; its leader holds them.
        state: What this member drops.
        saver: Has the host copy of the last step.
    """

    def __init__(self, me: rrl.Worker, gang: Gang, batons: Batons, state: DeviceState, saver: AsyncSaver) -> None:
        self._me, self._gang, self._batons, self._state, self._saver = me, gang, batons, state, saver
        self._train_s, self._back_s, self._cost_s, self._build_s = (deque[float](maxlen=_LEARNED_OVER) for _ in "tbcb")
        self._lent_s = 0.0

    def parts(self, after: int) -> Iterator[Part]:
        """Yield what :func:`.process_group.parts` yields, and lend before the first part of each step."""
        received = parts(self._me, self._gang, after)
        for number in range(after + 1, self._me.job.steps + 1):
            if not self._prepare(number):
                return
            spent, last = 0.0, False
            while not last:
                part = next(received, None)
                if part is None:
                    return
                last, begun = part.last, time.monotonic()
                yield part
                del part  # before the next one is received
                spent += time.monotonic() - begun
            self._train_s.append(spent)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step: for how long it lent (s), and the cost of a hand-over (s) if known."""
        return {"lent_s": self._lent_s} | ({"lend_cost_s": median(self._cost_s)} if self._cost_s else {})

    def until_evaluated(self) -> None:
        """Lend after the last step until its evaluation is settled or a stop is requested; nothing is restored."""
        number = self._me.job.steps + 1
        if self._me.job.eval is not None and (wish := self._await_guests(number)):
            with self._me.phase(LEND):
                self._lend(wish)
                self._until_balanced(number)

    def _prepare(self, number: int) -> bool:
        """Lend before step ``number``, if it gains; return False if a stop was requested."""
        self._lent_s = 0.0
        wish = self._await_guests(number)
        if not wish:
            return wish is not None
        begun = time.monotonic()
        with self._me.phase(LEND):
            copy = self._saver.host_copy()
            self._lend(wish)
            lent = time.monotonic()
            if not self._until_balanced(number):
                return False
            back, batons = time.monotonic(), self._batons
            held = batons.take()
            mine = _HandOver(held, batons.clean, batons.builds, lent - begun, batons.wake_s)
            # after this exchange, no guest has a baton
            others = self._gang.gather(mine, _HandOver)
            if not all(member.held for member in others):
                return False
            if not all(member.clean for member in others):
                self._state.await_memory()
            self._state.restore(copy)
            self._state.report_shortage()
            still_waking = max(0.0, lent + max(member.wake_s for member in others) - back)
            back_s = time.monotonic() - back - still_waking
            self._learn(self._gang.gather(msgspec.structs.replace(mine, back_s=back_s), _HandOver))
        self._lent_s = time.monotonic() - begun
        return True

    def _await_guests(self, number: int) -> Wish | None:
        """Return what to lend before step ``number`` (false if nothing), or None if a stop was requested."""
        rank0 = self._gang.rank == 0
        with self._me.phase(WAIT_DATA) if rank0 else self._me.phase(WAIT_DATA, waits_for=STORE):
            while True:
                reports = self._compare(number, 0.0)
                wish = reports[0].wish
                if any(report.stop for report in reports):
                    return None
                built, unbuilt = (any(flags) for flags in zip(*(report.sleeping for report in reports), strict=True))
                if (wish.built and built) or (wish.unbuilt and unbuilt):
                    return wish
                if not wish.patient:
                    return Wish()
                self._me.stopping.wait(_GUEST_POLL_S)

    def _lend(self, wish: Wish) -> None:
        self._state.drop()
        self._gang.all(True)  # nobody has tensors on a GPU from here on
        self._batons.lend(wish)

    def _until_balanced(self, number: int) -> bool:
        """Wait until the step is balanced, or no guest is left; return False if a stop was requested."""
        while True:
            reports = self._compare(number, _POLL_S)
            wish = reports[0].wish
            if any(report.stop for report in reports):
                return False
            if wish.balanced or not (wish.patient or any(report.lent for report in reports)):
                return True
            self._batons.lend(wish, again=True)

    def _compare(self, number: int, wait: float) -> list[_Report]:
        """Return the reports of all members; ``wait`` is that of rank 0's request to the store."""
        mine, stop = Wish(), self._me.stopping.is_set()
        if self._gang.rank == 0 and not stop:
            learned = self._learned()
            try:
                balance = self._me.await_balance(number, learned.train_s, learned.back_s, wait)
                mine = judge(balance, learned)
            except Stopping:
                stop = True
        report = _Report(stop, mine, self._batons.sleeping(), self._batons.lent)
        with blocked_on_rank0(self._me, self._gang):
            return self._gang.gather(report, _Report)

    def _learned(self) -> Learned:
        return Learned(
            median(self._train_s or [0.0]),
            median(self._back_s or [0.0]),
            median(self._cost_s) if len(self._cost_s) >= _JUDGED_AFTER else None,
            median(self._build_s or [0.0]),
        )

    def _learn(self, members: Sequence[_HandOver]) -> None:
        """Learn from a hand-over, unless a guest was killed or had died.

        The cost of one in which guests built their engines is that of no other.
        """
        if not all(member.clean for member in members):
            return
        out_s, wake_s, back_s = (
            max(getattr(member, name) for member in members) for name in ("out_s", "wake_s", "back_s")
        )
        self._back_s.append(back_s)
        if any(member.builds for member in members):
            self._build_s.append(wake_s)
        else:
            self._cost_s.append(out_s + wake_s + back_s)
