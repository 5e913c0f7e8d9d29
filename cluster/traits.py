"""What each cluster can do. The rest of rrl asks for these traits, and never for the name of a cluster.

The table :data:`CLUSTERS` is the only place that knows the names. A further cluster is one row there, one name in
:data:`ClusterName`, and its module or folder.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

ClusterName = Literal["local", "slurm"]
"""Values of ``[cluster] kind``."""


class ClusterTraits(Struct, frozen=True, kw_only=True):
    """What a cluster can do, as far as code outside of its own module depends on it."""

    module: str
    """Import path of its module, in which ``open_cluster(run: RunDir, spec: RunSpec, own_tag: str) -> Cluster`` returns
    the cluster of a run. ``own_tag`` is the tag of the allocation in which the calling manager runs; empty if it runs
    elsewhere."""
    roles_run_here: bool
    """True if the nodes are virtual nodes of the machine on which the run is submitted. The roles then have its files,
    its programs and the loopback address, share its GPUs and ports, and are children of the manager that they
    outlive."""
    manager_is_a_job: bool
    """True if the cluster runs the manager in a job, and its queue shows whether a run has a manager and jobs
    (:mod:`rrl.manager.bootstrap.manager_job`). If False, the manager is a process on the machine on which the run is
    submitted."""
    takes_batch_scripts: bool
    """True if nodes are requested by batch scripts, which the cluster tests and for which it estimates a start before
    they are submitted (:mod:`rrl.manager.bootstrap.preflight`)."""
    can_drain: bool
    """True if a node can be drained for all users of the cluster."""
    can_shrink: bool
    """True if single nodes of an allocation can be given back."""
    forms: tuple[str, ...]
    """Forms of the allocations (``[cluster] form``) that the cluster grants."""
    has_pyxis: bool
    """True if roles can run in containers of pyxis."""


CLUSTERS: dict[str, ClusterTraits] = {
    "local": ClusterTraits(
        module="rrl.cluster.local",
        roles_run_here=True,
        manager_is_a_job=False,
        takes_batch_scripts=False,
        can_drain=False,
        can_shrink=False,
        forms=("pool",),
        has_pyxis=False,
    ),
    "slurm": ClusterTraits(
        module="rrl.cluster.slurm.cluster",
        roles_run_here=False,
        manager_is_a_job=True,
        takes_batch_scripts=True,
        can_drain=True,
        can_shrink=True,
        forms=("pool", "replica", "hetjob"),
        has_pyxis=True,
    ),
}
"""The traits of each cluster, by the name in ``[cluster] kind``."""


def traits_of(cluster: str) -> ClusterTraits:
    """Return the traits of the cluster with this name (``RunSpec.cluster``)."""
    return CLUSTERS[cluster]
