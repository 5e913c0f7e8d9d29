"""A rollout that does nothing for a while in its first lease, and then works like ``light_rollout``.

``idle_rollout.py simulate SECONDS`` is in a phase of its own, ``idle_rollout.py tool SECONDS`` in ``generate``. In both
it answers probes.
"""

from __future__ import annotations

import sys
import time

import rrl
from rrl.core.types import Version
from rrl.tests.support.light_roles.light_rollout import answer


def main() -> None:
    how, seconds = sys.argv[1], float(sys.argv[2])
    with rrl.join() as me:
        me.on_probe(lambda: "the engine works")
        version, until = Version(0, 0), 0.0
        for work in me.work(at_most=8):
            if new := me.new_weights():
                version = new.version
            until = until or time.monotonic() + seconds
            with me.phase("simulate" if how == "simulate" else "generate"):
                while time.monotonic() < until and not me.stopping.is_set():
                    time.sleep(0.2)
                    me.answer_probe()
            with me.phase("generate"):
                answer(me, work, version)


if __name__ == "__main__":
    main()
