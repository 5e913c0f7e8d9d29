"""Measures whether clients and agents that others have written are served and trained as they are.

Clients, endpoint and store are real; the answers come from a script (benchmarks/_clients_scene.py). An episode is six
turns: five calls of a tool, and a report (tests/support/clients). Parts, each of which can be chosen by ``--part``; the
bars were chosen before the first measurement:

- ``episodes``: every client of benchmarks/_clients_table.py plays an episode. ``clients``, ``clients_ok``: all, and
  those that finished it (bar: equal). ``linear_branches``: largest number of samples of an episode whose client only
  appends (bar: 1), ``reencoded_tokens``: tokens of earlier turns that were encoded again in such an episode (bar: 0).
  ``token_drift``: trained tokens that were not sampled in their context (bar: 0). ``constrained_trained``: smallest
  share of the sampled tokens that are trained, among clients that ask for a schema or a tool (bar: 1).
  ``stream_violations``: exceptions of the clients' own accumulators over all streams, and ids that change (bar: 0).
- ``cuts``: each streaming client plays 20 episodes, in each of which a connection is cut behind a random event
  (``broken_streams``). ``sampled_twice``: tokens of a repeated call that were sampled again (bar: 0); ``lost_calls``:
  episodes that did not finish although the client repeats calls (bar: 0).
- ``untrained``: with ``cuts``, ``wrongly_trained``: trained tokens of calls by an untrained name, of answers that were
  not delivered, and of answers that a grammar masked (bar: 0).
- ``replay``: ``replayed_share``: turns that the next attempt takes over, smallest over the Agents SDK and Anthropic's
  client, whose process is killed in turn 4 (bar: 1).
- ``idle``: ``idle_reconnects``: connections that Codex opens again, with ``stream_idle_timeout_ms = 2000`` and answers
  of which every part takes 10 s (bar: 0).
- ``added``: ``added_p50_share``: median time of a turn of 64 tokens in each new form over that of a chat completion,
  minus 1, the largest (bar: 0.05).
- ``deaths``: ``death_errors``: failed calls while rollout, store, trainer and manager die ten times each during
  streamed answers of both new forms, and, behind a relay, the endpoint, too (bar: 0; benchmarks/_agents_deaths.py).
- ``by_name``, ``cost`` and ``constraints``: benchmarks/_clients_by_name.py, _clients_cost.py, _clients_constraints.py.

All but the last three parts need ``make setup-clients``: ``.venv-clients/bin/python -m rrl.benchmarks.clients``. Codex
and Claude Code take part where ``make test-clients BINARIES=1`` has installed them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import operator
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from rrl.benchmarks import _agents_deaths, _clients_cuts
from rrl.benchmarks._clients_scene import ScriptedRun, in_turn, scripted_run, trained_places
from rrl.benchmarks._clients_table import Client, installed
from rrl.benchmarks._provenance import last_line
from rrl.benchmarks._requirements import Need, check_requirements, missing
from rrl.benchmarks._table import print_bars, print_table
from rrl.roles.endpoint.calls.call import Policy
from rrl.tests.support.supervisor import temporary_runs_folder

CUTS, DEATHS, ROUNDS = 20, 10, 40
IDLE_S = 10.0
NATIVE_WAIT = "model_providers.rrl.stream_idle_timeout_ms=2000"
BARS: Mapping[str, float | None] = {
    "clients": None,
    "clients_ok": None,
    "linear_branches": 1,
    "reencoded_tokens": 0,
    "token_drift": 0,
    "wrongly_trained": 0,
    "broken_streams": None,
    "sampled_twice": 0,
    "lost_calls": 0,
    "death_errors": 0,
    "idle_reconnects": 0,
    "stream_violations": 0,
    "replayed_share": 1.0,
    "constrained_trained": 1.0,
    "invalid_enforced": 0,
    "max_logprob_error": 1e-3,
    "by_name_high": 0.9,
    "by_name_low": 0.1,
    "added_p50_share": 0.05,
    "cost_turn_240_over_30": 2,
    "stream_16k_cpu_s": 0.6,
    "stream_16k_stop_cpu_s": 0.9,
    "log_bytes_400_turns": 1_000_000,
    "longest_block_ms": 50,
}
AT_LEAST = {"replayed_share", "constrained_trained", "by_name_high"}

Figures = dict[str, Any]


def measure_episodes(folder: Path, _: int) -> Figures:
    from rrl.benchmarks._clients_streams import violations

    figures: Figures = {"clients": 0, "clients_ok": 0, "linear_branches": 0, "reencoded_tokens": 0}
    figures |= {"token_drift": 0, "constrained_trained": 1.0, "stream_violations": 0, "failures": []}
    rows = []
    for number, client in enumerate(installed()):
        with scripted_run(folder / f"episode-{number}", in_turn(client.answers), piece=16, pause=0.01) as run:
            played = run.play(client.command)
            wrong = [each for recorder in run.recorders for stream in recorder.streams for each in violations(stream)]
        ok = played.reward == 1.0 and len(played.turns) == len(client.answers)
        figures["clients"] += 1
        figures["clients_ok"] += ok
        figures["stream_violations"] += len(wrong)
        figures["token_drift"] += played.token_drift()
        if client.linear:
            figures["linear_branches"] = max(figures["linear_branches"], played.branches)
            figures["reencoded_tokens"] += played.reencoded_tokens()
        if client.constrained:
            figures["constrained_trained"] = min(figures["constrained_trained"], played.trained_share())
        if wrong or not ok:
            figures["failures"].append([client.name, played.error, *wrong[:3]])
        cells = (len(played.turns), played.branches, played.reencoded_tokens(), f"{played.trained_share():.2f}")
        rows.append([client.name, client.form, "yes" if ok else "NO", *map(str, cells)])
    print_table(("client", "form", "finished", "turns", "samples", "encoded again", "trained"), rows)
    return figures


def measure_cuts(folder: Path, times: int) -> Figures:
    cuts = []
    for number, client in enumerate(client for client in installed() if client.streams):
        of_client = _clients_cuts.measure(client, folder / f"cuts-{number}", times)
        cuts += of_client
        done, twice = sum(cut.finished for cut in of_client), sum(cut.sampled_twice for cut in of_client)
        print(f"{client.name}: {done} of {len(of_client)} finished, {twice} tokens sampled twice", flush=True)
    repeating = {client.name for client in installed() if client.repeats}
    return {
        "broken_streams": sum(cut.was_cut for cut in cuts),
        "sampled_twice": sum(cut.sampled_twice for cut in cuts),
        "lost_calls": sum(not cut.finished for cut in cuts if cut.client in repeating),
        "token_drift": sum(cut.token_drift for cut in cuts),
        "wrongly_trained": sum(cut.wrongly_trained for cut in cuts),
        "cuts": msgspec.to_builtins(cuts),
    }


def measure_untrained(folder: Path, _: int) -> Figures:
    """Return the trained tokens of episodes that must have none."""
    trained = 0
    for number, name in enumerate(("openai chat create", "openai responses stream", "anthropic stream")):
        with _run_of(name, folder / f"named-{number}", Policy(1.0, untrained=("*haiku*",))) as (client, run):
            played = run.play(client.command, HOUSE_MODEL="claude-haiku-4")
            assert played.reward == 1.0, played.error
            trained += sum(len(trained_places(sample)) for sample in played.samples)
    for number, name in enumerate(("openai responses parse", "pydantic-ai anthropic typed")):
        policy = Policy(1.0, constraints="enforce")
        with _run_of(name, folder / f"masked-{number}", policy) as (client, run):
            played = run.play(client.command)
            assert played.reward == 1.0, played.error
            trained += sum(len(trained_places(sample)) for sample in played.samples)
    return {"wrongly_trained": trained}


def measure_replay(folder: Path, _: int) -> Figures:
    shares = []
    for number, name in enumerate(("openai-agents plain", "openai-agents streamed", "anthropic create")):
        with _run_of(name, folder / f"replay-{number}", piece=8, pause=0.02) as (client, run):
            dead = run.play(client.command, kill_at=4)
            assert dead.turns, dead.error
            run.die()
            done = run.play(client.command)
            assert done.reward == 1.0, done.error
            kept = {turn.id for turn in done.turns}
            shares.append(sum(turn.id in kept for turn in dead.turns) / len(dead.turns))
    return {"replayed_share": min(shares), "replayed_shares": shares}


def measure_idle(folder: Path, _: int) -> Figures:
    if not any(client.package == "codex" for client in installed()):
        return {}
    with _run_of("codex", folder / "idle", piece=60, pause=IDLE_S) as (client, run):
        played = run.play((*client.command, "-c", NATIVE_WAIT))
        assert played.reward == 1.0, played.error
        return {"idle_reconnects": sum(recorder.calls for recorder in run.recorders) - len(played.turns)}


def measure_added(folder: Path, _: int) -> Figures:
    """Return how much longer a turn takes in the new forms, with plain answers and the clients of their makers."""
    import anthropic
    import openai

    seconds: dict[str, list[float]] = defaultdict(list)
    with scripted_run(folder / "added", lambda *_: "x" * 63, piece=4, pause=0.02) as run:
        key, url = run.key(run.lease()), run.server.base_url
        chat = openai.OpenAI(base_url=url, api_key=key)
        messages = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=key).messages
        for number in range(ROUNDS):
            asked: Any = [{"role": "user", "content": f"Question {number}."}]
            for form, create, given in (
                ("chat", chat.chat.completions.create, {"messages": asked}),
                ("responses", chat.responses.create, {"input": asked}),
                ("messages", messages.create, {"messages": asked, "max_tokens": 1000}),
            ):
                began = time.monotonic()
                create(model="policy", **given)
                seconds[form].append(time.monotonic() - began)
    medians = {form: median(times) for form, times in seconds.items()}
    print({form: round(value, 4) for form, value in medians.items()}, flush=True)
    return {"added_p50_share": max(medians["responses"], medians["messages"]) / medians["chat"] - 1, "turn_s": medians}


def measure_deaths(folder: Path, times: int) -> Figures:
    rows = ("rollout", "store", "trainer", "manager", "endpoint")
    deaths = _agents_deaths.measure(folder / "deaths", times, rows, forms=("responses", "messages"))
    return {"death_errors": deaths.client_errors, "deaths": msgspec.to_builtins(deaths)}


@contextmanager
def _run_of(
    name: str, folder: Path, policy: Policy = Policy(1.0), **options: Any
) -> Iterator[tuple[Client, ScriptedRun]]:
    """Open a run with the script of a client."""
    client = next(client for client in installed() if client.name == name)
    with scripted_run(folder, in_turn(client.answers), policy, **options) as run:
        yield client, run


def _other(name: str) -> Callable[[Path, int], Figures]:
    """Return the part that another module measures."""

    def measure(folder: Path, _: int) -> Figures:
        figures: Figures = importlib.import_module(f"rrl.benchmarks._clients_{name}").measure(folder / name)
        return figures

    return measure


PARTS: Mapping[str, Callable[[Path, int], Figures]] = {
    "episodes": measure_episodes,
    "cuts": measure_cuts,
    "untrained": measure_untrained,
    "replay": measure_replay,
    "idle": measure_idle,
    "added": measure_added,
    "deaths": measure_deaths,
    "by_name": _other("by_name"),
    "cost": _other("cost"),
    "constraints": _other("constraints"),
}
WITHOUT_CLIENTS = {"by_name", "cost", "constraints"}
TIMES = {"cuts": CUTS, "deaths": DEATHS}
JOINED: Mapping[str, Callable[[Any, Any], Any]] = {
    "token_drift": operator.add,
    "wrongly_trained": operator.add,
    "constrained_trained": min,
}
"""How the values of a figure of several parts are joined."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="run only this part; may be repeated")
    parser.add_argument("--times", type=int, help="number of cuts of each client, and of deaths of each kind")
    given = parser.parse_args()
    check_requirements("clients")
    why = missing(Need.CLIENTS)
    if why and not WITHOUT_CLIENTS.issuperset(given.part or ()):
        parser.exit(2, f"benchmarks/clients.py: {why}\n")
    figures: Figures = {}
    for part in given.part or (WITHOUT_CLIENTS if why else PARTS):
        with temporary_runs_folder() as folder:
            found = PARTS[part](folder, given.times or TIMES.get(part, 1))
        print(f"{part}: {[(name, found[name]) for name in found if name in BARS]}, load {os.getloadavg()[0]:.1f}")
        for name, value in found.items():
            figures[name] = JOINED[name](figures[name], value) if name in JOINED and name in figures else value
        sys.stdout.flush()
    if "clients" in figures:
        print(f"clients {figures['clients']}, finished {figures['clients_ok']}", flush=True)
    print_bars(figures, BARS, AT_LEAST)
    further = {name: value for name, value in figures.items() if name not in BARS}
    print(last_line("clients", {name: figures.get(name) for name in BARS}, {}, further))


if __name__ == "__main__":
    main()
