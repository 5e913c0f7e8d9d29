"""Checks whether pyslurm matches Slurm on this machine, for ``make test-pyslurm`` and the tests of the readers.

    python -m rrl.tests.support.slurm_readers.pyslurm_pair

If pyslurm does not match, the program prints one line and exits with 2.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

from rrl.tests.support.slurm.lab import ROOT_ENV, missing
from rrl.tests.support.slurm.root import version_of


def mismatch() -> str | None:
    """Return why pyslurm cannot be tested against the Slurm of the labs; None if it can."""
    if absent := missing():
        return f"not installed: {', '.join(absent)}"
    try:
        version = importlib.metadata.version("pyslurm")
    except importlib.metadata.PackageNotFoundError:
        return f"pyslurm is not installed for {sys.executable} (docs/sites.md, Reading Slurm by pyslurm)"
    root = os.environ.get(ROOT_ENV)
    slurm = version_of(Path(root) if root else None)
    if [int(part) for part in version.split(".")[:2]] != [int(part) for part in slurm.split(".")[:2]]:
        return f"pyslurm {version} was not built for Slurm {slurm}"
    return None


if __name__ == "__main__":
    if reason := mismatch():
        print(f"pyslurm cannot be tested here: {reason}", file=sys.stderr)
        sys.exit(2)
