"""Entry point of ``rrl``: runs one command, and reports any failure as one line on stderr.

Exit codes: 0 success, 1 the run or the operation failed, 2 the request is not valid. The exit codes of ``rrl health
check`` describe the node (:mod:`rrl.cli.health.check`).
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ..core.text import escaped_lines

DEFAULT_LEVEL = "warning"
"""Log level of a command, which prints its results instead of logging them. A manager logs at the level of its run."""
DEBUG_ENV = "RRL_DEBUG"
"""Environment variable; if it is set, the traceback of an unexpected error is shown."""
COMPLETE_ENV = "_RRL_COMPLETE"
"""Environment variable, named by typer, with which the scripts of ``rrl completion`` ask to complete a line."""

GLOBAL_OPTIONS = ("--runs-dir", "--verbose", "--version")
"""Options of ``rrl`` itself, which a command does not accept."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # print "?" for characters that the encoding lacks
            stream.reconfigure(errors="replace")
    try:
        return _run(list(arguments))
    except KeyboardInterrupt:  # Ctrl-C, in a command that does not handle it itself
        return 130
    except BrokenPipeError:  # the reader (| head) has ended: the flush at exit must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if COMPLETE_ENV in os.environ:  # the message would stand in the line that the user edits
            return 1
        return _exit_code(arguments, _report_error(error))


def _run(arguments: list[str]) -> int:
    """Run a command and return its exit code; ``--version`` and a plain ``status`` run without typer.

    These are the most frequent commands, and typer is slow: since 0.26 it imports pydantic to parse any argument.
    """
    if arguments == ["--version"]:
        from .common.output import print_version

        return print_version()
    if COMPLETE_ENV in os.environ:
        from .common.completion import prepare

        prepare()
    from ..core.log_lines import start_logging

    start_logging(DEFAULT_LEVEL)
    if arguments[:1] == ["status"] and len(arguments) <= 2 and not any(word.startswith("-") for word in arguments):
        from .run.status import status

        return status(arguments[1] if arguments[1:] else None, json=False)
    return int(_command_group()(arguments, prog_name="rrl", standalone_mode=False) or 0)


@functools.cache
def _command_group() -> Callable[..., Any]:
    """Return the commands, ready to parse arguments.

    Building them takes 40 ms. The result is kept for tests, which run many commands in one process.
    """
    from typer.main import get_command

    from .commands import app

    return get_command(app)


def _exit_code(arguments: Sequence[str], code: int) -> int:
    """Return the exit code of a command that failed with ``code``.

    ``rrl health check`` returns 3 (UNKNOWN) instead, and 0 in a prolog or epilog: a wrong call must not drain a node.
    """
    if list(arguments[:2]) != ["health", "check"]:
        return code
    return 0 if {"--prolog", "--epilog"} & set(arguments) else 3


def _report_error(error: Exception) -> int:
    from ..core.types import OperationFailed, UsageError

    if isinstance(error, UsageError | OperationFailed):
        return _print_error(str(error), 2 if isinstance(error, UsageError) else 1)
    typer = sys.modules.get("typer")
    if typer is not None and isinstance(error, typer.Abort):
        return 130
    if hasattr(error, "format_message"):  # an error of typer: an unknown option, a missing argument
        message = _bad_value_message(error) or " ".join(error.format_message().split()).rstrip(".")
        message = message.replace("'{JOB.TOML}...'", "'JOB.TOML'")  # typer's way to say "one or more"
        command = getattr(getattr(error, "ctx", None), "command_path", None) or "rrl"  # the command called wrongly
        option = str(getattr(error, "option_name", ""))
        if ours := _replaced_option(command, option):
            return _print_error(f"{option} is not an option of rrl; write: {ours}", 2)
        if command != "rrl" and option in GLOBAL_OPTIONS:
            return _print_error(f"{option} belongs before the command; see: rrl --help", 2)
        return _print_error(f"{message}{'' if message.endswith('?') else ';'} see: {command} --help", 2)
    if os.environ.get(DEBUG_ENV):
        raise error
    summary = " ".join(f"{type(error).__name__}: {error}".split())
    return _print_error(f"internal error: {summary} (a bug; set {DEBUG_ENV}=1 for its traceback)", 1)


def _replaced_option(command: str, option: str) -> str:
    """Return what to write instead of an option of a similar program; empty for any other option."""
    from .commands.command_group import replaced_option

    return replaced_option(command.removeprefix("rrl "), option)


def _bad_value_message(error: Exception) -> str:
    """Return what is wrong with the value of a number option, and what would be right; empty for any other error.

    typer checks numbers with pydantic, and pydantic's error is the cause of typer's error. Older versions of typer
    (before 0.26) do not use pydantic; their own message is then shown.
    """
    options, details = getattr(getattr(error, "param", None), "opts", ()), getattr(error.__cause__, "errors", None)
    if not options or details is None:
        return ""
    detail = details()[0]
    limit = detail.get("ctx", {}).get("ge")
    expected = {
        "int_parsing": "a whole number",
        "int_from_float": "a whole number",
        "float_parsing": "a number",
        "greater_than_equal": f"at least {limit}",
    }.get(detail["type"])
    return f'{options[0]}: must be {expected}, not "{detail["input"]}"' if expected else ""


def _print_error(text: str, code: int) -> int:
    for line in text.split("\n"):  # a job.toml with several mistakes has a line for each
        print(f"rrl: {escaped_lines(line)}", file=sys.stderr, flush=True)
    return code
