"""The simulated machines and processes of scenarios.

Detectors observe an event as they would on a real cluster.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.benchmarks.scenarios.format import Scenario
from rrl.benchmarks.scenarios.hardware import UPTIME
from rrl.benchmarks.scenarios.load import ScenarioError, load, load_all
from rrl.benchmarks.scenarios.methods import OURS, judge_of
from rrl.benchmarks.scenarios.ours import RrlDetectors
from rrl.benchmarks.scenarios.play import Played, play
from rrl.benchmarks.scenarios.rhythms import roles_of
from rrl.core.types import NodeName
from rrl.health.readers.samples import FabricData, HostData, KernelData, NvmlData, Reading

CRASH = '[[event]]\nat = "5min"\ndo = "crash"\nwho = "rollout/1"\nname = "first"\n'
TRUTH = '[[truth]]\nwho = "rollout/1"\ncause = "process"\nwithin = "30s"\nof = "first"\n'


def scenario(tmp_path: Path, text: str) -> Scenario:
    file = tmp_path / "one.toml"
    file.write_text(f'about = "x"\nlasts = "12min"\njitter = "0s"\n{text}')
    return load(file)


def event(do: str, more: str = "", at: str = "5min", who: str = "n4") -> str:
    return f'[[event]]\nat = "{at}"\ndo = "{do}"\nwho = "{who}"\n{more}\n'


class Listening(RrlDetectors):
    """Detectors that also record every sample of a node, and the GPUs of each replica."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.readings: list[tuple[str, Reading]] = []
        self.had: list[tuple[str, list[str]]] = []

    def reading(self, node: NodeName, reading: Reading, now: float) -> None:
        self.readings.append((node, reading))
        super().reading(node, reading, now)

    def gpus(self, incarnation: object, node: NodeName, uuids: list[str]) -> None:
        self.had.append((incarnation.replica, uuids))  # type: ignore[attr-defined]
        super().gpus(incarnation, node, uuids)  # type: ignore[arg-type]


def readings(tmp_path: Path, text: str) -> Listening:
    reported = scenario(tmp_path, text)
    judge = Listening(reported)
    play("one", reported, 0, judge)
    return judge


def played(tmp_path: Path, text: str) -> Played:
    reported = scenario(tmp_path, text)
    return play("one", reported, 0, judge_of(OURS, reported))


def data(judge: Listening, kind: type, node: str = "n4") -> list[object]:
    return [one.data for where, one in judge.readings if where == node and isinstance(one.data, kind)]


# ── readings ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_node_has_local_and_shared_file_systems(tmp_path: Path) -> None:
    *_, host = data(readings(tmp_path, event("mount", 'path = "/local/x"\nset = {used = 0.5}')), HostData)
    assert isinstance(host, HostData)
    assert {one.path: one.filesystem for one in host.mounts} == {
        "/": "xfs",
        "/tmp": "xfs",
        "/dev/shm": "tmpfs",
        "/home": "nfs4",
        "/scratch": "lustre",
        "/local/x": "xfs",
    }


@pytest.mark.parametrize(("by", "kernel", "nvml"), [("", 1, 1), ('by = ["kernel"]', 1, 0), ('by = ["nvml"]', 0, 1)])
def test_xid_is_reported_by_the_kernel_log_and_by_nvml(tmp_path: Path, by: str, kernel: int, nvml: int) -> None:
    judge = readings(tmp_path, event("xid", f"gpu = 2\nxid = 31\n{by}"))
    logged = [one for each in data(judge, KernelData) for one in each.events]  # type: ignore[attr-defined]
    events = [one for each in data(judge, NvmlData) for one in each.xids]  # type: ignore[attr-defined]
    assert ([one.xid for one in logged], [one.xid for one in events]) == ([31] * kernel, [31] * nvml)


def test_an_xid_is_found_where_the_kernel_log_may_not_be_read(tmp_path: Path) -> None:
    denied = event("reader", 'reader = "kernel"\nstate = "denied"', "0s", "n*")
    truth = '[[truth]]\nwho = "n4"\ncause = "gpu"\nof = "xid"\nwithin = "1min"\n'
    (one,) = played(tmp_path, denied + event("xid", "gpu = 2\nxid = 79") + truth).outcomes
    assert one.in_time


