"""What can never work as job.toml has it: the role that finds it ends with exit code 2 and one line, no traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


def refuse(why: object) -> NoReturn:
    """Ends the process."""
    print(f"rrl: {' '.join(str(why).split())}", file=sys.stderr, flush=True)
    raise SystemExit(2)


@contextmanager
def refusing(mistakes: type[Exception] = ValueError) -> Iterator[None]:
    """Inside, such an exception says what is wrong with job.toml. A user's own code goes elsewhere: of what that raises
    the traceback is wanted."""
    try:
        yield
    except mistakes as error:
        refuse(error)
