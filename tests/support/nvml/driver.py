"""A stand-in NVIDIA driver: nvidia-ml-py calls ``fake_nvml.c``, which answers from a file that this class writes.

    driver = FakeDriver(tmp_path).gpus(8)
    process = Popen(..., env={**os.environ, **driver.env()})
    driver.set(3, "ecc_volatile_uncorrected", 2)      # the running process sees it with its next call
    driver.xid(3, 79)

Only the driver's answers are invented. nvidia-ml-py, ctypes and the loader are real. So a hanging call or a lost device
has its real effect on the process. GPUs are numbered as by NVML; ``None`` means all GPUs.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Self

SOURCE = Path(__file__).with_name("fake_nvml.c")
STATE_ENV = "RRL_FAKE_NVML"
SONAME = "libnvidia-ml.so.1"
"""Name of the library that nvidia-ml-py loads. On Linux, nvidia-ml-py uses only the loader's search path."""

ERRORS = {
    "UNINITIALIZED": 1,
    "INVALID_ARGUMENT": 2,
    "NOT_SUPPORTED": 3,
    "NO_PERMISSION": 4,
    "NOT_FOUND": 6,
    "DRIVER_NOT_LOADED": 9,
    "TIMEOUT": 10,
    "IRQ_ISSUE": 11,
    "FUNCTION_NOT_FOUND": 13,
    "CORRUPTED_INFOROM": 14,
    "GPU_IS_LOST": 15,
    "RESET_REQUIRED": 16,
    "OPERATING_SYSTEM": 17,
    "LIB_RM_VERSION_MISMATCH": 18,
    "MEMORY": 20,
    "NOT_READY": 27,
    "GPU_NOT_FOUND": 28,
    "UNKNOWN": 999,
}
"""Numbers of NVML_ERROR_* by name. :meth:`FakeDriver.fail` takes the number of any other error."""

_ACTIONS = (
    "none",
    "gpu_reset",
    "node_reboot",
    "drain_p2p",
    "drain_and_reset",
    "recover_imex_domain",
    "bus_reset",
    "system_reboot",
)
_FABRIC = ("not_supported", "not_started", "in_progress", "completed")
_REASONS = (
    "gpu_idle",
    "applications_clocks",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal",
    "hw_thermal",
    "hw_power_brake",
    "display",
)
TEXTS = ("uuid", "name", "serial", "vbios", "pci")
LINK_FIELDS = ("active", "replay", "recovery", "crc_flit", "crc_data")
FIELDS = tuple(re.findall(r"^ +X\((\w+), ", SOURCE.read_text(), re.MULTILINE))
"""Names that :meth:`FakeDriver.set` takes, besides :data:`TEXTS`: fields of samples.NvidiaGpu, and a few that only the
stand-in has."""

FUNCTIONS = frozenset(re.findall(r"\b(nvml[A-Z]\w+)[(,]", SOURCE.read_text())) - {"nvmlInit_v2"}
"""Names that :meth:`FakeDriver.fail` and :meth:`FakeDriver.hang` take; nvidia-ml-py never calls nvmlInit_v2."""

Value = int | str | bool | Iterable[str] | None
"""A number, a text, or texts as in samples.Gpu; ``None`` means that the device does not support the field."""


