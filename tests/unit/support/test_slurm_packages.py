"""The changes that ``make slurm`` and ``make uninstall-slurm`` make on a machine, with fake apt-get and userdel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rrl.tests.support.slurm import packages

_APT = """#!/bin/sh
echo "apt-get $*" >> {log}
case "$*" in
    *--simulate*) [ -e {lists} ] && printf 'Inst munge (0.5)\\nInst slurmd (22.05)\\nConf munge (0.5)\\n' ;;
    update) touch {lists} ;;
    *--assume-no*) echo 'Need to get 14.2 MB of archives.'; exit 1 ;;
esac
"""


class Machine:
    """A machine without Slurm, on which root runs ``make slurm``. ``calls`` are the commands that were run."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._log, self.record = folder / "log", folder / "rrl-lab" / "packages"
        self._log.touch()
        (folder / "bin").mkdir()
        scripts = {"apt-get": _APT, "userdel": '#!/bin/sh\necho "userdel $*" >> {log}\n'}
        for name, text in scripts.items():
            script = folder / "bin" / name
            script.write_text(text.format(log=self._log, lists=folder / "lists"))
            script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(packages, "RECORD", self.record)
        monkeypatch.setattr(packages, "missing", self._missing)
        monkeypatch.setattr(packages, "plain_user", lambda: "rrl-lab")
        monkeypatch.setattr(packages, "_has_plain_user", lambda: "userdel rrl-lab" not in self.calls)

    def _missing(self, accounting: bool = False) -> list[str]:
        installed = any(call.startswith("apt-get install") for call in self.calls)
        return [] if installed and not any("purge" in call for call in self.calls) else ["slurmd"]

    @property
    def calls(self) -> list[str]:
        return self._log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_uninstall_removes_only_what_install_has_added(machine: Machine) -> None:
    packages.install()
    assert packages.uninstall() == "removed 2 packages; removed the user rrl-lab"
    assert machine.calls[-2:] == ["apt-get purge --yes munge slurmd", "userdel rrl-lab"]
    assert not machine.record.exists()
    assert packages.uninstall() == "there is nothing to remove"


def test_uninstall_keeps_a_slurm_that_was_there_before(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "missing", lambda accounting=False: [])
    assert packages.install() == "Slurm and the programs that its tests need are installed"
    assert "kept Slurm, which rrl has not installed" in packages.uninstall()
    assert not any("purge" in call for call in machine.calls)
