"""A trainer and a rollout without a model, at the pace of GPUs that this machine lacks (``python -m``).

Both are programs of a user's own over the worker API, so that two cores stand for dozens of GPUs. Everything else is
rrl's own: manager, store, leases, weights by pull, rewards, nodes. The trainer takes ``--step-s`` for each step. A
rollout has ``--places`` places, takes ``--token-s`` for a token, whatever number of answers it runs, and appends
``--chunk`` tokens of each answer at a time. Whenever a place is free, it asks for more work with its next append.

The number of tokens of an answer is drawn when a rollout begins it (:func:`length_of`). With ``--double FIRST LAST``,
the mean doubles while the step of the weights grows from FIRST to LAST, as answers of a reasoning model grow longer.

With ``--record FOLDER``, a rollout notes its unfinished chunk there, so that :func:`unsaved_tokens` can tell what was
lost with it. The lost tokens are those of the chunk that were generated until the kill.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import rrl
from rrl.core.types import Version
from rrl.roles.trajectories import server as store_program
from rrl.roles.trajectories.leases import WorkQueue
from rrl.roles.trajectories.types import Item, Segment

TOKEN, EOS = 2, 1
SPREAD = 0.5
"""Lengths are uniform between 1 - SPREAD and 1 + SPREAD times their mean."""


def scale_at(step: int, double: tuple[int, int]) -> float:
    """Return the factor on the mean length of the answers that weights of this step give."""
    first, last = double
    return 1.0 + min(1.0, max(0.0, (step - first) / (last - first)))


def length_of(item: Item, step: int, tokens: float, double: tuple[int, int], by_prompt: bool) -> int:
    """Return the number of tokens of an answer that is begun with weights of this step.

    With ``by_prompt``, the mean grows with the first digit of the prompt, from 0.1 to 4 times ``tokens``.
    """
    drawn = random.Random(item.trajectory).uniform(1.0 - SPREAD, 1.0 + SPREAD)
    factor = 0.1 * math.exp(math.log(40.0) * (item.prompt[0] - TOKEN) / 9) if by_prompt else 1.0
    return max(1, min(item.max_new, round(tokens * factor * drawn * scale_at(step, double))))


def train(step_s: float) -> None:
    """Train at a pace: the time of a step does not depend on its tokens."""
    with rrl.join() as me:
        publish(me, me.committed or 0)
        for batch in me.batches(after=me.committed or 0):
            with me.phase("train"):
                time.sleep(step_s)
            with me.phase("checkpoint"):
                file = me.checkpoint_dir(batch.number) / "step.json"
                file.write_text(json.dumps(batch.number))
                me.commit(batch.number, [file], {"tokens": float(sum(len(each.tokens) for each in batch.trajectories))})
            publish(me, batch.number)


def publish(me: rrl.Worker, step: int) -> None:
    """Serve the weights of a step: its number."""
    with me.phase("publish"):
        me.publish(step, [("step", "uint8", (8,), memoryview(step.to_bytes(8, "big")))])


def generate(
    places: int, token_s: float, chunk: int, length: Callable[[Item, int], int], record: Path | None = None
) -> None:
    """Generate at a pace; ``length`` returns the number of tokens of an answer that begins with weights of a step."""
    with rrl.join() as me:
        version = Version(0, 0)
        left: dict[int, int] = {}
        offsets: dict[int, int] = {}
        file = None if record is None else record / f"{str(me.launch.incarnation).replace('/', '-')}.json"

        def take(items: tuple[Item, ...]) -> None:
            for item in items:
                offsets[item.trajectory] = sum(len(segment.tokens) for segment in item.so_far)
                left[item.trajectory] = max(1, length(item, version.step) - offsets[item.trajectory])

        due = 0.0
        while not me.stopping.is_set():
            if new := me.new_weights():
                version = new.version
            if not left:
                take(me.lease(places))
                due = time.monotonic()
                continue
            counts = {trajectory: min(chunk, tokens) for trajectory, tokens in left.items()}
            due = max(due, time.monotonic() - chunk * token_s) + max(counts.values()) * token_s
            if file is not None:
                file.with_suffix(".new").write_text(json.dumps([time.time(), token_s, sorted(counts.values())]))
                file.with_suffix(".new").rename(file)
            with me.phase("generate"):
                time.sleep(max(0.0, due - time.monotonic()))
                finished = [trajectory for trajectory, count in counts.items() if count == left[trajectory]]
                segments = [_segment(each, offsets[each], counts[each], each in finished, version) for each in counts]
                free = places - len(left) + len(finished)
                appended = me.start_append(segments, finished, free).finish()
            for trajectory, count in counts.items():
                offsets[trajectory] += count
                left[trajectory] -= count
            for trajectory in (*finished, *appended.lost):
                left.pop(trajectory, None)
            take(appended.leased)


def _segment(trajectory: int, offset: int, count: int, ends: bool, version: Version) -> Segment:
    tokens = (TOKEN,) * (count - 1) + ((EOS,) if ends else (TOKEN,))
    return Segment(trajectory, offset, tokens, (-0.5,) * count, version)


def unsaved_tokens(record: Path, dead_at: float) -> int:
    """Return how many tokens, at most, a rollout had not appended that was found dead at ``dead_at`` (s)."""
    began, token_s, counts = json.loads(record.read_text())
    made = int((dead_at - began) / token_s)
    return sum(min(count, made) for count in counts)


def main() -> None:
    """Run one of the roles; ``trajectories`` is the built-in store with leases first come, first served."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("role", choices=("trainer", "rollout", "trajectories"))
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--places", type=int, default=8)
    parser.add_argument("--token-s", type=float, default=0.025)
    parser.add_argument("--tokens", type=float, default=32.0, help="mean number of tokens of an answer")
    parser.add_argument("--chunk", type=int, default=8)
    parser.add_argument("--double", type=int, nargs=2, default=(10**9, 10**9 + 1))
    parser.add_argument("--by-prompt", action="store_true", help="lengths depend on the prompt's first digit")
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    if given.role == "trainer":
        train(given.step_s)
    elif given.role == "trajectories":
        WorkQueue.by_length = property(lambda _: False)  # type: ignore[assignment,method-assign]
        store_program.main()
    else:

        def length(item: Item, step: int) -> int:
            return length_of(item, step, given.tokens, tuple(given.double), given.by_prompt)

        generate(given.places, given.token_s, given.chunk, length, given.record)


if __name__ == "__main__":
    main()
