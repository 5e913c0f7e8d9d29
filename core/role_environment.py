"""Set up the environment of a role's command: turn ``[env]`` into a bash script, and select environment variables.

The script runs as ``bash -c SCRIPT rrl-env MESSAGES REPORT COMMAND...``. MESSAGES and REPORT are file descriptors that
COMMAND does not inherit. MESSAGES receives stderr during the setup; REPORT receives the name of the part that failed,
or :data:`STARTED`. Each line of ``setup`` is evaluated separately (``eval``), so that a syntax error affects only its
own line. A line fails if its last command fails. The script does not use ``set -e``, with which scripts of sites and of
conda do not work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from shlex import quote

from msgspec import Struct

STARTED = b"begun"
"""What the setup script writes to its REPORT descriptor once the setup has succeeded and the command will start."""
SHELL_NAME = "rrl-env"
"""Name by which bash identifies itself in its messages."""
_MODULE_FILES = ("/etc/profile.d/z00_lmod.sh", "/etc/profile.d/lmod.sh", "/etc/profile.d/modules.sh")
"""Files in which Lmod (lmod.readthedocs.io, installing) and Environment Modules define ``module`` for login shells."""

_BEGIN = """\
rrl_messages=$1 rrl_report=$2 rrl_folder=$PWD
shift 2
rrl_command=("$@")
set --  # a sourced script sees the arguments of the script that sources it
exec {rrl_stderr}>&2 2>&"$rrl_messages"
trap 'rrl_code=$?; printf "[env] %s failed (exit %s)" "$rrl_at" "$rrl_code" >&"$rrl_report"; exit "$rrl_code"' EXIT
rrl_check() { local code=$?; [ "$code" = 0 ] || exit "$code"; }
rrl_fail() { printf '%s\\n' "$1" >&2; exit 1; }
"""
_END = """\
rrl_at="return to $rrl_folder"
[ "$PWD" = "$rrl_folder" ] || cd "$rrl_folder"
rrl_check
trap - EXIT
if ! type -P -- "${rrl_command[0]}" >/dev/null; then
    printf 'this node has no command %s; after [env], PATH is %s' "${rrl_command[0]}" "$PATH" >&"$rrl_report"
    exit 127
fi
printf begun >&"$rrl_report"
exec 2>&"$rrl_stderr" {rrl_stderr}>&- {rrl_messages}>&- {rrl_report}>&-
exec "${rrl_command[@]}"
"""


class EnvSpec(Struct, frozen=True):
    """The setup of a node before a process of a role starts there."""

    setup: tuple[str, ...] = ()
    """Lines of bash, which run first."""
    modules: tuple[str, ...] = ()
    venv: str = ""
    conda: str = ""
    passed: tuple[str, ...] = ()
    """Names, or patterns with ``*``, of variables that roles get from the submitting shell."""
    probe: tuple[str, ...] = ()
    """Python modules that each node must be able to import before a role is placed there."""
    python: str = ""
    """The interpreter on the nodes that has rrl installed."""
    probe_python: str = "python"
    """The interpreter that must import the probe's modules: [env] python, or that of the venv or conda environment."""


def prelude(env: EnvSpec) -> str:
    """Return the bash script for an ``[env]`` table; empty if there is nothing to set up."""
    sections = [_section(f"setup line {number}", f"eval {quote(line)}") for number, line in enumerate(env.setup, 1)]
    if env.modules:
        sections.append(_modules(env.modules))
    if env.venv:
        sections.append(_venv(env.venv))
    if env.conda:
        sections.append(_conda(env.conda))
    return "".join((_BEGIN, *sections, _END)) if sections else ""


def wrap(text: str, messages_fd: int, report_fd: int, command: Sequence[str]) -> tuple[str, ...]:
    """Return the command line that runs the setup script ``text`` and then becomes ``command``.

    The script writes its messages to the descriptor ``messages_fd``, and the result of the setup to ``report_fd``.
    """
    return ("bash", "-c", text, SHELL_NAME, str(messages_fd), str(report_fd), *command)


def _section(name: str, *lines: str) -> str:
    return "".join(f"{line}\n" for line in (f"rrl_at={quote(name)}", *lines, "rrl_check"))


