"""All checks, in the order in which they are shown. Pure: the same facts give the same lines."""

from __future__ import annotations

from rrl.cli.doctor.facts import Check, Facts
from rrl.cli.doctor.host_checks import host_checks, storage_checks
from rrl.cli.doctor.node_checks import node_checks
from rrl.cli.doctor.slurm_checks import slurm_checks


def judge(facts: Facts) -> list[Check]:
    """What was found, line by line. What could not be known is UNKNOWN, never OK."""
    return [*host_checks(facts), *storage_checks(facts), *slurm_checks(facts), *node_checks(facts)]
