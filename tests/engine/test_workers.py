"""vLLM's two worker processes of tensor parallelism (on CPU) get weights from the role, and end with it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from rrl.core.processes import descendants, read_process
from rrl.roles.rollout.engine import Engine, Sampling
from rrl.roles.rollout.vllm import engine as vllm_engine
from rrl.roles.rollout.vllm.weight_transfer import MEMFD_NAME, RrlWeightTransferEngine
from rrl.tests.support.engine import engines
from rrl.tests.support.engine.engines import ATOL, SPEC, Made
from rrl.transport.address import interfaces

pytestmark = pytest.mark.vllm

TEMPERATURE = 0.7
_A, _B = engines.random_weights(SPEC, 1), engines.random_weights(SPEC, 2)
_BUCKET = 20_000
"""Size of a bucket in bytes. A layer is larger, and most tensors are."""
_LISTENS = "0A"
"""The state TCP_LISTEN, as proc(5) prints it."""
_MESSAGE = 10_000
"""Upper bound for the bytes of all messages to vLLM about one version. The version itself has 400 KB."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    sampling = Sampling(temperature=TEMPERATURE, segment_tokens=8)
    with pytest.MonkeyPatch.context() as outside:
        for one in interfaces():
            if not one.address.startswith("127."):  # a site may set this variable for jobs of several nodes
                outside.setenv("GLOO_SOCKET_IFNAME", one.name)
        engine = engines.vllm_engine(SPEC, tmp_path_factory.mktemp("model"), sampling, tensor_parallel_size=2)
    yield engine
    workers = _workers()
    engine.close()
    assert [pid for pid in workers if read_process(pid) is not None] == [], "worker processes outlive their engine"


@pytest.fixture
def engine(shared: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Return an idle engine with the weights of step 0."""
    monkeypatch.setattr(vllm_engine, "BUCKET_BYTES", _BUCKET)
    engines.load(shared, 0, _A)
    return shared


def test_running_trajectories_continue_with_new_weights_in_several_processes(engine: Engine) -> None:
    given, made = engines.items(8, max_new=200), Made()
    engine.add(given)
    for step, model in ((1, _B), (2, _A)):
        made.steps(engine, 11)
        engines.load(engine, step, model)
    made.to_the_end(engine)
    assert sorted(made.finished) == [item.trajectory for item in given]
    worst = made.worst(given, {0: _A, 1: _B, 2: _A}, TEMPERATURE)
    assert worst.keys() == {0, 1, 2}
    assert max(worst.values()) < ATOL, worst


def test_weights_are_shared_not_copied_and_their_memory_is_freed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls_made: list[bytes] = []
    llm = cast(Any, engine)._llm
    ask = llm.collective_rpc

    def listening(method: str, **more: Any) -> Any:
        calls_made.append(pickle.dumps((method, more)))
        return ask(method, **more)

    monkeypatch.setattr(llm, "collective_rpc", listening)
    engines.load(engine, 1, _B)
    assert len(calls_made) > 10
    assert sum(map(len, calls_made)) < _MESSAGE
    for pid in (os.getpid(), *_workers()):
        open_files = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
        assert not [name for name in open_files if MEMFD_NAME in name]
        assert MEMFD_NAME not in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.usefixtures("engine")
def test_workers_listen_only_on_this_machine() -> None:
    found = [address for pid in _workers() for address in _listening(pid)]
    assert found, "no worker process listens at a TCP address"
    assert set(found) == {"0100007F"}, "not only 127.0.0.1"


def test_workers_survive_a_sigterm_to_their_whole_process_group(engine: Engine) -> None:
    given, made = engines.items(4, max_new=100), Made()
    engine.add(given)
    made.steps(engine, 3)
    for pid in _workers():
        os.kill(pid, signal.SIGTERM)
    made.to_the_end(engine)
    assert sorted(made.finished) == [item.trajectory for item in given]
    assert made.worst(given, {0: _A}, TEMPERATURE)[0] < ATOL


def test_forked_worker_ignores_sigterm_and_the_role_still_handles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightTransferEngine, "__init__", lambda self: None)
    before = signal.getsignal(signal.SIGTERM)
    RrlWeightTransferEngine()
    assert signal.getsignal(signal.SIGTERM) == before
    child = multiprocessing.get_context("fork").Process(target=_as_a_worker)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def _as_a_worker() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # vLLM's own, in each worker
    RrlWeightTransferEngine()
    os._exit(0 if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN else 1)


def _workers() -> list[int]:
    here = [process.pid for process in descendants(os.getpid())]
    return [pid for pid in here if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"VLLM::Worker")]


def _listening(pid: int) -> Iterator[str]:
    """Return the addresses at which a process listens, as proc(5) prints them."""
    sockets = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in sockets:
                yield fields[1].partition(":")[0]
