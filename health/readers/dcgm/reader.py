"""Reader of DCGM: dcgm-exporter's metrics on this node, and ``dcgmi health`` and ``dcgmi diag`` if installed.

No library of DCGM is loaded. The site sets the health watches (``dcgmi health -s a``); this reader reads their results.

Any user may listen on a free port and pretend to be dcgm-exporter or DCGM's host engine. The output of the exporter and
of the host engine counts only if their port belongs to root or to the site's ``readers.dcgm_user``. The command
``dcgmi`` is run only if its file belongs to one of these users.

:class:`rrl.health.checks.node_state.NodeState`, which also contains NVML's samples, drops values of unknown GPUs.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable

from ..base import NotInstalled, ReaderOptions
from ..isolation.process import set_parent_death_signal
from ..samples import DcgmData, DcgmGpu, DcgmIncident
from ..trust import NotTrusted, check_listener, check_program, trusted_uids
from . import parsing

HEALTH_INTERVAL_S = 60.0
"""Seconds between two runs of ``dcgmi health``. The runs are rare, because starting a program is the most expensive
operation of a reader."""
_EXPORTER_TIMEOUT_S = 4.0
_HEALTH_TIMEOUT_S = 8.0
_DIAG_TIMEOUT_S = 150.0
"""Seconds that ``dcgmi diag -r 1`` may take. The command itself takes about 30 s with eight GPUs (docs/sources.md,
DCGM). The limit is higher, because DCGM runs diagnostics one after another."""
TERM_TIMEOUT_S = 3.0
"""Seconds from SIGTERM to SIGKILL. SIGKILL is not sent at once, because DCGM's server may wait for a client that was
killed in this way."""
HOSTENGINE_PORT = 5555
"""Port of DCGM's host engine on 127.0.0.1, to which ``dcgmi`` connects by default."""
_MAX_PAGE_BYTES = 1 << 24
_CHUNK = 1 << 16


class _Unreadable(Exception):
    """A part of the data could not be read; the text says why."""


