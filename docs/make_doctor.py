"""Make docs/doctor.md from the catalogue of the checks of ``rrl doctor``."""

from __future__ import annotations

from pathlib import Path

from rrl.cli.doctor.catalogue import GROUPS, MEANINGS

PAGE = Path(__file__).parent / "doctor.md"
_INTRODUCTION = """\
# rrl doctor

Made from `cli/doctor/catalogue.py` by `.venv/bin/python -m rrl.docs.make_doctor`; do not edit.

`rrl doctor` reports which parts of rrl work at this site, which do not, and how to fix them. It changes nothing. Each
line is OK, WARN (works, with a restriction that you should know), FAIL (a run cannot work like this) or UNKNOWN: a fact
that cannot be determined is never reported as OK, and the line gives the reason. The exit code is 1 if any line is
FAIL, else 0; `--json` prints the lines and the facts from which they were judged.

- The Slurm checks use only read commands and `sbatch --test-only`: no job is submitted, and no node is drained to find
  out whether rrl has the rights to drain. `--partition`, `--account` and `--qos` name what your jobs need if the site's
  defaults are not suitable.
- `rrl doctor --yes` (or your yes to its question) runs one job of 10 s on one node: 1 CPU, 512 MiB, and a GPU if one is
  free. The job waits at most one minute for a node, is then cancelled, and leaves nothing behind.
- Without Slurm the checks cover this machine, which is what the local cluster needs.

`rrl init` writes a commented job.toml from the results.
"""


def page() -> str:
    """Return the page."""
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
