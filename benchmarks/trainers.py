"""Measures trainers that others have written: what they need to take part in a run, and what a failure costs them.

Parts, each of which can be chosen by ``--part``:

- ``lines``: ``trl_lines`` (bar: 100) and ``fsdp_lines`` (bar: 130): lines of the examples' trainers, blank lines and
  docstrings included. ``make check`` keeps them formatted at 120 columns.
- ``trl``: examples/trl, whose trainer is killed by SIGKILL in the middle. ``trl_reward_last`` is the mean reward of its
  last ten steps (bar: 0.9); ``trl_groups_trained_twice`` and ``trl_groups_lost`` are the groups that several steps, or
  none, have trained, although each step has trained its share (bars: 0).
- ``restart``: ``trl_restart_extra_s`` (bar: 1.5): the time from a SIGKILL of the trainer until the commit of the next
  step that was not trained before it, of TRL minus that of the built-in trainer. Both train the job of examples/trl, in
  turns; each kill waits for a ready standby process. Difference of the medians.
- ``moe``: ``moe_reward_gain`` (bar: at least 0.1): examples/moe, in which TRL trains a mixture of experts that vLLM
  samples. Mean reward of the last 20 steps minus that of the first 20, of the worst of three seeds.
- ``commit``: ``seconds_per_extra_file`` (bar: 0.002) of a commit of 2,000 files, on the disk of this checkout.
- ``shares``: ``share_bytes_ratio`` (bar: 0.15) and ``share_decode_ratio`` (bar: 0.05): what one rank of 8 receives of a
  batch, and computes to read it, over the whole batch and its objects.
- ``publish``: ``publish_shards_over_one`` (bar: 1.0) and ``largest_process_memory_over_one`` (bar: 0.5) of a version of
  1 GiB that four ranks publish in parts, over one rank.

``trl``, ``restart`` and ``moe`` need ``make setup-trainers``: ``.venv-trainers/bin/python -m rrl.benchmarks.trainers``.
The part ``moe`` needs ``make setup-vllm``, too. The last line is one JSON object (benchmarks/_provenance.py); a figure
of a part that was not run is null.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from rrl.benchmarks import _trainers_commit, _trainers_publish, _trainers_shares, restart
from rrl.benchmarks._parts import Figures, Measure, Samples, measure_parts
from rrl.benchmarks._provenance import RESULTS
from rrl.benchmarks._requirements import Need, check_requirements, missing
from rrl.tests.support.trainers import (
    EXAMPLES,
    TIMEOUT_S,
    VLLM_RRL,
    kill_rank,
    reward_gain,
    submit_example,
    trained_groups,
)

STEPS = 240
"""Number of steps of examples/trl."""
GROUPS_PER_STEP = 16
ROUNDS = 2
KILLS_PER_RUN = 3
KILL_WINDOW_S = 5.0
"""Length (s) of the interval from which the moment of a kill is drawn, after all roles work."""
SEEDS = (0, 1, 2)
"""Seeds of examples/moe, which has 60 steps."""
COMMAND = 'command = ["python", "trl_trainer.py"]\n'
ARMS = {"trl": COMMAND, "built_in": ""}
"""The trainer's command in each arm; without one, it is the built-in trainer."""
BARS = {
    "trl_lines": 100,
    "fsdp_lines": 130,
    "trl_reward_last": 0.9,
    "trl_groups_trained_twice": 0,
    "trl_groups_lost": 0,
    "trl_restart_extra_s": 1.5,
    "moe_reward_gain": 0.1,
    "seconds_per_extra_file": 0.002,
    "share_bytes_ratio": 0.15,
    "share_decode_ratio": 0.05,
    "publish_shards_over_one": 1.0,
    "largest_process_memory_over_one": 0.5,
}
AT_LEAST = {"trl_reward_last", "moe_reward_gain"}
"""Figures whose bar is a minimum."""
PROGRAMS = {"trl_lines": EXAMPLES / "trl" / "trl_trainer.py", "fsdp_lines": EXAMPLES / "fsdp" / "trainer.py"}


def measure_lines(_: Path) -> tuple[Figures, Samples]:
    return {name: len(path.read_text().splitlines()) for name, path in PROGRAMS.items() if path.exists()}, {}


