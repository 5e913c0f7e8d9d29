"""Make docs/status.svg, the status view of a real run shortly after a killed rollout was replaced.

    .venv/bin/python -m rrl.docs.make_picture                                          # after a change of the view
    .venv/bin/python -m rrl.docs.make_picture ~/rrl-runs/quickstart-1120-072205        # of another run

The picture shows a real state: the run's journal is folded up to that moment, the state is kept in docs/status.json,
and the view of ``rrl status`` draws it. Any run in which a rollout died and was replaced is suitable; ``make demo``
leaves one. A test (tests/project/test_docs.py) draws the state again and compares the pictures.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.padding import Padding

from rrl.cli.run.top.top_app import DARK_COLOURS
from rrl.cli.views.status import status_view
from rrl.core.run_dir import RunDir
from rrl.core.types import role_of
from rrl.manager.model import events as ev
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import State
from rrl.manager.storage.journal import replay

ROOT = Path(__file__).parents[1]
PICTURE = Path(__file__).parent / "status.svg"
STATE = PICTURE.with_suffix(".json")
"""State of the run in the picture, without the folders of the machine on which it ran."""
COLUMNS = 96
MAX_WAIT_S = 1.0
"""Seconds from the newest event of the picture to the time of drawing, so that the picture shows no span of 0s."""
_SVG = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<title>rrl status: a rollout was killed and has come back</title>
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width;
}}
.{unique_id}-title {{ font-size: 18px; font-family: system-ui, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""rich's frame without its web font, so that a picture in a README loads nothing from other servers."""


def representative_state(run: RunDir) -> State:
    """Return the first state in which a replaced rollout has worked and all rollouts generate. Raises LookupError."""
    state: State | None = None
    back = False
    for stamped in replay(run):
        state, event = fold(state, stamped), stamped.event
        if isinstance(event, ev.FirstWorkDone) and role_of(event.incarnation.replica) == "rollout":
            back = back or event.incarnation.number > 1
        if back and all(r.phase == "generate" and r.waits_for is None for r in state.workers if r.role == "rollout"):
            return state
    raise LookupError(f"{run.path}: no rollout was replaced in this run and worked again")


def picture(state: State) -> str:
    """Return the SVG of a state; the SVG depends on the state alone."""
    screen = Console(
        file=io.StringIO(),
        record=True,
        width=COLUMNS + 4,
        force_terminal=True,
        color_system="truecolor",
        markup=False,
        highlight=False,
        emoji=False,
        legacy_windows=False,
        _environ={},
    )
    screen.print(Padding(status_view(state, state.at + MAX_WAIT_S, COLUMNS), (1, 2)))
    return screen.export_svg(title="rrl status", theme=DARK_COLOURS, code_format=_SVG, unique_id="rrl")


def recorded_state() -> State:
    """Return the state that the picture shows."""
    return msgspec.json.decode(STATE.read_bytes(), type=State)


def record(run: RunDir) -> None:
    """Write the representative state of a run to docs/status.json. Raises LookupError."""
    text = msgspec.json.format(msgspec.json.encode(representative_state(run)), indent=0).decode()
    for folder, name in ((run.path.parent, "/rrl-runs"), (ROOT, "/rrl"), (Path.home(), "")):
        shown = f"/home/user{name}"
        text = text.replace(f"{folder}/", f"{shown}/").replace(f'{folder}"', f'{shown}"')
    STATE.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    if len(sys.argv) > 2:
        sys.exit(f"usage: python -m {__spec__.name if __spec__ else 'rrl.docs.make_picture'} [RUN_DIRECTORY]")
    if sys.argv[1:]:
        record(RunDir(Path(sys.argv[1]).absolute()))
    PICTURE.write_text(picture(recorded_state()), encoding="utf-8")


if __name__ == "__main__":
    main()
