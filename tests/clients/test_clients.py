"""Clients and agents that others have written play an episode against the real endpoint and store, and are trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.benchmarks._clients_cuts import play
from rrl.benchmarks._clients_scene import in_turn, scripted_run
from rrl.benchmarks._clients_streams import violations
from rrl.benchmarks._clients_table import Client, installed

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

CLIENTS = [pytest.param(client, id=client.name.replace(" ", "-")) for client in installed()]
RESUMING = [each for each in CLIENTS if each.values[0].streams and each.values[0].repeats]  # type: ignore[union-attr]


@pytest.mark.parametrize("client", CLIENTS)
def test_client_finishes_an_episode_and_every_sampled_token_is_trained_once(client: Client, tmp_path: Path) -> None:
    with scripted_run(tmp_path, in_turn(client.answers), piece=32, pause=0.01) as run:
        played = run.play(client.command)
        wrong = [each for recorder in run.recorders for stream in recorder.streams for each in violations(stream)]
    assert (played.reward, played.error) == (1.0, "")
    assert len(played.turns) == len(client.answers)
    assert (played.token_drift(), played.trained_share(), wrong) == (0, 1.0, [])
    if client.linear:
        assert (played.branches, played.reencoded_tokens()) == (1, 0)


@pytest.mark.parametrize("client", RESUMING)
def test_call_whose_stream_breaks_is_answered_without_sampling_again(client: Client, tmp_path: Path) -> None:
    played, proxy = play(client, tmp_path, cut_after=1)
    assert proxy.cut
    assert (played.reward, played.error) == (1.0, "")
    assert len({turn.request.split("/")[0] for turn in played.turns}) == len(played.turns)


def test_attempt_of_a_killed_agents_sdk_is_replayed(tmp_path: Path) -> None:
    client = next(client for client in installed() if client.name == "openai-agents streamed")
    with scripted_run(tmp_path, in_turn(client.answers), piece=8, pause=0.02) as run:
        dead = run.play(client.command, kill_at=4)
        run.die()
        done = run.play(client.command)
    assert len(dead.turns) == 4
    assert done.reward == 1.0
    assert {turn.id for turn in dead.turns} <= {turn.id for turn in done.turns}
