"""What a shadow does not take while it stands by, and takes when it becomes something: the CPU, and which GPUs.

It imports and builds beside roles that work, so its session is nice to all others (the autogroup of sched(7)), which
its owner may make it and take back. Not SCHED_IDLE: that nobody may leave without CAP_SYS_NICE or an RLIMIT_NICE that
few sites give, and beside roles that use every core it is never ready. Where each step has a CPU cgroup of its own,
that shares the cores between them, and this changes nothing.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path

from rrl.roles.environment import GPUS_ENV, VISIBLE

NICE = 10
"""what nice(1) adds; a tenth of a core beside a busy loop, 1.6 % with 19 (measured)"""
_ORDINARY = 0
_AGAIN = 0.03
"""s after which the kernel, which takes ten such changes a second from all of a machine's users, is asked again"""
_WITHIN = 1.0


def make_way(leader: int) -> None:
    """The session that this process leads runs when others leave it room, until it steps up."""
    _autogroup(leader, NICE)


def step_up() -> None:
    """This process's session is as any other again."""
    _autogroup(os.getpid(), _ORDINARY)


def _autogroup(pid: int, nice: int) -> None:
    until = time.monotonic() + _WITHIN
    while True:
        try:
            Path(f"/proc/{pid}/autogroup").write_text(str(nice))
            return
        except OSError as error:
            if error.errno != errno.EAGAIN:  # a kernel without, or a process that has ended
                return
            if time.monotonic() > until:
                print(f"rrl: the session of {pid} could not be made nice {nice}", file=sys.stderr, flush=True)
                return
            time.sleep(_AGAIN)


def keep_gpus(
    chosen: tuple[str, ...], held: tuple[str, ...], environ: MutableMapping[str, str] = os.environ
) -> tuple[str, ...]:
    """A trainer's shadow sees all GPUs of its node; ``chosen`` of them, as :func:`rrl.roles.gpus.held_gpus` names them,
    are what it works with from now on. Nothing of this process may have touched a GPU before. A rollout's has its own
    from its start, works with them already, and keeps them. Returns what it holds now."""
    if not chosen or chosen == held:
        return held
    given = environ.get(GPUS_ENV, "").split(",")
    if not set(chosen) <= set(given):  # UUIDs, which CUDA takes as they are
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
        return chosen
    places = [given.index(name) for name in chosen]
    for name in (GPUS_ENV, *VISIBLE):
        listed = environ.get(name, "").split(",")
        if len(listed) == len(given):
            environ[name] = ",".join(listed[place] for place in places)
    return chosen
