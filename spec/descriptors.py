"""How many files a process of rrl may hold open: a manager of a large run, a merge of its logs, a role with RDMA."""

from __future__ import annotations

import resource

NOFILE = 1_048_576
"""Most open files that are asked for: Linux's fs.nr_open. Where containers allow 2**30, programs that go through all
descriptors at their start take minutes, and children inherit the limit."""


def raise_nofile() -> None:
    """The soft limit, usually 1024, goes up to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = NOFILE if hard == resource.RLIM_INFINITY else min(hard, NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, enough), hard))
