"""Collects the tests of vLLM only if vLLM is installed. vLLM has an environment of its own (make test-vllm)."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
