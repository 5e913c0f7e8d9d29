"""Report why this process ends, in an end report that the launcher of its step copies into the exit record.

The manager's decisions use this report, never the output of the process. Two reasons are reported: an invalid
configuration of the job (:func:`exits_on_invalid_config`), and an uncaught exception
(:func:`report_uncaught_exceptions`). The exceptions :class:`Unrepairable`, :class:`Misuse` and :class:`Diverged` are
marked in the report.
Outside of a run nothing is reported.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import msgspec

from ...core.launch import LAUNCH_ENV, EndReport, InvalidConfig, Launch, Raised, read_launch
from ...core.run_dir import OwnPath, RunDir, full_storage_error, write_atomically
from ...core.text import exit_invalid_config, on_one_line
from ...core.types import RaisedException, Version

_WRITE_TIMEOUT_S = 2.0
"""Timeout (s) for writing the report, because a process that ends must not wait for hung storage."""
_MAX_MESSAGE_CHARS = 400
"""Maximum number of characters reported from an exception's message or from the last line of output. The log contains
the whole text."""
_RRL = Path(__file__).parents[2]
_PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})
"""Names of the folders that contain installed packages."""
_DETERMINISTIC_OS_ERRORS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
"""OS errors whose usual cause is a mistake in the user's code, not storage or the network."""
_ENVIRONMENTAL_ERRORS = frozenset(
    {
        "torch.OutOfMemoryError",
        "torch.AcceleratorError",
        "torch.distributed.DistError",
        "zmq.error.ZMQError",
        "http.client.HTTPException",
        "urllib3.exceptions.HTTPError",
        "aiohttp.client_exceptions.ClientError",
        "httpx.TransportError",
    }
)
"""Names of further error classes whose cause may be memory, a GPU or the network. The classes are compared by name, so
that this module need not import their packages."""
_MARK = "_rrl_environmental"
"""Attribute of an exception that was raised in a call of a service (:func:`mark_environmental`)."""


class Unrepairable(RuntimeError):
    """Ends the run, because every further start would end in the same way.

    Args:
        message: What was observed.
        why: Why a start would not help, and what would be right; for people.
    """

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


class ScorerFails(Unrepairable):
    """Ends a reward role whose scorer fails for most groups.

    Args:
        raised: The newest exception of the scorer.
        groups: Number of groups that were dropped because of exceptions of the scorer.
    """

    def __init__(self, raised: RaisedException, groups: int) -> None:
        why = f"scorer exceptions dropped {groups} groups, including most of the newest ones"
        super().__init__(f"{why}; this run ends", why)
        self.raised = raised


class Misuse(ValueError):
    """The role's code breaks a rule of the worker API, so that this process would lose or corrupt its work."""


class Diverged(RuntimeError):
    """A model with the weights of ``version`` has ``returned`` values that are not finite, or the GPU is broken."""

    def __init__(self, version: Version | None, returned: str) -> None:
        super().__init__(f"the model with weights {version} returned {returned}: training may have diverged")


@contextmanager
def exits_on_invalid_config(errors: type[Exception] = ValueError) -> Iterator[None]:
    """Return a context manager that reports ``errors`` as mistakes in job.toml and exits with code 2.

    The run then ends at once, because every start of the role would fail with the same mistake. So a check whose result
    depends on the node must be outside of this context. The user's code must be outside too, because its errors need a
    traceback.
    """
    try:
        yield
    except errors as error:
        _report(InvalidConfig(on_one_line(error)[:_MAX_MESSAGE_CHARS]))
        exit_invalid_config(error)
    except SystemExit as error:
        raise as_exception(error) from None


def report_uncaught_exceptions(launch: Launch) -> None:
    """Install a hook that reports the exception that ends this process, after Python has printed the traceback."""
    print_traceback, process = sys.excepthook, os.getpid()

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        print_traceback(kind, error, trace)
        if os.getpid() == process:  # a forked child is not the role's process
            _report(Raised(_described_end(error, Path(launch.cwd))))

    sys.excepthook = report


def as_exception(error: BaseException) -> Exception:
    """Return what the user's code raised as an Exception. A SystemExit would end the process without a traceback."""
    if isinstance(error, Exception):
        return error
    return RuntimeError(f"the code raised {type(error).__name__}: {error}").with_traceback(error.__traceback__)


