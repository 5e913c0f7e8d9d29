"""A third cluster. Its nodes are elsewhere, but it runs no manager, tests no job, drains no node and keeps each one."""

from __future__ import annotations

import pytest

from rrl.cluster.base import Cluster
from rrl.cluster.local import LocalCluster
from rrl.cluster.traits import CLUSTERS, ClusterTraits
from rrl.config.job.schema import Job
from rrl.core.run_dir import RunDir
from rrl.core.run_spec import RunSpec
from rrl.manager.model.actions import Drain, ExternalAction, Shrink, Undrain
from rrl.tests.support.manager.node_world import Nodes

FLUX = "flux"


def install(patch: pytest.MonkeyPatch) -> None:
    """Add the cluster to the table, until the end of the test."""
    traits = ClusterTraits(
        module=__name__,
        roles_run_here=False,
        manager_is_a_job=False,
        takes_batch_scripts=False,
        can_drain=False,
        can_shrink=False,
        forms=("pool", "replica"),
        has_pyxis=False,
    )
    patch.setitem(CLUSTERS, FLUX, traits)


def on_flux(job: Job) -> Job:
    """Return the job with ``[cluster] kind = "flux"``, which job.toml accepts only for clusters of rrl."""
    return job.model_copy(update={"cluster": job.cluster.model_copy(update={"kind": FLUX})})


class FakeFlux(Nodes):
    """The cluster as the planner sees it."""

    cluster = FLUX

    def _carry_out(self, action: ExternalAction) -> None:
        assert not isinstance(action, Drain | Undrain | Shrink), f"the cluster cannot carry out {action.tag}"
        super()._carry_out(action)


class FakeFluxCluster(LocalCluster):
    """The cluster as the manager opens it; its nodes stand for those of another machine."""


def open_cluster(run: RunDir, spec: RunSpec, own_tag: str) -> Cluster:
    assert own_tag == "", "the manager is not in an allocation"
    return FakeFluxCluster(run)
