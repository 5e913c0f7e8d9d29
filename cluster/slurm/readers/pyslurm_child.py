"""The process that uses pyslurm: it answers one request after another, until its stdin is closed.

    python -P -m rrl.cluster.slurm.readers.pyslurm_child MODULE

It is a process of its own, for three reasons. A call of pyslurm holds the interpreter's lock until slurmctld answers
(measured: 6.5 s). pyslurm ends the process if slurm.conf cannot be read. And pyslurm is licensed under the GPL, version
2 only. Therefore no other process of rrl imports it.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import BinaryIO

import msgspec

from ..parsing import Unreadable
from .messages import DrainNode, Failed, ReadConfig, ReadJobs, ReadNodes, ReadSteps, Ready, Reply, Request, UndrainNode
from .pyslurm_objects import PyslurmObjects


def main(module_name: str) -> None:
    """Import the module, report its version, and answer requests until stdin is closed."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the library prints must not mix with the replies
    pyslurm = importlib.import_module(module_name)
    objects = PyslurmObjects(pyslurm)
    _send(replies, Ready(str(pyslurm.__version__)))
    requests = msgspec.json.Decoder(Request)
    for line in sys.stdin.buffer:
        _send(replies, _answer(objects, requests.decode(line)))


def _answer(objects: PyslurmObjects, request: Request) -> Reply:
    try:
        match request:
            case ReadJobs():
                return objects.jobs()
            case ReadSteps():
                return objects.steps()
            case ReadNodes(names):
                return objects.nodes(names)
            case ReadConfig():
                return objects.config()
            case DrainNode(name, reason):
                return objects.drain(name, reason)
            case UndrainNode(name):
                return objects.undrain(name)
    except Unreadable:  # ends this process: another reader may understand what Slurm says
        raise
    except Exception as error:  # the manager derives from the error number whether the outcome is known
        return objects.failed(error)
    return Failed(0, f"{type(request).__name__} is not a request")


def _send(replies: BinaryIO, reply: Reply) -> None:
    replies.write(msgspec.json.encode(reply) + b"\n")
    replies.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
