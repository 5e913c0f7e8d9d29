"""The role ``agents`` (``python -m rrl.roles.agents.main``): runs the user's agent for each leased episode.

The agents run in the event loop of the main thread. The endpoint that they call, and the connection to the store, each
run in a thread of their own.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

import rrl

from ..endpoint.key import decode_key
from ..endpoint.loopback import LoopbackEndpoint
from ..launcher.end_report import exits_on_invalid_config
from ..models.chat import open_chat
from ..models.conversation import ModelChat
from ..models.tasks import TaskError, load_episode_items
from ..trajectories.episodes.requests import LeasedEpisodes, LeaseEpisodes
from ..worker.status.episode_status import EpisodeStatus
from .attempts import AgentContext, Attempts
from .user_function import load_agent
from .user_program import program_agent

LEASE_WAIT_S = 1.0
"""Seconds that a request for episodes waits at the store before it is repeated."""
_POLL_S = 0.2
"""Seconds between two checks whether the manager has requested a stop."""


async def serve(me: rrl.Worker, agent: AgentContext, chat: ModelChat) -> None:
    """Serve the endpoint, and run as many attempts as the job allows, until a stop is requested.

    Args:
        me: This process.
        agent: The values that all attempts share.
        chat: Tokenizer and chat template.

    Raises:
        Exception: The exception with which more than half of the newest attempts failed.
    """
    loop = asyncio.get_running_loop()

    async def leases_episodes() -> None:
        """Wait until the agents' event loop runs, if it has no agent whose code may block it."""
        if not status.at_work:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop))

    with me.episode_status() as status:
        reported = status.endpoint_changed
        with LoopbackEndpoint(
            me.job, me.run_dir.id, me.keys.secret, chat, me.ask_store, reported, me, leases_episodes
        ) as endpoint:
            await _run(me, agent, endpoint, status)


async def _run(me: rrl.Worker, context: AgentContext, endpoint: LoopbackEndpoint, status: EpisodeStatus) -> None:
    changed = asyncio.Event()
    attempts = Attempts(context, endpoint.base_url, endpoint.api_key, me.ask_store, changed.set)
    leasing: asyncio.Task[LeasedEpisodes | None] | None = None
    reported = 0
    try:
        while not me.stopping.is_set() and attempts.error is None:
            if leasing is not None and leasing.done():
                leased = leasing.result()
                for item in leased.items if leased is not None else ():
                    attempts.start(item)
                leasing = None
            status.attempts_changed(len(attempts.episodes))
            free = context.settings.concurrency - len(attempts.episodes)
            if leasing is None and free:
                leasing = asyncio.create_task(me.ask_store(LeaseEpisodes, free, LEASE_WAIT_S, attempts.episodes))
                leasing.add_done_callback(lambda _: changed.set())
            if attempts.ended > reported:
                me.progress(attempts.ended - reported)
                reported = attempts.ended
            me.note(attempts.note)
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await changed.wait()
            changed.clear()
    finally:
        if leasing is not None:
            leasing.cancel()
        await attempts.cancel()
    if attempts.error is not None:
        raise attempts.error


def _codex_home(me: rrl.Worker, api_key: str) -> Path:
    """Return the folder of Codex for a key: one for each episode of each run, the same on every node."""
    key = decode_key(api_key, me.run_dir.id, me.keys.secret)
    assert key is not None, "the endpoint of this process has issued the key"
    run = hashlib.sha256(bytes(me.run_dir.path)).hexdigest()[:12]  # another user's run may have the same name
    return Path(tempfile.gettempdir(), f"rrl-codex-{run}-{key.episode}")


def main() -> None:
    """Join the run, serve the endpoint, and run agents until a stop is requested."""
    me = rrl.join()
    folder, job = Path(me.launch.cwd), me.job
    assert job.agents is not None
    with exits_on_invalid_config():
        chat = open_chat(job.model)
    with exits_on_invalid_config(TaskError):
        item_text = load_episode_items(job, chat.tokenizer, folder)
        agent = (
            load_agent(job.agents.function, folder)
            if job.agents.function is not None
            else program_agent(job.agents.command or (), folder, partial(_codex_home, me))
        )
    with me:
        context = AgentContext(agent, job.agents, item_text, folder)
        asyncio.run(serve(me, context, chat))


if __name__ == "__main__":
    main()
