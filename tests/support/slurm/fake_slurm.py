"""Wraps Slurm's commands on PATH, so that a test can make them slow, fail, answer late or give false output.

A run that is submitted with :attr:`FakeSlurm.shell` uses the wrappers, and so does its manager's job. A test can change
the wrappers' behaviour during the run.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

from rrl.tests.support.slurm.lab import SlurmLab

COMMANDS = ("sbatch", "salloc", "srun", "scancel", "scontrol", "squeue")
_WRAPPER = Path(__file__).with_name("fake_slurm_commands") / "wrapper"


class FakeSlurm:
    """Provides wrappers of Slurm's commands for one run on ``lab``."""

    def __init__(self, lab: SlurmLab, name: str) -> None:
        account = pwd.getpwnam(lab.user)
        self._instructions = lab.dir / f"fake-{name}"
        commands = lab.dir / f"fake-{name}-commands"
        for folder in (self._instructions, commands):
            folder.mkdir(mode=0o755)
        os.chown(self._instructions, account.pw_uid, account.pw_gid)
        for command in COMMANDS:
            (commands / command).write_bytes(_WRAPPER.read_bytes())
            (commands / command).chmod(0o755)
        self.shell = {"PATH": f"{commands}:{lab.environment()['PATH']}", "RRL_FAKE_SLURM": str(self._instructions)}
        """Environment variables for the submitting shell."""

    @contextlib.contextmanager
    def doing(self, instruction: str, *commands: str) -> Iterator[None]:
        """Make these commands follow ``instruction`` (such as ``delay 30`` or ``fail TEXT``) until the block ends."""
        files = [self._instructions / command for command in commands]
        for file in files:
            fresh = file.with_name(f".{file.name}")
            fresh.write_text(f"{instruction}\n")
            fresh.chmod(0o644)
            fresh.rename(file)
        try:
            yield
        finally:
            for file in files:
                file.unlink()

    def calls(self, command: str) -> list[float]:
        """Return the times of the calls of a command (s since 1970)."""
        try:
            lines = (self._instructions / "calls").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [float(line.split()[0]) for line in lines if line.split()[1] == command]
