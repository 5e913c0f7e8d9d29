"""The kernel log: the lines that are recognised, their age, and the effect of a flood of lines."""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl.health.readers.base import NotInstalled, PermissionDenied, ReaderOptions
from rrl.health.readers.kernel_log import MAX_EVENTS, MAX_TEXT_CHARS, KernelReader, recognise
from rrl.health.readers.samples import KernelEvent

XID_79 = "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


class Log:
    """A pipe in place of /dev/kmsg.

    Like /dev/kmsg it does not block a read, but one read may return several records.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "kmsg"
        os.mkfifo(self.path)
        # without a reader, it could not be opened for writing
        self._reading = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        self._writing = os.open(self.path, os.O_WRONLY)
        self._number = 100

    def write(self, text: str, age: float = 0.0, skip: int = 0) -> None:
        self._number += 1 + skip
        stamp = int((time.monotonic() - age) * 1e6)
        os.write(self._writing, f"4,{self._number},{stamp},-;{text}\n SUBSYSTEM=pci\n DEVICE=+pci:x\n".encode())

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    made = Log(tmp_path)
    yield made
    made.close()


@pytest.fixture
def reader(log: Log) -> Iterator[KernelReader]:
    made = KernelReader(ReaderOptions(kmsg=str(log.path)))
    yield made
    made.close()


LINES = [
    (XID_79, {"kind": "xid", "xid": 79, "pci": "0000:1b:00", "pid": None}),
    (
        "NVRM: Xid (PCI:0000:cb:00): 13, pid=4242, name=python, Graphics Exception",
        {"kind": "xid", "xid": 13, "pci": "0000:cb:00", "pid": 4242},
    ),
    ("NVRM: Xid (0000:03:00): 31, Ch 00000008", {"kind": "xid", "xid": 31, "pci": "0000:03:00"}),
    (
        "NVRM: Xid (PCI:0001:B1:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
        {"kind": "xid", "xid": 154, "pci": "0001:b1:00"},
    ),
    (
        "NVRM: Xid (PCI:0000:07:00 GPU-I:05 GPU-CI:00): 94, pid=7194, name=python, Contained: CE User Channel (0x9)",
        {"kind": "xid", "xid": 94, "pci": "0000:07:00", "pid": 7194},
    ),
    ("NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus.", {"kind": "xid", "xid": 79, "pci": "0000:44:00"}),
    ("NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.", {"kind": "xid", "xid": 79, "pci": "0000:01:00"}),
    (
        r"NVRM: The NVIDIA GPU 0000:b3:00.0\x0a   NVRM: (PCI ID: 10de:26b5) installed in this system has\x0a   NVRM: "
        "fallen off the bus and is not responding to commands.",
        {"kind": "xid", "xid": 79, "pci": "0000:b3:00"},
    ),
    (
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 28 sourcetrack timeout error",
        {"kind": "sxid", "xid": 24007, "pci": "0000:c1:00", "device": "nvidia-nvswitch3"},
    ),
    ("mce: [Hardware Error]: CPU 2: Machine Check: 0 Bank 5: bea0000000000108", {"kind": "mce"}),
    ("{1}[Hardware Error]: event severity: recoverable", {"kind": "mce"}),
    ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0_Ha#0", {"kind": "mce", "device": "EDAC MC0"}),
    ("EDAC MC1: UE page 0x0, offset 0x0, grain 0", {"kind": "mce", "device": "EDAC MC1"}),
    ("mce: Uncorrected hardware memory error in user-access at 6f5a2b4400", {"kind": "mce"}),
    ("Out of memory: Killed process 1234 (python) total-vm:1kB, anon-rss:1kB", {"kind": "oom", "pid": 1234}),
    ("Memory cgroup out of memory: Killed process 77 (ray::x) total-vm:1kB", {"kind": "oom", "pid": 77}),
    ("mlx5_core 0000:65:00.0 ens1f0np0: Link down", {"kind": "nic", "device": "ens1f0np0"}),
    ("ixgbe 0000:01:00.0 eth0: NIC Link is Down", {"kind": "nic", "device": "eth0"}),
    (
        "mlx5_core 0000:65:00.0: poll_health:795:(pid 0): Fatal error 1 detected",
        {"kind": "nic", "device": "mlx5_core 0000:65:00.0"},
    ),
    ("mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link DOWN", {"kind": "nic", "device": "mlx5_5"}),
    ("igb 0000:01:00.0 eno1: igb: eno1 NIC Link is Down", {"kind": "nic", "device": "eno1"}),
    (
        "mlx5_core 0000:65:00.0 eth0: NETDEV WATCHDOG: CPU: 3: transmit queue 3 timed out 5001 ms",
        {"kind": "nic", "device": "eth0"},
    ),
    ("ib0: Lost carrier", {"kind": "nic", "device": "ib0"}),
    ("NETDEV WATCHDOG: eth1 (mlx5_core): transmit queue 3 timed out", {"kind": "nic", "device": "eth1"}),
    ("blk_update_request: I/O error, dev nvme0n1, sector 12 op 0x0:(READ)", {"kind": "io", "device": "nvme0n1"}),
    ("Buffer I/O error on dev dm-0, logical block 12, lost async page write", {"kind": "io", "device": "dm-0"}),
    ("nvme nvme1: I/O 12 QID 4 timeout, aborting", {"kind": "io", "device": "nvme1"}),
    ("EXT4-fs error (device sda1): ext4_lookup:1602: inode #2", {"kind": "filesystem", "device": "sda1"}),
    ("EXT4-fs (sda1): Remounting filesystem read-only", {"kind": "filesystem", "device": "sda1"}),
    ("XFS (dm-3): Metadata corruption detected at xfs_agf_read", {"kind": "filesystem", "device": "dm-3"}),
    ("XFS (sda2): log I/O error -5", {"kind": "filesystem", "device": "sda2"}),
    (
        "BTRFS: error (device sdb1) in btrfs_commit_transaction:2323: errno=-5 IO failure",
        {"kind": "filesystem", "device": "sdb1"},
    ),
    ("BTRFS info (device sdb1): forced readonly", {"kind": "filesystem", "device": "sdb1"}),
    ("nfs: server filer.site not responding, still trying", {"kind": "filesystem", "device": "filer.site"}),
    ("nfs: server filer.site OK", {"kind": "filesystem_back", "device": "filer.site"}),
    (
        "Lustre: work-OST0003-osc-ffff8: Connection to work-OST0003 (at 10.0.0.1@o2ib) was lost; in progress"
        " operations",
        {"kind": "filesystem", "device": "work-OST0003"},
    ),
    (
        "Lustre: work-OST0003-osc-ffff8: Connection restored to 10.0.0.1@o2ib (at 10.0.0.1@o2ib)",
        {"kind": "filesystem_back", "device": "work-OST0003"},
    ),
    (
        "LustreError: 167-0: work-OST0003-osc-ffff8: This client was evicted by work-OST0003; in progress operations"
        " fail",
        {"kind": "filesystem", "device": "work-OST0003"},
    ),
    (
        "XFS (sda2): Corruption of in-memory data (0x8) detected at x (fs/xfs/a.c:1).  Shutting down filesystem.",
        {"kind": "filesystem", "device": "sda2"},
    ),
    ("nvme nvme1: I/O tag 12 (100c) opcode 0x2 (Read) QID 4 timeout, aborting", {"kind": "io", "device": "nvme1"}),
    ("INFO: task kworker/3:1:991 blocked for more than 120 seconds.", {"kind": "hung_task", "pid": 991}),
    ("INFO: task python:991 blocked for more than 120 seconds.", {"kind": "hung_task", "pid": 991}),
    ("watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [kworker/3:1:1234]", {"kind": "hung_task", "pid": 1234}),
]


@pytest.mark.parametrize(("line", "expected"), LINES, ids=[line[:30] for line, _ in LINES])
def test_kernel_log_line_of_a_known_failure_is_recognised(line: str, expected: dict[str, object]) -> None:
    event = recognise(line.encode(), 1.5)
    assert event is not None
    assert {name: getattr(event, name) for name in expected} == expected
    assert (event.text, event.age) == (line, 1.5)


@pytest.mark.parametrize(
    "line",
    [
        "EXT4-fs (sda1): mounted filesystem with ordered data mode",
        "mlx5_core 0000:65:00.0 ens1f0np0: Link up",
        "mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link ACTIVE",
        "eth0: Link down[4242]: segfault at 0 ip 0 sp 0 error 4 in libc.so",  # a program of that name
        'audit: type=1400 apparmor="DENIED" name="ib0: Link down" comm="python"',  # a file of that name
        "NVRM: GPU at PCI:0000:3b:00: GPU-2dfe2b2e-0000-1111-2222-333344445555",
        "nvme nvme0: 8/0/0 default/read/poll queues",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.82.09",
        "python[123]: segfault at 0 ip 0 sp 0 error 4 in libc.so",
        "oom-kill:constraint=CONSTRAINT_NONE,task=python,pid=1234",
        "XFS (dm-3): Mounting V5 Filesystem",
    ],
)
def test_harmless_line_is_not_recognised(line: str) -> None:
    assert recognise(line.encode(), 0.0) is None


# ── names that users choose ──────────────────────────────────────────────────────────────────────────────────────────
HOSTILE = [
    XID_79,
    "NVRM: Xid (PCI:0000:cb:00): 79, x",
    "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Fatal, Link 3",
    "mce: [Hardware Error]: Machine check events logged, Uncorrected",
    "EDAC MC0: 1 UE memory read error on CPU (x)",
    "Memory failure: 0x1: ",
    "EXT4-fs error (device sda1): x",
    "XFS (a): been shut down",
    "XFS (a): log I/O error",
    "critical medium error, dev sda, sector 1",
    "I/O error, dev sda, sector 1 op",
    "Buffer I/O error on dev sda",
    "ib0: Link down",
    "ib0: Lost carrier",
    "ib0 NIC Link is Down",
    "mlx5_core 0000:65:00.0: Fatal error 1 detected",
    "NETDEV WATCHDOG: ib0: timed out",
    "nvme nvme0: I/O 1 QID 1 timeout",
    "BTRFS: error (device sda1) in x",
    "nfs: server a not responding",
    "INFO: task x:1 blocked for more than 120 seconds.",
    "EDAC MC0: UE x",
    "Out of memory: Killed process 1 (x)",
    "\\x0aNVRM: Xid (PCI:0000:cb:00): 79, x",
]
KERNEL_FORMATS = [
    # recorded on Linux 6.18 (x86-64), where the attacker's program set its comm and the name of its file
    "{comm}[8146]: segfault at 0 ip 000055e0ade65170 sp 00007fff0dcb5de0 error 6 in {file}[1170,55e0ade65000+1000]"
    " likely on CPU 1 (core 1, socket 0)",
    "{comm}[8146]: segfault at 0 ip 0 sp 0 error 4 in {file}[401000+1000]",
    "traps: {comm}[8157] general protection fault ip:561c82fdd161 sp:7ffce1b564f0 error:0 in {file}[1161,561c+1000]",
    "traps: {comm}[8163] trap int3 ip:55ce43b4f12e sp:7fff07213b20 error:0 in {file}[112e,55ce43b4f000+1000]",
    "{comm} (69): drop_caches: 3",
    # linux arch/x86/kernel/{signal,umip}.c, arch/arm64/kernel, arch/powerpc/kernel
    "{comm}[77] bad frame in rt_sigreturn frame:0 ip:0 sp:0 orax:0 in {file}[401000+1000]",
    "umip: {comm}[77] ip:401000 sp:7ffc: SGDT instruction cannot be used by applications.",
    "{comm}[77]: unhandled exception: DABT (lower EL), ESR 0x0, unhandled level 0 translation fault in {file}[0+1000]",
    "{comm}[77]: segfault (11) at 0 nip 0 lr 0 code 1 in {file}[0+1000]",
    # linux mm, kernel, block, security
    "{comm} invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
    "{comm}: page allocation failure: order:4, mode:0x40cc0, nodemask=(null),cpuset={file},mems_allowed=0",
    "{comm}: attempt to access beyond end of device",
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset={file},task={comm},pid=1234,uid=1000",
    "mmap: {comm} (77): VmData 4096 exceed data ulimit 0. Update limits or use boot option ignore_rlimit_data.",
    "process '{file}' started with executable stack",
    "capability: warning: `{comm}' uses 32-bit capabilities (legacy support in use)",
    "netlink: 8 bytes leftover after parsing attributes in process `{comm}'.",
    "warning: `{comm}' uses wireless extensions which will stop working for Wi-Fi 7 hardware; use nl80211",
    'ptrace attach of "{file}"[1] was attempted by "{file}"[2]',
    'audit: type=1701 audit(1.1:1): auid=1000 comm="{comm}" exe="{file}" sig=11 res=1',
    "overlayfs: failed to resolve '{file}': -2",
    "usb 1-1: Product: {file}",
    "{file}IN=lo OUT= MAC=00:00 SRC=127.0.0.1 DST=127.0.0.1 LEN=84",  # a packet filter's rule chooses the prefix
    " in {file}[1170,55e0ade65000+1000]",  # the end of a line whose beginning another line interrupted
]
"""Messages in which the kernel prints text that a user has chosen."""


def as_the_kernel_prints(comm: str) -> str:
    """Return the first 15 bytes of a name as /dev/kmsg escapes them."""
    return "".join(chr(b) if 32 <= b < 127 and b != 92 else f"\\x{b:02x}" for b in comm.encode()[:15])


@pytest.mark.parametrize("form", KERNEL_FORMATS)
def test_name_that_a_user_chooses_is_never_recognised_as_a_kernel_message(form: str) -> None:
    for comm in ("x", *HOSTILE):
        for file in ("x", *HOSTILE):
            line = form.format(comm=as_the_kernel_prints(comm), file=file)
            assert recognise(line.encode(), 0.0) is None, line


@given(
    st.sampled_from(KERNEL_FORMATS),
    st.lists(st.sampled_from(sorted({part for line in HOSTILE for part in re.split(r"(?<=[ :(])", line)})), max_size=6),
    st.text(max_size=15),
    st.sampled_from(HOSTILE),
)
def test_combination_of_user_chosen_names_is_never_recognised_as_a_kernel_message(
    form: str, parts: list[str], comm: str, file: str
) -> None:
    for name in (comm, "".join(parts)):
        line = form.format(comm=as_the_kernel_prints(name), file="".join(parts) or file)
        assert recognise(line.encode(), 0.0) is None, line


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("4,101,1000,-", [79]),
        ("0,101,1000,-,caller=T1", [79]),
        ("12,101,1000,-", []),  # facility 1: a program wrote the record into /dev/kmsg
        ("28,101,1000,-", []),  # facility 3: a daemon did
        ("4,101,1000,c", []),
        ("4,101,1000,+", []),  # a fragment of a line
    ],
)
def test_only_records_of_the_kernel_facility_count(tmp_path: Path, head: str, expected: list[int]) -> None:
    (tmp_path / "kmsg").write_text(f"{head};{XID_79}\n")
    reader = KernelReader(ReaderOptions(kmsg=str(tmp_path / "kmsg")))
    assert [event.xid for event in reader.read().events] == expected
    reader.close()


def test_xid_event_states_whether_the_node_has_its_pci_device(tmp_path: Path) -> None:
    devices = tmp_path / "sys/bus/pci/devices"
    for address, vendor in (("0000:1b:00.0", "0x10de"), ("0000:cb:00.0", "0x8086")):
        (devices / address).mkdir(parents=True)
        (devices / address / "vendor").write_text(f"{vendor}\n")
    (tmp_path / "proc/driver/nvidia/gpus/0000:2a:00.0").mkdir(parents=True)
    lines = [f"4,{n},1000,-;NVRM: Xid (PCI:0000:{bus}:00): 79, x" for n, bus in enumerate(("1b", "cb", "2a", "99"))]
    (tmp_path / "kmsg").write_text("\n".join(lines) + "\n")
    options = ReaderOptions(kmsg=str(tmp_path / "kmsg"), sysfs=str(tmp_path / "sys"), proc=str(tmp_path / "proc"))
    reader = KernelReader(options)
    shutil.rmtree(devices / "0000:1b:00.0")  # a GPU that fell off its bus may be missing in the list of devices
    assert [event.pci_exists for event in reader.read().events] == [True, False, True, False]
    reader.close()


def test_xid_event_has_no_device_state_where_devices_cannot_be_listed(tmp_path: Path) -> None:
    (tmp_path / "kmsg").write_text(f"4,1,1000,-;{XID_79}\n")
    reader = KernelReader(ReaderOptions(kmsg=str(tmp_path / "kmsg"), sysfs=str(tmp_path), proc=str(tmp_path)))
    assert [event.pci_exists for event in reader.read().events] == [None]
    reader.close()


def test_long_kernel_log_line_is_cut() -> None:
    event = recognise((XID_79 + "x" * 5000).encode(), 0.0)
    assert event is not None
    assert len(event.text) == MAX_TEXT_CHARS


def test_earlier_lines_are_read_first_with_their_age_and_new_ones_once(log: Log, reader: KernelReader) -> None:
    log.write(XID_79, age=120.0)
    log.write("just talk")
    (old,) = reader.read().events
    assert (old.xid, round(old.age)) == (79, 120)
    log.write("Out of memory: Killed process 5 (x)", age=2.0)
    (new,) = reader.read().events
    assert (new.kind, round(new.age)) == ("oom", 2)
    assert reader.read().events == ()


def test_record_longer_than_one_read_is_skipped_and_the_next_one_is_read(log: Log, reader: KernelReader) -> None:
    log.write("talk " * 2000)  # longer than one read
    log.write(XID_79)
    assert [event.xid for event in reader.read().events] == [79]


def test_lines_overwritten_by_the_kernel_are_counted(log: Log, reader: KernelReader) -> None:
    log.write("one")
    log.write("five", skip=3)
    assert reader.read().dropped == 3


def test_flood_of_lines_is_cut_and_counted_without_hiding_an_xid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rrl.health.readers.kernel_log._MAX_READ_S", math.inf)  # one read takes the whole flood
    noise = [f"4,{n},1000,-;Buffer I/O error on dev sda, logical block {n}" for n in range(5000)]
    noise[2500] = f"4,2500,1000,-;{XID_79}"
    noise[3000] = "4,3000,1000,-;Out of memory: Killed process 5 (x)"
    (tmp_path / "kmsg").write_text("\n".join(noise) + "\n")
    reader = KernelReader(ReaderOptions(kmsg=str(tmp_path / "kmsg")))
    data = reader.read()
    reader.close()
    assert len(data.events) == MAX_EVENTS
    assert data.dropped == 5000 - MAX_EVENTS
    assert [event.kind for event in data.events if event.kind != "io"] == ["xid", "oom"]
    assert data.events[0].kind == "io"  # events are in the order in which they were written


def test_storm_of_one_xid_does_not_hide_another_xid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrl.health.readers.kernel_log._MAX_READ_S", math.inf)
    lines = [f"4,{n},1000,-;NVRM: Xid (PCI:0000:1b:00): 13, pid=1, again {n}" for n in range(1000)]
    lines.append(f"4,1000,1000,-;{XID_79}")
    (tmp_path / "kmsg").write_text("\n".join(lines) + "\n")
    reader = KernelReader(ReaderOptions(kmsg=str(tmp_path / "kmsg")))
    events: tuple[KernelEvent, ...] = reader.read().events
    reader.close()
    assert {event.xid for event in events} == {13, 79}


def test_malformed_kernel_log_records_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "kmsg").write_bytes(
        b"\n;;\nx,y,z;NVRM: Xid (PCI:0000:1b:00): 79\n6,1\n\xff\xfe;\n4,1,5,-;" + XID_79.encode() + b"\n"
    )
    reader = KernelReader(ReaderOptions(kmsg=str(tmp_path / "kmsg")))
    assert [event.xid for event in reader.read().events] == [79]
    reader.close()


def test_a_missing_log_is_absent(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match="there is no"):
        KernelReader(ReaderOptions(kmsg=str(tmp_path / "kmsg")))


def test_unreadable_kernel_log_names_the_setting_that_forbids_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/kernel/dmesg_restrict").write_text("1\n")
    monkeypatch.setattr(os, "open", refused)  # root may read every file, so that no real file is refused
    with pytest.raises(PermissionDenied, match=r"^/dev/kmsg: not permitted \(dmesg_restrict=1\)$"):
        KernelReader(ReaderOptions(proc=str(tmp_path)))


def test_the_real_log_is_read_from_its_beginning_without_waiting() -> None:
    try:
        reader = KernelReader(ReaderOptions())
    except (NotInstalled, PermissionDenied) as error:
        pytest.skip(str(error))
    try:
        reader.read()
        reader.read()
    finally:
        reader.close()