def test_nodes_have_a_long_uptime_and_old_lines_belong_to_their_boot(tmp_path: Path) -> None:
    line = 'text = "mlx5_core 0000:9a:00.0 ib4: Link down"'
    judge = readings(tmp_path, event("kernel", line, "0s") + event("kernel", line))
    reported = [
        (reading.at - one.age, one)
        for _, reading in judge.readings
        if isinstance(reading.data, KernelData)
        for one in reading.data.events
    ]
    assert [at for at, _ in reported] == pytest.approx([60.0, UPTIME + 300.0], abs=2.0)
    assert {(one.kind, one.device) for _, one in reported} == {("nic", "ib4")}


def test_kernel_log_line_may_have_any_age(tmp_path: Path) -> None:
    judge = readings(tmp_path, event("xid", 'xid = 31\nage = "2h"', "0s"))
    (line,) = [one for each in data(judge, KernelData) for one in each.events]  # type: ignore[attr-defined]
    assert line.age == pytest.approx(7200.0, abs=10.0)
    assert not any(each.xids for each in data(judge, NvmlData))  # type: ignore[attr-defined]


def test_gpus_and_hcas_can_vanish_and_fields_of_an_old_driver_are_unread(tmp_path: Path) -> None:
    judge = readings(
        tmp_path,
        event("gpu_gone", 'gpu = [0, 3]\nfor = "1min"')
        + event("hca_gone", 'port = "mlx5_2/1"', who="n5")
        + event("gpu", 'gpu = "*"\nunread = ["recovery_action"]', "1min")
        + event("gpu", "gpu = 1\nlink = 7\ngrow = {crc_data = 10.0}", "1min", "n3"),
    )
    counts = {len(each.gpus) for each in data(judge, NvmlData)}  # type: ignore[attr-defined]
    ports = {len(each.ports) for each in data(judge, FabricData, "n5")}  # type: ignore[attr-defined]
    assert (counts, ports) == ({8, 6}, {8, 7})
    *_, last = data(judge, NvmlData)
    assert isinstance(last, NvmlData)
    assert {one.recovery_action for one in last.gpus} == {None}
    assert last.gpus[0].unread["recovery_action"] == "not supported"
    *_, other = data(judge, NvmlData, "n3")
    assert isinstance(other, NvmlData)
    assert [one.link for one in other.gpus[1].nvlinks or () if one.crc_data] == [7]


def test_expectations_of_the_site_are_checked(tmp_path: Path) -> None:
    truth = '[[truth]]\nwho = "n4"\ncause = "software"\nverdict = "WARN"\nat = "0s"\n'
    assert played(tmp_path, f'[expect]\ndriver = "999"\n{truth}').outcomes[0].in_time


def test_node_is_sampled_at_full_rate_from_an_event_that_follows_another(tmp_path: Path) -> None:
    slow = event("mount", "set = {used = 0.5}", at="1min", who="n6")
    down = event("port", 'set = {state = "DOWN"}\nafter = "mount"', at="380s")
    judge = readings(tmp_path, slow + down)
    first = next(reading.at - UPTIME for node, reading in judge.readings if node == "n4" and _has_a_port_down(reading))
    assert 439.0 <= first <= 446.0


def _has_a_port_down(reading: Reading) -> bool:
    return isinstance(reading.data, FabricData) and any(port.state == "DOWN" for port in reading.data.ports)


# ── GPUs and defaults of roles ───────────────────────────────────────────────────────────────────────────────────────
def test_two_rollouts_on_one_node_have_different_gpus(tmp_path: Path) -> None:
    judge = readings(tmp_path, '[roles.rollout]\nreplicas = 2\ngpus = 4\non = ["n3", "n3"]\n')
    had = dict(judge.had)
    assert had["rollout/0"] == [f"GPU-n3-{n}" for n in range(4)]
    assert had["rollout/1"] == [f"GPU-n3-{n}" for n in range(4, 8)]


def test_foreign_process_on_spare_gpus_is_reported_before_a_role_starts(tmp_path: Path) -> None:
    taken = event("gpu", "set = {memory_used = 64424509440}", "0s", "n6")
    truth = '[[truth]]\nwho = "n6"\ncause = "user"\nverdict = "WARN"\nwithin = "1min"\n'
    assert played(tmp_path, taken + truth).outcomes[0].in_time
    assert played(tmp_path, "").false == ()


