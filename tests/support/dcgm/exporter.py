"""A stand-in for dcgm-exporter, which serves a page of metrics by HTTP/1.0 as Go's net/http does."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping

_PAGE = """\
# HELP DCGM_FI_DEV_GPU_TEMP GPU temperature (in C).
# TYPE DCGM_FI_DEV_GPU_TEMP gauge
{temperatures}
# HELP DCGM_FI_DEV_XID_ERRORS Value of the last XID error encountered.
# TYPE DCGM_FI_DEV_XID_ERRORS gauge
{last_xids}
"""
_GPU = 'gpu="{index}",UUID="{uuid}",pci_bus_id="00000000:1B:00.0",device="nvidia{index}",modelName="NVIDIA H100"'


def labels(index: int, uuid: str, more: str = "") -> str:
    return "{" + _GPU.format(index=index, uuid=uuid) + more + "}"


def page(uuids: Mapping[int, str], *lines: str, last_xid: int = 0) -> str:
    """Return a page with the metrics that all exporters have, followed by ``lines``."""
    return _PAGE.format(
        temperatures="\n".join(f"DCGM_FI_DEV_GPU_TEMP{labels(i, uuid)} 41" for i, uuid in uuids.items()),
        last_xids="\n".join(f"DCGM_FI_DEV_XID_ERRORS{labels(i, uuid)} {last_xid}" for i, uuid in uuids.items()),
    ) + "".join(f"{line}\n" for line in lines)


class Exporter:
    """A server of ``text``, the current page, with the HTTP status ``status``.

    If ``silent``, it accepts connections and sends no reply.
    """

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/metrics"
        self.text = ""
        self.status = "200 OK"
        self.hangs = threading.Event()
        self.requests: list[str] = []


@contextlib.contextmanager
def exporter() -> Iterator[Exporter]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        made = Exporter(server.getsockname()[1])
        over = threading.Event()
        thread = threading.Thread(target=_serve, args=(server, made, over), daemon=True)
        thread.start()
        try:
            yield made
        finally:
            over.set()
            made.hangs.clear()
            with contextlib.suppress(OSError), socket.create_connection(server.getsockname()[:2]):
                pass  # so that it looks up
            thread.join()


def _serve(server: socket.socket, made: Exporter, over: threading.Event) -> None:
    held: list[socket.socket] = []
    while True:
        line, _ = server.accept()
        if over.is_set():
            break
        if made.hangs.is_set():
            held.append(line)
            continue
        with line:
            made.requests.append(line.recv(4096).decode().split("\r\n")[0])
            head = f"HTTP/1.0 {made.status}\r\nContent-Type: text/plain; version=0.0.4\r\n\r\n"
            line.sendall((head + made.text).encode())
    for one in (line, *held):
        one.close()
