"""How a complaint about somebody's file is told."""

from __future__ import annotations

import re


def on_one_line(what: object) -> str:
    """Without line breaks and control characters: what is in a file must not drive a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in re.sub(r"\s+", " ", str(what)))