class DcgmReader:
    """Reader of dcgm-exporter and ``dcgmi``."""

    name = "dcgm"
    interval_s = 15.0

    def __init__(self, options: ReaderOptions) -> None:
        self._options = options
        self._window: dict[tuple[str, int], int] = {}
        """Xids that the exporter counted in its last window, by UUID and code."""
        self._totals: dict[tuple[str, int], int] = {}
        self._uuids: dict[str, str] = {}
        """UUIDs by DCGM's GPU number."""
        self._incidents: tuple[DcgmIncident, ...] = ()
        self._health_unread = ""
        self._health_due = 0.0
        self._health_at: float | None = None
        self._diagnosed: tuple[DcgmIncident, ...] | str | None = None
        self.timeout_s = 20.0 + (_DIAG_TIMEOUT_S if options.diag else 0.0)

    def read(self) -> DcgmData:
        """Read the exporter, and ``dcgmi health`` when it is due.

        Raises:
            NotInstalled: The node has neither an exporter nor ``dcgmi``.
        """
        unread: dict[str, str] = {}
        gpus: tuple[DcgmGpu, ...] = ()
        try:
            gpus = self._metrics(self._page())
        except _Unreadable as error:
            unread["exporter"] = str(error)
        program = _program(self._options.dcgmi)
        if program is None:
            if "exporter" in unread:
                raise NotInstalled(
                    f"no dcgm-exporter ({unread['exporter']}), and {self._options.dcgmi} is not installed"
                )
            unread["health"] = f"{self._options.dcgmi} is not installed"
        elif time.monotonic() >= self._health_due:
            self._health_at = time.monotonic()
            self._health_due = self._health_at + HEALTH_INTERVAL_S
            self._check(program)
        if program is not None and self._health_unread:
            unread["health"] = self._health_unread
        incidents = self._incidents + self._diag(program, unread)
        return DcgmData(gpus, incidents, unread, self._health_at, self._driver_gpus())

    def close(self) -> None:
        """Do nothing, since the reader keeps nothing open."""
        pass

    def _page(self) -> str:
        """Return the exporter's metrics page. Raises _Unreadable if the exporter is not trusted or does not answer.

        The owner of the port is checked before and after the request, so that a process that takes the port while the
        exporter restarts is noticed.
        """
        host, port, path = _parse_url(self._options.exporter)
        try:
            trusted = trusted_uids(self._options.dcgm_user)
            check_listener(self._options.proc, port, trusted)
            page = _get(host, port, path)
            check_listener(self._options.proc, port, trusted)
        except NotTrusted as error:
            raise _Unreadable(f"{self._options.exporter}: {error}") from None
        return page

    def _run(
        self, argv: list[str], timeout_s: float, parse: Callable[[str], tuple[DcgmIncident, ...]]
    ) -> tuple[DcgmIncident, ...]:
        """Run a ``dcgmi`` command and return the incidents that ``parse`` finds in its output.

        Raises:
            _Unreadable: The command fails, times out, or prints something that ``parse`` does not understand; or the
                program or the host engine belongs neither to root nor to ``dcgm_user``.
        """
        try:
            trusted = trusted_uids(self._options.dcgm_user)
            check_program(argv[0], trusted)
            check_listener(self._options.proc, HOSTENGINE_PORT, trusted)
        except (NotTrusted, OSError) as error:
            raise _Unreadable(f"{self._options.dcgmi}: {error}") from None
        return _run(argv, timeout_s, parse)

    def _driver_gpus(self) -> tuple[str, ...]:
        """Return the UUIDs of the GPUs that the driver lists.

        The driver may not know the UUID of an unused GPU (``GPU-????...``). Such a GPU is left out.
        """
        found: list[str] = []
        folder = f"{self._options.proc}/driver/nvidia/gpus"
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(folder)):
                with contextlib.suppress(OSError), open(f"{folder}/{name}/information") as file:
                    found += re.findall(r"^GPU UUID:\s*(GPU-[0-9a-f-]+)\s*$", file.read(), re.MULTILINE)
        return tuple(found)

    def _metrics(self, page: str) -> tuple[DcgmGpu, ...]:
        gpus: dict[str, dict[str, float]] = {}
        window: dict[tuple[str, int], int] = {}
        counter: dict[tuple[str, int], int] = {}
        numbers: dict[str, int] = {}
        for sample in parsing.samples(page):
            uuid = sample.labels.get("UUID") or sample.labels.get("uuid") or ""
            number = sample.labels.get("gpu", "")
            if not uuid:
                continue
            if number.isdigit():
                self._uuids[number], numbers[uuid] = uuid, int(number)
            maxima = gpus.setdefault(uuid, {})
            code = sample.labels.get("xid", "")
            if sample.metric in (parsing.XID_COUNT, parsing.XID_TOTAL):
                if code.isdigit():
                    counts = window if sample.metric == parsing.XID_COUNT else counter
                    counts[uuid, int(code)] = int(sample.value)
            else:  # a GPU in MIG mode has one line per instance
                maxima[sample.metric] = max(sample.value, maxima.get(sample.metric, 0.0))
        self._count(counter or window)
        return tuple(self._gpu(uuid, numbers.get(uuid), maxima) for uuid, maxima in gpus.items())

    def _count(self, window: dict[tuple[str, int], int]) -> None:
        """Add the new Xids to the totals.

        The exporter counts Xids since its start, or within a sliding window. With a window, an Xid is missed if an
        earlier Xid with the same code leaves the window at the same time. NVML and the kernel log miss no Xid for this
        reason.
        """
        for key, count in window.items():
            self._totals[key] = self._totals.get(key, 0) + max(0, count - self._window.get(key, 0))
        self._window = window

    def _gpu(self, uuid: str, number: int | None, maxima: dict[str, float]) -> DcgmGpu:
        double, failed = maxima.get(parsing.DOUBLE_BIT), maxima.get(parsing.REMAP_FAILED)
        return DcgmGpu(
            uuid=uuid,
            index=number,
            tensor_active=maxima.get(parsing.TENSOR),
            xid_counts={code: total for (of, code), total in self._totals.items() if of == uuid},
            ecc_volatile_uncorrected=None if double is None else int(double),
            remap_failed=None if failed is None else failed > 0,
        )

    def _check(self, program: str) -> None:
        self._incidents, self._health_unread = (), ""
        try:
            self._incidents = self._run([program, "health", "-c", "-j"], _HEALTH_TIMEOUT_S, self._health)
        except _Unreadable as error:
            self._health_unread = str(error)

    def _health(self, text: str) -> tuple[DcgmIncident, ...]:
        return parsing.health(text, self._uuids)

    def _diag(self, program: str | None, unread: dict[str, str]) -> tuple[DcgmIncident, ...]:
        """Return the incidents of ``dcgmi diag``, which is run only at the first call."""
        if not self._options.diag:
            return ()
        if program is None:
            unread["diag"] = f"{self._options.dcgmi} is not installed"
            return ()
        if self._diagnosed is None:
            argv = [program, "diag", "-r", "1", "-j"]
            try:
                self._diagnosed = self._run(argv, _DIAG_TIMEOUT_S, lambda text: parsing.diag(text, self._uuids))
            except _Unreadable as error:
                self._diagnosed = str(error)
        if isinstance(self._diagnosed, str):
            unread["diag"] = self._diagnosed
            return ()
        return self._diagnosed


