"""A rollout without a model that answers each turn of ``examples/agents.toml`` with a random digit.

The digits are random, so that a turn that is sampled again probably gets another answer than before.
"""

from __future__ import annotations

import random
import time

import rrl
from rrl.core.types import Version
from rrl.roles.trajectories.types import Item, Segment

TURN_SECONDS = 0.02
EOS = 1
DIGITS = range(2, 12)
"""Ids of the pieces 0 to 9."""


def main() -> None:
    with rrl.join() as me:
        version = Version(0, 0)
        for work in me.work():
            if new := me.new_weights():
                version = new.version
            with me.phase("generate"):
                time.sleep(TURN_SECONDS)
                segments = [_answer(item, version) for item in work.items]
                work.append(segments, [segment.trajectory for segment in segments])


def _answer(item: Item, version: Version) -> Segment:
    """Return a whole answer: a digit and the end of sequence.

    No item has tokens yet, because answers are appended whole.
    """
    assert not item.so_far
    return Segment(item.trajectory, 0, (random.choice(DIGITS), EOS), (-2.3, 0.0), version)


if __name__ == "__main__":
    main()
