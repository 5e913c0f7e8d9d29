"""Read the properties of a machine that roles need: limits, network, Python packages, UCX, NVML, DCGM, scratch space.

``rrl doctor`` runs these readers on the login node, and :mod:`.main` on a compute node, so that the results can be
compared. Every reader has a deadline; a value that cannot be read is :class:`Unavailable` with the reason. Versions
come from the metadata of the installed packages. Libraries (NVML, UCX, torch) are loaded only in child processes, which
can be killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import ipaddress
import os
import re
import resource
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ....cluster.base import Refused, Unanswered
from ....config.import_paths import ENGINES
from ....core.command_runner import run
from ....transport.address import NETWORK_ENV, interfaces, own_address
from ....transport.tcp_inspection import try_packet_filter

DCGM_PORT = 9400
"""Default port of dcgm-exporter (README of github.com/NVIDIA/dcgm-exporter)."""
_LOCAL_CONNECT_TIMEOUT_S = 0.3
"""Timeout (s) of a connection to this machine itself."""
_PACKAGES = (
    "rrl-slurm",
    "torch",
    "transformers",
    "reasoning-gym",
    *(name for row in ENGINES.values() for name in row.distributions),
    "ucxx-cu12",
    "ucxx-cu13",
    "libucx-cu12",
    "nixl-cu12",
    "nixl-cu13",
    "nvidia-ml-py",
)
_SIOCGIFNETMASK = 0x891B
"""The ioctl that reads an interface's netmask (netdevice(7))."""
_RDMA = "/sys/class/infiniband"
"""Folder that lists RDMA devices, RoCE cards included."""


class UnavailableCause(StrEnum):
    """Why something could not be read."""

    TIMEOUT = "timeout"
    NOT_FOUND = "not_found"
    """A file or program does not exist."""
    NVML = "nvml"
    """The driver's library returned an error."""
    OTHER = "other"


class Unavailable(Struct, frozen=True, tag=True):
    """The reason why a value could not be read. It says nothing about whether the value is good or bad."""

    why: str
    """The reason, for people."""
    cause: UnavailableCause = UnavailableCause.OTHER


class Interface(Struct, frozen=True):
    """A network interface with an IPv4 address."""

    name: str
    address: str
    network: str
    """The network in CIDR form."""


class Network(Struct, frozen=True, tag=True):
    """The host name and the network interfaces of a machine."""

    host: str
    resolves: str
    """The address to which the host name resolves; empty if it does not resolve."""
    chosen: str
    """The address on which roles listen; empty if there is none."""
    trouble: str
    """Why no address can be chosen; empty if an address is chosen."""
    requested: str
    """The value of $RRL_NETWORK."""
    interfaces: tuple[Interface, ...]
    rdma: tuple[str, ...] = ()
    """Names of the RDMA devices, including those that UCX cannot use."""
    filter_refused: str = ""
    """Why the kernel does not let this user attach a packet filter to a socket; empty if the kernel permits it."""


class Limits(Struct, frozen=True, tag=True):
    """Soft limits of this process (-1 means unlimited), and the hard limit of open files."""

    memlock: int
    """Limit (bytes) of locked memory."""
    nofile: int
    nofile_hard: int
    core: int
    """Limit (bytes) of the size of a core dump."""
    core_pattern: str
    """The kernel's core_pattern, which names the destination of core dumps."""


class Machine(Struct, frozen=True, tag=True):
    """The CPUs and the memory of a machine."""

    cpus: int
    """Number of CPUs that this process may use."""
    memory: int
    """Bytes of memory in total."""
    available: int
    """Bytes of memory that are available."""


class Python(Struct, frozen=True, tag=True):
    """The Python installation that runs rrl."""

    executable: str
    version: str
    prefix: str
    prefix_filesystem: str
    """Type of the file system of the virtual environment."""
    packages: dict[str, str]
    """Versions of the packages that rrl uses, by name."""


class Ucx(Struct, frozen=True, tag=True):
    """The UCX library that roles use."""

    version: str
    transports: dict[str, tuple[str, ...]]
    """Devices by the name of the UCX transport (``tcp``, ``rc_mlx5``)."""
    source: str
    """The installation that was read: ``the wheel libucx`` or ``the system's UCX``."""


class Nvml(Struct, frozen=True, tag=True):
    """Version of the NVIDIA driver, and its GPUs.

    Both are empty if there is no driver.
    """

    driver: str
    """The driver's version."""
    gpus: tuple[str, ...]
    """Product names of the GPUs."""


class Dcgm(Struct, frozen=True, tag=True):
    """The installed parts of DCGM."""

    dcgmi: str
    """Path of the program dcgmi; empty if there is none."""
    exporter: bool
    """Whether a process listens on the port of dcgm-exporter."""


