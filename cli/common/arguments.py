"""Arguments that commands of several groups share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .completion import runs

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead, for programs.")]
_RUN = "The run's id, an unambiguous beginning of it, or its folder. Default: the newest run."
Run = Annotated[str | None, typer.Argument(metavar="RUN", help=_RUN, show_default=False, autocompletion=runs)]
NamedRun = Annotated[
    str, typer.Argument(metavar="RUN", help=_RUN.partition(" Default")[0], show_default=False, autocompletion=runs)
]
JobFiles = Annotated[
    list[Path],
    typer.Argument(
        metavar="JOB.TOML",
        show_default=False,
        help="The job spec. Each of several files adds keys to those before it, or replaces their values.",
    ),
]
_TRUST = "Go on although other users may write the job's folder, and so make code run as you."
Trust = Annotated[bool, typer.Option("--trust-folder", help=_TRUST)]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        show_default=False,
        help="Value of one key, which replaces the value in the files; may be repeated.",
    ),
]
