"""Measures what expected lengths and dispatch gain over first come, first served, in virtual time.

The production functions (``roles/trajectories/dispatch``) choose which engine gets which answers and which answers
move. Engines, times and lengths are simulated (benchmarks/_dispatch_world.py). A *trace* is a source of lengths
(synthetic, or recorded as in benchmarks/_dispatch_traces.py), a shape of τ(b), the seconds of a token with b answers
running, and a set of engines. Each trace has several steps, of which each is timed from its start until its last answer
is done, in every arm with the same lengths. Arms: today's order; the same answers dealt out evenly; StreamRL's two
pools; and the production functions with rankers from none to perfect:

- ``none`` has observed nothing; ``wrong`` has learned the lengths of other prompts and is certain of them;
- ``unseen`` and ``seen`` have learned 1,000 groups of the source, and the prompts of the steps are new or among them;
- ``perfect`` knows every length. The *oracle* is the better of this and of a schedule made with all lengths at hand.

Chosen before the first figure: ``worst_over_fifo`` is the largest ratio of summed seconds of a trace, over all traces
and all rankers (bar: 1.02). ``share_of_oracle`` is the smallest share of the oracle's gain that ``seen`` and ``unseen``
have, over all traces in which the oracle gains at least 5 % (bar: 0.25). ``recall20_unseen`` is the share of the
longest 20 % of the recorded prompts that are new to the ranker, among those that it expects to be (bar: 0.7 after 1,000
groups). ``decision_us`` is the median time of a decision with 10,000 answers waiting and free places everywhere (bar:
1,000). ``real_over_fifo`` is the ratio of the seconds of steps in whole runs with vLLM (benchmarks/_dispatch_real.py),
null without vLLM.

Prints tables, and one JSON object with all samples as its last line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from heapq import heapify, heappop, heappush
from typing import Any

from rrl.benchmarks._dispatch_policies import FirstCome, FixedLists, Product, clairvoyant, two_pools
from rrl.benchmarks._dispatch_traces import LIMIT, Prompt, permuted, recorded, synthetic
from rrl.benchmarks._dispatch_world import Outcome, Policy, World
from rrl.benchmarks._requirements import Need, check_requirements, missing
from rrl.benchmarks._table import print_table
from rrl.roles.trajectories.dispatch.engine_load import CurveTable, EngineLoad
from rrl.roles.trajectories.dispatch.lengths import Answer, GroupEstimate, Lengths
from rrl.roles.trajectories.dispatch.token_times import TokenTimes
from rrl.roles.trajectories.dispatch.work_sharing import CONSIDERED, EngineView, Waiting, length_class, share

LEARNED_GROUPS = 1_000
"""Groups of the source that a ranker has observed before the steps: 500 prompts, twice each."""
GROUP_SIZE = 8
TAIL = 0.2
WAITING = 10_000
DECISIONS = 200
MAX_OVER_FIFO = 1.02
MIN_SHARE = 0.25
MIN_GAIN = 0.05
MIN_RECALL = 0.7
MAX_DECISION_US = 1_000.0
Tau = Callable[[int], float]
TAUS: dict[str, Tau] = {
    "flat": lambda b: 6.5e-3 + 0.04e-3 * b,  # a dense 7B model
    "concave": lambda b: 4e-3 * (1 + 0.5 * math.sqrt(b)),  # mixture of experts, or long contexts
    "linear": lambda b: 15e-3 + 4e-3 * b,  # a CPU
}
ENGINES: dict[str, tuple[int, tuple[tuple[int, float], ...]]] = {
    "8 x 64": (64, ((64, 1.0),) * 8),
    "8 x 32, queue": (64, ((32, 1.0),) * 8),
    "4 x 128, half empty": (32, ((128, 1.0),) * 4),
    "3 + 1 half as fast": (32, ((64, 1.0),) * 3 + ((64, 2.0),)),
}
"""Prompts of a step, and (places, factor on τ) of each engine."""
RANKERS = ("none", "wrong", "unseen", "seen", "perfect")


class Source:
    """Prompts of one kind, and rankers that have learned from them."""

    def __init__(self, name: str, prompts: Sequence[Prompt]) -> None:
        self.name = name
        half = LEARNED_GROUPS // 2
        self.known, self.new = prompts[:half], prompts[half:]
        self.learned = _learned([*self.known, *self.known])
        other = permuted(self.known, 7)
        self.misled = _learned([*other, *other])


def _learned(prompts: Sequence[Prompt]) -> Lengths:
    lengths, rng = Lengths(LIMIT), random.Random(2)
    for prompt in prompts:
        lengths.observe(prompt.tokens, [Answer(tokens, True) for tokens in prompt.answers(GROUP_SIZE, rng)])
    return lengths


def arms(
    source: Source, prompts: Sequence[Prompt], times: dict[int, TokenTimes], new: bool
) -> Iterator[tuple[str, Callable[[World], Policy]]]:
    """Yield the arms of a step with these prompts, which are new to the rankers or not."""

    def product(lengths: Lengths) -> Callable[[World], Policy]:
        expected = [lengths.expect(prompt.tokens) for prompt in prompts]
        return lambda world: Product(expected, lengths, lengths.separates, lengths.informed, deepcopy(times))

    def pools(lengths: Lengths) -> Callable[[World], Policy]:
        points = [math.exp(lengths.expect(prompt.tokens).mean) for prompt in prompts]
        return lambda world: two_pools(world, [points[each.group] for each in world.answers], world.engines[0].times)

    yield "fifo", lambda world: FirstCome()
    yield "even", lambda world: FixedLists(
        [[each.number for each in world.answers if each.number % len(world.engines) == i]
         for i in range(len(world.engines))])  # fmt: skip
    learned = "unseen" if new else "seen"
    yield learned, product(source.learned)
    yield f"pools {learned}", pools(source.learned)
    if new:
        yield "none", product(Lengths(LIMIT))
        yield "perfect", lambda world: Product(None, source.learned, True, True, deepcopy(times))
        yield "pools perfect", lambda world: two_pools(
            world, [float(each.length) for each in world.answers], world.engines[0].times)  # fmt: skip
    else:
        yield "wrong", product(source.misled)
        yield "pools wrong", pools(source.misled)
    yield "clairvoyant", clairvoyant


def measure(source: Source, tau: Tau, engines: str, seeds: int) -> dict[str, list[Outcome]]:
    """Return the outcomes of each arm of a trace; the names of arms say whether the prompts were new."""
    count, shape = ENGINES[engines]
    scaled = [(places, _slower(tau, factor)) for places, factor in shape]
    found: dict[str, list[Outcome]] = {}
    times: dict[int, TokenTimes] = {}
    rng = random.Random(-1)  # a step before the first one, with today's order, in which the engines' times are learned
    prompts = rng.sample(source.known, count)
    world = World([prompt.answers(GROUP_SIZE, rng) for prompt in prompts], scaled)
    world.run(
        Product([source.learned.expect(prompt.tokens) for prompt in prompts], source.learned, False, False, times)
    )
    for seed in range(seeds):
        rng = random.Random(seed)
        for new in (True, False):
            prompts = rng.sample(source.new if new else source.known, count)
            lengths = [prompt.answers(GROUP_SIZE, rng) for prompt in prompts]
            for arm, policy in arms(source, prompts, times, new):
                world = World(lengths, scaled)
                name = f"{arm} {'new' if new else 'known'}" if arm in ("fifo", "even", "clairvoyant") else arm
                found.setdefault(name, []).append(world.run(policy(world)))
    return found


def _slower(tau: Tau, factor: float) -> Tau:
    return lambda running: factor * tau(running)


def over_fifo(outcomes: dict[str, list[Outcome]], arm: str) -> float:
    """Return the ratio of an arm's seconds to those of first come, first served with the same answers."""
    return _seconds(outcomes, arm) / _seconds(outcomes, f"fifo {_kind(arm)}")