class Scratch(Struct, frozen=True, tag=True):
    """The folders for temporary files."""

    tmp: str
    """Path of the folder for temporary files ($TMPDIR, else /tmp)."""
    tmp_filesystem: str
    """Type of the file system of ``tmp``."""
    tmp_free: int
    """Free bytes in ``tmp``."""
    trouble: str
    """Why no file can be written into ``tmp``; empty if files can be written."""
    shm_free: int
    """Free bytes in /dev/shm; 0 if it does not exist."""


class Torch(Struct, frozen=True, tag=True):
    """The result of importing torch."""

    version: str
    gpus: int
    """Number of GPUs that torch can use."""
    seconds: float
    """Seconds that the import took."""


class Host(Struct, frozen=True):
    """The results of all readers on one machine, except the import of torch."""

    network: Network | Unavailable
    limits: Limits | Unavailable
    machine: Machine | Unavailable
    python: Python | Unavailable
    ucx: Ucx | Unavailable
    nvml: Nvml | Unavailable
    dcgm: Dcgm | Unavailable
    scratch: Scratch | Unavailable

    @property
    def packages(self) -> dict[str, str]:
        """Return the versions of the installed packages that rrl uses; empty if they could not be read."""
        return {} if isinstance(self.python, Unavailable) else self.python.packages


def read_host(within: float) -> Host:
    """Run all readers in parallel, within at most ``within`` seconds."""
    readers: dict[str, Callable[[], object]] = {
        "network": _network,
        "limits": _limits,
        "machine": _machine,
        "python": _python,
        "dcgm": _dcgm,
        "scratch": _scratch,
        "ucx": lambda: read_ucx(within),
        "nvml": lambda: _nvml(within),
    }
    return Host(**run_readers(readers, within))


def run_readers(readers: Mapping[str, Callable[[], object]], within: float) -> dict[str, Any]:
    """Run each reader in a thread of its own and return the results by name.

    A reader that raises, or does not return within ``within`` seconds, has the result :class:`Unavailable`. A reader
    that hangs, for example on a dead file server, does not keep the program from ending.
    """
    results: dict[str, Any] = {}

    def run(name: str, reader: Callable[[], object]) -> None:
        try:
            results[name] = reader()
        except Exception as error:
            results[name] = Unavailable(_one_line(error), _cause(error))

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in readers.items()]
    deadline = time.monotonic() + within
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = Unavailable(f"no answer within {within:g} s", UnavailableCause.TIMEOUT)
    return {name: results.get(name, late) for name in readers}


def filesystem(path: Path) -> str:
    """Return the type of the file system of ``path`` from /proc/self/mountinfo (``ext4``, ``nfs4``, ``lustre``)."""
    real, longest_mount, file_system = os.path.realpath(path), "", ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mount = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split()[4])
        if (real == mount or real.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(longest_mount):
            longest_mount, file_system = mount, after.split()[0]
    return file_system


# ── the readers ────────────────────────────────────────────────────────────────────────────────────────────────────
def _network() -> Network:
    host = socket.gethostname()
    try:
        resolves = socket.gethostbyname(host)
    except OSError:
        resolves = ""
    rdma = tuple(sorted(os.listdir(_RDMA))) if os.path.isdir(_RDMA) else ()
    try:
        chosen, trouble = own_address(), ""
    except OSError as error:
        chosen, trouble = "", str(error)
    return Network(
        host, resolves, chosen, trouble, os.environ.get(NETWORK_ENV, ""), tuple(_networks()), rdma, try_packet_filter()
    )


def _networks() -> Sequence[Interface]:
    networks = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ioctl_socket:
        for interface in interfaces():
            request = struct.pack("256s", interface.name.encode()[:15])
            mask = socket.inet_ntoa(fcntl.ioctl(ioctl_socket, _SIOCGIFNETMASK, request)[20:24])
            network = ipaddress.ip_network(f"{interface.address}/{mask}", strict=False)
            networks.append(Interface(interface.name, interface.address, str(network)))
    return networks


def _limits() -> Limits:
    nofile, nofile_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Limits(
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        nofile=nofile,
        nofile_hard=nofile_hard,
        core=resource.getrlimit(resource.RLIMIT_CORE)[0],
        core_pattern=Path("/proc/sys/kernel/core_pattern").read_text().strip(),
    )


def _machine() -> Machine:
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE))
    return Machine(len(os.sched_getaffinity(0)), int(fields["MemTotal"]) * 1024, int(fields["MemAvailable"]) * 1024)


