"""How a role's command gets into its container: apptainer's command line, pyxis's options of srun. Pure.

With apptainer the role's first process stays on the node and only the command runs in the image; with pyxis, a plugin
of srun, the whole step does, first process and all. Neither makes a process namespace, so that the processes of a role
are found and ended by their marks as everywhere else. What was looked up: apptainer-exec(1) of 1.4
(man.archlinux.org), apptainer.org/docs/user/latest (bind paths, environment), github.com/NVIDIA/pyxis (README,
wiki/Usage).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rrl.manager.cluster import NotStarted
from rrl.spec.jobview import ContainerView, RoleView

APPTAINER, PYXIS = "apptainer", "pyxis"
_SHARED_MEMORY = "/dev/shm"
"""torch's data loaders and UCX meet there; pyxis's images have one of their own otherwise"""
_FILES = (".sif", ".sqsh", ".squashfs", ".img")
"""An image with such a name is a file, and like every path in job.toml it starts at the folder of job.toml. apptainer
would find it there by itself, pyxis takes a name without a slash for one in a registry."""
NO_USER_SITE = {"PYTHONNOUSERSITE": "1"}
"""For every container: ~/.local of the host holds packages for the host's Python."""


def mounts(container: ContainerView, run_dir: str, job_dir: str) -> tuple[tuple[str, str, str], ...]:
    """(source, target, flag) of each mount, the flag empty, ``ro`` or ``rw``: run directory, job folder, shared memory,
    and the job's own, which win where they have the same target. Raises NotStarted for a folder that cannot be one."""
    for folder in (run_dir, job_dir):
        if set(folder) & set(":,+"):
            raise NotStarted(f"{folder} cannot be mounted into a container: its name has one of : , +")
    wanted = {folder: (folder, folder, "") for folder in (run_dir, job_dir, _SHARED_MEMORY)}
    for text in container.mounts:
        source, _, rest = text.partition(":")
        target, _, flag = rest.partition(":")
        wanted[target or source] = (source, target or source, flag)
    return tuple(wanted.values())


def apptainer(
    role: RoleView, container: ContainerView, run_dir: str, job_dir: str, argv: Sequence[str]
) -> tuple[str, ...]:
    """``argv`` in the role's image. The environment that apptainer is started with reaches it, but for PATH and
    LD_LIBRARY_PATH, which are the image's (apptainer.org, environment and metadata); values are not evaluated
    (``--no-eval``): a password may hold a dollar sign. The site's default decides whether the home is mounted."""
    binds = (f"--bind={':'.join(filter(None, mount))}" for mount in mounts(container, run_dir, job_dir))
    gpus = ("--nv",) if role.each.gpus else ()
    return ("apptainer", "exec", "--no-eval", *binds, f"--pwd={job_dir}", *gpus, _image(role, job_dir), *argv)


def pyxis(role: RoleView, container: ContainerView, run_dir: str, job_dir: str) -> tuple[str, ...]:
    """Options of srun. No entry point and no home: a site's enroot.conf may have both, and the first is not ours."""
    listed = ",".join(":".join(filter(None, mount)) for mount in mounts(container, run_dir, job_dir))
    return (
        f"--container-image={_image(role, job_dir)}", f"--container-mounts={listed}", f"--container-workdir={job_dir}",
        "--no-container-mount-home", "--no-container-remap-root", "--no-container-entrypoint",
    )  # fmt: skip


def _image(role: RoleView, job_dir: str) -> str:
    if "://" in role.image or not role.image.endswith(_FILES):
        return role.image
    return str(Path(job_dir) / Path(role.image).expanduser())