def measure_trl(folder: Path) -> tuple[Figures, Samples]:
    run = submit_example("trl", folder, ())
    kill_rank(run, 0, at_step=STEPS // 2)
    state = run.wait_end(TIMEOUT_S)
    assert (state.outcome, state.step) == ("completed", STEPS), state.why
    run.wait_gone()
    groups = trained_groups(run)
    return {
        "trl_reward_last": run.summary()["reward_last10"],
        "trl_groups_trained_twice": len(groups) - len(set(groups)),
        "trl_groups_lost": STEPS * GROUPS_PER_STEP - len(set(groups)),
    }, {}


def measure_restart(folder: Path) -> tuple[Figures, Samples]:
    seconds: Samples = {arm: [] for arm in ARMS}
    for turn in range(ROUNDS):
        for arm, command in ARMS.items():
            changes = (
                (COMMAND, command),
                (f"steps = {STEPS}", f"steps = {restart.STEPS}"),
                ("[limits]", '[recovery]\nbackoff = "0s"\nper_node = 10\n[limits]'),
            )
            run = submit_example("trl", folder / f"{arm}-{turn}", changes)
            for number in range(KILLS_PER_RUN):
                delay_s = random.Random(f"{turn}:{number}").uniform(0.0, KILL_WINDOW_S)
                # a trainer of one's own restores nothing that was trained after the last commit
                continues = (lambda *_: 1) if command else restart.restored_step
                killed = restart.kill(run, restart.ARMS["warm_ready"], delay_s, continues)
                seconds[arm].append(killed.seconds())
                print(f"{arm}-{turn}: {killed.seconds():.3f} s, load {killed.load}", flush=True)
            assert run.call("cancel", run.run.id, stdout=subprocess.DEVNULL).wait(TIMEOUT_S) == 0
            run.wait_gone(TIMEOUT_S)
    extra_s = median(seconds["trl"]) - median(seconds["built_in"])
    return {"trl_restart_extra_s": extra_s}, {f"{arm}_restart_s": values for arm, values in seconds.items()}


def measure_moe(folder: Path) -> tuple[Figures, Samples]:
    gains = []
    for seed in SEEDS:
        run = submit_example("moe", folder / str(seed), (("seed = 0", f"seed = {seed}"),))
        state = run.wait_end(TIMEOUT_S)
        assert state.outcome == "completed", state.why
        run.wait_gone()
        gains.append(reward_gain(run))
        print(f"moe, seed {seed}: {gains[-1]:.3f}", flush=True)
    return {"moe_reward_gain": min(gains)}, {"moe_reward_gain": gains}


def measure_commit(_: Path) -> tuple[Figures, Samples]:
    RESULTS.mkdir(exist_ok=True)  # on a disk; the folder of temporary files may be in memory
    return {"seconds_per_extra_file": _trainers_commit.seconds_per_extra_file(RESULTS / f"commit-{os.getpid()}")}, {}


PARTS: Mapping[str, Measure] = {
    "lines": measure_lines,
    "trl": measure_trl,
    "restart": measure_restart,
    "moe": measure_moe,
    "commit": measure_commit,
    "shares": lambda _: (_trainers_shares.measure(), {}),
    "publish": lambda _: (_trainers_publish.measure(), {}),
}
WITH_TRL = {"trl", "restart", "moe"}


def lacking(part: str) -> str | None:
    """Return what this machine lacks for the part, and how to get it; None if it lacks nothing."""
    if part == "moe" and not VLLM_RRL.exists():
        return f"{VLLM_RRL} does not exist; to install it: make setup-vllm"
    return missing(Need.TRAINERS) if part in WITH_TRL else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="run only this part; may be repeated")
    given = parser.parse_args()
    check_requirements("trainers")
    for part in given.part or ():
        if (why := lacking(part)) is not None:
            parser.exit(2, f"benchmarks/trainers.py --part {part}: {why}\n")
    parts = given.part or [part for part in PARTS if lacking(part) is None]
    measure_parts("trainers", (PARTS[part] for part in parts), BARS, AT_LEAST)


if __name__ == "__main__":
    main()