def _python() -> Python:
    packages = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    version = ".".join(map(str, sys.version_info[:3]))
    return Python(sys.executable, version, sys.prefix, filesystem(Path(sys.prefix)), packages)


def _dcgm() -> Dcgm:
    with socket.socket() as connection:
        connection.settimeout(_LOCAL_CONNECT_TIMEOUT_S)
        return Dcgm(shutil.which("dcgmi") or "", connection.connect_ex(("127.0.0.1", DCGM_PORT)) == 0)


def _scratch() -> Scratch:
    tmp, trouble, free = os.environ.get("TMPDIR") or "/tmp", "", 0
    try:
        with tempfile.TemporaryFile(dir=tmp) as file:
            file.write(b"rrl")
        free = shutil.disk_usage(tmp).free
    except OSError as error:
        trouble = error.strerror or str(error)
    shm = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    return Scratch(tmp, filesystem(Path(tmp)), free, trouble, shm)


def read_ucx(within: float) -> Ucx:
    """Run the ``ucx_info`` of the UCX that ucxx loads and parse its output.

    ucxx loads the wheel libucx, unless RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY is set.

    Raises:
        FileNotFoundError: there is no ``ucx_info``.
        OSError: ``ucx_info`` failed.
    """
    env, program, source = dict(os.environ), shutil.which("ucx_info"), "the system's UCX"
    prefers_system = env.get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "false").lower() != "false"
    if not (prefers_system and program):
        wheels = (Path(path, "libucx") for path in sys.path)
        if (wheel := next((path for path in wheels if (path / "bin/ucx_info").exists()), None)) is not None:
            program, source = str(wheel / "bin/ucx_info"), "the wheel libucx"
            env["LD_LIBRARY_PATH"] = f"{wheel / 'lib'}:{env.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    if program is None:
        raise FileNotFoundError("ucx_info was not found: neither the wheel libucx nor a system UCX is installed")
    result = run([program, "-v", "-d"], within, env=env)
    if result.code:
        raise OSError(f"ucx_info ended with {result.code}: {result.message}")
    return parse_ucx(result.out, source)


def parse_ucx(text: str, source: str = "") -> Ucx:
    """Parse the output of ``ucx_info -v -d``; ``source`` names the installation that it belongs to."""
    version = re.search(r"# Library version: (\S+)|# UCT version=(\S+)", text)
    transports: dict[str, tuple[str, ...]] = {}
    for name, device in re.findall(r"#\s+Transport: (\S+)\s*\n#\s+Device: (\S+)", text):
        transports[name] = (*transports.get(name, ()), device)
    return Ucx((version[1] or version[2]) if version else "", transports, source)


def _nvml(within: float) -> Nvml | Unavailable:
    """Query NVML in a child process, because a hung GPU hangs every process that queries it."""
    result = run([sys.executable, "-P", "-c", f"from {__name__} import print_nvml; print_nvml()"], within)
    if result.code:
        raise OSError(result.message.rpartition(" / ")[2] or f"the reader of NVML ended with {result.code}")
    return msgspec.json.decode(result.out, type=Nvml | Unavailable)


def print_nvml() -> None:
    """Read NVML and print the result as JSON for :func:`_nvml`."""
    from ....health.readers.base import NotInstalled, PermissionDenied, ReaderOptions
    from ....health.readers.nvml.reader import NvmlReader

    found: Nvml | Unavailable
    try:
        data = NvmlReader(ReaderOptions()).read()
        found = Nvml(data.driver, tuple(gpu.name for gpu in data.gpus))
    except NotInstalled:
        found = Nvml("", ())
    except (PermissionDenied, RuntimeError) as error:
        found = Unavailable(str(error), UnavailableCause.NVML)
    print(msgspec.json.encode(found).decode())


def read_torch(within: float) -> Torch:
    """Import torch in a child process.

    Raises:
        OSError: torch cannot be imported; the text is the last line of the error.
        TimeoutError: the import took more than ``within`` seconds.
    """
    code = "import torch; print(torch.__version__, torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    started = time.monotonic()
    result = run([sys.executable, "-P", "-c", code], within)
    if result.code:
        raise OSError(result.message.rpartition(" / ")[2])
    version, gpus = result.out.split()
    return Torch(version, int(gpus), time.monotonic() - started)


def _cause(error: Exception) -> UnavailableCause:
    if isinstance(error, TimeoutError):
        return UnavailableCause.TIMEOUT
    return UnavailableCause.NOT_FOUND if isinstance(error, FileNotFoundError) else UnavailableCause.OTHER


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = " ".join(str(error).split())
    return text if isinstance(error, OSError | Refused | Unanswered) and text else f"{type(error).__name__}: {text}"
