"""mini-swe-agent with its model class for responses, in a local shell."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ |= {"MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "1"}

import yaml
from minisweagent import package_dir
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models import get_model

from rrl.tests.support.clients import house

config = yaml.safe_load((Path(package_dir) / "config" / "mini.yaml").read_text())
model = get_model("openai/policy", {**config["model"], "model_class": sys.argv[1], "cost_tracking": "ignore_errors"})
kept = {key: config["agent"][key] for key in ("system_template", "instance_template")}
agent = DefaultAgent(model, LocalEnvironment(), **kept)
result = agent.run(house.TASK)
print(result, file=sys.stderr)
looks = [m for m in agent.messages if "has 12 chairs" in str(m.get("content", m.get("output", "")))]
print(float(result.get("exit_status") == "Submitted"))
