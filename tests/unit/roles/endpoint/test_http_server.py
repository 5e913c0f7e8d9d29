"""The endpoint's server stops although a call still waits for its reply."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rrl.roles.endpoint.http_server import EndpointServer

TIMEOUT_S = 30.0


def test_stop_breaks_the_connection_of_a_waiting_call_without_a_reply() -> None:
    arrived = threading.Event()

    async def wait(_: Request) -> Response:
        arrived.set()
        await asyncio.sleep(2 * TIMEOUT_S)
        return Response()

    server = EndpointServer(Starlette(routes=[Route("/v1/models", wait)]))
    server.start()
    client = openai.OpenAI(base_url=server.base_url, api_key="any", max_retries=0)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(client.models.list)
        assert arrived.wait(TIMEOUT_S)
        server.stop()
        with pytest.raises(openai.APIConnectionError):
            call.result(TIMEOUT_S)
