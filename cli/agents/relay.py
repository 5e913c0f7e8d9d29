"""``rrl relay``: an HTTP proxy beside an outside agent, which holds the agent's calls while the endpoint restarts."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from importlib.util import find_spec

from ...api.runs import StateReader, find_run
from ...core.ownership import user_name
from ...core.run_dir import RunDir
from ...core.types import OperationFailed, UsageError
from ...health.readers.trust import listeners
from ...roles.endpoint.addresses import read_addresses
from ..common.output import print_line
from .endpoint import serving_role

PACKAGES = ("starlette", "uvicorn", "httpx2")
"""Packages of the extra ``endpoint``, which serve the relay and connect it to the endpoint."""


def relay(name: str | None, port: int) -> int:
    """Serve the relay of a run until Ctrl-C or SIGTERM, then return exit code 0.

    Raises:
        UsageError: The job of the run has no endpoint, or a package is missing.
        OperationFailed: The run has ended, or the port cannot be bound.
    """
    run = find_run(name)
    serving_role(run)
    if missing := [package for package in PACKAGES if find_spec(package) is None]:
        raise UsageError(
            f"the relay needs {missing[0]}, which is not installed; pip install '.[endpoint]' in rrl's clone"
        )
    from ...roles.endpoint.http_server import LOOPBACK, EndpointServer
    from ...roles.endpoint.relay import Relay

    try:
        server = EndpointServer(Relay(_Look(run)).application, port=port)
    except OSError as error:
        others = [user_name(uid) for uid in sorted(listeners("/proc", port)) if uid != os.geteuid()]
        keys = f" by {others[0]}, who gets the keys of agents that call it" if others else ""
        why = f"{os.strerror(error.errno or 0)}{keys}"
        raise OperationFailed(f"{LOOPBACK}:{port}: {why}; choose another port: --port 0") from None
    ends = (signal.SIGINT, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before the threads start: they inherit this mask
    server.start()
    print_line(f"the relay of {run.id} listens: base URL {server.base_url}; Ctrl-C ends it")
    signal.sigwait(ends)
    server.stop()
    return 0


class _Look:
    """Reads a run for the relay. Calling the object returns (addresses of the endpoint, whether the run has ended)."""

    def __init__(self, run: RunDir) -> None:
        self._run, self._reader = run, StateReader(run)
        self._addresses: tuple[str, ...] = ()

    def __call__(self) -> tuple[Sequence[str], bool]:
        try:
            state = self._reader.state()
            self._addresses = tuple(read_addresses(self._run).values())
        except (OSError, OperationFailed, UsageError):  # the storage is unavailable: the addresses may still be right
            return self._addresses, self._run.removed()
        return self._addresses, state is not None and state.outcome is not None
