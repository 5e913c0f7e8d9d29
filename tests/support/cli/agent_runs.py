"""Writes runs whose jobs have an endpoint for outside agents, as input of commands."""

from __future__ import annotations

import tomllib
from pathlib import Path

from rrl.config.job.resolve import resolve
from rrl.config.job.schema import Job
from rrl.core.run_dir import RunDir
from rrl.core.run_spec import RunSpec
from rrl.roles.endpoint.addresses import write_address
from rrl.tests.support.cli.story import Story
from rrl.tests.support.job_toml import JOB
from rrl.transport.keys import RunKeys

_PIECES = 'pieces = "0123456789+= "'
_CHAT_JOB = JOB.replace(_PIECES, f'{_PIECES}\nchat = {{ user = "{{content}}=" }}')
ENDPOINT_JOB = f"{_CHAT_JOB}[roles.endpoint]\nreplicas = 2\n"


def endpoint_job() -> RunSpec:
    return resolve(Job.model_validate(tomllib.loads(ENDPOINT_JOB)), "/venv/bin/python")


def written_with_endpoint(story: Story, root: Path, *base_urls: str) -> RunDir:
    """Return the run directory of a story, with its keys and the addresses of the first replicas of its endpoint."""
    run = story.written(root)
    RunKeys.make().save(run.keys)
    for index, base_url in enumerate(base_urls):
        write_address(run, index, base_url)
    return run
