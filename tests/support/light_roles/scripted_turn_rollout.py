"""A rollout without a model that answers each turn by a script: ``scripted_turn_rollout.py CLIENT``.

The script is that of a client of benchmarks/_clients_table.py, and the job's model a folder of
tests/support/roles/endpoint/tool_folders.py.
"""

from __future__ import annotations

import sys
import time

import rrl
from rrl.benchmarks._clients_scene import in_turn, scripted_answer
from rrl.benchmarks._clients_table import CLIENTS
from rrl.core.types import Version
from rrl.roles.models.chat import open_chat
from rrl.roles.trajectories.types import Segment

PIECE, PAUSE_S = 16, 0.02


def main() -> None:
    script = in_turn(next(client for client in CLIENTS if client.name == sys.argv[1]).answers)
    with rrl.join() as me:
        chat, version = open_chat(me.job.model), Version(0, 0)
        for work in me.work(at_most=1):
            if new := me.new_weights():
                version = new.version
            for item in work.items:
                answer = scripted_answer(chat, script, item.prompt)
                offset = sum(len(part.tokens) for part in item.so_far)
                while offset < len(answer):
                    with me.phase("generate"):
                        time.sleep(PAUSE_S)
                        tokens = tuple(answer[offset : offset + PIECE])
                        offset += len(tokens)
                        part = Segment(item.trajectory, offset - len(tokens), tokens, (-1.0,) * len(tokens), version)
                        if work.append([part], [item.trajectory] if offset == len(answer) else []):
                            break


if __name__ == "__main__":
    main()
