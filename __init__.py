"""rrl: reinforcement-learning post-training on Slurm that continues when machines fail.

The worker API is all that a user's trainer or rollout needs::

    import rrl

    with rrl.join() as me:
        ...

The Python API starts and watches runs, as the commands do::

    run = rrl.submit("job.toml", set={"run.steps": 500})
    summary = run.wait()

The names are imported when they are first used (PEP 562), so that ``import rrl`` and the command line import neither
the API nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rrl.api.logs.log_reader import LogLine as LogLine
    from rrl.api.run import Run as Run
    from rrl.api.run import run as run
    from rrl.api.run import submit as submit
    from rrl.api.watching.run_state import RunState as RunState
    from rrl.core.types import OperationFailed as OperationFailed
    from rrl.core.types import UsageError as UsageError
    from rrl.core.types import Version as Version
    from rrl.manager.reporting.accounting.run_report import RunReport as RunReport
    from rrl.manager.reporting.step_metrics import StepRow as StepRow
    from rrl.manager.reporting.summary import Summary as Summary
    from rrl.roles.models.hf_names import hf_names as hf_names
    from rrl.roles.models.hf_names import hf_tensors as hf_tensors
    from rrl.roles.models.tensors import pack as pack
    from rrl.roles.models.tensors import unpack as unpack
    from rrl.roles.trainer.checkpoint_export import Exported as Exported
    from rrl.roles.trainer.loss_function import LossSum as LossSum
    from rrl.roles.trainer.loss_function import LossTokens as LossTokens
    from rrl.roles.trajectories.batches import Batch as Batch
    from rrl.roles.trajectories.batches import Part as Part
    from rrl.roles.trajectories.types import Item as Item
    from rrl.roles.trajectories.types import Score as Score
    from rrl.roles.trajectories.types import Segment as Segment
    from rrl.roles.trajectories.types import ToScore as ToScore
    from rrl.roles.trajectories.types import Trajectory as Trajectory
    from rrl.roles.worker.api import Worker as Worker
    from rrl.roles.worker.api import join as join
    from rrl.roles.worker.episode_work import Episode as Episode
    from rrl.roles.worker.status.external_waits import waiting as waiting
    from rrl.roles.worker.work_items import NewWeights as NewWeights
    from rrl.roles.worker.work_items import ScoringLease as ScoringLease
    from rrl.roles.worker.work_items import WorkLease as WorkLease

_HOMES = {
    "Exported": "rrl.roles.trainer.checkpoint_export",
    "LogLine": "rrl.api.logs.log_reader",
    "OperationFailed": "rrl.core.types",
    "Run": "rrl.api.run",
    "RunReport": "rrl.manager.reporting.accounting.run_report",
    "RunState": "rrl.api.watching.run_state",
    "StepRow": "rrl.manager.reporting.step_metrics",
    "Summary": "rrl.manager.reporting.summary",
    "UsageError": "rrl.core.types",
    "run": "rrl.api.run",
    "submit": "rrl.api.run",
    "Version": "rrl.core.types",
    "hf_names": "rrl.roles.models.hf_names",
    "hf_tensors": "rrl.roles.models.hf_names",
    "pack": "rrl.roles.models.tensors",
    "unpack": "rrl.roles.models.tensors",
    "waiting": "rrl.roles.worker.status.external_waits",
    "Batch": "rrl.roles.trajectories.batches",
    "Item": "rrl.roles.trajectories.types",
    "LossSum": "rrl.roles.trainer.loss_function",
    "LossTokens": "rrl.roles.trainer.loss_function",
    "Part": "rrl.roles.trajectories.batches",
    "Score": "rrl.roles.trajectories.types",
    "Segment": "rrl.roles.trajectories.types",
    "ToScore": "rrl.roles.trajectories.types",
    "Trajectory": "rrl.roles.trajectories.types",
    "Worker": "rrl.roles.worker.api",
    "join": "rrl.roles.worker.api",
    "Episode": "rrl.roles.worker.episode_work",
    "NewWeights": "rrl.roles.worker.work_items",
    "ScoringLease": "rrl.roles.worker.work_items",
    "WorkLease": "rrl.roles.worker.work_items",
}
__all__ = [
    "Batch",
    "Episode",
    "Exported",
    "Item",
    "LogLine",
    "LossSum",
    "LossTokens",
    "NewWeights",
    "OperationFailed",
    "Part",
    "Run",
    "RunReport",
    "RunState",
    "Score",
    "ScoringLease",
    "Segment",
    "StepRow",
    "Summary",
    "ToScore",
    "Trajectory",
    "UsageError",
    "Version",
    "WorkLease",
    "Worker",
    "hf_names",
    "hf_tensors",
    "join",
    "pack",
    "run",
    "submit",
    "unpack",
    "waiting",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'rrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names of the public API, including those that are not imported yet."""
    return list(__all__)
