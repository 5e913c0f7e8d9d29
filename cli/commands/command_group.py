"""``rrl`` as a group of commands: the help in sections, and hints for commands of similar programs."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

SECTIONS = {
    "Prepare a job": ("init", "check", "schema", "completion"),
    "Start, watch and end runs": ("submit", "status", "top", "list", "logs", "cancel", "resume", "rm", "manage"),
    "Understand a run, and get its results": ("samples", "explain", "report", "metrics", "track", "export"),
    "Change a run in progress": ("restart", "resize", "drain", "undrain", "inject"),
    "Train agents": ("episodes", "endpoint", "relay"),
    "Look after a site": ("doctor", "health"),
}
"""Sections of ``rrl --help``, with the commands in each, in their order."""
OTHER_SECTION = "Other commands"
"""Section of the commands that no other section names."""

_CHECK, _SUBMIT, _STATUS = "rrl check job.toml", "rrl submit job.toml", "rrl status RUN"
COMMAND_WORDS = {
    "ps": "rrl list",
    "ls": "rrl list",
    "queue": "rrl list",
    "squeue": "rrl list",
    "config": f"{_CHECK} --defaults",
    "resolve": f"{_CHECK} --defaults",
    "dry-run": _CHECK,
    "validate": _CHECK,
    "lint": _CHECK,
    "plan": _CHECK,
    "preview": _CHECK,
    "apply": _SUBMIT,
    "run": _SUBMIT,
    "launch": _SUBMIT,
    "start": _SUBMIT,
    "train": _SUBMIT,
    "sbatch": _SUBMIT,
    "show": _STATUS,
    "describe": _STATUS,
    "info": _STATUS,
    "watch": f"{_STATUS} --live",
    "monitor": f"{_STATUS} --live",
    "log": "rrl logs RUN",
    "tail": "rrl logs RUN -f",
    "follow": "rrl logs RUN -f",
    "stop": "rrl cancel RUN",
    "kill": "rrl cancel RUN",
    "abort": "rrl cancel RUN",
    "scancel": "rrl cancel RUN",
    "delete": "rrl rm RUN",
    "remove": "rrl rm RUN",
    "continue": "rrl resume RUN",
    "requeue": "rrl resume RUN",
    "scale": "rrl resize RUN POOL N",
    "new": "rrl init",
    "create": "rrl init",
}
"""Names of commands in similar programs (srtctl, prime-rl, kubectl, docker, Slurm), and what to write instead."""
OPTION_WORDS = {
    "submit": {
        "--dry-run": _CHECK,
        "--test-only": _CHECK,
        "--validate": _CHECK,
        "--config": _SUBMIT,
        "--file": _SUBMIT,
        "-c": _SUBMIT,
        "-f": _SUBMIT,
        "--override": f"{_SUBMIT} --set KEY=VALUE",
        "-o": f"{_SUBMIT} --set KEY=VALUE",
        "--follow": f"{_SUBMIT} --wait",
        "--watch": f"{_SUBMIT} --wait",
        "-w": f"{_SUBMIT} --wait",
    },
    "check": {"--all": f"{_CHECK} --defaults", "-f": _CHECK, "--config": _CHECK},
    "status": {
        "--watch": f"{_STATUS} --live",
        "-w": f"{_STATUS} --live",
        "-f": f"{_STATUS} --live",
        "--follow": f"{_STATUS} --live",
    },
    "logs": {"--tail": "rrl logs RUN --lines 100"},
}
"""For each command of rrl, options that similar programs have and rrl lacks, with what to write instead."""


class CommandGroup(TyperGroup):
    """The commands of ``rrl``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the first argument names.

        Raises UsageError, with what to write instead, for a command in :data:`COMMAND_WORDS`.
        """
        if args and args[0] not in self.commands and (ours := COMMAND_WORDS.get(args[0])):
            from ...core.types import UsageError

            raise UsageError(f'"{args[0]}" is not a command of rrl; write: {ours}')
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in sections, with all purposes in one column."""
        visible = {name: command for name, command in self.commands.items() if not command.hidden}
        named = {name for names in SECTIONS.values() for name in names}
        sections = SECTIONS | {OTHER_SECTION: tuple(name for name in visible if name not in named)}
        width = max(map(len, visible))
        for title, names in sections.items():
            shown = [(name, visible[name]) for name in names if name in visible]
            if shown:
                with formatter.section(title):
                    limit = formatter.width - 6 - width
                    formatter.write_dl([(name.ljust(width), one.get_short_help_str(limit)) for name, one in shown])


def replaced_option(command: str, option: str) -> str:
    """Return what to write instead of an option of a similar program; empty if the option is not known."""
    return OPTION_WORDS.get(command, {}).get(option, "")
