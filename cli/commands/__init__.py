"""The commands with their arguments and help. Each command's module is imported only when the command runs.

The order of the imports is the order in ``rrl --help``.
"""

from ..health.commands import health
from .app import app

# isort: off
from . import run_commands as run_commands
from . import result_commands as result_commands
from . import intervention_commands as intervention_commands
from . import job_commands as job_commands

app.add_typer(health)

__all__ = ["app"]