def library(old: bool = False) -> Path:
    """Return the folder with the library, which is compiled once for each version of its source.

    The folder is in the virtual environment. Several processes may call this at the same time. With ``old``, the
    library lacks the functions that a driver before r525 lacks.
    """
    flags = ["-DOLD_DRIVER"] if old else []
    digest = sha256(SOURCE.read_bytes() + repr(flags).encode()).hexdigest()[:16]
    folder = Path(sys.prefix) / "cache" / f"fake-nvml-{digest}"
    made = folder / SONAME
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        half = folder / f"{os.getpid()}-{threading.get_ident()}.so"
        command = ["gcc", "-std=gnu11", "-O2", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{SONAME}"]
        subprocess.run([*command, *flags, "-o", str(half), str(SOURCE)], check=True)
        half.replace(made)
    return folder


class FakeDriver:
    """A stand-in driver.

    Its state file is replaced as a whole at every change, so no process reads half of it.
    """

    def __init__(self, folder: Path, old: bool = False) -> None:
        self.state = folder / "fake_nvml.state"
        self._library = library(old)
        self._count = 0
        self._version = "570.86.15"
        self._epoch = 0
        self._sequence = 0
        self._values: dict[tuple[str, str], str] = {}
        self._processes: dict[tuple[int, int], int] = {}
        self._failing: dict[tuple[str, int], int] = {}
        self._hanging: set[tuple[str, int]] = set()
        self._xids: list[str] = []
        self._write()

    def env(self) -> dict[str, str]:
        """Return the environment of a process that uses this driver.

        The loader reads the environment only at the start of a process.
        """
        others = [part for part in os.environ.get("LD_LIBRARY_PATH", "").split(":") if part]
        return {"LD_LIBRARY_PATH": ":".join([str(self._library), *others]), STATE_ENV: str(self.state)}

    def load(self) -> None:
        """Load the library into this process, so that the loader finds it under the name of NVML's library.

        If the environment lacks ``RRL_FAKE_NVML``, the library reports that no driver is loaded, as other tests of this
        process expect.
        """
        ctypes.CDLL(str(self._library / SONAME))

    def gpus(self, count: int) -> Self:
        self._count = count
        return self._write()

    def version(self, version: str) -> Self:
        self._version = version
        return self._write()

    def reload(self) -> Self:
        """Reload the driver: earlier handles and sessions become invalid."""
        self._epoch += 1
        return self._write()

    def set(self, gpu: int | None, field: str, value: Value) -> Self:
        kind = "text" if field in TEXTS else "set"
        if kind == "set" and field not in FIELDS:
            raise ValueError(f"no field {field!r} of the stand-in; there are {', '.join((*FIELDS, *TEXTS))}")
        self._values[f"{kind} {_number(gpu)}", field] = _written(field, value)
        return self._write()

    def link(self, gpu: int | None, link: int | None, field: str, value: int | None) -> Self:
        if field not in LINK_FIELDS:
            raise ValueError(f"no field {field!r} of a link; there are {', '.join(LINK_FIELDS)}")
        self._values[f"link {_number(gpu)} {_number(link)}", field] = _written(field, value)
        return self._write()

    def process(self, gpu: int, pid: int, memory: int = 1 << 30) -> Self:
        self._processes[gpu, pid] = memory
        return self._write()

    def end_process(self, gpu: int, pid: int) -> Self:
        del self._processes[gpu, pid]
        return self._write()

    def fail(self, function: str, error: str | int, gpu: int | None = None) -> Self:
        """Make a function of NVML fail.

        ``function`` is an exported function, ``*`` for all functions that take a device, or ``field:<ID>``.
        """
        code = error if isinstance(error, int) else ERRORS[error]
        self._failing[_exported(function), -1 if gpu is None else gpu] = code
        return self._write()

    def lose(self, gpu: int, error: str = "GPU_IS_LOST") -> Self:
        """Make all queries of this GPU fail, as after Xid 79."""
        return self.fail("*", error, gpu)

    def hang(self, function: str, gpu: int | None = None) -> Self:
        """Make the function hang until :meth:`heal`; a signal without a handler still ends the calling process."""
        self._hanging.add((_exported(function), -1 if gpu is None else gpu))
        return self._write()

    def heal(self) -> Self:
        """End all failures and hangs; fields keep their values."""
        self._failing.clear()
        self._hanging.clear()
        return self._write()

    def xid(self, gpu: int | None, code: int) -> Self:
        """Report an Xid; with ``gpu`` None the event does not name its device."""
        self._sequence += 1
        self._xids.append(f"xid {self._sequence} {-1 if gpu is None else gpu} {code}")
        return self._write()

    def uuid(self, gpu: int) -> str:
        return self._values.get((f"text {gpu}", "uuid"), f"GPU-{0xFA4E0000 + gpu:08x}-0000-4000-8000-{gpu:012x}")

    def _write(self) -> Self:
        lines = [f"gpus {self._count}", f"driver {self._version}", f"epoch {self._epoch}"]
        # values for all GPUs are written first, so that a value for one GPU replaces them, even if it was set earlier
        lines += sorted(f"{where} {field} {value}" for (where, field), value in self._values.items())
        lines += [f"process {gpu} {pid} {memory}" for (gpu, pid), memory in self._processes.items()]
        lines += [f"fail {function} {code} {gpu}" for (function, gpu), code in self._failing.items()]
        lines += [f"hang {function} {gpu}" for function, gpu in sorted(self._hanging)]
        half = self.state.with_suffix(".half")
        half.write_text("\n".join([*lines, *self._xids, ""]))
        half.replace(self.state)
        return self


def _exported(function: str) -> str:
    """Return the exported name of a function, whose name may lack its version (such as ``_v2`` of nvmlInit_v2)."""
    if function == "*" or function.startswith("field:"):
        return function
    plain = re.sub(r"_v\d$", "", function)
    names = ("nvmlInitWithFlags",) if plain == "nvmlInit" else (function, f"{plain}_v3", f"{plain}_v2", plain)
    for name in names:
        if name in FUNCTIONS:
            return name
    raise ValueError(f"the stand-in has no function {function}")


def _number(which: int | None) -> str:
    return "*" if which is None else str(which)


def _written(field: str, value: Value) -> str:
    if value is None:
        return "unsupported"
    if isinstance(value, str):
        named = {"recovery_action": _ACTIONS, "fabric_state": _FABRIC}.get(field)
        return value if named is None else str(named.index(value))
    if isinstance(value, int):
        return str(int(value))
    return str(sum(1 << _REASONS.index(reason) for reason in value))
