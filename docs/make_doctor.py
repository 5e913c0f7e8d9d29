"""Makes docs/doctor.md from what the code says of each check of ``rrl doctor``."""

from __future__ import annotations

from pathlib import Path

from rrl.cli.doctor.catalogue import GROUPS, MEANINGS

PAGE = Path(__file__).parent / "doctor.md"
_INTRODUCTION = """\
# rrl doctor

Made from `cli/doctor/catalogue.py` by `.venv/bin/python -m rrl.docs.make_doctor`; do not edit.

`rrl doctor` says what of rrl works at this place, what does not, and what to do about it. It changes nothing. Each line
is OK, WARN (works, with something to know), FAIL (a run cannot work so) or UNKNOWN: what cannot be known is never
called OK, and its reason stands beside it. The exit code is 1 if a line is FAIL, else 0; `--json` prints the lines and
the facts that they were judged from.

- Slurm is asked by reading commands and `sbatch --test-only`: nothing is submitted, no node is drained to see whether
  it can be. `--partition`, `--account` and `--qos` say what your jobs need at a site where the defaults do not do.
- `rrl doctor --yes` (or your yes to its question) runs one job of 10 s on one node: 1 CPU, 512 MiB, a GPU where one is
  free. It waits for a node for a minute at most, is cancelled then, and leaves nothing.
- Without Slurm the answer is about this machine, which is what the local cluster needs.

`rrl init` writes a commented job.toml from what was found.
"""


def page() -> str:
    """The page."""
    parts = [_INTRODUCTION]
    for group, title in GROUPS.items():
        rows = [
            f"| `{name.partition('.')[2]}` | {meaning.question} | {meaning.fix or 'nothing to do'} |"
            for name, meaning in MEANINGS.items()
            if name.startswith(f"{group}.")
        ]
        table = ["| check | what it asks | if it is bad |", "|---|---|---|", *rows]
        parts.append("\n".join([f"\n## {title}: `{group}.*`\n", *table, ""]))
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
