"""What CPU and GPU of one replica do, as its node's agent tells every few seconds: idle, at work, or one cannot say.

Loads are evidence only where they come without a gap: an agent that is silent, or cannot look, says nothing about who
is idle. A GPU whose kernels run is no evidence of progress either, where a collective spins (``spins``).
"""

from __future__ import annotations

from dataclasses import dataclass

GAP = 15.0
"""s between two loads after which nobody knows what was in between; the agent tells some every 2 s"""
IDLE_CPU = 0.05
"""cores: who does nothing but beat takes less than 0.01 (measured), an idle engine of several processes 0.02 to 0.04"""
IDLE_GPU = 0.02
"""share of the time in which a kernel ran"""
HOST_CPU = 0.5
"""cores from which a CPU counts as at work for a GPU that idles: an evaluation, advantages, a batch that is prepared"""
SPIN_GPU = 0.9
"""share from which a GPU counts as kept by a kernel; NCCL's that waits for a peer keeps it wholly"""
SPIN_TENSOR = 0.01
"""share of the time in which tensor cores worked, below which they do not"""


@dataclass(slots=True)
class Activity:
    """Of one life. Times are those at which a load said so: silence of the agent moves nothing."""

    at: float | None = None
    """of the newest load"""
    idle_since: float | None = None
    """neither CPU nor GPU has worked since, in all loads without a gap"""
    idle_loads: int = 0
    """loads in a row that say so"""
    dark_since: float | None = None
    """no kernel has run since; of who has no GPU, the same as ``idle_since``. Enough against who tells of tokens"""
    spins_since: float | None = None
    """its GPU has been kept since by kernels that compute nothing"""
    spin_loads: int = 0
    works: bool = False
    """by the newest load: a kernel ran; of who has no GPU, the CPU worked"""
    kernels: bool = False
    """by the newest load, a kernel ran"""
    hosts: bool = False
    """by the newest load, its GPU idled and its CPU did not"""
    runs: bool = False
    """by the newest load, its CPU worked, as that of a stopped process does not, whatever keeps its GPU"""
    kernels_seen: bool = False
    """a kernel has run before"""
    tensor_seen: bool = False
    """its tensor cores have worked before: without that their silence says nothing"""
    tensor_at: float | None = None
    """of the newest load that says that they worked"""

    def add(
        self, cpu: float, gpu: float | None, now: float, tensor: float | None = None, must_show: bool = False
    ) -> None:
        """A load: cores taken, the share of the time (0 to 1) in which a kernel ran and in which tensor cores worked,
        both None where nobody can say; all since the load before. ``must_show``: its work is known to need tensor
        cores, though its own were not seen at work yet."""
        if self.at is None or now - self.at > GAP:
            self.rest()
        since = now if self.at is None else self.at
        idle = cpu < IDLE_CPU and (gpu is None or gpu < IDLE_GPU)
        kept = gpu is not None and gpu >= SPIN_GPU and tensor is not None and tensor < SPIN_TENSOR
        spins = kept and (self.tensor_seen or must_show)
        self.idle_since, self.idle_loads = _run(idle, self.idle_since, self.idle_loads, since)
        dark = idle if gpu is None else gpu < IDLE_GPU
        self.dark_since = (since if self.dark_since is None else self.dark_since) if dark else None
        self.spins_since, self.spin_loads = _run(spins, self.spins_since, self.spin_loads, since)
        self.works = not idle and (gpu is None or gpu >= IDLE_GPU)
        self.kernels = gpu is not None and gpu >= IDLE_GPU
        self.kernels_seen = self.kernels_seen or self.kernels
        self.runs = cpu >= IDLE_CPU
        self.hosts = gpu is not None and gpu < IDLE_GPU and cpu >= HOST_CPU
        if tensor is not None and tensor >= SPIN_TENSOR:
            self.tensor_seen, self.tensor_at = True, now
        self.at = now

    def rest(self) -> None:
        """Nothing is known any more."""
        self.at = self.idle_since = self.dark_since = self.spins_since = self.tensor_at = None
        self.idle_loads = self.spin_loads = 0
        self.works = self.kernels = self.hosts = self.runs = False

    def idle_for(self, since: float) -> float:
        """s that it was seen idle, counted from ``since`` on; below 0: not at all."""
        if self.at is None or self.idle_since is None:
            return -1.0
        return self.at - max(self.idle_since, since)

    def dark_for(self, since: float) -> float:
        if self.at is None or self.dark_since is None:
            return -1.0
        return self.at - max(self.dark_since, since)

    def spins_for(self, since: float) -> float:
        if self.at is None or self.spins_since is None:
            return -1.0
        return self.at - max(self.spins_since, since)


def _run(holds: bool, since: float | None, loads: int, began: float) -> tuple[float | None, int]:
    if not holds:
        return None, 0
    return (began if since is None else since), loads + 1
