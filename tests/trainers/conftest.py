"""Collects the tests of other people's trainers only where TRL is installed (make test-trainers)."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("trl") else ["test_*.py"]
