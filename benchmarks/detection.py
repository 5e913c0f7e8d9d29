"""Measures how well rrl's detectors and other methods detect failures, in scripted scenarios in virtual time.

``python detection.py [--scenarios DIR] [--seeds K] [--first-seed N] [--curve] [--no-baselines] [--only GLOB] [--jobs N]
[--warnings] [--json]``. The scenarios are files (scenarios/scenarios.md); another folder of scenarios can
be used instead.
rrl uses its default limits. The baselines are one fixed timeout, RobustRL's rules, and a judge that warns about every
replica. RobustRL's rules are played with 5, 15 and 30 s for the answer of a suspected rollout, because its paper does
not publish this time. ``--no-baselines`` plays rrl only, in a sixth of the time.

Prints the delays of hangs by role beside RobustRL's. Then it prints for each suite (``faults``, ``no_fault``) how many
failures each method found and missed, its false alarms, and its warnings per hour. The delays by role and cause follow,
and each mistake of rrl with its scenario and seed. With ``--curve``, rrl's limits are also shortened until it raises as
many false alarms as RobustRL. No run uses such limits; only the figures ``equal_false_alarms`` and ``curve`` come from
them. The last line is one JSON object (benchmarks/_provenance.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer

from rrl.benchmarks._detection_curve import FACTORS, MATCHED, MatchedDelay, Point, match_delay, point
from rrl.benchmarks._detection_figures import STATISTICS, hang_delays, hang_delays_by_role, samples, suites
from rrl.benchmarks._detection_runs import Run, available_cores, play_all
from rrl.benchmarks._provenance import provenance, raw_samples
from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._table import print_table
from rrl.benchmarks.scenarios.format import Scenario
from rrl.benchmarks.scenarios.load import ScenarioError, load_all
from rrl.benchmarks.scenarios.methods import METHODS, OURS
from rrl.benchmarks.scenarios.play import Played
from rrl.benchmarks.scenarios.score import confusion, delays, quantile

SHIPPED = Path(__file__).parent.parent / "tests" / "data" / "scenarios"
MAX_CURVE_SEEDS = 2
"""Maximum number of seeds of the curve. For each seed, the curve plays every scenario ten more times."""
_MAX_LISTED_MISTAKES = 400
"""Maximum number of mistakes of rrl that are listed."""


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(help=(__doc__ or "").splitlines()[0])
def main(
    scenarios: Annotated[Path, typer.Option(help="folder of scenario files")] = SHIPPED,
    seeds: Annotated[int, typer.Option(min=1, help="number of plays of each scenario")] = 5,
    first_seed: Annotated[int, typer.Option(min=0, help="the first seed")] = 0,
    curve: Annotated[bool, typer.Option("--curve", help="also play all methods with scaled limits")] = False,
    baselines: Annotated[bool, typer.Option("--baselines/--no-baselines", help="also play the baselines")] = True,
    only: Annotated[str, typer.Option(help="play only scenarios with such a name (* and ? are wildcards)")] = "*",
    jobs: Annotated[int | None, typer.Option(min=1, help="number of processes; default: usable cores")] = None,
    warnings: Annotated[bool, typer.Option("--warnings", help="also list every WARN of rrl")] = False,
    json_only: Annotated[bool, typer.Option("--json", help="print only the JSON line")] = False,
) -> None:
    check_requirements("detection")
    try:
        chosen = {name: each for name, each in load_all(scenarios).items() if fnmatchcase(name, only)}
    except ScenarioError as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from None
    if not chosen:
        typer.echo(f"{scenarios}: no scenario is called {only}", err=True)
        raise typer.Exit(2)
    if curve and not baselines:
        typer.echo("--curve scales the limits of the baselines too; remove --no-baselines", err=True)
        raise typer.Exit(2)
    methods = METHODS if baselines else (OURS,)
    numbers = range(first_seed, first_seed + seeds)
    processes = jobs or available_cores()
    plays = _plays(scenarios, chosen, methods, numbers, processes)
    points, match = _curve(scenarios, chosen, numbers[:MAX_CURVE_SEEDS], plays, processes) if curve else ([], None)
    result = _result(chosen, plays, points, match)
    if not json_only:
        _print_results(result, plays, points)
        if warnings:
            _print_warnings(plays[OURS])
    raw = raw_samples("detection", samples(plays))
    print(json.dumps(result | provenance() | {"seeds": [first_seed, first_seed + seeds - 1], "raw": str(raw)}))


def _plays(
    folder: Path, chosen: Mapping[str, Scenario], methods: Iterable[str], seeds: range, jobs: int
) -> dict[str, list[Played]]:
    runs = [Run(name, seed, method) for name in chosen for seed in seeds for method in methods]
    done = play_all(folder, runs, jobs)
    return {method: [done[run] for run in runs if run.method == method] for method in methods}


def _curve(
    folder: Path, chosen: Mapping[str, Scenario], seeds: range, plays: Mapping[str, Sequence[Played]], jobs: int
) -> tuple[list[Point], MatchedDelay]:
    runs = [
        Run(name, seed, method, factor)
        for method, factors in FACTORS.items()
        for factor in factors
        if factor != 1.0
        for name in chosen
        for seed in seeds
    ]
    by: dict[tuple[str, float], list[Played]] = {}
    for run, play in play_all(folder, runs, jobs).items():
        by.setdefault((run.method, run.factor), []).append(play)
    for method in FACTORS:
        by[method, 1.0] = [play for play in plays[method] if play.seed in seeds]
    points = [point(method, factor, by[method, factor]) for method, factor in sorted(by)]
    return points, match_delay({factor: each for (name, factor), each in by.items() if name == OURS}, by[MATCHED, 1.0])


def _result(
    chosen: Mapping[str, Scenario],
    plays: Mapping[str, Sequence[Played]],
    points: Sequence[Point],
    match: MatchedDelay | None,
) -> dict[str, Any]:
    counted = suites(plays)
    hangs = hang_delays_by_role(plays)
    result: dict[str, Any] = {
        "scenarios": len(chosen),
        "runs": counted["all"][OURS]["runs"],
        "precision": counted["all"][OURS]["precision"],
        "recall": counted["all"][OURS]["recall"],
        "hang_delay_over_robustrl": {
            role: {
                method: {name: figures[name]["ratio"] for name in STATISTICS}
                for method, figures in each.items()
                if figures["both"]
            }
            for role, each in hangs.items()
            if any(figures["both"] for figures in each.values())
        },
        "hangs": hangs,
        "suites": counted,
        **hang_delays(plays[OURS]),
        "broken": sorted({play.scenario for play in plays[OURS] if play.broken}),
    }
    if match is not None:
        result["equal_false_alarms"] = {
            "hang_delay_over_robustrl_30s": None if match.ratio is None else round(match.ratio, 4),
            "factor_of_shipped_bounds": round(match.factor, 3),
            "reached": match.reached,
        }
        result["curve"] = [
            {
                "method": one.method,
                "factor": one.factor,
                "precision": round(one.precision, 4),
                "recall": round(one.recall, 4),
                "false_per_run": round(one.false_per_run, 4),
                "hang_delay": one.delay,
            }
            for one in points
        ]
    return result


# ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _print_results(result: Mapping[str, Any], plays: Mapping[str, Sequence[Played]], points: Sequence[Point]) -> None:
    print("delays of the hangs that both find, s: rrl with its default limits / RobustRL")
    print_table(
        ["role, time for an answer", "both", "rrl alone", "RobustRL alone", *STATISTICS],
        [
            [
                f"{role}, {method.removeprefix('robustrl_')}",
                str(each["both"]),
                str(each["ours_alone"]),
                str(each["robustrl_alone"]),
                *(_pair(each.get(name)) for name in STATISTICS),
            ]
            for role, methods in result["hangs"].items()
            for method, each in methods.items()
        ],
    )
    for suite, methods in result["suites"].items():
        print(f"\nsuite {suite}; warnings: per hour, unexplained per hour, mean unexplained ones at a time")
        print_table(
            [
                "method",
                "runs",
                "found",
                "late",
                "missed",
                "false",
                "precision",
                "recall",
                "WARN found",
                "warnings",
                "unexplained",
                "stand",
            ],
            [
                [
                    method,
                    *(str(each[key]) for key in ("runs", "found", "late", "missed", "false")),
                    f"{each['precision']:.4f}",
                    f"{each['recall']:.4f}",
                    f"{each['warn_truths_found']} of {each['warn_truths']}",
                    f"{each['warnings_per_hour']:.2f}",
                    f"{each['unexplained_per_hour']:.2f}",
                    f"{each['unexplained_standing']:.2f}",
                ]
                for method, each in methods.items()
            ],
        )
    for method, each in plays.items():
        print(f"\n{method}: true cause (down) and reported cause")
        _print_confusion(each)
    print("\ndelay from the failure to the first alarm, s: median / p95 (found)")
    kinds = sorted({kind for each in plays.values() for kind in delays(each)})
    by = {method: delays(each) for method, each in plays.items()}
    print_table(
        ["role, cause", *plays],
        [
            [f"{role}, {cause}", *(_spread(by[method].get((role, cause), [])) for method in plays)]
            for role, cause in kinds
        ],
    )
    if points:
        print("\nlimits multiplied by a factor; 1: the default or published limits")
        print_table(
            ["method", "factor", "precision", "recall", "false/run", "hang delay, s"],
            [
                [
                    one.method,
                    f"{one.factor:g}",
                    f"{one.precision:.4f}",
                    f"{one.recall:.4f}",
                    f"{one.false_per_run:.3f}",
                    "" if one.delay is None else f"{one.delay:.0f}",
                ]
                for one in points
            ],
        )
    _print_mistakes(plays[OURS])


def _pair(figure: Mapping[str, float] | None) -> str:
    return "" if figure is None else f"{figure['ours']:.0f} / {figure['robustrl']:.0f}"


def _print_confusion(plays: Sequence[Played]) -> None:
    counts = confusion(plays)
    true, called = sorted({one for one, _ in counts}), sorted({one for _, one in counts})
    print_table(["", *called], [[one, *(str(counts[one, other] or "") for other in called)] for one in true])


def _spread(values: Sequence[float]) -> str:
    return f"{quantile(values, 0.5):.0f} / {quantile(values, 0.95):.0f} ({len(values)})" if values else ""


def _print_mistakes(plays: Sequence[Played]) -> None:
    lines = []
    for play in plays:
        at = f"{play.scenario} seed {play.seed}"
        lines += [f"{at}: {play.broken}"] if play.broken else []
        for one in play.outcomes:
            if not one.in_time:
                late = "never" if one.found_at is None else f"after {one.found_at - one.since:.0f} s by {one.detector}"
                lines.append(f"{at}: missed {one.who} ({one.cause}) since {one.since:.0f} s; found {late}")
        for alarm in play.false:
            lines.append(f"{at}: false alarm at {alarm.at:.0f} s about {alarm.who}: {alarm.detector}: {alarm.text}")
    print(f"\nmistakes of ours: {len(lines)}")
    for line in lines[:_MAX_LISTED_MISTAKES]:
        print(f"  {line}")


def _print_warnings(plays: Sequence[Played]) -> None:
    lines = [
        f"{play.scenario} seed {play.seed}: WARN at {one.at:.0f} s about {one.who}"
        f"{'' if one.until == inf else f', until {one.until:.0f} s'}: {one.detector}: {one.text}"
        for play in plays
        for one in play.warnings
    ]
    print(f"\nwarnings of ours: {len(lines)}")
    for line in lines:
        print(f"  {line}")


if __name__ == "__main__":
    app()
