"""Checks whether this machine has what the benchmarks need, and prints one line for each need that is not met.

``make bench`` runs this program first. It checks the needs of all benchmarks before the first one starts, and exits
with 2 if a benchmark cannot run. A benchmark that is run alone checks its own needs (:func:`check_requirements`).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path

from rrl.examples.smollm2 import make_model
from rrl.tests.support.slurm import lab as slurm
from rrl.tests.support.slurm import netns
from rrl.tests.support.slurm_readers import pyslurm_pair
from rrl.tests.support.supervisor import exit_on_sigterm


class Need(StrEnum):
    SLURM = "Slurm"
    TORCH = "torch"
    UCX = "UCX"
    NAMESPACES = "network namespaces"
    VLLM = "vLLM"
    SMOLLM2 = "the model SmolLM2"
    OPENAI = "OpenAI's client"
    PYSLURM = "a pyslurm that matches Slurm"
    TRAINERS = "TRL"
    CLIENTS = "the clients of others"
    TRACKERS = "TensorBoard, wandb and MLflow"


NEEDS: Mapping[str, tuple[Need, ...]] = {
    "agent_cost": (),
    "agents": (Need.TORCH, Need.OPENAI),
    "checkpoint": (Need.TORCH,),
    "cli_startup": (),
    "clients": (Need.TORCH, Need.SMOLLM2),
    "code_lines": (),
    "delta": (Need.TORCH, Need.SMOLLM2, Need.UCX),
    "detection": (),
    "dispatch": (Need.TORCH,),
    "elastic": (),
    "ettr": (Need.TORCH, Need.SLURM),
    "hostile_ports": (),
    "learning": (Need.TORCH,),
    "looks": (),
    "report": (),
    "manager_away": (Need.TORCH, Need.SLURM),
    "planner": (),
    "publishing": (Need.TORCH,),
    "restart": (Need.TORCH, Need.SLURM),
    "rollout_recovery": (Need.TORCH,),
    "slurm_reads": (Need.SLURM,),
    "snapshots": (Need.TORCH,),
    "stream": (Need.TORCH,),
    "tags": (Need.TORCH,),
    "takeover": (Need.SLURM,),
    "track": (Need.TRACKERS,),
    "trainers": (Need.TORCH,),
    "weights": (Need.TORCH, Need.UCX),
}
"""Needs of each benchmark that is run without options, as ``make bench`` does."""
PARTS: Mapping[str, tuple[Need, ...]] = {
    "agents": (Need.VLLM, Need.SMOLLM2),
    "clients": (Need.CLIENTS,),
    "delta": (Need.NAMESPACES,),
    "dispatch": (Need.VLLM,),
    "hostile_ports": (Need.UCX,),
    "slurm_reads": (Need.PYSLURM,),
    "trainers": (Need.TRAINERS,),
    "weights": (Need.NAMESPACES,),
}
"""Needs of only a part of a benchmark. If such a need is not met, the benchmark leaves out this part."""
ALTERNATIVES: Mapping[tuple[str, Need], str] = {
    ("delta", Need.SMOLLM2): "--part faults",
    ("delta", Need.UCX): "--part updates --part loopback --part namespaces",
    ("manager_away", Need.SLURM): "--cluster local",
    ("restart", Need.SLURM): "--cluster local",
    ("takeover", Need.SLURM): "--cluster local",
    ("weights", Need.UCX): "--part namespaces --kind tcp",
}
"""For a benchmark and one of its needs, the options with which the benchmark runs without meeting this need."""


def _slurm() -> str | None:
    absent = slurm.missing()
    return f"not installed: {', '.join(absent)}; to install it: make slurm" if absent else None


def _module(name: str, extra: str) -> str | None:
    if importlib.util.find_spec(name) is not None:
        return None
    return f"Python's {name} is not installed; to install it: make setup (or pip install '.[{extra}]')"


def _namespaces() -> str | None:
    return (
        None if netns.possible() else "they need root and iproute2, and a kernel that allows them (containers may not)"
    )


def _vllm() -> str | None:
    if importlib.util.find_spec("vllm") is not None:
        return None
    return (
        "Python's vllm is not installed; to install it: make setup-vllm, and run the benchmark by .venv-vllm/bin/python"
    )


def _trainers() -> str | None:
    if importlib.util.find_spec("trl") is not None:
        return None
    return (
        "Python's trl is not installed; to install it: make setup-trainers, and run the benchmark by"
        " .venv-trainers/bin/python"
    )


def _clients() -> str | None:
    if importlib.util.find_spec("pydantic_ai") is not None:
        return None
    return (
        "Python's pydantic_ai is not installed; to install it: make setup-clients, and run the benchmark by"
        " .venv-clients/bin/python"
    )


def _smollm2() -> str | None:
    folder = make_model.FOLDER.expanduser()
    for each in (folder, folder.with_name(f"{folder.name}-tools")):
        if not make_model.is_complete(each):
            return f"{each} has no complete model; to make it: make smollm2"
    return None


def _trackers() -> str | None:
    return next((reason for name in ("tensorboard", "wandb", "mlflow") if (reason := _module(name, name))), None)


_MISSING: Mapping[Need, Callable[[], str | None]] = {
    Need.SLURM: _slurm,
    Need.TORCH: lambda: _module("torch", "torch"),
    Need.UCX: lambda: _module("ucxx", "ucx"),
    Need.NAMESPACES: _namespaces,
    Need.VLLM: _vllm,
    Need.SMOLLM2: _smollm2,
    Need.OPENAI: lambda: _module("openai", "dev"),
    Need.TRAINERS: _trainers,
    Need.CLIENTS: _clients,
    Need.PYSLURM: pyslurm_pair.mismatch,
    Need.TRACKERS: _trackers,
}


def missing(need: Need) -> str | None:
    """Return why a need is not met on this machine and how to meet it; None if it is met."""
    return _MISSING[need]()


def unmet(benchmark: str, needs: Iterable[Need]) -> Iterator[str]:
    """Yield one line for each of ``needs`` that is not met."""
    for need in needs:
        if (why := missing(need)) is not None:
            instead = ALTERNATIVES.get((benchmark, need))
            yield f"benchmarks/{benchmark}.py needs {need}: {why}" + (f"; without it: {instead}" if instead else "")


def check_requirements(benchmark: str, without: Collection[Need] = ()) -> None:
    """Make SIGTERM end this benchmark by an exception, so that it cleans up, and check the benchmark's needs.

    ``without``: needs that do not apply to the given options. Raises SystemExit(2) after a line for each unmet need.
    """
    exit_on_sigterm()
    if lines := list(unmet(benchmark, [need for need in NEEDS[benchmark] if need not in without])):
        print("\n".join(lines), file=sys.stderr)
        raise SystemExit(2)


def main() -> int:
    """Check the needs of all benchmarks; return the exit code."""
    lines = [line for benchmark, needs in NEEDS.items() for line in unmet(benchmark, needs)]
    for benchmark, parts in PARTS.items():
        for need in parts:
            if (why := missing(need)) is not None:
                print(f"benchmarks/{benchmark}.py leaves out the part that needs {need}: {why}", file=sys.stderr)
    if lines:
        print("\n".join(lines), file=sys.stderr)
        names = sorted(set(NEEDS) - {Path(line.split()[0]).stem for line in lines})
        print(
            f"no benchmark was started; these can run here, by python benchmarks/NAME.py: {', '.join(names)}",
            file=sys.stderr,
        )
    return 2 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
