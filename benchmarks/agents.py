"""Measures what agents learn, whether their tokens stay exact, what the endpoint costs, and how deaths affect them.

Everything is real: the openai client, the endpoint, the store, the roles, vLLM and its own server. Parts:

- ``learning``: examples/agents.toml (guess a digit) from random weights, with rollout, store, trainer, agents and
  manager killed once each in the middle (benchmarks/_agents_learning.py). A policy that ignores the hints finds at most
  0.3 of the digits.
- ``drift``: examples/agents_smollm2.toml, SmolLM2 on vLLM with a tool, a second conversation and a condensed context,
  while its weights change. Tokens and contexts are compared with what the engines recorded. Log-probabilities are
  compared with those that torch computes from the versions that the tokens name (benchmarks/_agents_drift.py).
- ``overhead``: the endpoint of a run and vLLM's own server get the same requests for 64 tokens, 1 and 32 at once, in
  alternating rounds (benchmarks/_agents_overhead.py). The time of a turn covers all that the client waits for.
- ``deaths``: each kind of process dies several times while 32 agents are at work (benchmarks/_agents_deaths.py). For
  comparison, the same agents work behind a plain round-robin proxy over two of vLLM's servers, one of which is killed
  (benchmarks/_agents_proxy.py).

These figures and bars were chosen before the first measurement:

- ``found_last10``: smallest mean share of found digits over the last ten steps, among the seeds (bar: 0.5).
- ``token_drift``: number of trained tokens of the parts ``learning`` and ``drift`` that no engine sampled after the
  same tokens, with the same log-probability and version (bar: 0).
- ``max_logprob_error``: largest difference from torch's log-probabilities (nats; bar: 1e-3).
- ``text_would_change``: share of SmolLM2's complete answers that have other tokens after they were decoded and encoded
  again.
- ``added_p50_share_1``, ``added_p50_share_32``: median time of a turn with all 64 tokens at the endpoint, divided by
  that at vLLM's server, minus 1; with 1 and with 32 calls at once (bar: 0.05).
- ``throughput_over_direct``: tokens per second at the endpoint divided by those at vLLM's server, with 32 calls at
  once, over all rounds (bar: 0.9).
- ``client_errors``: number of failed calls that a client did not repeat any more (bar: 0).
- ``resampled_tokens``: number of tokens that were sampled again although the dead attempt had received them, plus the
  number of tokens in complete answers for which no engine has recorded the same prompt and answer (bar: 0).
- ``replayed_share``: share of the turns of dead attempts that the next attempt took over.
- ``proxy_client_errors``: number of calls that failed behind the proxy.
- ``proxy_lost_tokens``: number of tokens that these calls had received.

Prints tables, and one JSON object with all samples as its last line. The figures of a part that was not run are null.
All parts except ``learning`` need vLLM: ``.venv-vllm/bin/python benchmarks/agents.py``, after ``make smollm2``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from msgspec import Struct

from rrl.benchmarks import _agents_deaths, _agents_learning, _agents_overhead
from rrl.benchmarks._agents_deaths import Deaths
from rrl.benchmarks._agents_learning import Learned
from rrl.benchmarks._agents_overhead import AT_ONCE, DIRECT, RRL, Overhead
from rrl.benchmarks._provenance import provenance
from rrl.benchmarks._requirements import Need, check_requirements, missing
from rrl.benchmarks._table import print_table
from rrl.tests.support.supervisor import temporary_runs_folder

SEEDS = 3
PARTS = ("learning", "drift", "overhead", "deaths")
MIN_FOUND = 0.5
MAX_LOGPROB_ERROR = 1e-3
MAX_ADDED_P50_SHARE = 0.05
MIN_THROUGHPUT = 0.9


class Results(Struct):
    """The results of the parts; None or empty for a part that was not run."""

    learned: list[Learned] = []
    drift: Any = None
    """Result of the part ``drift`` (:class:`._agents_drift.Drift`)."""
    overhead: Overhead | None = None
    deaths: Deaths | None = None
    proxied: Any = None
    """Result of the agents behind the proxy, in the part ``deaths`` (:class:`._agents_proxy.Proxied`)."""


def lacking() -> str | None:
    """Return what the parts lack that are about SmolLM2 on vLLM, and how to get it; None if they lack nothing."""
    return missing(Need.VLLM) or missing(Need.SMOLLM2)


def measure(parts: Sequence[str], seeds: Sequence[int], steps: int, rounds: int, times: int) -> Results:
    """Run the parts, and print a table after each."""
    results = Results()
    with temporary_runs_folder() as folder:
        for seed in seeds if "learning" in parts else ():
            results.learned.append(_agents_learning.learn(folder / f"learning-{seed}", seed, steps))
            _print_learned(results.learned[-1])
        if "drift" in parts:
            from rrl.benchmarks import _agents_drift  # imported here: not every part needs it

            results.drift = _agents_drift.measure(folder / "drift")
            print_table(("drift", ""), [[name, str(value)] for name, value in _fields(results.drift)])
        if "overhead" in parts:
            results.overhead = _agents_overhead.measure(folder / "overhead", rounds)
            _print_overhead(results.overhead)
        if "deaths" in parts:
            results.deaths = _agents_deaths.measure(folder / "deaths", times)
            print_table(("deaths", ""), [[name, str(value)] for name, value in _fields(results.deaths)])
            if lacking() is None:
                from rrl.benchmarks import _agents_proxy

                results.proxied = _agents_proxy.measure(folder / "proxy")
                print_table(("proxy", ""), [[name, str(value)] for name, value in _fields(results.proxied)])
        sys.stdout.flush()
    return results


def _fields(value: Any) -> list[tuple[str, Any]]:
    return list(msgspec.to_builtins(value).items())


def _print_learned(each: Learned) -> None:
    heads = ("seed", "steps", "first 10", "last 10", "drift", "tokens", "run s", "load", "incarnations")
    print_table(
        heads,
        [
            [
                str(each.seed),
                str(each.steps),
                f"{each.first10:.3f}",
                f"{each.last10:.3f}",
                str(each.token_drift),
                str(each.trained_tokens),
                f"{each.run_s:.0f}",
                f"{each.load[0]} to {each.load[1]}",
                " ".join(f"{name} {number}" for name, number in each.incarnations.items()),
            ]
        ],
    )
    sys.stdout.flush()


def _print_overhead(each: Overhead) -> None:
    print_table(
        ("arm", "p50 s, 1 at once", "p50 s, 32 at once", "tokens/s"),
        [
            [arm, f"{each.p50(arm, 1):.3f}", f"{each.p50(arm, AT_ONCE):.3f}", f"{each.throughput(arm):.1f}"]
            for arm in _agents_overhead.ARMS
        ],
    )
    print(f"load {each.load[0]} to {each.load[1]}", flush=True)


def figures(results: Results) -> dict[str, Any]:
    """Return the figures that the module's docstring describes; a figure of a part that was not run is None."""
    learned, drift, overhead, deaths, proxied = (
        results.learned,
        results.drift,
        results.overhead,
        results.deaths,
        results.proxied,
    )
    drifts = [each.token_drift for each in learned] + ([drift.token_drift] if drift else [])
    return {
        "found_last10": min((round(each.last10, 4) for each in learned), default=None),
        "token_drift": sum(drifts) if drifts else None,
        "max_logprob_error": drift and drift.max_logprob_error,
        "text_would_change": drift and drift.text_would_change,
        "added_p50_share_1": overhead and round(overhead.added(1), 4),
        "added_p50_share_32": overhead and round(overhead.added(AT_ONCE), 4),
        "throughput_over_direct": overhead and round(overhead.throughput(RRL) / overhead.throughput(DIRECT), 4),
        "client_errors": deaths and deaths.client_errors,
        "resampled_tokens": deaths and deaths.resampled_tokens + deaths.changed_tokens,
        "replayed_share": deaths and deaths.replayed_share,
        "proxy_client_errors": proxied and proxied.client_errors,
        "proxy_lost_tokens": proxied and proxied.lost_tokens,
    }


