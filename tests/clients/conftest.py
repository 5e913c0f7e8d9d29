"""Collects the tests of other people's clients only where they are installed (make test-clients).

The two large programs are further ones, of their own (make test-clients BINARIES=1).
"""

from __future__ import annotations

from importlib.util import find_spec

from rrl.benchmarks._clients_table import installed

_BINARIES = [] if any(client.binary for client in installed()) else ["test_native_runs.py"]
collect_ignore_glob = _BINARIES if find_spec("pydantic_ai") else ["test_*.py"]
