"""The probe on a node, as a process of its own, and the process on the login node that receives its report."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rrl.cli.doctor.node_probe.host import Unavailable
from rrl.cli.doctor.node_probe.main import NONCE_ENV, NONCE_FILE, REPORT, NodeReport, connect_login_node, nonce_proof
from rrl.cli.doctor.node_visit import ReportListener

TIMEOUT_S = 60.0
PROBE = (sys.executable, "-P", "-m", "rrl.cli.doctor.node_probe.main")
TORCH = """
__version__ = "9.9"
class cuda:
    is_available = staticmethod(lambda: False)
"""
"""A replacement for torch, because importing torch itself takes two seconds on two cores each time."""


@pytest.fixture
def login() -> Iterator[ReportListener]:
    with ReportListener() as listener:
        yield listener


@pytest.fixture
def folder(tmp_path: Path, login: ReportListener) -> Path:
    (tmp_path / NONCE_FILE).write_text(login.nonce)
    return tmp_path


@pytest.fixture(autouse=True)
def light_torch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path_factory.mktemp("light")
    (place / "torch.py").write_text(TORCH)
    monkeypatch.setenv("PYTHONPATH", str(place))


def probe(folder: Path, nonce: str, *addresses: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {NONCE_ENV: nonce, "SLURMD_NODENAME": "n7"}
    return subprocess.run([*PROBE, str(folder), *addresses], env=env, capture_output=True, text=True, timeout=TIMEOUT_S)


def received_report(login: ReportListener) -> NodeReport:
    deadline = time.monotonic() + TIMEOUT_S
    while login.report is None:
        assert time.monotonic() < deadline, "the probe sent no report in time"
        time.sleep(0.01)
    return login.report


def written(folder: Path) -> NodeReport:
    return msgspec.json.decode((folder / REPORT).read_bytes(), type=NodeReport)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_node_reports_in_the_folder_and_on_the_connection_with_its_clock(login: ReportListener, folder: Path) -> None:
    good, dead = f"127.0.0.1:{login.port}", f"127.0.0.1:{free_port()}"
    ended = probe(folder, login.nonce, dead, good)
    assert (ended.returncode, ended.stderr) == (0, "")
    report = received_report(login)
    assert report == written(folder)
    assert (report.node, report.folder) == ("n7", "")
    assert {one.address: one.trouble for one in report.reached} == {good: "", dead: "Connection refused"}
    assert Path(report.rrl) == Path(__file__).parents[5]
    assert not isinstance(report.host.python, Unavailable)
    assert not isinstance(report.torch, Unavailable)
    assert (report.torch.version, report.torch.gpus) == ("9.9", 0)
    (compared,) = (one for one in report.reached if not one.trouble)
    assert abs(compared.skew) <= compared.bound + 0.001  # both read the same clock


def test_report_arrives_on_the_connection_if_the_folder_is_not_shared(login: ReportListener, tmp_path: Path) -> None:
    ended = probe(tmp_path / "absent", login.nonce, f"127.0.0.1:{login.port}")
    assert ended.returncode == 0
    assert received_report(login).folder == "No such file or directory"


def test_folder_with_another_nonce_is_reported(login: ReportListener, folder: Path) -> None:
    (folder / NONCE_FILE).write_text("of another probe")
    probe(folder, login.nonce, f"127.0.0.1:{login.port}")
    assert received_report(login).folder == "the file nonce in this folder was written for another probe"
    assert not (folder / REPORT).exists()


def test_report_is_in_the_folder_if_the_login_node_is_unreachable(folder: Path, login: ReportListener) -> None:
    assert probe(folder, login.nonce).returncode == 0
    assert written(folder).reached == ()
    assert login.report is None


def test_exit_code_is_1_without_folder_and_connection(tmp_path: Path, login: ReportListener) -> None:
    assert probe(tmp_path / "absent", login.nonce, f"127.0.0.1:{free_port()}").returncode == 1


def test_missing_arguments_print_the_usage() -> None:
    env = {name: value for name, value in os.environ.items() if name != NONCE_ENV}
    ended = subprocess.run([*PROBE], env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)


# ── other peer────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "expected_text",
    [
        b'{"nonce":"guessed","at":"x"}\n',
        b"GET / HTTP/1.1\r\n\r\n",
        b"\n",
        b"\xff" * 4096,
        b'{"nonce":7}\n',
        '{"nonce":"ü"}\n'.encode(),
    ],
)
def test_peer_without_the_nonce_is_disconnected(login: ReportListener, expected_text: bytes) -> None:
    with socket.create_connection(("127.0.0.1", login.port), TIMEOUT_S) as foreign:
        foreign.settimeout(TIMEOUT_S)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            foreign.sendall(expected_text)
            assert foreign.recv(100) == b""
    assert login.report is None
    connect_login_node(f"127.0.0.1:{login.port}", login.nonce)[0].close()  # the next connection is served


def test_silent_foreign_connections_do_not_block_the_node(login: ReportListener) -> None:
    silent = [socket.create_connection(("127.0.0.1", login.port), TIMEOUT_S) for _ in range(17)]
    for one in silent:
        one.close()
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        with contextlib.suppress(OSError):
            connect_login_node(f"127.0.0.1:{login.port}", login.nonce)[0].close()
            return
        assert time.monotonic() < deadline, "connections are no longer accepted"


def test_login_node_without_a_proof_gets_no_report() -> None:
    got: list[bytes] = []

    def pretend(server: socket.socket) -> None:
        line, _ = server.accept()
        with line:
            got.append(line.recv(4096))
            line.sendall(nonce_proof("another nonce").encode() + b"\n")
            got.append(line.recv(4096))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=pretend, args=(server,))
        thread.start()
        with pytest.raises(OSError, match="another program answered"):
            connect_login_node(f"127.0.0.1:{server.getsockname()[1]}", "the nonce")
        thread.join(TIMEOUT_S)
    assert got[1:] == [b""]
