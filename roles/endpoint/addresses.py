"""The addresses of the endpoint's replicas, each a file in the run directory.

A replica writes its address when it listens. The file of a replica that has died remains until the next incarnation of
the replica replaces it. So an address says where the replica listened last; perhaps no process listens there now.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from ...core.run_dir import RunDir, write_atomically


class EndpointAddress(Struct, frozen=True):
    """The address at which a replica of the endpoint listens."""

    base_url: str
    """Base URL for OpenAI's clients: ``http://<host>:<port>/v1``."""


def write_address(run: RunDir, replica: int, base_url: str) -> None:
    """Write the address of a replica, durably and atomically.

    Args:
        run: The run directory.
        replica: Index of the replica.
        base_url: Base URL at which the replica listens.

    Raises:
        OSError: The run directory cannot be written.
    """
    run.endpoints.mkdir(mode=0o700, exist_ok=True)
    write_atomically(run.endpoint_file(replica), msgspec.json.encode(EndpointAddress(base_url)))


def read_addresses(run: RunDir) -> dict[int, str]:
    """Return the base URL of each replica that has written its address, by index; damaged files are skipped.

    Raises:
        OSError: The folder of addresses cannot be read. A missing folder counts as empty.
    """
    found: dict[int, str] = {}
    try:
        names = [path for path in run.endpoints.iterdir() if path.suffix == ".json" and path.stem.isdecimal()]
    except FileNotFoundError:
        return found
    for path in names:
        try:
            found[int(path.stem)] = msgspec.json.decode(path.read_bytes(), type=EndpointAddress).base_url
        except (OSError, msgspec.MsgspecError):
            continue
    return dict(sorted(found.items()))
