"""Episodes in which a connection is cut behind a random event of a stream."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from msgspec import Struct

from rrl.benchmarks._clients_proxy import CuttingProxy
from rrl.benchmarks._clients_scene import Played, common_length, in_turn, scripted_run, trained_places
from rrl.benchmarks._clients_table import Client

PIECE, PAUSE_S = 8, 0.02
"""Tokens that become durable at once, and seconds between them: an answer takes 0.3 s."""


class Cut(Struct, frozen=True):
    """An episode in which a connection was cut."""

    client: str
    after: int
    """Number of the event behind which the connection was cut, and of all events of an episode without a cut."""
    of: int
    was_cut: bool
    sampled_twice: int
    """Number of tokens of answers to a call that had been answered before."""
    wrongly_trained: int
    """Number of trained tokens of answers whose end the client did not get, and which no later turn continues."""
    token_drift: int
    finished: bool
    error: str


def measure(client: Client, folder: Path, times: int) -> list[Cut]:
    """Play an episode without a cut, and then ``times`` episodes with a cut each."""
    whole, proxy = play(client, folder / "whole", None)
    assert whole.reward == 1.0, whole.error
    assert proxy.events, f"{client.name} has not streamed"
    draw, of = random.Random(client.name), proxy.events
    cuts = []
    for number in range(times):
        after = draw.randrange(1, of)
        played, proxy = play(client, folder / str(number), after)
        cuts.append(
            Cut(
                client.name,
                after,
                of,
                proxy.cut,
                _sampled_twice(played),
                _wrongly_trained(played, proxy),
                played.token_drift(),
                played.reward == 1.0,
                played.error,
            )
        )
    return cuts


def play(client: Client, folder: Path, cut_after: int | None) -> tuple[Played, CuttingProxy]:
    """Let a client play an episode through a proxy."""
    with scripted_run(folder, in_turn(client.answers), piece=PIECE, pause=PAUSE_S) as run:
        proxy = CuttingProxy(run.server.base_url, cut_after)
        played = run.play(client.command, proxy.base_url)
        proxy.close()
        return played, proxy


def _sampled_twice(played: Played) -> int:
    tokens: Counter[str] = Counter()
    first: dict[str, int] = {}
    for turn in played.turns:
        meaning = turn.request.split("/")[0]
        tokens[meaning] += len(turn.sampled)
        first.setdefault(meaning, len(turn.sampled))
    return sum(tokens.values()) - sum(first.values())


def _wrongly_trained(played: Played, proxy: CuttingProxy) -> int:
    """Return the number of trained tokens of answers of which the client got no end.

    Tokens that a later turn continues do not count: the client has kept them.
    """
    wrong = 0
    for turn in played.turns:
        if any(f"{turn.id:x}".encode() in received for received in proxy.received):
            continue
        before = played.sampled[turn.id].context
        answer = before + turn.sampled
        later = [played.sampled[other.id].context for other in played.turns if other.id > turn.id]
        kept = max((common_length(answer, context) for context in later), default=0)
        for sample in played.samples:
            end = common_length((*sample.prompt, *sample.tokens), answer)
            places = [len(sample.prompt) + place for place in trained_places(sample)]
            wrong += sum(max(kept, len(before)) <= place < end for place in places)
    return wrong
