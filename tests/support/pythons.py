"""``make test-python``: runs the pure tests and one whole run on the other versions of Python that rrl supports.

    python -m rrl.tests.support.pythons [VERSION ...]

3.13 is that of Debian 13: its packages are unpacked into a folder, which takes the place of /usr for the tests, in a
mount namespace of their own (this needs root). No Debian has 3.12: ``$RRL_PYTHON_3_12`` or a ``python3.12`` on PATH is
used, else this version is not tested. Neither environment has torch, whose wheels for these versions take several GB,
so the run has the light roles of :mod:`rrl.tests.support.light_roles`. The exit code is 0 only if no test failed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rrl.tests.support.slurm.root import roots_folder, unpack

CHECKOUT = Path(__file__).parents[2]
VERSIONS = ("3.12", "3.13")
_DEBIAN = {"3.13": "trixie"}
"""Debian's suite of a version."""
_PROGRAMS = (
    "bash",
    "coreutils",
    "dash",
    "findutils",
    "git",
    "grep",
    "iproute2",
    "libstdc++6",
    "make",
    "procps",
    "sed",
    "util-linux",
)
"""Packages that the tests and the wheels need, besides those of Python."""
_EXTRAS = "dev,endpoint,parquet"
_WHOLE_RUN = "tests/integration/local/test_runs.py"
_WHOLE_RUN_NAME = "test_killed_rollout_restarts_alone"
_IN_ROOT = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /usr && exec "$@"')
"""Command that runs another command with the folder that follows as /usr."""


def main(argv: Sequence[str]) -> int:
    lines, good = [], True
    for version in argv or VERSIONS:
        try:
            command = _interpreter(version)
        except RuntimeError as error:
            lines.append(f"Python {version}: not tested: {error}")
            continue
        failed = _failed(version, command)
        good = good and not failed
        lines.append(f"Python {version}: {f'{failed} failed' if failed else 'passed'}")
    print("\n".join(lines))
    return 0 if good else 1


def _interpreter(version: str) -> list[str]:
    """Return the command that runs this version of Python. Raises RuntimeError if there is none."""
    variable = f"RRL_PYTHON_{version.replace('.', '_')}"
    given = os.environ.get(variable) or shutil.which(f"python{version}")
    if given and subprocess.run([given, "-c", ""], capture_output=True).returncode == 0:
        return [given]
    if version not in _DEBIAN:
        raise RuntimeError(f"there is no python{version} on PATH; {variable} may name one")
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise RuntimeError(f"Debian's packages can be used only by root, and with apt-get; {variable} may name one")
    root = roots_folder() / f"python-{version}"
    if not (root / "ready").exists():
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        unpack(_DEBIAN[version], root, (f"python{version}", f"python{version}-venv", *_PROGRAMS))
        (root / "ready").touch()
    return [*_IN_ROOT, str(root / "usr"), f"/usr/bin/python{version}"]


def _failed(version: str, command: Sequence[str]) -> str:
    """Install rrl for this interpreter and run the tests; return what failed, empty if everything passed."""
    venv = roots_folder() / f"python-{version}-venv"
    python = str(venv / "bin/python")
    inside = command[:-1]
    pip = [*inside, python, "-m", "pip", "install", "--quiet", "--use-pep517", "--disable-pip-version-check"]
    print(f"== Python {version} in {venv}", flush=True)
    for name, step in (
        ("the environment", [*command, "-m", "venv", "--clear", str(venv)]),
        ("the installation", [*pip, "--constraint", "constraints.txt", "--editable", f".[{_EXTRAS}]"]),
        ("the pure tests", [*inside, "make", "--assume-old=.venv/.ready", "test-fast", f"BIN={venv / 'bin'}"]),
        ("the whole run", [*inside, python, "-m", "pytest", "-q", _WHOLE_RUN, "-k", _WHOLE_RUN_NAME]),
    ):
        # compiled modules of this version are kept apart, so that nothing is left in the checkout
        env = os.environ | {"PYTHONPYCACHEPREFIX": str(venv / "pycache")}
        if subprocess.run(step, cwd=CHECKOUT, env=env).returncode:
            return name
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
