"""``make test-slurm-versions``: runs the tests that need Slurm on each version of Slurm in turn.

    python -m rrl.tests.support.slurm.versions [VERSION ...] [-- PYTEST OPTION ...]

Long tests run only with the option ``-m slurm``. The programs of a version are fetched if they are missing
(:mod:`rrl.tests.support.slurm.root`). Jobs are submitted by a plain user. The last lines give the result of each
version. The exit code is 0 only if all tests passed and none was skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from rrl.tests.support.slurm.lab import ROOT_ENV
from rrl.tests.support.slurm.root import SUITES, ensure

CHECKOUT = Path(__file__).parents[3]


def main(argv: Sequence[str]) -> int:
    end = argv.index("--") if "--" in argv else len(argv)
    versions, options = argv[:end], argv[end + 1 :]
    lines, good = [], True
    for version in versions or SUITES:
        try:
            root = ensure(version)
        except RuntimeError as error:
            passed, line = False, str(error)
        else:
            passed, line = _run(root, options)
        good = good and passed
        lines.append(f"Slurm {version} ({SUITES.get(version, '?')}): {line}")
    print("\n".join(lines))
    return 0 if good else 1


def _run(root: Path, options: Sequence[str]) -> tuple[bool, str]:
    """Run the tests; return whether all passed, and a text with the numbers of tests and the time."""
    env = os.environ | {ROOT_ENV: str(root), "RRL_REQUIRE_SLURM": "1"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        print(f"== {(root / 'ready').read_text().strip()} in {root}", flush=True)
        argv = [sys.executable, "-m", "pytest", "-q", "-m", "slurm and not long", f"--junitxml={report}", *options]
        code = subprocess.run(argv, cwd=CHECKOUT, env=env).returncode
        if not report.exists():
            return False, f"pytest ended with {code} and without a report"
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    tests, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    line = f"{tests - bad - skipped} passed, {bad} failed, {skipped} skipped in {float(suite.get('time', 0)):.0f} s"
    return code == 0, line


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
