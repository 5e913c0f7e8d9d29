"""What a node had when it was looked at before: an agent that comes back would else not miss what broke meanwhile."""

from __future__ import annotations

from msgspec import Struct

from rrl.health.seen import Seen


class HardwarePast(Struct, frozen=True):
    boot: str
    """id of the boot that it is of: another one may well bring other hardware up"""
    job: str = ""
    """of the cluster, in which its node is ours: another one may be given other GPUs of it, and comes later"""
    gpus: int = 0
    """the most that were there"""
    hcas: tuple[str, ...] = ()
    ports_up: tuple[str, ...] = ()
    links_up: dict[str, tuple[int, ...]] = {}
    """by GPU's UUID"""


def hardware_of(seen: Seen, job: str = "") -> HardwarePast:
    links = {gpu: tuple(sorted(up)) for gpu, up in sorted(seen.links_up.items())}
    return HardwarePast(seen.boot, job, seen.most_gpus, tuple(sorted(seen.hcas)), tuple(sorted(seen.ports_up)), links)


def recall(seen: Seen, past: HardwarePast, job: str = "") -> None:
    """Of the same boot and job, or nothing."""
    if not seen.boot or (past.boot, past.job) != (seen.boot, job):
        return
    seen.most_gpus = max(seen.most_gpus, past.gpus)
    seen.hcas.update(past.hcas)
    seen.ports_up.update(past.ports_up)
    for gpu, links in past.links_up.items():
        seen.links_up.setdefault(gpu, set()).update(links)
