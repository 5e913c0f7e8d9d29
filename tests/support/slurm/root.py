"""Provides other versions of Slurm beside the installed one, by unpacking packages of another Debian suite.

The packages are unpacked into a folder and not installed, so no root rights are needed. apt resolves and downloads the
packages as for a machine without packages, and patchelf makes the programs use the libc and the libraries of their
folder. So these are ordinary programs of this machine, with its files, users and processes. There is no chroot, and no
wrapper that would receive signals instead of srun.

    python -m rrl.tests.support.slurm.lab root 24.11
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOTS_ENV = "RRL_SLURM_ROOTS"
"""Environment variable with the folder of the roots; the submitting user must be able to read it."""
SUITES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "forky"}
"""Debian's suite of each version of Slurm that the tests run on."""
PROGRAMS = (
    "munged",
    "sacct",
    "sacctmgr",
    "salloc",
    "sattach",
    "sbatch",
    "sbcast",
    "scancel",
    "scontrol",
    "sdiag",
    "sinfo",
    "slurmctld",
    "slurmd",
    "slurmdbd",
    "slurmstepd",
    "sprio",
    "squeue",
    "srun",
    "sstat",
)
_PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurmdbd", "munge", "patchelf")
_MIRROR = "http://deb.debian.org/debian"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_APT_CONF = """\
Dir::Etc::sourcelist "{work}/sources.list";
Dir::Etc::sourceparts "/dev/null/";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null/";
Dir::State::lists "{work}/lists";
Dir::State::status "{work}/status";
Dir::State::extended_states "{work}/extended_states";
Dir::Cache "{work}";
Dir::Cache::archives "{work}/archives";
Dir::Log "{work}";
APT::Sandbox::User "";
APT::Install-Recommends "false";
Acquire::Languages "none";
Acquire::Check-Valid-Until "false";
"""
"""Valid-Until is not checked: unstable suites are signed for a week, and a test machine's clock may be ahead."""


def roots_folder() -> Path:
    """Return the folder of the roots: ``$RRL_SLURM_ROOTS``, or by default a folder in /var/cache or ~/.cache.

    Root uses /var/cache, because other users cannot read root's home.
    """
    if given := os.environ.get(ROOTS_ENV):
        return Path(given).absolute()
    return Path("/var/cache" if os.geteuid() == 0 else Path.home() / ".cache") / "rrl-slurm-roots"


def programs_of(root: Path) -> Path:
    """Return the folder of the version's programs, which must be the first folder on PATH."""
    return root / "programs"


def ensure(version: str) -> Path:
    """Return the root of a version; create it if it does not exist (about 5 s, and a download of 30 MB).

    Raises RuntimeError if it cannot be created.
    """
    if version not in SUITES:
        raise RuntimeError(f"no Debian suite is known for Slurm {version}; there are {', '.join(SUITES)}")
    root = roots_folder() / SUITES[version]
    root.parent.mkdir(parents=True, exist_ok=True)
    with _alone(root.with_suffix(".lock")):
        if not (root / "ready").exists():
            if absent := [name for name in ("apt-get", "dpkg-deb") if shutil.which(name) is None]:
                raise RuntimeError(f"to unpack Slurm {version} from Debian's packages, install {', '.join(absent)}")
            shutil.rmtree(root, ignore_errors=True)
            _make(SUITES[version], root)
    if (message := version_of(root)) != version:
        raise RuntimeError(f"Debian's {SUITES[version]} has Slurm {message} now, not {version}")
    return root


def version_of(root: Path | None) -> str:
    """Return the version (``24.11``) of the programs in ``root``; None means the installed programs."""
    output = _output_of([str(programs_of(root) / "slurmctld") if root else "/usr/sbin/slurmctld", "-V"])
    return ".".join(output.split()[-1].split(".")[:2])


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _make(suite: str, root: Path) -> None:
    unpack(suite, root, _PACKAGES)
    programs_of(root).mkdir()
    _use_own_libraries(root)
    shutil.rmtree(root / "usr/share")
    (root / "ready").write_text(_output_of([str(programs_of(root) / "slurmctld"), "-V"]))


def unpack(suite: str, root: Path, packages: Sequence[str]) -> None:
    """Unpack packages of a suite, and all that they need, into ``root``. Raises RuntimeError if that fails."""
    work = root / "work"
    for folder in (work / "lists/partial", work / "archives/partial"):
        folder.mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):  # suites before trixie still ship files in the unmerged folders
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    (work / "status").touch()
    (work / "sources.list").write_text(f"deb [signed-by={_KEYRING}] {_MIRROR} {suite} main\n")
    (work / "apt.conf").write_text(_APT_CONF.format(work=work))
    apt = {"APT_CONFIG": str(work / "apt.conf"), "PATH": os.environ["PATH"]}
    _output_of(["apt-get", "update"], apt)
    _output_of(["apt-get", "install", "--yes", "--download-only", *packages], apt)
    for package in sorted((work / "archives").glob("*.deb")):
        _unpack(package, root)
    shutil.rmtree(work)


def _unpack(package: Path, root: Path) -> None:
    """Unpack a package. ``dpkg-deb -x`` is not used, because it replaces the links of a merged /usr by folders."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as archive:
        done = subprocess.run(
            ["tar", "-x", "--no-same-owner", "--keep-directory-symlink", "-C", root], stdin=archive.stdout
        )
    if archive.returncode or done.returncode:
        raise RuntimeError(f"{package.name} cannot be unpacked to {root}")


def _use_own_libraries(root: Path) -> None:
    """Make the programs and Slurm's plugins use the libraries of this folder. Raises RuntimeError if that fails."""
    libraries = next(root.glob("usr/lib/*-linux-gnu*"))
    loader = next(libraries.glob("ld-linux-*.so.?"))
    plugins = libraries / "slurm-wlm"
    patchelf = [
        str(loader),
        "--library-path",
        str(libraries),
        str(root / "usr/bin/patchelf"),
        "--force-rpath",
        "--set-rpath",
        f"{plugins}:{libraries}",
    ]
    _output_of([*patchelf, *map(str, plugins.glob("*.so"))])
    for name in PROGRAMS:
        found = [root / "usr" / folder / f"{name}{wlm}" for folder in ("bin", "sbin") for wlm in ("-wlm", "")]
        program = next(path for path in found if path.exists())
        _output_of([*patchelf, "--set-interpreter", str(loader), str(program)])
        (programs_of(root) / name).symlink_to(program)
    reported = _output_of([str(loader), "--list", str(programs_of(root) / "slurmctld")])
    if strange := [line.strip() for line in reported.splitlines() if "=>" in line and str(root) not in line]:
        raise RuntimeError(f"slurmctld of {root} uses libraries outside of it: {'; '.join(strange)}")


def _output_of(argv: Sequence[str], env: dict[str, str] | None = None) -> str:
    done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        tail = "; ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise RuntimeError(f"{' '.join(argv[:4])} ended with {done.returncode}: {tail}")
    return done.stdout