def test_a_role_keeps_its_default_replicas_where_another_key_is_given(tmp_path: Path) -> None:
    own = '[roles.sandbox]\ngpus = 1\n[[roles.sandbox.rhythm]]\nphase = "runs"\nlasts = "9s"\n'
    roles = roles_of(scenario(tmp_path, f"[roles.rollout]\ngpus = 4\n{own}"))
    assert (roles["rollout"].replicas, roles["sandbox"].replicas) == (3, 1)


def test_a_role_keeps_its_default_first_phases_where_a_rhythm_is_given(tmp_path: Path) -> None:
    rhythm = '[[roles.trainer.rhythm]]\nphase = "train"\nlasts = "9s"\n'
    given, removed = (roles_of(scenario(tmp_path, text + rhythm)) for text in ("", "[roles.trainer]\nonce = []\n"))
    assert [phase.phase for phase in given["trainer"].once or ()] == ["checkpoint", "publish"]
    assert removed["trainer"].once == ()


# ── incarnations ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_failure_due_while_the_next_incarnation_starts_waits_for_it(tmp_path: Path) -> None:
    second = event("crash", 'name = "second"\nafter = "first"', "2s", "rollout/1")
    reported = played(tmp_path, CRASH + second + TRUTH + TRUTH.replace("first", "second"))
    assert [one.in_time for one in reported.outcomes] == [True, True]
    assert reported.false == ()


def test_effects_of_a_failure_end_with_the_repaired_incarnation(tmp_path: Path) -> None:
    reported = played(tmp_path, CRASH + event("exit", 'after = "first"', "2s", "rollout/1") + TRUTH)
    assert (len(reported.outcomes), reported.false, reported.broken) == (1, (), "")


def test_node_that_dies_without_a_manager_is_found_by_the_next_manager(tmp_path: Path) -> None:
    away = '[[event]]\nat = "5min"\ndo = "manager_restart"\nfor = "60s"\nname = "away"\n'
    dies = event("node_dies", 'down_after = "never"\nafter = "away"', "20s", "@rollout/1")
    truth = '[[truth]]\nwho = "@rollout/1"\nor = "rollout/1"\nof = "node_dies"\ncause = "node"\nwithin = "4min"\n'
    assert played(tmp_path, away + dies + truth).outcomes[0].in_time


# ── expected findings ────────────────────────────────────────────────────────────────────────────────────────────────
DISK = event("mount", 'path = "/scratch"\nset = {used = 0.9}')


def test_warning_that_exists_when_its_truth_begins_counts_as_found(tmp_path: Path) -> None:
    truth = '[[truth]]\nwho = "n4"\ncause = "storage"\nverdict = "WARN"\nat = "8min"\nwithin = "10s"\n'
    (one,) = played(tmp_path, DISK + truth).outcomes
    assert (one.in_time, one.found_at) == (True, one.since)


def test_failing_a_node_where_a_warning_suffices_is_a_false_alarm(tmp_path: Path) -> None:
    lost = event("gpu_lost", "gpu = 1")
    truth = '[[truth]]\nwho = "n4"\ncause = "gpu"\nverdict = "WARN"\nwithin = "3min"\n'
    assert played(tmp_path, lost + truth).false == ()
    assert [one.who for one in played(tmp_path, lost + truth + 'never = "fail"\n').false] == ["n4"]


