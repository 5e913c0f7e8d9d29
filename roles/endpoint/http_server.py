"""Serves an application at an address of this node, in a thread with an event loop of its own.

So code of the agents that blocks their event loop delays only themselves, and never an answer.
"""

from __future__ import annotations

import logging
import socket
import threading

import uvicorn
from starlette.applications import Starlette

LOOPBACK = "127.0.0.1"
_MAX_CONNECTIONS = 8192
"""Connections at once; further ones get 503. An agent has one or two for each of its calls."""
_MAX_HEADER_BYTES = 64 * 2**10
"""Bytes of the largest header that is buffered."""
_IDLE_S = 75
"""Seconds after which an idle connection is closed: longer than clients keep theirs, so that none breaks in use."""
_STOP_TIMEOUT_S = 5.0
"""Seconds for open calls to end once the server is stopped."""


class EndpointServer:
    """A server of the application.

    Args:
        application: The application.
        host: Address of this node to listen at.
        port: Port to listen on; 0: any free one.

    Raises:
        OSError: The port cannot be bound.
    """

    def __init__(self, application: Starlette, host: str = LOOPBACK, port: int = 0) -> None:
        self._socket = socket.create_server((host, port), backlog=1024)
        self.base_url = f"http://{host}:{self._socket.getsockname()[1]}/v1"
        """Base URL for OpenAI's clients."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # the application logs what matters of it
        self._server = uvicorn.Server(
            uvicorn.Config(
                application, log_config=None, access_log=False, lifespan="off", ws="none", http="h11", loop="asyncio",
                proxy_headers=False, server_header=False, limit_concurrency=_MAX_CONNECTIONS,
                h11_max_incomplete_event_size=_MAX_HEADER_BYTES, timeout_keep_alive=_IDLE_S,
                timeout_graceful_shutdown=1,
            )
        )  # fmt: skip
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="endpoint", daemon=True)

    def start(self) -> None:
        """Start the thread. Connections are accepted from now on, and served as soon as the loop runs."""
        self._thread.start()

    def stop(self) -> None:
        """Close all connections and end the thread."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(_STOP_TIMEOUT_S)
        self._socket.close()