def _program(name: str) -> str | None:
    folders = [""] if os.sep in name else os.environ.get("PATH", os.defpath).split(os.pathsep)
    paths = (os.path.join(folder, name) for folder in folders)
    return next((path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)), None)


def _run(
    argv: list[str], timeout_s: float, parse: Callable[[str], tuple[DcgmIncident, ...]]
) -> tuple[DcgmIncident, ...]:
    """Run a command and parse its output. Raises _Unreadable if either fails."""
    from ....core.command_runner import run  # imported late: subprocess costs memory, and most nodes have no dcgmi

    me = os.getpid()

    def end_with_reader() -> None:
        set_parent_death_signal(me, signal.SIGTERM)

    try:
        # preexec_fn is allowed here, because the process of a reader has one thread
        ended = run(argv, timeout_s, term_grace_s=TERM_TIMEOUT_S, preexec_fn=end_with_reader)
        return parse(ended.out + ended.err)
    except OSError as error:
        raise _Unreadable(str(error)) from None
    except parsing.NotUnderstood as error:
        raise _Unreadable(f"{' '.join(argv[1:3])}: {error}") from None


def _parse_url(url: str) -> tuple[str, int, str]:
    """Return host, port and path of the exporter's URL. Raises _Unreadable if the URL is not supported."""
    scheme, _, rest = url.partition("://")
    place, _, path = rest.partition("/")
    host, _, port = place.partition(":")
    if scheme != "http" or host != "127.0.0.1" or not port.isdigit():
        raise _Unreadable(f"{url}: the URL is not supported; it must be http://127.0.0.1:PORT/PATH")
    return host, int(port), path


def _get(host: str, port: int, path: str) -> str:
    """Fetch the page. Raises _Unreadable if that fails.

    HTTP/1.0 is written by hand because importing urllib.request alone would take 6 MiB.
    """
    place = f"{host}:{port}"
    url = f"http://{place}/{path}"
    deadline = time.monotonic() + _EXPORTER_TIMEOUT_S
    page = bytearray()
    try:
        with socket.create_connection((host, port), _EXPORTER_TIMEOUT_S) as connection:
            connection.sendall(f"GET /{path} HTTP/1.0\r\nHost: {place}\r\nAccept: text/plain\r\n\r\n".encode())
            while len(page) < _MAX_PAGE_BYTES:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                connection.settimeout(left)
                if not (data := connection.recv(_CHUNK)):
                    break
                page += data
    except TimeoutError:
        raise _Unreadable(f"{url} did not answer within {_EXPORTER_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise _Unreadable(f"{url}: {os.strerror(error.errno) if error.errno else error}") from None
    head, found, body = bytes(page).partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0].decode(errors="replace")
    if not found or status.split()[1:2] != ["200"]:
        raise _Unreadable(f"{url}: {status[:100] or 'no answer'}")
    return body.decode(errors="replace")
