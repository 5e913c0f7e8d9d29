"""A process that holds memory of the first GPU: ``python -m rrl.tests.support.gpu.cuda_process MIB HOW``.

It prints "ready" once it holds the memory, and runs until its standard input ends or it is killed. HOW is one of:
- ``idle``: no kernel runs.
- ``spin``: kernels run one after another and compute nothing, as in a collective that waits for a lost member.
- ``orphan``: a child process in a session of its own holds the memory, and outlives this process.
"""

from __future__ import annotations

import os
import subprocess
import sys

SPIN_CYCLES = 50_000_000
"""Clock cycles of one spinning kernel, which takes some hundredths of a second at the 1 to 2 GHz of a GPU."""


def main() -> None:
    mib, how = int(sys.argv[1]), sys.argv[2]
    if how == "orphan":
        argv = [sys.executable, "-m", "rrl.tests.support.gpu.cuda_process", str(mib), "idle"]
        endless, writer = os.pipe()
        os.set_inheritable(writer, True)  # the orphan's input never ends, because the orphan holds the other end
        child = subprocess.Popen(
            argv, stdin=endless, stdout=subprocess.PIPE, text=True, start_new_session=True, close_fds=False
        )
        assert child.stdout is not None
        print(f"{child.stdout.readline().strip()} {child.pid}", flush=True)
        sys.stdin.read()
        return
    import torch

    held = torch.ones(mib * 2**20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    print("ready", flush=True)
    while how == "spin":
        torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]  # a kernel of torch's own tests
        torch.cuda.synchronize()
    sys.stdin.read()
    del held


if __name__ == "__main__":
    main()
