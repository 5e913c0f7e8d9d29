"""Codex or Claude Code, which look into the floors with their shell: ``native.py codex|claude [option ...]``.

Both work in the folder ``work`` of the current folder, and have their home beside it. Codex finds the endpoint in
``CODEX_HOME``, Claude Code in the environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rrl.tests.support.clients import house

BINARIES = Path(sys.prefix, "npm", "node_modules", ".bin")
ARGUMENTS = {
    "codex": ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
    "claude": ["-p", "--model", "policy", "--permission-mode", "bypassPermissions"],
}
LOG = "looked.txt"


def look_command(floor: str) -> str:
    """Return the command by which the model looks into a floor."""
    return f"echo '{floor}' >> {LOG}; echo '{floor} has 12 chairs.'"


def main() -> None:
    """Run the program, and print the reward."""
    name, *options = sys.argv[1:]
    home, work = Path("home").absolute(), Path("work").absolute()
    home.mkdir(exist_ok=True)
    work.mkdir(exist_ok=True)
    (work / LOG).write_text("")
    environment = os.environ | {"HOME": str(home), "IS_SANDBOX": "1"}
    command = [str(BINARIES / name), *ARGUMENTS[name], *options, house.TASK]
    done = subprocess.run(command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    print(done.stderr[-3000:], file=sys.stderr)
    if done.returncode:
        print((done.stdout + done.stderr).strip().splitlines()[-1], file=sys.stderr)
        sys.exit(done.returncode)
    house.looked += (work / LOG).read_text().splitlines()
    house.report(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
