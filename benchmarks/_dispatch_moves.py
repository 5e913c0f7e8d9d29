"""Measures what the dispatch of the store loses without moves, and without expected finishing times, in virtual time.

Arms, each with the rankers ``seen`` and ``unseen`` of benchmarks/dispatch.py and the traces of that benchmark:

- ``on``: the production functions.
- ``no moves``: no running answer moves, so no *courses* of pairs of engines are computed.
- ``by pace``: in addition, waiting answers are dealt out by the engines' times per token alone, the longest first, so
  that no expected finishing time of an engine (``engine_load``) is computed either.

The rule, chosen before the first figure was seen: the headline of an arm is the mean, over all traces, both rankers and
all seeds, of seconds(arm) / seconds(on) - 1. What the arm lacks is removed from the product if the headline is below
0.03; of two arms below 0.03 the one that lacks more decides.

Prints a table, and one JSON object as its last line; the seconds of all steps are in the file that ``raw`` names.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from copy import deepcopy

from rrl.benchmarks._dispatch_policies import FirstCome, Product
from rrl.benchmarks._dispatch_traces import recorded, synthetic
from rrl.benchmarks._dispatch_world import World
from rrl.benchmarks._provenance import provenance, raw_samples
from rrl.benchmarks._table import print_table
from rrl.benchmarks.dispatch import ENGINES, GROUP_SIZE, LEARNED_GROUPS, TAUS, Source, slower
from rrl.roles.trajectories.dispatch.token_times import TokenTimes

ARMS = {"on": (True, False), "no moves": (False, False), "by pace": (False, True)}
"""For each arm: whether answers move, and whether waiting answers are dealt out by pace alone."""
OFF = ("no moves", "by pace")


def measure(source: Source, tau: str, engines: str, seeds: int) -> dict[str, list[float]]:
    """Return the seconds of each step, by arm and ranker, in the order of the seeds."""
    count, shape = ENGINES[engines]
    scaled = [(places, slower(TAUS[tau], factor)) for places, factor in shape]
    times: dict[int, TokenTimes] = {}
    rng = random.Random(-1)  # for a first step, in which the policy learns the engines' times
    prompts = rng.sample(source.known, count)
    world = World([prompt.answers(GROUP_SIZE, rng) for prompt in prompts], scaled)
    world.run(
        Product([source.learned.expect(prompt.tokens) for prompt in prompts], source.learned, False, False, times)
    )
    seconds: dict[str, list[float]] = {}
    for seed in range(seeds):
        rng = random.Random(seed)
        for ranker, among in (("unseen", source.new), ("seen", source.known)):
            prompts = rng.sample(among, count)
            lengths = [prompt.answers(GROUP_SIZE, rng) for prompt in prompts]
            expected = [source.learned.expect(prompt.tokens) for prompt in prompts]
            fifo = World(lengths, scaled).run(FirstCome())
            seconds.setdefault(f"fifo {ranker}", []).append(fifo.seconds)
            for arm, (moves, by_pace) in ARMS.items():
                policy = Product(expected, source.learned, True, moves, deepcopy(times), by_pace)
                outcome = World(lengths, scaled).run(policy)
                seconds.setdefault(f"{arm} {ranker}", []).append(outcome.seconds)
                seconds.setdefault(f"moves of {arm} {ranker}", []).append(outcome.moves)
    return seconds


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--seeds", type=int, default=10)
    seeds = options.parse_args().seeds
    sources = [Source("synthetic", synthetic(2 * LEARNED_GROUPS, 1)), Source("recorded", recorded())]
    samples = {}
    for source in sources:
        for tau in TAUS:
            for engines in ENGINES:
                samples[f"{source.name}, {tau}, {engines}"] = measure(source, tau, engines, seeds)
    raw = raw_samples("dispatch-moves", samples)
    losses = {name: {arm: _losses(trace, arm) for arm in OFF} for name, trace in samples.items()}
    rows = []
    for name, trace in samples.items():
        moved = statistics.mean(trace["moves of on unseen"] + trace["moves of on seen"])
        over_fifo = [sum(map(_pair(trace, arm), range(2 * seeds))) / (2 * seeds) for arm in ARMS]
        cells = [f"{_mean(losses[name][arm]):+.4f} ± {_error(losses[name][arm]):.4f}" for arm in OFF]
        rows.append([name, *cells, *(f"{each:.3f}" for each in over_fifo), f"{moved:.1f}"])
    print_table(("source, tau, engines", *OFF, *(f"{arm} / fifo" for arm in ARMS), "moves"), rows)
    headline = {}
    for arm in OFF:
        of_seeds = [statistics.mean(trace[arm][seed] for trace in losses.values()) for seed in range(seeds)]
        headline[arm] = {"loss": round(_mean(of_seeds), 5), "error": round(_error(of_seeds), 5)}
        headline[arm]["worst_trace"] = round(max(_mean(trace[arm]) for trace in losses.values()), 4)
    print(json.dumps({"headline": headline, "seeds": seeds, **provenance(), "raw": str(raw)}))


def _losses(trace: dict[str, list[float]], arm: str) -> list[float]:
    """Return seconds(arm) / seconds(on) - 1 of each seed, as the mean of both rankers."""
    return [
        statistics.mean(
            trace[f"{arm} {ranker}"][seed] / trace[f"on {ranker}"][seed] - 1 for ranker in ("unseen", "seen")
        )
        for seed in range(len(trace["on seen"]))
    ]


def _pair(trace: dict[str, list[float]], arm: str):
    seeds = len(trace["on seen"])
    return lambda i: (
        trace[f"{arm} {'seen' if i >= seeds else 'unseen'}"][i % seeds]
        / trace[f"fifo {'seen' if i >= seeds else 'unseen'}"][i % seeds]
    )


_mean = statistics.mean


def _error(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


if __name__ == "__main__":
    main()
