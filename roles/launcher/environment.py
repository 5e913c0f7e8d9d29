"""The node's part of a role's environment: its address, the GPUs that Slurm assigned, and raised resource limits."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from ...core.launch import Launch
from ...core.processes import raise_nofile
from ...core.role_environment import is_launcher_variable
from ...core.types import slot_of
from ...transport.address import interface_on, own_address

ADDRESS_ENV = "RRL_ADDRESS"
"""Environment variable with the address on which a role listens. The launcher of the role's step chooses it."""
GPUS_ENV = "RRL_GPUS"
"""Environment variable with the numbers of the GPUs that Slurm assigned to this step on this node, separated by commas;
unset if there are none."""
READERS_ENV = "RRL_READERS"
"""Environment variable with the names of the readers that run beside an agent, separated by commas. It overrides the
readers in the agent's launch file; ``none`` starts no reader."""
_SLURM_GPU_VARIABLES = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
VISIBLE_DEVICES_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables in which Slurm names this step's GPUs for libraries. Slurm sets them when the step starts, so the launch
file cannot contain them."""
_SYS = Path("/sys/class")


def node_environment(launch: Launch) -> dict[str, str]:
    """Return the environment of the command of ``launch``, without the marks that :func:`command_env` adds.

    Variables of the launch file take precedence over those of the node.

    Raises:
        NoAddress: the node has no interface in the configured network.
    """
    image = {name: value for name, value in os.environ.items() if launch.in_image and not is_launcher_variable(name)}
    from_slurm = {name: os.environ[name] for name in VISIBLE_DEVICES_VARIABLES if name in os.environ}
    if launch.gpus and (gpus := slurm_gpus()):
        from_slurm[GPUS_ENV] = gpus
    if launch.guest and launch.gpus:
        from_slurm = {name: _share_of(launch, gpus) for name, gpus in from_slurm.items()}
    return image | from_slurm | _addresses(launch) | launch.env


def boot_id() -> str:
    """Return the kernel's id of this boot of the node."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def configured_readers(launch: Launch) -> tuple[str, ...]:
    """Return the names of the readers that run beside the agent of ``launch``, in the configured order."""
    override = os.environ.get(READERS_ENV)
    return tuple(name for name in override.split(",") if name != "none") if override else launch.readers


def slurm_gpus() -> str:
    """Return the numbers of the GPUs that Slurm assigned to this step, separated by commas; empty if there are none."""
    return next((os.environ[name] for name in _SLURM_GPU_VARIABLES if os.environ.get(name)), "")


def _share_of(launch: Launch, gpus: str) -> str:
    """Return the GPUs of a guest, of all GPUs of the trainer on this node: guests share them in order."""
    first = launch.gpus * slot_of(launch.incarnation.replica)
    return ",".join(gpus.split(",")[first : first + launch.gpus])


def _addresses(launch: Launch) -> dict[str, str]:
    """Return the variables that bind rrl, gloo, NCCL and UCX to the configured network.

    By default gloo and NCCL use the interface of the host name, which is the management network on many clusters.
    """
    if not launch.network:
        return {ADDRESS_ENV: "127.0.0.1" if launch.virtual_node else own_address()}
    chosen = interface_on(launch.network)
    names = {
        "GLOO_SOCKET_IFNAME": chosen.name,
        "NCCL_SOCKET_IFNAME": f"={chosen.name}",  # without "=" NCCL takes the name as a prefix (NCCL's manual)
    }
    if devices := ucx_devices(chosen.name):
        names["UCX_NET_DEVICES"] = devices
    return {ADDRESS_ENV: chosen.address} | names


def ucx_devices(interface: str, sys: Path = _SYS) -> str:
    """Return ``UCX_NET_DEVICES`` for an interface, with the RDMA ports behind it (``mlx5_0:1,ib0``).

    The result is empty if the node has RDMA devices but none of them belongs to this interface, because the interface
    alone would disable RDMA.
    """
    devices = _names(sys / "net" / interface / "device" / "infiniband")
    if not devices:
        return "" if rdma_devices(sys) else interface
    try:  # "dev_port" counts from 0, UCX from 1
        port = int((sys / "net" / interface / "dev_port").read_text()) + 1
    except (OSError, ValueError):
        port = 1
    return ",".join((*(f"{device}:{port}" for device in devices), interface))


def rdma_devices(sys: Path = _SYS) -> tuple[str, ...]:
    """Return the names of this node's RDMA devices (``mlx5_0``)."""
    return _names(sys / "infiniband")


def raise_limits() -> None:
    """Raise the soft limits of locked memory and open files to the hard limits, and disable core dumps.

    The limits are raised because RDMA locks the memory that it registers, and keeps a file descriptor for each
    connection. The limit of open files is raised at most to :data:`rrl.core.processes.MAX_NOFILE`. Core dumps are
    disabled because one core dump of a model could fill the home directory.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (locked, locked))
    raise_nofile()


def see_all_gpus() -> None:
    """Remove the variables with which Slurm restricts a step to its GPUs, since an agent monitors all GPUs."""
    for name in VISIBLE_DEVICES_VARIABLES:
        os.environ.pop(name, None)


def _names(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError:
        return ()
