"""What only the node knows of a role's environment: its address, the GPUs that Slurm gave, and limits worth raising."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from ...core.launch import Launch
from ...core.processes import raise_nofile
from ...core.role_environment import is_launcher_variable
from ...transport.address import interface_on, own_address

ADDRESS_ENV = "RRL_ADDRESS"
"""where a role listens for others: chosen once, by its first process"""
GPUS_ENV = "RRL_GPUS"
"""Slurm's numbers of the GPUs on this node that this step was given, with commas; unset where Slurm gave none"""
READERS_ENV = "RRL_READERS"
"""names of the readers that run beside an agent, separated by commas, instead of those in its launch file; ``none``:
no reader"""
_SLURM_GPU_VARIABLES = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
VISIBLE_DEVICES_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""what Slurm gave this step, as libraries read it; the manager could not know"""
_SYS = Path("/sys/class")


def node_environment(launch: Launch) -> dict[str, str]:
    """The whole environment of the command of ``launch``, but for its marks; what the launch file says wins.

    Raises NoAddress where the node has no interface in the network that is asked for."""
    image = {name: value for name, value in os.environ.items() if launch.in_image and not is_launcher_variable(name)}
    given = {name: os.environ[name] for name in VISIBLE_DEVICES_VARIABLES if name in os.environ}
    if launch.gpus and (gpus := slurm_gpus()):
        given[GPUS_ENV] = gpus
    return image | given | _addresses(launch) | launch.env


def boot_id() -> str:
    """Of this node: another one after each boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def configured_readers(launch: Launch) -> tuple[str, ...]:
    """Return the names of the readers that run beside the agent of ``launch``, in the order in which they are named."""
    given = os.environ.get(READERS_ENV)
    return tuple(name for name in given.split(",") if name != "none") if given else launch.readers


def slurm_gpus() -> str:
    """Slurm's numbers of the GPUs on this node that this step was given, with commas; empty where it gave none."""
    return next((os.environ[name] for name in _SLURM_GPU_VARIABLES if os.environ.get(name)), "")


def _addresses(launch: Launch) -> dict[str, str]:
    """gloo and NCCL else take the interface of the host's name, which is the management network on many clusters."""
    if not launch.network:  # the local cluster stays on this machine
        return {ADDRESS_ENV: own_address() if "SLURM_JOB_ID" in os.environ else "127.0.0.1"}
    chosen = interface_on(launch.network)
    names = {
        "GLOO_SOCKET_IFNAME": chosen.name,
        "NCCL_SOCKET_IFNAME": f"={chosen.name}",  # "=": exactly this one, not all that begin so (NCCL's manual)
    }
    if devices := ucx_devices(chosen.name):
        names["UCX_NET_DEVICES"] = devices
    return {ADDRESS_ENV: chosen.address} | names


def ucx_devices(interface: str, sys: Path = _SYS) -> str:
    """``UCX_NET_DEVICES`` for an interface, with the RDMA port behind it if there is one (``mlx5_0:1,ib0``); empty
    where naming it would take RDMA away: the node has such devices, but not behind this interface."""
    behind = _names(sys / "net" / interface / "device" / "infiniband")
    if not behind:
        return "" if rdma_devices(sys) else interface
    try:  # "dev_port" counts from 0, UCX from 1
        port = int((sys / "net" / interface / "dev_port").read_text()) + 1
    except (OSError, ValueError):
        port = 1
    return ",".join((*(f"{device}:{port}" for device in behind), interface))


def rdma_devices(sys: Path = _SYS) -> tuple[str, ...]:
    """Names of this node's RDMA devices (``mlx5_0``)."""
    return _names(sys / "infiniband")


def raise_limits() -> None:
    """RDMA locks what it registers and keeps a descriptor for each connection: the soft limits go up to the hard ones.
    Core dumps stay off: one of a model fills the home."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (locked, locked))
    raise_nofile()


def see_all_gpus() -> None:
    """For an agent, which shares all GPUs of its node: Slurm shows a step what it is to use."""
    for name in VISIBLE_DEVICES_VARIABLES:
        os.environ.pop(name, None)


def _names(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError:
        return ()
