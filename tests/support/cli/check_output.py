"""Reads the output of ``rrl check``."""

from __future__ import annotations


def doubts_in(shown: str) -> list[str]:
    """Return the lines of the section ``doubts`` in the output of ``rrl check``; empty if it says ``none``."""
    section = shown.partition("── doubts ")[2].partition("\n")[2].partition("\n── ")[0].strip()
    assert section, "rrl check has printed no section of doubts"
    return [] if section == "none" else [line.removeprefix("- ") for line in section.splitlines()]
