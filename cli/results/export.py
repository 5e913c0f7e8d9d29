"""``rrl export``: a committed checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from ...roles.trainer.checkpoint_export import ExportFailed, ExportRefused, export_checkpoint
from ..common.output import print_json, print_line
from ..common.runs import OperationFailed, UsageError, find_run
from ..views.formatting import size


def export(name: str, folder: Path, step: int | None, *, json: bool) -> int:
    """Export a checkpoint and print what was written; returns exit code 0."""
    run = find_run(name)
    try:
        done = export_checkpoint(run, step, folder.expanduser())
    except ExportRefused as error:
        raise UsageError(str(error)) from None
    except ExportFailed as error:
        raise OperationFailed(str(error)) from None
    except OSError as error:
        raise OperationFailed(f"{error.filename or folder}: {error.strerror or error}; nothing was exported") from None
    if json:
        print_json(done)
    else:
        print_line(f"step {done.step} of {done.run}: {done.folder}  ({size(done.nbytes)}, {done.dtype})")
    return 0
