"""``rrl endpoint`` and ``rrl relay``: how agents outside of a run reach its endpoint.

The relay is an HTTP proxy beside an agent, which holds the agent's calls while the endpoint restarts.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from msgspec import Struct

from ...api.runs import StateReader, find_run, job_of, read_state
from ...core.ownership import user_name
from ...core.run_dir import RunDir
from ...core.run_spec import RoleSpec
from ...core.text import escaped
from ...core.types import OperationFailed, ReplicaId, UsageError, replica_id
from ...health.readers.trust import listeners
from ...manager.model.state import State, Status
from ...roles.endpoint.addresses import read_addresses
from ...roles.endpoint.key import run_key
from ...transport.keys import RunKeys
from ..common.output import print_json, print_line, program

_SECRET = "secret: anyone with this key can open episodes of the run and set their rewards"


class ServingReplica(Struct, frozen=True):
    """A replica of the endpoint that has written its address."""

    replica: str
    base_url: str
    """Base URL for OpenAI's clients."""
    joined: bool
    """False while the replica is being started again: its address may then belong to an earlier process."""


class EndpointAccess(Struct, frozen=True):
    """The data that an agent outside of the run needs: the content of ``rrl endpoint --json``."""

    run: str
    replicas: tuple[ServingReplica, ...]
    run_key: str
    """Secret key with which episodes of the run are opened."""


def endpoint(name: str | None, *, json: bool) -> int:
    """Print the addresses of the endpoint of a run and how to open an episode; returns exit code 0.

    Raises:
        UsageError: The job of the run has no endpoint.
        OperationFailed: The endpoint has not started yet, or the run has ended.
    """
    access = endpoint_access(find_run(name))
    if json:
        print_json(access)
    else:
        sys.stdout.write(_text(access))
    return 0


def endpoint_access(run: RunDir) -> EndpointAccess:
    """Return where the endpoint of a run is, and the key of the run.

    Raises:
        UsageError: The job of the run has no endpoint.
        OperationFailed: The endpoint has not started yet, the run has ended, or its files cannot be read.
    """
    role = serving_role(run)
    state = read_state(run)
    try:
        addresses = {replica_id(role.name, index): base_url for index, base_url in read_addresses(run).items()}
        keys = RunKeys.load(run.keys)
    except OSError as error:
        raise OperationFailed(str(error)) from None
    replicas = tuple(ServingReplica(id, base_url, _has_joined(state, id)) for id, base_url in addresses.items())
    if not replicas:
        raise OperationFailed(f"the endpoint of {run.id} has not started yet; see: {program()} status {run.id}")
    return EndpointAccess(run.id, replicas, run_key(run.id, keys.secret))


def serving_role(run: RunDir) -> RoleSpec:
    """Return the endpoint of a run that has not ended.

    Raises:
        UsageError: The job of the run has no endpoint.
        OperationFailed: The run has ended, or its run spec cannot be read.
    """
    job = job_of(run)
    if job is None:
        raise OperationFailed(f"{run.run_spec} cannot be read; without it nothing is known of the endpoint")
    if not (roles := job.kind("endpoint")):
        raise UsageError(
            f"{run.id} has no endpoint for agents outside of the run; its job needs a table [roles.endpoint]"
        )
    state = read_state(run)
    if state is not None and state.outcome is not None:
        raise OperationFailed(f"{run.id} has ended ({state.outcome.value}), so its endpoint no longer answers")
    return roles[0]


def _has_joined(state: State | None, replica: ReplicaId) -> bool:
    held = None if state is None else state.replicas.get(replica)
    return held is not None and held.status is Status.JOINED


def _text(access: EndpointAccess) -> str:
    waiting = "   (being started again)"
    lines = [f"{one.replica}  {escaped(one.base_url)}{'' if one.joined else waiting}" for one in access.replicas]
    root = escaped(access.replicas[0].base_url).removesuffix("/v1")
    return (
        "\n".join(
            [
                *lines,
                "",
                f"# {_SECRET}",
                f"export RRL_RUN_KEY={access.run_key}",
                "# open an episode: the reply has its item, and the api_key and base_url for the OpenAI client of the"
                " agent",
                f'curl -sX POST {root}/rrl/v1/episodes -H "Authorization: Bearer $RRL_RUN_KEY"',
                "# end it with its reward (API_KEY: the api_key of the episode)",
                f'curl -sX POST {root}/rrl/v1/episodes/finish -H "Authorization: Bearer $API_KEY"'
                " -d '{\"reward\": 1.0}'",
                "",
                "# hold calls while the endpoint restarts, on the machine of the agent:"
                f" {program()} relay {access.run}",
            ]
        )
        + "\n"
    )


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
