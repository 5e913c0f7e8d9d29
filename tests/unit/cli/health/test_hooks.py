"""The scripts of examples/health run with a tool that is broken, old or stuck.

In tests/integration/slurm/test_health_hooks.py the scripts run in Slurm.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

HOOKS = ["prolog.sh", "epilog.sh", "healthcheck.sh"]
EXAMPLES = Path(__file__).parents[4] / "examples/health"
_SCONTROL = """#!/bin/sh
echo "$@" >> {asked}
"""


def hook(name: str, tmp_path: Path, rrl: str, settings: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Run a hook, and return (exit code, its queries to Slurm, its messages to the system's log)."""
    for program, text in (
        ("rrl", rrl),
        ("scontrol", _SCONTROL.format(asked=tmp_path / "asked")),
        ("logger", f'#!/bin/sh\necho "$@" >> {tmp_path / "logged"}\n'),
    ):
        (tmp_path / program).write_text(text)
        (tmp_path / program).chmod(0o755)
    script = (EXAMPLES / name).read_text().replace("RRL=/opt/rrl/bin/rrl ", f"RRL={tmp_path}/rrl ")
    script = script.replace("PATH=/usr/local/sbin:", f"PATH={tmp_path}:/usr/local/sbin:", 1)
    for old, new in (settings or {}).items():
        script = script.replace(f"\n{old} ", f"\n{new} ", 1)
    (tmp_path / name).write_text(script)
    done = subprocess.run(["sh", str(tmp_path / name)], env={}, cwd="/", capture_output=True, text=True, timeout=60)
    reported = [(tmp_path / one).read_text() if (tmp_path / one).exists() else "" for one in ("asked", "logged")]
    return done.returncode, reported[0], reported[1]


FAILS = "#!/bin/sh\necho 'FAIL gpu_lost: GPU 1 does not answer the driver'\nexit 2\n"


def failing(code: int = 0, outcome: str = "") -> str:
    """Return a script that replaces rrl and reports a failed check.

    Its ``drain-node`` records the arguments, prints ``outcome`` and exits with ``code``.
    """
    drain = f"[ $2 = drain-node ] && echo \"$@\" >> ${{0%/*}}/asked && echo '{outcome}' && exit {code}\n"
    return FAILS.replace("\n", f"\n{drain}", 1)


@pytest.mark.parametrize("name", HOOKS)
def test_failure_to_record_a_finding_is_in_the_systems_log(name: str, tmp_path: Path) -> None:
    rrl = "#!/bin/sh\necho 'OK 18 checks'\necho 'not recorded: /history: no answer within 3 s'\n"
    code, _, logged = hook(name, tmp_path, rrl)
    assert code == 0
    assert "not recorded: /history: no answer within 3 s" in logged


@pytest.mark.parametrize("name", HOOKS)
def test_history_and_metrics_are_passed_to_the_check_if_the_site_names_them(name: str, tmp_path: Path) -> None:
    rrl = f"#!/bin/sh\necho \"$@\" >> {tmp_path}/asked\necho 'OK 18 checks'\n"
    _, asked, _ = hook(name, tmp_path, rrl)
    assert "--record" not in asked
    assert "--prometheus" not in asked
    _, asked, _ = hook(name, tmp_path, rrl, {"HISTORY=": "HISTORY=/shared/h", "METRICS=": "METRICS=/var/rrl.prom"})
    assert " --record --history /shared/h --prometheus /var/rrl.prom" in asked


def test_a_failure_fails_the_prolog_and_drains(tmp_path: Path) -> None:
    code, asked, _ = hook("prolog.sh", tmp_path, failing())
    assert code == 1
    assert asked == "health drain-node --why gpu_lost: GPU 1 does not answer the driver\n"
    code, asked, _ = hook("healthcheck.sh", tmp_path, failing())
    assert code == 0
    assert asked.splitlines()[-1].endswith(" --why gpu_lost: GPU 1 does not answer the driver")


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (1, "held back: hooks have drained 20 of 100 nodes within 600 s"),
        (3, "not drained: sinfo: no answer"),
        (2, "Usage: rrl"),
        (137, ""),
    ],
)
def test_failure_whose_drain_is_held_back_keeps_the_node_and_is_logged(
    name: str, code: int, outcome: str, tmp_path: Path
) -> None:
    ended, _, logged = hook(name, tmp_path, failing(code, outcome))
    assert ended == 0
    assert f"FAIL, but the node stays in use: {outcome} (gpu_lost: GPU 1 does not answer the driver)" in logged


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize(
    "rrl",
    [
        '#!/bin/sh\necho "python3: can\'t open file" >&2\nexit 2\n',
        "#!/bin/sh\nif\n",
        "#!/no/such/python\n",
        "#!/bin/sh\nkill -9 $$\n",
        "#!/bin/sh\necho 'Usage: rrl'\nexit 2\n",
    ],
)
def test_unusable_tool_drains_no_node_and_is_logged(name: str, rrl: str, tmp_path: Path) -> None:
    code, asked, logged = hook(name, tmp_path, rrl)
    assert (code, asked) == (0, "")
    assert "this node was not checked" in logged


@pytest.mark.parametrize("name", HOOKS)
def test_reader_stuck_in_the_kernel_does_not_delay_the_hook(name: str, tmp_path: Path) -> None:
    """The stuck reader keeps the hook's stderr open."""
    pid = tmp_path / "pid"
    left = f"[ $2 = check ] && {{ echo noise >&2; sleep 1000 >/dev/null & echo $! > {pid}; }}\n"
    code, asked, _ = hook(name, tmp_path, failing().replace("\n", f"\n{left}", 1))
    os.kill(int(pid.read_text()), signal.SIGKILL)  # it is there still
    assert code == (name == "prolog.sh")
    assert "drain-node" in asked