def _print_bars(of: dict[str, Any]) -> None:
    """Print whether each figure in ``of`` meets its bar; figures of parts that were not run are left out."""
    bars: tuple[tuple[str, Callable[[float], bool]], ...] = (
        ("found_last10", lambda value: value >= MIN_FOUND),
        ("token_drift", lambda value: value == 0),
        ("max_logprob_error", lambda value: value <= MAX_LOGPROB_ERROR),
        ("added_p50_share_1", lambda value: value <= MAX_ADDED_P50_SHARE),
        ("added_p50_share_32", lambda value: value <= MAX_ADDED_P50_SHARE),
        ("throughput_over_direct", lambda value: value >= MIN_THROUGHPUT),
        ("client_errors", lambda value: value == 0),
        ("resampled_tokens", lambda value: value == 0),
    )
    for name, met in bars:
        if of[name] is not None:
            print(f"{name} {of[name]:g}: {'met' if met(of[name]) else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=PARTS, action="append", help="run only this part; may be repeated")
    parser.add_argument("--seed", type=int, action="append", help="run only this seed of learning; may be repeated")
    parser.add_argument("--steps", type=int, default=_agents_learning.STEPS, help="number of steps of learning")
    parser.add_argument("--rounds", type=int, default=_agents_overhead.ROUNDS, help="number of rounds of overhead")
    parser.add_argument("--times", type=int, default=_agents_deaths.TIMES, help="number of deaths of each kind")
    given = parser.parse_args()
    check_requirements("agents")
    without_vllm = ("learning", "deaths")
    parts = given.part or (PARTS if lacking() is None else without_vllm)
    if any(part not in without_vllm for part in parts) and (why := lacking()):
        parser.exit(2, f"benchmarks/agents.py: {why}\n")
    torch.set_num_threads(1)
    results = measure(parts, given.seed or range(SEEDS), given.steps, given.rounds, given.times)
    of = figures(results)
    _print_bars(of)
    print(json.dumps({**of, "samples": msgspec.to_builtins(results), **provenance()}))


if __name__ == "__main__":
    main()
