"""``rrl endpoint`` prints the addresses and the key for agents outside of a run, or why the run has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rrl.cli import main
from rrl.cli.common.output import JSON_SCHEMA
from rrl.core.types import Outcome
from rrl.roles.endpoint.key import EpisodeKey, decode_key
from rrl.tests.support.cli.agent_runs import endpoint_job, written_with_endpoint
from rrl.tests.support.cli.json_keys import assert_fits_its_schema
from rrl.tests.support.cli.story import Story
from rrl.transport.keys import RunKeys

RUN = "small-7"
URLS = ("http://10.0.0.4:4001/v1", "http://10.0.0.5:4002/v1")


def begun() -> Story:
    """Return a story in which the first replica of the endpoint works and the second one is being started again."""
    story = Story(RUN, endpoint_job()).requests_nodes().gets_nodes()
    return story.launches("endpoint/0", "n1").joins("endpoint/0", "serve").launches("endpoint/1", "n1")


def test_addresses_and_the_call_that_opens_an_episode_are_printed(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written_with_endpoint(begun(), root, *URLS)
    assert main.run(["endpoint", RUN]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"endpoint/0  {URLS[0]}\nendpoint/1  {URLS[1]}   (being started again)\n\n# secret: ")
    key = shown.split("export RRL_RUN_KEY=")[1].split("\n")[0]
    assert decode_key(key, RUN, RunKeys.load(run.keys).secret) == EpisodeKey(RUN, 0, 0)
    assert 'curl -sX POST http://10.0.0.4:4001/rrl/v1/episodes -H "Authorization: Bearer $RRL_RUN_KEY"\n' in shown
    assert f"rrl relay {RUN}" in shown


def test_json_output_has_the_addresses_and_the_opening_call(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written_with_endpoint(begun(), root, *URLS)
    assert main.run(["endpoint", RUN, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert_fits_its_schema("endpoint", shown)
    assert shown.pop("run_key").startswith("rrl-")
    assert shown == {
        "schema": JSON_SCHEMA,
        "run": RUN,
        "replicas": [
            {"replica": "endpoint/0", "base_url": URLS[0], "joined": True},
            {"replica": "endpoint/1", "base_url": URLS[1], "joined": False},
        ],
    }


@pytest.mark.parametrize("command", ["endpoint", "relay"])
def test_a_run_without_an_endpoint_is_one_line_and_exit_code_2(
    root: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    Story(RUN).works().written(root)
    assert main.run([command, RUN]) == 2
    assert capsys.readouterr().err == (
        f"rrl: {RUN} has no endpoint for agents outside of the run; its job needs a table [roles.endpoint]\n"
    )


def test_endpoint_that_has_not_started_yet_is_one_line_and_exit_code_1(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written_with_endpoint(Story(RUN, endpoint_job()), root)
    assert main.run(["endpoint", RUN]) == 1
    assert capsys.readouterr().err == f"rrl: the endpoint of {RUN} has not started yet; see: rrl status {RUN}\n"
    run.endpoints.mkdir()
    (run.endpoints / "0.json").write_text("{")  # another version of rrl may write a file without a readable address
    assert main.run(["endpoint", RUN]) == 1


@pytest.mark.parametrize("command", ["endpoint", "relay"])
def test_an_ended_run_is_one_line_although_its_addresses_remain(
    root: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    written_with_endpoint(begun().ends(Outcome.COMPLETED, "all steps are done"), root, *URLS)
    assert main.run([command, RUN]) == 1
    assert capsys.readouterr().err == f"rrl: {RUN} has ended (completed), so its endpoint no longer answers\n"


def test_keys_that_others_can_read_are_not_used(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written_with_endpoint(begun(), root, *URLS)
    run.keys.chmod(0o644)
    assert main.run(["endpoint", RUN]) == 1
    assert "has mode 0644; the run's keys must be 0600" in capsys.readouterr().err
