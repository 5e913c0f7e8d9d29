"""What benchmarks need of this machine, and one line for each thing that is missing.

``make bench`` runs this program first: it checks the needs of all benchmarks before the first one takes its time, and
ends with 2 where a benchmark cannot run. A benchmark that is run alone checks its own needs with :func:`begin`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path

from rrl.tests.support.slurm import lab as slurm
from rrl.tests.support.slurm import netns
from rrl.tests.support.supervisor import exit_on_sigterm


class Need(StrEnum):
    SLURM = "Slurm"
    TORCH = "torch"
    UCX = "UCX"
    NAMESPACES = "network namespaces"


NEEDS: Mapping[str, tuple[Need, ...]] = {
    "agent_cost": (),
    "checkpoint": (Need.TORCH,),
    "cli_startup": (),
    "detection": (),
    "hostile_ports": (),
    "manager_away": (Need.TORCH, Need.SLURM),
    "restart": (Need.TORCH, Need.SLURM),
    "rollout_recovery": (Need.TORCH,),
    "snapshots": (Need.TORCH,),
    "weights": (Need.TORCH, Need.UCX),
}
"""Of each benchmark when it is run without options, as ``make bench`` does."""
PARTS: Mapping[str, tuple[Need, ...]] = {"hostile_ports": (Need.UCX,), "weights": (Need.NAMESPACES,)}
"""What a benchmark does without: it leaves out the part that needs it."""
ALTERNATIVES: Mapping[tuple[str, Need], str] = {
    ("manager_away", Need.SLURM): "--cluster local",
    ("restart", Need.SLURM): "--cluster local",
    ("weights", Need.UCX): "--part namespaces --kind tcp",
}
"""Options with which a benchmark does without a need."""


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


_MISSING: Mapping[Need, Callable[[], str | None]] = {
    Need.SLURM: _slurm,
    Need.TORCH: lambda: _module("torch", "torch"),
    Need.UCX: lambda: _module("ucxx", "ucx"),
    Need.NAMESPACES: _namespaces,
}


def missing(need: Need) -> str | None:
    """Why a need is not met on this machine and what would meet it; None where it is met."""
    return _MISSING[need]()


def unmet(benchmark: str, needs: Iterable[Need]) -> Iterator[str]:
    """One line for each of ``needs`` that is not met."""
    for need in needs:
        if (why := missing(need)) is not None:
            instead = ALTERNATIVES.get((benchmark, need))
            yield f"benchmarks/{benchmark}.py needs {need}: {why}" + (f"; without it: {instead}" if instead else "")


def check_requirements(benchmark: str, without: Collection[Need] = ()) -> None:
    """Have SIGTERM unwind this benchmark, and check its needs.

    ``without``: needs that the given options do not have. Raises SystemExit(2) after a line for each unmet need.
    """
    exit_on_sigterm()
    if lines := list(unmet(benchmark, [need for need in NEEDS[benchmark] if need not in without])):
        print("\n".join(lines), file=sys.stderr)
        raise SystemExit(2)


def main() -> int:
    """Check the needs of all benchmarks; the exit code."""
    lines = [line for benchmark, needs in NEEDS.items() for line in unmet(benchmark, needs)]
    for benchmark, parts in PARTS.items():
        for need in parts:
            if (why := missing(need)) is not None:
                print(f"benchmarks/{benchmark}.py leaves out the part that needs {need}: {why}", file=sys.stderr)
    if lines:
        print("\n".join(lines), file=sys.stderr)
        names = sorted(set(NEEDS) - {Path(line.split()[0]).stem for line in lines})
        print(f"none was started; what can be run here, each with python benchmarks/NAME.py: {', '.join(names)}",
              file=sys.stderr)  # fmt: skip
    return 2 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
