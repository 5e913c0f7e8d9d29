"""Announces and installs the packages that labs need on this machine, and removes them again.

The program needs root. It installs Debian's packages of Slurm, and creates the system user as which labs submit jobs.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rrl.tests.support.plain_user import PLAIN_USER, plain_user
from rrl.tests.support.slurm import accounting as slurm_accounting
from rrl.tests.support.slurm.lab import missing

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "iproute2")
"""Debian packages; iproute2 is for nodes with networks of their own."""
RECORD = Path("/var/lib/rrl-lab/packages")
"""File with the names of the packages that :func:`install` has added to this machine. Only these are removed again."""


def install(accounting: bool = False) -> str:
    """Install missing Debian packages (root only), and create the labs' plain user; return what was done.

    The user is created here because two labs that start at the same time would both create it.

    Raises:
        RuntimeError: A program is missing and cannot be installed; the text says what to do instead.
    """
    message = _install_packages(accounting)
    plain_user()
    return message


def _install_packages(accounting: bool) -> str:
    packages = PACKAGES + (slurm_accounting.PACKAGES if accounting else ())
    absent = missing(accounting=accounting) + ([] if shutil.which("ip") else ["ip"])
    if not absent:
        return "Slurm and the programs that its tests need are installed"
    wanted = ["install", "--yes", "--no-install-recommends", *packages]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise RuntimeError(f"not installed: {', '.join(absent)}; ask root to run: apt-get {' '.join(wanted)}")
    print("Slurm's programs are missing; asking apt which packages have them", flush=True)
    if _apt("--simulate", *wanted).returncode:  # the package lists may be old or absent
        print("downloading Debian's package lists (apt-get update)", flush=True)
        _apt("update", check=True)
    added = [
        line.split()[1]
        for line in _apt("--simulate", *wanted, check=True).stdout.splitlines()
        if line.startswith("Inst ")
    ]
    sizes = [line for line in _apt("--assume-no", *wanted).stdout.splitlines() if line.startswith(("Need to", "After"))]
    print(f"installing {len(added)} of Debian's packages: {' '.join(added)}", *sizes, sep="\n  ")
    print("make uninstall-slurm removes them", flush=True)
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text("\n".join(sorted({*_recorded(), *added})))  # so that an interrupted installation can be undone
    _apt(*wanted, check=True)
    if absent := missing(accounting=accounting):
        raise RuntimeError(f"installed {' '.join(packages)}, but these programs are still missing: {', '.join(absent)}")
    return "installed " + " ".join(packages)


def uninstall() -> str:
    """Remove the packages that :func:`install` has added, and the labs' plain user (root only). Returns what was done.

    Raises:
        RuntimeError: A package or the user cannot be removed.
    """
    if os.geteuid() != 0:
        raise RuntimeError("only root can remove packages and users")
    done = []
    if recorded := _recorded():
        print(f"removing {len(recorded)} packages: {' '.join(recorded)}", flush=True)
        _apt("purge", "--yes", *recorded, check=True)
        shutil.rmtree(RECORD.parent)
        done.append(f"removed {len(recorded)} packages")
    elif not missing():
        done.append(f"kept Slurm, which rrl has not installed (to remove it: apt-get purge {' '.join(PACKAGES[:-1])})")
    if _has_plain_user():
        removal = subprocess.run(["userdel", PLAIN_USER], capture_output=True, text=True)
        if removal.returncode:
            raise RuntimeError(f"cannot remove the user {PLAIN_USER}: {removal.stderr.strip()}")
        done.append(f"removed the user {PLAIN_USER}")
    return "; ".join(done) or "there is nothing to remove"


def _recorded() -> Sequence[str]:
    try:
        return RECORD.read_text().split()
    except FileNotFoundError:
        return ()


def _has_plain_user() -> bool:
    try:
        return bool(pwd.getpwnam(PLAIN_USER))
    except KeyError:
        return False


def _apt(*argv: str, check: bool = False) -> subprocess.CompletedProcess[str]:
    """Run apt-get. With ``check``, raises RuntimeError with its output if it fails."""
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    done = subprocess.run(["apt-get", *argv], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"apt-get {' '.join(argv)} failed:\n{done.stdout[-2000:]}{done.stderr}")
    return done
