"""What was written last before something failed, on one line: the best reason there is when nobody told another one."""

from __future__ import annotations

from pathlib import Path

_LINES = 3
_CHARACTERS = 400
_READ = 4096
"""bytes of a file's end that are looked at"""
_ABSENT = ("execve(): ", "No module named 'rrl'", "No module named rrl")
"""slurmstepd on an interpreter that is not there; an interpreter without rrl"""


def absent(words: str) -> bool:
    """They prove that what was to be started is not there, or cannot be started at all."""
    return any(text in words for text in _ABSENT)


def last_lines(text: str) -> str:
    """The last lines of a text that say something, joined by `` / `` and cut at the front."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-_LINES:])[-_CHARACTERS:]


def last_lines_of(path: Path) -> str:
    """The same of a file; empty where there is none, or none that can be read."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _READ))
            return last_lines(file.read().decode(errors="replace"))
    except OSError:
        return ""
