"""``rrl relay`` names who listens at its port: agents that call that port would give their keys to this user."""

from __future__ import annotations

import os
import sys

import pytest

from rrl.cli import main
from rrl.core.run_dir import RUNS_ENV
from rrl.tests.support.cli.agent_runs import endpoint_job, written_with_endpoint
from rrl.tests.support.cli.story import Story
from rrl.tests.support.plain_user import PlainUser

LISTEN = "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); s.accept()"


def test_port_of_the_relay_that_another_user_has_taken_is_named(
    owner: PlainUser, attacker: PlainUser, capfd: pytest.CaptureFixture[str]
) -> None:
    process = attacker.popen(sys.executable, "-c", LISTEN)
    assert process.stdout is not None
    port = process.stdout.readline().strip()

    def victim() -> None:
        os.environ[RUNS_ENV] = str(owner.home)
        story = Story("small-7", endpoint_job()).requests_nodes().gets_nodes()
        story.launches("endpoint/0", "n1").joins("endpoint/0", "serve")
        written_with_endpoint(story, owner.home, "http://10.0.0.4:4001/v1")
        assert main.run(["relay", "small-7", "--port", port]) == 1

    owner.call(victim, 60)
    assert capfd.readouterr().err == (
        f"rrl: 127.0.0.1:{port}: Address already in use by {attacker.name}, who gets the keys of agents that call it;"
        " choose another port: --port 0\n"
    )
    process.kill()
    process.communicate()