def mark_environmental(error: BaseException) -> None:
    """Record in an exception that a service outside of the run may have caused it."""
    with suppress(Exception):  # the user's exception class may forbid it
        setattr(error, _MARK, True)


def _described_end(error: BaseException, folder: Path) -> RaisedException:
    """Describe the exception that ends this process; for :class:`ScorerFails`, describe the exception of the scorer."""
    raised = error.raised if isinstance(error, ScorerFails) else described(error, folder)
    why = error.why if isinstance(error, Unrepairable) else None
    return msgspec.structs.replace(raised, counts_always=isinstance(error, Misuse | Diverged), unrepairable=why)


def described(error: BaseException, folder: Path) -> RaisedException:
    """Return a description of an exception; files in ``folder``, the job's folder, are named relative to it."""
    frames = traceback.extract_tb(error.__traceback__)
    try:
        message = on_one_line(error.msg if isinstance(error, SyntaxError) else error).strip()
    except BaseException:  # a user's __str__ may raise
        message = ""
    if (full := full_storage_error(error)) is not None and full is not error:
        message = f"{on_one_line(full)} ({message})"
    name = _class_name(next(kind for kind in type(error).__mro__ if kind.__module__ != __name__))  # marks are not shown
    calls = "\n".join(f"{frame.filename}:{frame.lineno}" for frame in frames)
    return RaisedException(
        type=name,
        message=message[:_MAX_MESSAGE_CHARS],
        place=place_of(error, folder),
        fingerprint=hashlib.sha256(f"{name}\n{calls}".encode()).hexdigest()[:16],
        environmental=_is_environmental(error),
    )


def _class_name(kind: type[BaseException]) -> str:
    """Return the name of a class as a traceback shows it."""
    hidden = kind.__module__ in ("builtins", "__main__")
    return kind.__qualname__ if hidden else f"{kind.__module__}.{kind.__qualname__}"


def _is_environmental(error: BaseException) -> bool:
    """Return whether storage, network, memory, a GPU or a service may have caused the error."""
    if getattr(error, _MARK, False) or full_storage_error(error) is not None:
        return True
    if isinstance(error, OSError):
        return not isinstance(error, _DETERMINISTIC_OS_ERRORS)
    known = any(_class_name(kind) in _ENVIRONMENTAL_ERRORS for kind in type(error).__mro__)
    return known or isinstance(error, MemoryError)


def place_of(error: BaseException, folder: Path) -> str:
    """Return the ``file:line`` to report for an exception.

    :func:`users_place` chooses it among the frames of the traceback. For a syntax error, it may also choose the line
    that contains the error.
    """
    places = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno or 0))
    return users_place(places, folder) if places else "unknown place"


def users_place(places: Sequence[tuple[str, int]], folder: Path) -> str:
    """Return ``file:line`` of the innermost frame in the user's code, else in rrl's code, else in any code.

    Args:
        places: File and line of each frame, the innermost last.
        folder: The job's folder; files in it are named relative to it.
    """
    own = [place for place in places if _is_own(place[0], folder)]
    in_rrl = [place for place in places if Path(place[0]).is_relative_to(_RRL)]
    name, line = (own or in_rrl or places)[-1]
    file = Path(name)
    return f"{file.relative_to(folder) if file.is_relative_to(folder) else file}:{line}"


def _is_own(file: str, folder: Path) -> bool:
    """Return whether a file belongs to the user, and not to Python, an installed package or rrl.

    rrl's examples count as the user's files if ``folder``, the job's folder, contains them.
    """
    path = Path(file)
    installed = not _PACKAGE_FOLDERS.isdisjoint(path.parts) or path.is_relative_to(sysconfig.get_path("stdlib"))
    return not (installed or file.startswith("<")) and (path.is_relative_to(folder) or not path.is_relative_to(_RRL))


def _report(report: EndReport) -> None:
    """Write the end report of this process; give up after :data:`_WRITE_TIMEOUT_S`."""
    if (launch_file := os.environ.get(LAUNCH_ENV)) is None:
        return

    def write() -> None:
        with suppress(OSError, msgspec.DecodeError):  # the launcher takes the last line of the traceback instead
            launch = read_launch(OwnPath(launch_file))
            write_atomically(RunDir(Path(launch.run_dir)).end_report_file(launch.tag), msgspec.json.encode(report))

    writer = threading.Thread(target=write, name="end report", daemon=True)
    writer.start()
    writer.join(_WRITE_TIMEOUT_S)
