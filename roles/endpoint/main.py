"""The role ``endpoint`` (``python -m rrl.roles.endpoint.main``): serves agents outside of the run.

It serves the same application as a process with the run's own agents, and additional routes by which agents open and
end episodes. It listens at the address of the node in the run's network, and writes its address into the run directory
before it reports to the manager that it serves agents.
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from pathlib import Path

import rrl

from ...core.types import index_of
from ..launcher.end_report import exits_on_invalid_config
from ..launcher.environment import ADDRESS_ENV
from ..models.chat import open_chat
from ..models.conversation import ModelChat
from ..models.tasks import TaskError, load_episode_items
from .addresses import write_address
from .application import Endpoint, served_run
from .episode_routes import EpisodeRoutes
from .http_server import LOOPBACK, EndpointServer

_POLL_S = 0.2
"""Seconds between two checks whether the manager has requested a stop."""


def serve(me: rrl.Worker, chat: ModelChat, routes: EpisodeRoutes, host: str, port: int) -> None:
    """Serve agents until a stop is requested.

    Args:
        me: This process.
        chat: Tokenizer and chat template.
        routes: The routes of episodes.
        host: Address at which it listens.
        port: Port at which it listens; 0 selects a free port.

    Raises:
        OSError: The port cannot be bound, or the run directory cannot be written.
    """
    changed = threading.Event()
    served = served_run(me.job, me.run_dir.id, me.keys.secret)
    endpoint = Endpoint(served, chat, me.ask_store, changed.set, routes.routes(), outlived=True)
    server = EndpointServer(endpoint.application, host, port)
    server.start(me)
    try:
        write_address(me.run_dir, int(index_of(me.launch.incarnation.replica)), server.base_url)
        _report(me, endpoint, changed)
    finally:
        endpoint.close()
        server.stop()


def _report(me: rrl.Worker, endpoint: Endpoint, changed: threading.Event) -> None:
    """Report phase and progress until a stop is requested; ``changed`` is set whenever they may have changed."""
    reported, name = 0, ""
    with ExitStack() as phase:
        while not me.stopping.is_set():
            now = "wait_turn" if endpoint.waiting else "wait_work"
            if now != name:
                name = now
                phase.close()
                phase.enter_context(me.phase(name))
            if (done := endpoint.answered) > reported:
                me.progress(done - reported)
                reported = done
            changed.wait(_POLL_S)
            changed.clear()


def main() -> None:
    """Join the run, and serve agents until a stop is requested."""
    me = rrl.join()
    job = me.job
    assert job.endpoint is not None
    with exits_on_invalid_config():
        chat = open_chat(job.model)
    with exits_on_invalid_config(TaskError):
        item_text = load_episode_items(job, chat.tokenizer, Path(me.launch.cwd))
    not_evaluated = ""
    if job.eval is None:
        not_evaluated = "the job has no evaluations: it has no table [eval]"
    elif job.agents is not None:
        not_evaluated = "the job evaluates the agents of [roles.agents], and none outside of the run"
    with me:
        routes = EpisodeRoutes(me.ask_store, me.run_dir.id, me.keys.secret, item_text, not_evaluated)
        serve(me, chat, routes, os.environ.get(ADDRESS_ENV, LOOPBACK), job.endpoint.port)


if __name__ == "__main__":
    main()
