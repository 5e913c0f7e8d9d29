"""Measures what expected lengths and dispatch gain over first come, first served, in virtual time.

The production functions (``roles/trajectories/dispatch``) choose which engine gets which answers. Engines, times and
lengths are simulated (benchmarks/_dispatch_world.py). A *trace* consists of a source of lengths (synthetic or recorded,
benchmarks/_dispatch_traces.py), a shape of τ(b), and a set of engines. τ(b) is the seconds of a token with b answers
running. Each trace has several steps, with the same lengths in every arm. Each step is timed from its start until its
last answer is done. Arms: first come, first served; the answers assigned evenly to the engines beforehand; StreamRL's
two pools; and the production functions with rankers from wrong to perfect:

- ``wrong`` has learned, for each prompt, the lengths of another prompt.
- ``unseen`` and ``seen`` have learned 1,000 groups of the source. The prompts of the steps are new to ``unseen``, and
  ``seen`` has learned them.
- ``perfect`` knows every length. The *oracle* is the better of this arm and of a schedule made from all true lengths.
- ``true mean`` knows the mean logarithm of each prompt's lengths, and nothing else. No ranker of prompts can know more,
  so this arm's gain is the most that a ranker can attain with the production rules. The tables show this arm's share of
  the oracle's gain beside the shares of the rankers.

Seconds of a step are noisy: in some traces the ratio of one step to first come, first served has a standard deviation
of 0.05. The mean of three steps then says little about a bar of 1.02, and the largest of 120 such means exceeds it by
chance. All arms of a seed have the same lengths, so ratios are paired, and each figure has a standard error
(benchmarks/_dispatch_figures.py). A trace is played with ``--seeds`` seeds. As long as one of its figures is less than
three standard errors away from its bar, it gets 8 more seeds, up to ``--most-seeds``. When this rule was chosen, 9 of
the 24 traces had been measured, with 8 seeds each.

These figures and bars were chosen before the first measurement, except the two that are marked as added later:

- ``worst_over_fifo``: largest ratio of a trace's summed seconds to those of first come, first served, over all traces
  and the rankers from wrong to perfect (bar: 1.02).
- ``share_of_oracle``: smallest share of the oracle's gain that ``seen`` and ``unseen`` have, over all traces in which
  the oracle gains at least 5 % (bar: 0.25).
- ``attainable_share_of_oracle`` (added later): smallest share of the oracle's gain that ``true mean`` has, over the
  same traces.
- ``share_of_attainable`` (added later): smallest share of the gain of ``true mean`` that ``seen`` and ``unseen`` have,
  over the same traces.
- ``recall20_unseen``: how many of the longest 20 % of the recorded prompts the ranker also expects among the
  longest 20 %, as a share; only prompts that are new to the ranker count (bar: 0.7 after 1,000 groups).
- ``decision_us``: median time of a decision with 10,000 answers waiting and free places everywhere (bar: 1,000).
- ``real_over_fifo``: seconds of steps in whole runs with vLLM (benchmarks/_dispatch_real.py) with leases by expected
  length, divided by those with first come, first served. It is null if vLLM is not installed.

Prints tables, and one JSON object with all samples as its last line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from heapq import heapify, heappop, heappush
from typing import Any

from rrl.benchmarks._dispatch_figures import LEARNED, MAX_OVER_FIFO, MIN_SHARE, RANKERS, Trace, figures, kind
from rrl.benchmarks._dispatch_policies import FirstCome, FixedLists, Product, clairvoyant, two_pools
from rrl.benchmarks._dispatch_traces import LIMIT, Prompt, permuted, recorded, synthetic
from rrl.benchmarks._dispatch_world import Policy, World
from rrl.benchmarks._provenance import provenance
from rrl.benchmarks._requirements import Need, check_requirements, missing
from rrl.benchmarks._table import print_table
from rrl.roles.trajectories.dispatch.lengths import Answer, Lengths
from rrl.roles.trajectories.dispatch.token_times import TokenTimes
from rrl.roles.trajectories.dispatch.work_sharing import CONSIDERED, EngineView, length_class, share

LEARNED_GROUPS = 1_000
"""Number of groups of the source that a ranker has observed before the steps: 500 prompts, each twice."""
GROUP_SIZE = 8
TAIL = 0.2
WAITING = 10_000
DECISIONS = 200
SEEDS = 8
"""Number of seeds with which a trace begins, and number of further seeds that an undecided trace gets at a time."""
MOST_SEEDS = 64
REAL_SEEDS = 3
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
"""For each set of engines: the number of prompts of a step, and (places, factor) for each engine. An engine runs at
most ``places`` answers at once; ``factor`` multiplies its τ(b), the seconds of a token with b answers running."""


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
    """Yield the arms of a step with these prompts; ``new`` says whether the prompts are new to the rankers."""

    def points(world: World, means: Sequence[float]) -> list[float]:
        return [math.exp(means[each.group]) for each in world.answers]

    def product(means: Sequence[float], separates: bool = True) -> Callable[[World], Policy]:
        return lambda world: Product(points(world, means) if separates else None, deepcopy(times))

    def pools(means: Sequence[float]) -> Callable[[World], Policy]:
        return lambda world: two_pools(world, points(world, means), world.engines[0].times)

    def known(lengths: Lengths) -> list[float]:
        return [lengths.expect(prompt.tokens).mean for prompt in prompts]

    def true(world: World) -> list[float]:
        return [float(each.length) for each in world.answers]

    kind, learned = ("new", "unseen") if new else ("known", "seen")
    yield f"fifo {kind}", lambda world: FirstCome()
    yield (
        f"even {kind}",
        lambda world: FixedLists(
            [
                [each.number for each in world.answers if each.number % len(world.engines) == i]
                for i in range(len(world.engines))
            ]
        ),
    )
    yield f"true mean {kind}", product([prompt.mean for prompt in prompts])
    yield learned, product(known(source.learned), source.learned.separates)
    yield f"pools {learned}", pools(known(source.learned))
    if new:
        yield "perfect", lambda world: Product(true(world), deepcopy(times))
        yield "pools perfect", lambda world: two_pools(world, true(world), world.engines[0].times)
    else:
        yield "wrong", product(known(source.misled), source.misled.separates)
        yield "pools wrong", pools(known(source.misled))
    yield f"clairvoyant {kind}", clairvoyant


def measure(source: Source, tau: str, engines: str, seeds: int, most_seeds: int) -> Trace:
    """Play a trace and return its outcomes.

    The trace is played with ``seeds`` seeds. Until it is decided (:meth:`Trace.decided`), it gets further seeds, up to
    ``most_seeds`` in all.
    """
    count, shape = ENGINES[engines]
    scaled = [(places, _slower(TAUS[tau], factor)) for places, factor in shape]
    trace = Trace(source.name, tau, engines)
    times: dict[int, TokenTimes] = {}
    rng = random.Random(-1)  # for a first step, in which the policy learns the engines' times
    prompts = rng.sample(source.known, count)
    World([prompt.answers(GROUP_SIZE, rng) for prompt in prompts], scaled).run(Product(None, times))
    seed = 0
    while seed < seeds or (seed < most_seeds and (seed % SEEDS or not trace.decided())):
        rng = random.Random(seed)
        for new in (True, False):
            prompts = rng.sample(source.new if new else source.known, count)
            lengths = [prompt.answers(GROUP_SIZE, rng) for prompt in prompts]
            for arm, policy in arms(source, prompts, times, new):
                world = World(lengths, scaled)
                trace.add(arm, world.run(policy(world)))
        seed += 1
    return trace


def _slower(tau: Tau, factor: float) -> Tau:
    return lambda running: factor * tau(running)


def recall(truth: Sequence[float], expected: Sequence[float]) -> float:
    """Return the share of the longest values (:data:`TAIL` of all) that are also expected to be among the longest."""
    count = int(TAIL * len(truth))
    longest, guessed = (
        set(sorted(range(len(values)), key=lambda i: -values[i])[:count]) for values in (truth, expected)
    )
    return len(longest & guessed) / count


def kendall(truth: Sequence[float], expected: Sequence[float]) -> float:
    """Return Kendall's rank correlation, estimated from 20,000 pairs."""
    rng, total, pairs = random.Random(0), 0, 0
    for _ in range(20_000):
        i, j = rng.randrange(len(truth)), rng.randrange(len(truth))
        if truth[i] != truth[j]:
            pairs += 1
            order = (expected[i] > expected[j]) - (expected[i] < expected[j])
            total += order if truth[i] > truth[j] else -order
    return total / pairs


