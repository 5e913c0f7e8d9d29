"""A stand-in for the export program.

The file ``script`` of the run directory has one word for each step. With ``fails``, the program writes two lines to
stderr and fails. With ``hangs``, it waits until its stdin is closed, and then creates a file. With any other word, it
creates the folder of the export.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    run, step, folder = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    script = json.loads((run / "script").read_text())
    (run / f"begun-{step}").touch()
    match script.get(step):
        case "fails":
            sys.exit(f"a warning of a library\nthe disk\tis full {step}")
        case "hangs":
            sys.stdin.read()
            (run / f"ended-{step}").touch()
            sys.exit(1)
        case _:
            folder.mkdir(parents=True)
