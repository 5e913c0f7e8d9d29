"""vLLM's own OpenAI server, as users start it, and a plain round-robin proxy over several of them."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

START_TIMEOUT_S = 600.0
"""Deadline (s) of a server's start, which takes 16 s on quiet cores."""
KV_CACHE_GIB = 1
MODEL = "policy"
"""Name under which the model is served."""


class VllmServer:
    """A running server."""

    def __init__(self, process: subprocess.Popen[bytes], base_url: str, log: Path) -> None:
        self.process, self.base_url, self.log = process, base_url, log

    def kill(self) -> None:
        """Kill all processes of the server, because its engine's process would outlive it (docs/sources.md, vLLM)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    """Return a TCP port of the loopback that is free now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


@contextmanager
def serving(model: Path, folder: Path, max_length: int, sequences: int, count: int = 1) -> Iterator[list[VllmServer]]:
    """Start ``count`` servers of a model at the same time, wait until each is healthy, and kill them afterwards.

    The arguments are those of rrl's own engine on a CPU (:mod:`rrl.roles.rollout.vllm.config`), which has one thread.

    Args:
        model: Hugging Face folder.
        folder: Folder of the logs.
        max_length: Greatest number of tokens of context and answer together.
        sequences: Greatest number of sequences at once.
        count: Number of servers.
    """
    servers = [_start(model, folder / f"vllm-{index}.log", max_length, sequences) for index in range(count)]
    try:
        until = time.monotonic() + START_TIMEOUT_S
        for server in servers:
            while not _is_healthy(server):
                assert server.process.poll() is None, server.log.read_text(errors="replace")[-3000:]
                assert time.monotonic() < until, f"vLLM's server did not start: {server.log}"
                time.sleep(0.5)
        yield servers
    finally:
        for server in servers:
            server.kill()


def _start(model: Path, log: Path, max_length: int, sequences: int) -> VllmServer:
    port = free_port()
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "TORCH_COMPILE_DISABLE": "1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "vllm.entrypoints.openai.api_server",
                "--model",
                str(model),
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                "--served-model-name",
                MODEL,
                "--dtype",
                "float32",
                "--enforce-eager",
                "--max-model-len",
                str(max_length),
                "--max-num-seqs",
                str(sequences),
                "--generation-config",
                "vllm",
            ],
            env=env,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return VllmServer(process, f"http://127.0.0.1:{port}/v1", log)


def _is_healthy(server: VllmServer) -> bool:
    try:
        with urllib.request.urlopen(server.base_url.removesuffix("/v1") + "/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def round_robin(base_urls: Sequence[str]) -> Starlette:
    """Return a plain proxy, which passes each call to the next server and does not interpret it."""
    client = httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=None))
    upstreams = itertools.cycle(base_urls)

    async def forward(request: Request) -> Response:
        url = next(upstreams).removesuffix("/v1") + request.url.path
        headers = {"content-type": "application/json"}
        try:
            reply = await client.send(
                client.build_request("POST", url, content=await request.body(), headers=headers), stream=True
            )
        except httpx2.TransportError as error:
            return Response(f"the server cannot be reached: {error}", 502)

        async def content() -> AsyncIterator[bytes]:
            try:
                async for piece in reply.aiter_raw():
                    yield piece
            finally:
                await reply.aclose()

        return StreamingResponse(content(), reply.status_code, media_type=reply.headers.get("content-type"))

    return Starlette(routes=[Route("/v1/{path:path}", forward, methods=["POST"])])
