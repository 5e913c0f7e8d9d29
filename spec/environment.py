"""Which environment variables of a shell, of the manager or of an image reach a role."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

ALLOWED = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "SHELL", "LD_LIBRARY_PATH", "VIRTUAL_ENV",
    "CONDA_EXE",
)  # fmt: skip
"""what roles inherit of the manager's environment; nothing passes that is not named"""
OF_THE_HOST = ("PATH", "HOME", "TMPDIR", "SHELL", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_EXE")
"""those of them that name folders of the host: in a container that starts with our own process they mean nothing"""
_LAUNCHERS = frozenset((
    "SLURM", "SLURMD", "SBATCH", "SRUN", "SALLOC", "SPANK", "PMI", "PMI2", "PMIX", "OMPI", "ORTE", "PRTE", "RRL",
))  # fmt: skip
"""What stands before the first ``_`` in variables of launchers. They are misread by torch, Hugging Face and mpi4py
(docs/sources.md, sites), and never pass, whoever asks for them; ours are set anew for each role."""


def of_a_launcher(name: str) -> bool:
    return name.partition("_")[0] in _LAUNCHERS


def passing(patterns: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Variables whose name is one of ``patterns``, or begins with one that ends in ``*``; but none of a launcher."""
    names, starts = set(), []
    for pattern in patterns:
        if pattern.endswith("*"):
            starts.append(pattern[:-1])
        else:
            names.add(pattern)
    return {
        name: value
        for name, value in sorted(environ.items())
        if (name in names or name.startswith(tuple(starts))) and not of_a_launcher(name)
    }