def _kind(arm: str) -> str:
    return "known" if arm.endswith(("known", "seen", "wrong")) and not arm.endswith("unseen") else "new"


def _seconds(outcomes: dict[str, list[Outcome]], arm: str) -> float:
    return sum(outcome.seconds for outcome in outcomes[arm])


def oracle(outcomes: dict[str, list[Outcome]], kind: str) -> float:
    """Return the oracle's ratio to first come, first served."""
    best = over_fifo(outcomes, f"clairvoyant {kind}")
    return min(best, over_fifo(outcomes, "perfect")) if kind == "new" else best


def recall(truth: Sequence[float], expected: Sequence[float]) -> float:
    """Return which share of the longest :data:`TAIL` is among as many that are expected to be the longest."""
    count = int(TAIL * len(truth))
    longest, guessed = (
        set(sorted(range(len(values)), key=lambda i: -values[i])[:count]) for values in (truth, expected)
    )
    return len(longest & guessed) / count


def kendall(truth: Sequence[float], expected: Sequence[float]) -> float:
    """Return Kendall's rank correlation, from 20,000 pairs."""
    rng, total, pairs = random.Random(0), 0, 0
    for _ in range(20_000):
        i, j = rng.randrange(len(truth)), rng.randrange(len(truth))
        if truth[i] != truth[j]:
            pairs += 1
            order = (expected[i] > expected[j]) - (expected[i] < expected[j])
            total += order if truth[i] > truth[j] else -order
    return total / pairs