def ranked(prompts: Sequence[Prompt]) -> dict[str, float]:
    """Return the figures of a ranker after 1,000 groups, for the prompts of these groups and for all other prompts."""
    known, new = prompts[:LEARNED_GROUPS], prompts[LEARNED_GROUPS:]
    lengths = _learned(known)
    figures = {}
    for name, those in (("seen", known), ("unseen", new)):
        truth, expected = [each.mean for each in those], [lengths.expect(each.tokens).mean for each in those]
        figures[f"recall20_{name}"] = recall(truth, expected)
        figures[f"kendall_{name}"] = kendall(truth, expected)
    return figures


def decision_times() -> list[float]:
    """Return the times (µs) of decisions with 10,000 waiting answers and nine half-full engines of 128 places."""
    rng = random.Random(0)
    means = [rng.gauss(7.3, 0.8) for _ in range(WAITING // GROUP_SIZE)]
    heap = [(math.inf, -length_class(math.exp(means[i // GROUP_SIZE])), i) for i in range(WAITING)]
    heapify(heap)
    engines = [EngineView(TokenTimes().table, 64, 64) for _ in range(9)]
    taken = []
    for _ in range(DECISIONS):
        begun = time.perf_counter()
        first = [heappop(heap) for _ in range(CONSIDERED)]
        share([number for _, _, number in first], engines[0], engines[1:])
        for entry in first:
            heappush(heap, entry)
        taken.append((time.perf_counter() - begun) * 1e6)
    return taken


def real(seeds: int) -> dict[str, Any]:
    """Return the figures of whole runs with vLLM (benchmarks/_dispatch_real.py), or why vLLM cannot be used."""
    if (why := missing(Need.VLLM)) is not None:
        return {"real_over_fifo": None, "real_over_fifo_reason": why}
    from rrl.benchmarks import _dispatch_real  # imported here, because it needs torch and all roles

    return _dispatch_real.measure(seeds)


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--seeds", type=int, default=SEEDS, help="least number of seeds of each trace")
    options.add_argument("--most-seeds", type=int, default=MOST_SEEDS, help="greatest number of seeds of a trace")
    options.add_argument("--tau", choices=TAUS, action="append", help="use only this shape of τ; may be repeated")
    options.add_argument("--real-seeds", type=int, default=REAL_SEEDS, help="number of runs of each arm with vLLM")
    options.add_argument("--only-real", action="store_true", help="measure only whole runs with vLLM")
    given = options.parse_args()
    check_requirements("dispatch")
    if given.only_real:
        print(json.dumps(real(given.real_seeds) | provenance()))
        return
    texts = recorded()
    sources = [Source("synthetic", synthetic(2 * LEARNED_GROUPS, 1)), Source("recorded", texts)]
    traces: list[Trace] = []
    for source in sources:
        for tau in given.tau or TAUS:
            for engines in ENGINES:
                traces.append(measure(source, tau, engines, given.seeds, given.most_seeds))
                print(f"{_name(traces[-1])}: {len(traces[-1].seeds)} seeds", file=sys.stderr, flush=True)
    _print_traces(traces)
    found = {key: round(value, 4) for key, value in (figures(traces) | ranked(texts)).items()}
    found["kendall"] = found["kendall_unseen"]
    taken = decision_times()
    found["decision_us"] = round(statistics.median(taken), 1)
    _print_bars(found)
    print(
        json.dumps(
            {
                **found,
                **real(given.real_seeds),
                "samples": [_sample(trace) for trace in traces],
                "decisions_us": [round(each, 1) for each in taken],
                **provenance(),
            }
        )
    )


def _name(trace: Trace) -> str:
    return f"{trace.source}, {trace.tau}, {trace.engines}"


def _print_traces(traces: Sequence[Trace]) -> None:
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; seconds of a step over first come, first served")
    print_table(
        ("source, tau, engines", "seeds", *RANKERS),
        [
            [_name(trace), str(len(trace.seeds)), *(str(trace.estimate(trace.over_fifo, arm)) for arm in RANKERS)]
            for trace in traces
        ],
    )
    shown = (
        "even new",
        "pools unseen",
        "pools seen",
        "pools wrong",
        "pools perfect",
        "true mean new",
        "true mean known",
    )
    print_table(
        ("source, tau, engines", *shown, "oracle new", "oracle known"),
        [
            [
                _name(trace),
                *(f"{trace.over_fifo(arm):.3f}" for arm in shown),
                *(f"{trace.oracle(kind):.3f}" for kind in ("new", "known")),
            ]
            for trace in traces
        ],
    )
    print("Gain as a share of the oracle's gain (if that is 5 % or more), and of a ranker's that knows true means")
    print_table(
        ("source, tau, engines", "unseen", "true mean", "of attainable", "seen", "true mean", "of attainable"),
        [[_name(trace), *(cell for arm in LEARNED for cell in _share_cells(trace, arm))] for trace in traces],
    )


def _share_cells(trace: Trace, arm: str) -> tuple[str, str, str]:
    if not trace.gainful(arm):
        return "", "", ""
    known = f"{trace.share(f'true mean {kind(arm)}'):.2f}"
    return str(trace.estimate(trace.share, arm)), known, f"{trace.share_of_attainable(arm):.2f}"


def _sample(trace: Trace) -> dict[str, Any]:
    ratios = {arm: trace.over_fifo(arm) for arm in trace.seconds}
    ratios |= {f"oracle {prompts}": trace.oracle(prompts) for prompts in ("new", "known")}
    return {
        "source": trace.source,
        "tau": trace.tau,
        "engines": trace.engines,
        "seeds": len(trace.seeds),
        "over_fifo": {arm: round(ratio, 4) for arm, ratio in ratios.items()},
        "seconds": {arm: [round(each, 2) for each in those] for arm, those in trace.seconds.items()},
    }


def _print_bars(found: dict[str, float]) -> None:
    for name, bar, most in (
        ("worst_over_fifo", MAX_OVER_FIFO, True),
        ("share_of_oracle", MIN_SHARE, False),
        ("recall20_unseen", MIN_RECALL, False),
        ("decision_us", MAX_DECISION_US, True),
    ):
        met = found[name] <= bar if most else found[name] >= bar
        print(f"{name} {found[name]:g}, bar {'at most' if most else 'at least'} {bar:g}: {'met' if met else 'MISSED'}")


if __name__ == "__main__":
    main()
