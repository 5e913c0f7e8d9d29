"""Reads by the NVML reader, in this process or in a new process, in which the loader searches the library again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import msgspec

from rrl.health.readers.samples import NvidiaGpu, NvmlData

SECONDS = 60.0
"""Deadline (s) of one read in a new process, which only a broken build reaches."""

PROGRAM = """
import sys, msgspec
from rrl.health.readers.base import NotInstalled, PermissionDenied, ReaderOptions
from rrl.health.readers.nvml.reader import NvmlReader

reader = NvmlReader(ReaderOptions())
for line in sys.stdin:
    try:
        output = msgspec.json.encode(reader.read()).decode()
    except (NotInstalled, PermissionDenied, RuntimeError) as error:
        output = f"{type(error).__name__}: {error}"
    print(output, flush=True)
reader.close()
"""


def start(environ: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a process that reads once per input line, and prints the sample or the error as one line."""
    env = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "RRL_FAKE_NVML")}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**env, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def result_of_child(environ: Mapping[str, str]) -> str:
    """Return the output of one read in a new process."""
    process = start(environ)
    output, _ = process.communicate("read\n", timeout=SECONDS)
    assert process.returncode == 0
    return output.strip()


def read_in_child(environ: Mapping[str, str]) -> NvmlData:
    return msgspec.json.decode(result_of_child(environ), type=NvmlData)


def reading_error(gpu: NvidiaGpu, healthy: NvidiaGpu) -> list[str]:
    """Return what is wrong with a sample of which a part could not be read; empty if nothing is wrong.

    A value is wrong if it differs from ``healthy`` and is not missing with a reason.
    """
    wrong = []
    for field in NvidiaGpu.__struct_fields__:
        value = getattr(gpu, field)
        if field in ("unread", "lost") or value == getattr(healthy, field):
            continue
        if field == "nvlinks" and value is not None and any(name.startswith("nvlinks.") for name in gpu.unread):
            continue  # one part of each link
        missing = value in (None, "") and bool(gpu.unread.get(field))
        if not missing:
            wrong.append(f"{field} = {value!r}, unread {gpu.unread.get(field)!r}")
    return wrong