def test_an_exact_truth_is_found_by_the_rank_that_it_names(tmp_path: Path) -> None:
    gang = "[roles.trainer]\nranks = 2\n"
    crash = event("crash", "", "5min", "trainer/0.1")
    truth = '[[truth]]\nwho = "{}"\ncause = "process"\nwithin = "1min"\nexact = true\n'
    assert played(tmp_path, gang + crash + truth.format("trainer/0.1")).outcomes[0].in_time
    assert not played(tmp_path, gang + crash + truth.format("trainer/0")).outcomes[0].in_time


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("text", "expected_text"),
    [
        (
            CRASH + CRASH.replace("first", "other") + TRUTH.replace('of = "first"\n', ""),
            "one.toml:14: truth.0.of: is needed if there is not exactly one event",
        ),
        (CRASH + TRUTH.replace("first", "nope"), "truth.0.of: there is no event nope"),
        (CRASH + CRASH + TRUTH, "truth.0.of: several events are called first"),
        (event("gpu", 'gpu = 1\nset = {remap_failed = "yes"}'), 'remap_failed must be true or false, not "yes"'),
        (event("gpu", "gpu = 1.5\nset = {remap_failed = true}"), "event.0.gpu: must be a number of a GPU"),
        (event("gpu", "gpu = [1, 8]\nset = {remap_failed = true}"), "nodes of this scenario have 8 GPUs"),
        (event("gpu", 'set = {clock_reasons = ["hw_powerbrake"]}'), 'did you mean "hw_power_brake"?'),
        (event("gpu", 'set = {recovery_action = "reset"}'), 'did you mean "gpu_reset"?'),
        (event("gpu", 'set = {fabric_state = "done"}'), "fabric_state cannot be done"),
        (event("dcgm", 'incident = "NVLINK_DWN"'), 'did you mean "NVLINK_DOWN"?'),
        (event("mount", "set = {used = 97}"), "used is a share, from 0 to 1, not 97"),
        (event("port", "set = {symbol_error = 200}"), "grow = {symbol_error = 2.0}"),
        (event("hang", "for = 30", "5min", "rollout/1"), 'a duration needs a unit; write for example "30s"'),
        (
            event("stretch", 'for = "3min"', "5min", "trainer/0.1") + "[roles.trainer]\nranks = 2\n",
            "stretch affects a whole gang: write trainer/0",
        ),
        (event("xid", 'xid = 31\nage = "2h"'), "event.0.age: is only for lines that are in the log from the beginning"),
        ('[roles.rollout]\nrhythm = ["generate"]\n', "roles.rollout.rhythm.0: must be a table"),
        ("[expect]\ngpu = 8\n", "what can be expected of a node"),
        ("[roles.store]\nstarts = '9s'\n", 'roles.store: there is no default role store; did you mean "trajectories"?'),
        ("[roles.trainers]\ngpus = 4\n", 'there is no default role trainers; did you mean "trainer"?'),
        ("[roles.sandbox]\ngpus = 4\n", "one of your own needs [[roles.sandbox.rhythm]]"),
        ("[phases.generat]\nlongest = '9s'\n", 'phases.generat: no role has a phase generat; did you mean "generate"?'),
        (event("kernel", 'text = "mlx5_core: the link has gone"'), "event.0.text: rrl's reader of the kernel log"),
        (event("kernel"), "event.0.do: rrl's reader of the kernel log ignores a line without text"),
        (event("kernel", 'text = "NVRM: Xid (PCI:0000:1b:00): 79, x"'), 'do = "xid", xid = 79'),
        (event("port", 'set = {state = "Down"}'), 'state cannot be Down; did you mean "DOWN"?'),
        (event("port", 'set = {physical = "linkup"}'), 'physical cannot be linkup; did you mean "LinkUp"?'),
        (event("gpu", 'set = {fabric_state = "done"}'), "it can be "),
        (CRASH + CRASH + event("cut", 'after = "first"'), "event.2.after: several events are called first"),
        (
            event("cut", 'name = "a"\nafter = "b"') + event("cut", 'name = "b"\nafter = "a"'),
            "event.0.after: a, b wait for each other, so none of them occurs",
        ),
    ],
)
def test_mistake_is_one_line_with_its_place_and_a_correct_form(tmp_path: Path, text: str, expected_text: str) -> None:
    with pytest.raises(ScenarioError) as error:
        scenario(tmp_path, text)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{tmp_path}/one.toml:")
    assert expected_text in line


def test_events_that_would_come_after_the_end_with_every_seed_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "one.toml"
    file.write_text('about = "x"\nlasts = "5min"\njitter = "10min"\n')
    with pytest.raises(ScenarioError, match=r"one\.toml:3: jitter: is as long as the scenario"):
        load(file)


def test_single_file_can_be_played(tmp_path: Path) -> None:
    scenario(tmp_path, "")
    assert list(load_all(tmp_path / "one.toml")) == ["one"]


def test_both_spellings_of_gpu_use_are_accepted(tmp_path: Path) -> None:
    reported = scenario(
        tmp_path,
        event("quiet", 'gpu = 0.9\nfor = "1min"', "5min", "rollout/1")
        + '[[roles.rollout.rhythm]]\nphase = "generate"\nlasts = "90s"\nrate = 9.0\ngpu_use = 0.8\n',
    )
    assert (reported.event[0].gpu_use, reported.roles["rollout"].rhythm[0].gpu) == (0.9, 0.8)
