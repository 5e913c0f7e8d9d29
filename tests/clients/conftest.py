"""Collects the tests of other people's clients only where they are installed (make test-clients)."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("pydantic_ai") else ["test_*.py"]
