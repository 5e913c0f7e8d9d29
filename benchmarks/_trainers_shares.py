"""Measures what a rank of 8 receives and computes to read its share of a batch, over what the whole batch takes.

A real store binds a batch of 512 trajectories of 2,048 to 6,144 tokens (4,096 on average) with prompts of 200 tokens.
Each trajectory has several versions and was appended in segments of 256 tokens.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rrl.core.types import Incarnation, Version
from rrl.roles.trajectories.arrays import Arrays
from rrl.roles.trajectories.batches import decode
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Answer, By, PackedPart, PartBound, Prompt, Segment, Share
from rrl.tests.support.roles.trajectories import crew
from rrl.transport.control.sockets import Codec, encode_frame

WORLD, TRAJECTORIES, GROUP, MEAN_TOKENS, SEGMENT, PROMPT = 8, 512, 8, 4096, 256, 200
ROUNDS = 5
DIVISIONS: tuple[By, ...] = "group", "sequence"


def measure() -> dict[str, float]:
    """Return the bars of shares; each is that of the rank with the largest share."""
    codec = Codec(Answer)
    with tempfile.TemporaryDirectory() as folder:
        store = _store(Path(folder))
        whole = encode_frame(1, 1, store.part(crew.TRAINER, 1))
        figures: dict[str, float] = {"share_whole_bytes": len(whole)}
        whole_s = _cpu_s(lambda: decode(_received(codec, whole)).trajectories[0])
        for number, by in enumerate(DIVISIONS, start=2):
            trainer = crew.incarnation_of("trainer/0", number)  # each incarnation divides in one way
            shares = [Share(rank, WORLD, by) for rank in range(WORLD)]
            frames = [_answer(store, trainer, share) for share in shares]
            rank = max(range(WORLD), key=lambda rank: len(frames[rank]))
            share_s = _cpu_s(partial(_read, codec, frames[rank], shares[rank]))
            figures[f"share_{by}_bytes_ratio"] = len(frames[rank]) / len(whole)
            figures[f"share_{by}_decode_ratio"] = share_s / whole_s
            figures[f"share_{by}_store_s"] = _cpu_s(partial(_answer, store, trainer, shares[rank]))
        store.close()
    for bar in ("bytes_ratio", "decode_ratio"):
        figures[f"share_{bar}"] = max(figures[f"share_{by}_{bar}"] for by in DIVISIONS)
    return figures | {"share_whole_decode_s": whole_s}


def _store(folder: Path) -> Store:
    store = Store(
        folder,
        group_size=GROUP,
        groups_per_batch=TRAJECTORIES // GROUP,
        max_ahead_batches=0,
        max_new_tokens=2 * MEAN_TOKENS,
        next_prompt=lambda item: Prompt(item, tuple(range(PROMPT))),
    )
    store.update_membership(crew.ALL)
    draw = random.Random(0)
    leased: list[int] = []
    while len(leased) < TRAJECTORIES:
        leased += [item.trajectory for item in crew.lease(store, holding=leased)]
    for trajectory in leased:
        length = draw.randint(MEAN_TOKENS // 2, MEAN_TOKENS + MEAN_TOKENS // 2)
        segments = []
        for start in range(0, length, SEGMENT):
            tokens = tuple(range(start, min(start + SEGMENT, length)))
            version = Version(start // (8 * SEGMENT), 1)
            segments.append(Segment(trajectory, start, tokens, (-0.5,) * len(tokens), version))
        store.append(crew.ROLLOUT, segments, [trajectory])
    store.flush()
    crew.score(store)
    return store


def _received(codec: Codec, frame: bytes) -> PackedPart:
    decoded = codec.decode(frame)
    assert decoded is not None
    answer = decoded[2]
    assert isinstance(answer, PartBound), answer
    return answer.part


def _read(codec: Codec, frame: bytes, share: Share) -> Arrays:
    return decode(_received(codec, frame), share).arrays


def _answer(store: Store, trainer: Incarnation, share: Share) -> bytes:
    return encode_frame(1, 1, store.part(trainer, 1, None, share))


def _cpu_s(do: Callable[[], object]) -> float:
    """Return the median CPU time (s) of ``do``, which is called once before: the first call imports numpy."""
    do()
    times = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        do()
        times.append(time.process_time() - begun)
    return statistics.median(times)
