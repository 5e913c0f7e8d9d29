"""A lab runs the requested version of Slurm, or the request is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rrl.tests.support.slurm import root as slurm_root
from rrl.tests.support.slurm.lab import ROOT_ENV, SlurmLab


def test_slurm_version_without_a_debian_suite_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"no Debian suite is known for Slurm 17.02; there are 22.05, 24.11, 26.05"):
        slurm_root.ensure("17.02")


def test_machine_without_debian_tools_gets_an_error_and_keeps_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(slurm_root.ROOTS_ENV, str(tmp_path / "roots"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"install apt-get, dpkg-deb$"):
        slurm_root.ensure("24.11")
    assert [path.name for path in (tmp_path / "roots").iterdir()] == ["trixie.lock"]


def test_unfinished_root_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def build(suite: str, root: Path) -> None:
        built.append(suite)
        (root / "programs").mkdir(parents=True)
        program = root / "programs/slurmctld"
        program.write_text("#!/bin/sh\necho slurm-wlm 24.11.5\n")
        program.chmod(0o755)
        (root / "ready").touch()

    monkeypatch.setenv(slurm_root.ROOTS_ENV, str(tmp_path))
    monkeypatch.setattr(slurm_root, "_make", build)
    (tmp_path / "trixie").mkdir()
    (tmp_path / "trixie/half").touch()
    assert slurm_root.ensure("24.11") == tmp_path / "trixie"
    assert not (tmp_path / "trixie/half").exists()
    assert slurm_root.ensure("24.11") == tmp_path / "trixie"
    assert built == ["trixie"]
    (tmp_path / "trixie/programs/slurmctld").write_text("#!/bin/sh\necho slurm-wlm 25.11.1\n")
    with pytest.raises(RuntimeError, match=r"Debian's trixie has Slurm 25.11 now, not 24.11"):
        slurm_root.ensure("24.11")


def test_daemons_and_commands_have_the_requested_slurm_version(slurm_lab: SlurmLab) -> None:
    given = os.environ.get(ROOT_ENV)
    version = slurm_root.version_of(Path(given) if given else None)
    assert slurm_lab.version == tuple(map(int, version.split(".")))
    running = slurm_lab.slurm("scontrol", "show", "config")
    assert f"SLURM_VERSION           = {version}." in running
    for command in ("srun", "sbatch", "squeue"):
        assert slurm_lab.run_as_user([command, "--version"]).stdout.split()[-1].startswith(f"{version}.")