def _modules(names: Sequence[str]) -> str:
    definition = _section(
        "modules",
        "if ! type module >/dev/null 2>&1; then",
        f"    for rrl_file in {' '.join(_MODULE_FILES)}; do",
        '        if [ -r "$rrl_file" ]; then source "$rrl_file"; break; fi',
        "    done",
        "fi",
        'type module >/dev/null 2>&1 || rrl_fail \'there is no "module" on this node; define it by a line of [env]'
        ' setup, for example "source /opt/lmod/init/bash"\'',
    )
    return definition + "".join(_section(f"module load {name}", f"module load {quote(name)}") for name in names)


def _venv(folder: str) -> str:
    activate = f"{_path(folder)}/bin/activate"
    return _section(
        f"venv {folder}",
        f"[ -r {activate} ] || rrl_fail 'the folder has no bin/activate on this node'",
        f"source {activate}",
    )


def _conda(name: str) -> str:
    return _section(
        f"conda {name}",
        'case "$(type -t conda)" in',
        "    function) ;;",
        '    file) eval "$(conda shell.bash hook)" ;;',
        '    *) [ -x "${CONDA_EXE:-}" ] || rrl_fail \'there is no "conda" on this node; put it into PATH by a line of'
        " [env] setup'",
        '       eval "$("$CONDA_EXE" shell.bash hook)" ;;',
        "esac",
        f"conda activate {_path(name)}",
    )


def _path(text: str) -> str:
    """Quote a path, except for a leading ``~``, which is the home directory on the node."""
    return f'"$HOME"/{quote(text[2:])}' if text.startswith("~/") else quote(text)


INHERITED_VARIABLES = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "SHELL",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "CONDA_EXE",
    "TORCHINDUCTOR_CACHE_DIR",
    "MPLCONFIGDIR",
)
"""The only variables of the manager's environment that roles inherit. The last two name folders that torch and
matplotlib (a requirement of reasoning-gym) would otherwise create in /tmp and in the home directory."""
SAFE_PATH_ENV = "PYTHONSAFEPATH"
"""Environment variable: keeps ``python -m`` from searching the working folder for modules, also in processes that torch
and vLLM start. ``python -P`` does the same for one process. Programs of the user must not inherit it, as they may
import modules beside their script."""
HOST_ONLY_VARIABLES = (
    "PATH",
    "HOME",
    "TMPDIR",
    "SHELL",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "CONDA_EXE",
    "TORCHINDUCTOR_CACHE_DIR",
    "MPLCONFIGDIR",
)
"""Inherited variables that name files or folders of the host, and are therefore not set in containers."""
_LAUNCHER_PREFIXES = frozenset(
    ("SLURM", "SLURMD", "SBATCH", "SRUN", "SALLOC", "SPANK", "PMI", "PMI2", "PMIX", "OMPI", "ORTE", "PRTE", "RRL")
)
"""Text before the first ``_`` in the names of variables that Slurm, PMI, MPI and rrl set for the processes they start.
torch, Hugging Face and mpi4py misread such variables (docs/sources.md, sites), so they are never passed on, even if the
job requests it. rrl sets its own variables for each role."""

RENDEZVOUS_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of ``torch.distributed`` that :func:`rrl.join` sets for each incarnation."""


def is_launcher_variable(name: str) -> bool:
    """Return whether a variable belongs to Slurm, PMI, MPI or rrl, and is therefore never passed on to a role."""
    return name.partition("_")[0] in _LAUNCHER_PREFIXES


def select_variables(patterns: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose name is in ``patterns``, or begins with a pattern that ends in ``*``.

    Variables of Slurm, PMI, MPI and rrl are excluded (:func:`is_launcher_variable`).
    """
    names, prefixes = set(), []
    for pattern in patterns:
        if pattern.endswith("*"):
            prefixes.append(pattern[:-1])
        else:
            names.add(pattern)
    return {
        name: value
        for name, value in sorted(environ.items())
        if (name in names or name.startswith(tuple(prefixes))) and not is_launcher_variable(name)
    }