def ranked(prompts: Sequence[Prompt]) -> dict[str, float]:
    """Return the figures of a ranker after 1,000 groups, on prompts that it knows and on the others."""
    known, new = prompts[:LEARNED_GROUPS], prompts[LEARNED_GROUPS:]
    lengths = _learned(known)
    figures = {}
    for name, those in (("seen", known), ("unseen", new)):
        truth, expected = [each.mean for each in those], [lengths.expect(each.tokens).mean for each in those]
        figures[f"recall20_{name}"] = recall(truth, expected)
        figures[f"kendall_{name}"] = kendall(truth, expected)
    return figures


def decision_times() -> list[float]:
    """Return the µs of decisions: 10,000 answers wait, nine engines run 64 each and have 64 free places."""
    rng, table = random.Random(0), CurveTable(LIMIT)
    estimates = [GroupEstimate(rng.gauss(7.3, 0.8), 0.05, 0.35) for _ in range(WAITING // GROUP_SIZE)]
    curves = [table.curve(estimate, 0) for estimate in estimates for _ in range(GROUP_SIZE)]
    heap = [(math.inf, -length_class(math.exp(estimates[i // GROUP_SIZE].mean)), i) for i in range(WAITING)]
    heapify(heap)
    times = TokenTimes().table
    engines = [
        EngineView(str(number), EngineLoad(table.widths, times, rng.sample(curves, 64)), 64, 64) for number in range(9)
    ]
    taken = []
    for _ in range(DECISIONS):
        begun = time.perf_counter()
        first = [heappop(heap) for _ in range(CONSIDERED)]
        share([Waiting(number, curves[number]) for _, _, number in first], engines[0], engines[1:])
        for entry in first:
            heappush(heap, entry)
        taken.append((time.perf_counter() - begun) * 1e6)
    return taken


def real(seeds: int) -> dict[str, Any]:
    """Return what whole runs with vLLM show (benchmarks/_dispatch_real.py), or why they were not made."""
    if (why := missing(Need.VLLM)) is not None:
        return {"real_over_fifo": None, "real_over_fifo_reason": why}
    from rrl.benchmarks import _dispatch_real  # imported here: it needs torch and all roles

    return _dispatch_real.measure(seeds)


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--seeds", type=int, default=3, help="steps of each trace and kind of prompts")
    options.add_argument("--tau", choices=TAUS, action="append", help="only this shape; may be repeated")
    options.add_argument("--only-real", action="store_true", help="only whole runs with vLLM")
    given = options.parse_args()
    check_requirements("dispatch")
    if given.only_real:
        print(json.dumps(real(given.seeds)))
        return
    texts = recorded()
    sources = [Source("synthetic", synthetic(2 * LEARNED_GROUPS, 1)), Source("recorded", texts)]
    rows: list[list[str]] = []
    samples: list[dict[str, Any]] = []
    for source in sources:
        for tau in given.tau or TAUS:
            for engines in ENGINES:
                outcomes = measure(source, TAUS[tau], engines, given.seeds)
                samples.append(_sample(source.name, tau, engines, outcomes))
                rows.append(_row(samples[-1]))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; seconds of a step over first come, first served")
    print_table(("source, tau, engines", "even", *RANKERS, "oracle", "oracle known", "pools unseen", "seen", "wrong",
                 "perfect", "moved"), rows)  # fmt: skip
    figures = {key: round(value, 4) for key, value in (_figures(samples) | ranked(texts)).items()}
    figures["kendall"] = figures["kendall_unseen"]
    taken = decision_times()
    figures["decision_us"] = round(statistics.median(taken), 1)
    _print_bars(figures)
    print(json.dumps({
        **figures, **real(given.seeds),
        "seeds": given.seeds, "samples": samples, "decisions_us": [round(each, 1) for each in taken],
    }))  # fmt: skip


def _sample(source: str, tau: str, engines: str, outcomes: dict[str, list[Outcome]]) -> dict[str, Any]:
    ratios = {arm: over_fifo(outcomes, arm) for arm in outcomes}
    ratios |= {"oracle new": oracle(outcomes, "new"), "oracle known": oracle(outcomes, "known")}
    answers = ENGINES[engines][0] * GROUP_SIZE
    return {
        "source": source, "tau": tau, "engines": engines,
        "over_fifo": {arm: round(ratio, 4) for arm, ratio in ratios.items()},
        "moved": {arm: round(statistics.mean(each.moves for each in outcomes[arm]) / answers, 4) for arm in RANKERS},
        "seconds": {arm: [round(each.seconds, 2) for each in those] for arm, those in outcomes.items()},
    }  # fmt: skip


def _row(sample: dict[str, Any]) -> list[str]:
    ratios, moved = sample["over_fifo"], sample["moved"]
    shown = ("even new", *RANKERS, "oracle new", "oracle known", "pools unseen", "pools seen", "pools wrong",
             "pools perfect")  # fmt: skip
    name = f"{sample['source']}, {sample['tau']}, {sample['engines']}"
    return [name, *(f"{ratios[arm]:.3f}" for arm in shown), f"{(moved['seen'] + moved['unseen']) / 2:.1%}"]


def _figures(samples: Sequence[dict[str, Any]]) -> dict[str, float]:
    shares, gains, possible = [], 0.0, 0.0
    singles = []
    for sample in samples:
        ratios, seconds = sample["over_fifo"], sample["seconds"]
        for arm, kind in (("unseen", "new"), ("seen", "known")):
            if (best := 1 - ratios[f"oracle {kind}"]) >= MIN_GAIN:
                shares.append((1 - ratios[arm]) / best)
                gains, possible = gains + 1 - ratios[arm], possible + best
        singles += [
            own / fifo for arm in RANKERS
            for own, fifo in zip(seconds[arm], seconds[f"fifo {_kind(arm)}"], strict=True)
        ]  # fmt: skip
    return {
        "worst_over_fifo": max(sample["over_fifo"][arm] for sample in samples for arm in RANKERS),
        "worst_step_over_fifo": max(singles),
        "two_pools_worst_over_fifo": max(
            ratio for sample in samples for arm, ratio in sample["over_fifo"].items() if arm.startswith("pools")),
        "share_of_oracle": min(shares, default=math.nan),
        "share_of_oracle_together": gains / possible if possible else math.nan,
        "oracle_over_fifo": statistics.mean(sample["over_fifo"]["oracle new"] for sample in samples),
        "learned_over_fifo": statistics.mean(
            sample["over_fifo"][arm] for sample in samples for arm in ("seen", "unseen")),
        "even_over_fifo": statistics.mean(sample["over_fifo"]["even new"] for sample in samples),
        "moved_share": statistics.mean(sample["moved"][arm] for sample in samples for arm in ("seen", "unseen")),
    }  # fmt: skip


def _print_bars(figures: dict[str, float]) -> None:
    for name, bar, most in (
        ("worst_over_fifo", MAX_OVER_FIFO, True), ("share_of_oracle", MIN_SHARE, False),
        ("recall20_unseen", MIN_RECALL, False), ("decision_us", MAX_DECISION_US, True),
    ):  # fmt: skip
        met = figures[name] <= bar if most else figures[name] >= bar
        print(
            f"{name} {figures[name]:g}, bar {'at most' if most else 'at least'} {bar:g}: {'met' if met else 'MISSED'}"
        )


if __name__ == "__main__":
    main()
