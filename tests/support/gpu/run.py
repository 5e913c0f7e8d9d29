"""``make test-gpu``: runs tests/gpu on this machine's GPU, with an interpreter that has torch and without a network.

Only the standard library is imported, because the interpreter may lack rrl and its dependencies. Missing packages
are installed from a folder of wheels into ``.venv-gpu`` in the root. The interpreter's own packages stay visible
there and are not changed. Without a GPU the program prints one line and exits with code 0.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
ENVIRONMENT = ROOT / ".venv-gpu"
REHEARSAL_ENV = "RRL_GPU_REHEARSAL"
"""Environment variable. If it is set, the tests run without a GPU: tests with torch use the CPU, tests with NVML use
the library that the loader finds. Such a rehearsal checks only that the tests themselves work."""
OLDEST_PYTHON = (3, 11)
TEST_TOOLS = ("pytest", "pytest-timeout")
_NVML = "libnvidia-ml.so.1"
_PROGRAM_MISSING = """
import importlib.metadata, sys
for line in sys.stdin.read().splitlines():
    name = line.partition(" ")[0]
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        print(line)
try:
    import rrl.core.types
except ImportError:
    print("rrl")
"""
_PROGRAM_PATHS = "import sys; print('\\n'.join(path for path in sys.path if path.endswith('-packages')))"


def no_gpu() -> str:
    """Return why no GPU can be used on this machine; "" if NVML lists a GPU."""
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:
        return f"{_NVML} is not installed (no NVIDIA driver)"
    if code := nvml.nvmlInit_v2():
        return f"the NVIDIA driver does not start (NVML code {code})"
    count = ctypes.c_uint(0)
    code = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    return "" if code == 0 and count.value else "the NVIDIA driver lists no GPU"


def requirements() -> tuple[list[str], list[str]]:
    """Return the requirements of all tests, and those of only some tests, each after its package's name.

    An entry is, for example, "numpy numpy>=1.26".
    """
    import tomllib  # imported here, because main prints a message for interpreters without it

    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    needed = [*project["dependencies"], *TEST_TOOLS]
    return _with_names(needed), _with_names(project["optional-dependencies"]["torch"])


def _with_names(texts: list[str]) -> list[str]:
    return [f"{re.split(r'[^A-Za-z0-9._-]', text)[0]} {text}" for text in texts]


def missing(python: str, wanted: list[str]) -> list[str]:
    """Return the packages of ``wanted`` that the interpreter lacks, "rrl" included."""
    done = subprocess.run([python, "-c", _PROGRAM_MISSING], input="\n".join(wanted), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"make test-gpu: {python} does not work: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout.split("\n")[:-1]


def prepared(python: str, wheels: Path) -> str:
    """Return an interpreter that has rrl and the requirements of the tests: ``python`` or that of ``.venv-gpu``.

    Exits with one line if a package that all tests need is neither installed nor in ``wheels``.
    """
    needed, useful = requirements()
    absent = missing(python, [*needed, *useful])
    if not absent or (not wheels.is_dir() and set(absent) <= set(useful)):
        _report_missing(absent)
        return python
    own = _environment(python)
    install = [python, "-m", "pip", "--python", own, "install", "--quiet", "--no-index", "--find-links", str(wheels)]
    for line in _without_rrl(missing(own, [*needed, *useful])) if wheels.is_dir() else ():
        subprocess.run([*install, line.partition(" ")[2]], capture_output=line in useful)
    if lacking := _without_rrl(missing(own, needed)):
        names = ", ".join(line.partition(" ")[2] for line in lacking)
        raise SystemExit(f"make test-gpu: {python} lacks {names}; give WHEELS=folder, made by make wheelhouse")
    _report_missing(_without_rrl(missing(own, useful)))
    return own


def _environment(python: str) -> str:
    """Create ``.venv-gpu`` with the packages of ``python`` and with rrl, and return its interpreter.

    The environment has no pip of its own, because some machines lack ensurepip. The pip of ``python`` installs into it.
    """
    subprocess.run([python, "-m", "venv", "--without-pip", "--system-site-packages", ENVIRONMENT], check=True)
    own = str(ENVIRONMENT / "bin" / "python")
    source = ENVIRONMENT / "src"
    source.mkdir(exist_ok=True)
    if not (source / "rrl").is_symlink():
        (source / "rrl").symlink_to(ROOT)
    (packages,) = _output(own, "import sysconfig; print(sysconfig.get_path('purelib'))")
    (Path(packages) / "rrl-gpu.pth").write_text("\n".join([str(source), *_output(python, _PROGRAM_PATHS)]))
    return own


def _output(python: str, program: str) -> list[str]:
    return subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout.splitlines()


def _without_rrl(lines: list[str]) -> list[str]:
    return [line for line in lines if line != "rrl"]


def _report_missing(lines: list[str]) -> None:
    if lines:
        names = ", ".join(line.partition(" ")[2] for line in lines)
        print(f"make test-gpu: without {names}: some tests are skipped", file=sys.stderr)


def main() -> int:
    """Find a GPU and an interpreter, and run the tests; return pytest's exit code, or 0 without a GPU."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--wheels", type=Path, default=ROOT / "wheelhouse", help="folder of wheels")
    options.add_argument("pytest", nargs="*", help="further arguments for pytest")
    given = options.parse_args()
    if not os.environ.get(REHEARSAL_ENV) and (why := no_gpu()):
        print(f"make test-gpu: nothing is tested: {why}")
        return 0
    if sys.version_info < OLDEST_PYTHON:
        print(f"make test-gpu: {sys.executable} is Python {sys.version.split()[0]}; rrl needs 3.11", file=sys.stderr)
        return 2
    python = prepared(sys.executable, given.wheels)
    argv = [python, "-m", "pytest", "-m", "gpu", "-rs", "--durations=5", str(ROOT / "tests" / "gpu"), *given.pytest]
    return subprocess.run(argv, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
