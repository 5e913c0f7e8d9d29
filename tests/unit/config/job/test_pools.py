"""Rollout pools and tags of job.toml: what a pool takes from [roles.rollout], its nodes, and its mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl.config.job.document import JobDocument, parse_setting
from rrl.config.job.load import SpecError, job_from
from rrl.config.job.render import as_toml, merged_toml
from rrl.config.job.resolve import resolve
from rrl.config.job.schema import Job
from rrl.core.run_spec import NodeGroup, RunSpec, TagsSpec
from rrl.core.types import Resources

SLURM = """\
[run]
name = "pools"
steps = 10
[cluster]
kind = "slurm"
walltime = "4h"
[task]
dataset = "chain_sum"
[model.tokenizer]
pieces = "0123456789+= "
"""
LINES = SLURM.count("\n")
LOCAL = SLURM.replace('kind = "slurm"', 'kind = "local"')
NO_TASK = '[run]\nname = "x"\n[commands.judge]\ncommand = ["judge"]\n'
BURST = "[rollouts.burst]\nreplicas = { min = 0, max = 4 }\nnode_hours = 3\n"


def load(text: str, *options: str) -> Job:
    return job_from(JobDocument((text,), [parse_setting(one) for one in options]), Path("/job"))


def spec(text: str, *options: str) -> RunSpec:
    return resolve(load(text, *options), "python")


def test_pool_takes_what_it_does_not_give_from_the_first_pool_and_merges_its_tables() -> None:
    made = spec(
        SLURM
        + """
[slurm]
account = "a"
[roles.rollout]
replicas = 4
cpus = 2
mem = "8GiB"
exclusive = false
lease = 32
engine = "vllm"
vllm = { max_num_seqs = 64, gpu_memory_utilization = 0.8 }
env = { A = "1", B = "2" }
[cluster.node]
mem = "16GiB"
[rollouts.h20]
replicas = 2
gpus = 8
vllm = { tensor_parallel_size = 8, gpu_memory_utilization = 0.9 }
env = { B = "3" }
slurm = { partition = "h20" }
"""
    )
    pool = made.role("h20")
    assert (pool.kind, pool.replicas, pool.min_replicas, pool.max_replicas) == ("rollout", 2, 0, None)
    assert (pool.per_member, pool.exclusive, pool.env) == (Resources(2, 8, 8 * 2**30), True, {"A": "1", "B": "3"})
    assert made.rollouts["h20"].lease == 32
    assert made.rollouts["h20"].vllm == {"max_num_seqs": 64, "gpu_memory_utilization": 0.9, "tensor_parallel_size": 8}
    assert made.rollouts["rollout"].vllm == {"max_num_seqs": 64, "gpu_memory_utilization": 0.8}
    assert (made.role("rollout").min_replicas, pool.table, made.role("rollout").table) == (
        0,
        "rollouts.h20",
        "roles.rollout",
    )
    options = {"exclusive": "", "account": "a", "partition": "h20"}
    assert made.node_group_of("h20") == NodeGroup(
        "h20", ("h20",), 2, Resources(2, 8, 8 * 2**30), 14400.0, options, True, dedicated=True
    )
    assert made.node_groups[-1].name == "h20"
    assert "h20" not in made.node_groups[0].roles


@pytest.mark.parametrize("form", ["pool", "replica", "hetjob"])
def test_nodes_of_a_further_pool_are_jobs_of_their_own_in_every_form(form: str) -> None:
    one_node = "one_node_components = true\n" if form == "hetjob" else ""
    cluster = f'kind = "slurm"\nform = "{form}"\n{one_node}'
    made = spec(SLURM.replace('kind = "slurm"\n', cluster) + BURST + 'walltime = "2h"\n')
    burst = made.node_groups[-1]
    assert (burst.name, burst.nodes, burst.min_nodes, burst.walltime) == ("burst", 0, 0, 7200.0)
    assert burst.separate_jobs
    assert burst.dedicated
    assert not any(group.dedicated for group in made.node_groups[:-1])
    role = made.role("burst")
    assert (role.replicas, role.max_replicas, role.node_seconds) == (0, 4, 10800.0)


def test_elastic_pool_works_on_the_local_cluster_whose_spares_do_not_generate_by_default() -> None:
    made = spec(LOCAL + BURST)
    assert made.role("burst").is_elastic
    assert made.tags == TagsSpec(spare=("train",), rollout=("train",))
    assert spec(SLURM).tags == TagsSpec(spare=("rollout", "train"), rollout=("train",))
    assert spec(LOCAL + '[tags]\nspare = ["rollout"]\nrollout = []\n').tags == TagsSpec(("rollout",), ())
    assert spec(SLURM.replace("[cluster]", '[cluster]\nform = "replica"')).tags.spare == ("train",)


def test_pool_with_another_engine_does_not_take_the_arguments_of_vllm() -> None:
    base = '[roles.rollout]\nengine = "vllm"\nvllm = { max_num_seqs = 8 }\n'
    made = spec(SLURM + base + '[rollouts.a]\nengine = "torch"\n[rollouts.b]\nengine = "mine:Engine"\n[rollouts.c]\n')
    assert {name: one.vllm for name, one in made.rollouts.items()} == {
        "rollout": {"max_num_seqs": 8},
        "a": {},
        "b": {},
        "c": {"max_num_seqs": 8},
    }


def test_first_pool_may_hold_only_the_keys_of_the_others() -> None:
    keys = '[roles.rollout]\nreplicas = 0\nengine = "vllm"\ngpus = 8\n'
    pools = "[rollouts.a]\nvllm = { tensor_parallel_size = 8 }\n[rollouts.b]\ngpus = 2\nvllm.tensor_parallel_size = 2\n"
    made = spec(SLURM + keys + pools)
    assert {role.name: (role.replicas, role.per_member.gpus) for role in made.kind("rollout")} == {
        "rollout": (0, 8),
        "a": (1, 8),
        "b": (1, 2),
    }


@pytest.mark.parametrize(
    ("option", "bounds"),
    [
        ("rollouts.burst.replicas.max=8", (0, 8)),
        ("rollouts.burst.replicas={min=2,max=9}", (2, 9)),
        ("rollouts.more.replicas=3", (0, 4)),
    ],
)
def test_settings_change_the_bounds_of_a_pool(option: str, bounds: tuple[int, int]) -> None:
    role = spec(SLURM + BURST, option).role("burst")
    assert (role.replicas, role.max_replicas) == bounds


def test_number_of_an_elastic_pool_can_be_set_without_its_budget() -> None:
    text = SLURM + BURST.replace("node_hours = 3\n", "")
    assert (spec(text, "rollouts.burst.replicas=3").role("burst").is_elastic) is False


HAS_NO_EFFECT = "has no effect on a fixed number of replicas; remove this key, or write replicas = { min = 0, max ="
FAULT = '[[faults.planned]]\nkind = "kill"\ntarget = "%s"\nat = "step=5"\n'
PHASE = '[phases."mine"]\nprogresses = false\nlongest = "1h"\nwaits_for = "%s"\n'
POOL = "[rollouts.a]\n"


@pytest.mark.parametrize(
    ("text", "line", "complaint"),
    [
        # the number of replicas
        ("[rollouts.a]\nreplicas = 0\n", 2, "rollouts.a.replicas: must be at least 1 or a table, not 0"),
        ('[rollouts.a]\nreplicas = "4"\n', 2, 'rollouts.a.replicas: must be a whole number or a table, not "4"'),
        (
            "[rollouts.a]\nreplicas = { mn = 0, max = 4 }\n",
            2,
            'rollouts.a.replicas.mn: unknown key; did you mean "min"?',
        ),
        ("[rollouts.a]\nreplicas = { min = -1, max = 4 }\n", 2, "rollouts.a.replicas.min: must be at least 0, not -1"),
        (
            "[rollouts.a]\nreplicas = { min = 2 }\n",
            2,
            "rollouts.a.replicas.max: missing; add max = ... in [rollouts.a.replicas] (most replicas; the run requests"
            " and releases nodes between the two)",
        ),
        (
            "[rollouts.a]\nreplicas = { min = 4, max = 2 }\nnode_hours = 1\n",
            2,
            "rollouts.a.replicas: min = 4 is more than max = 2; lower min, or raise max",
        ),
        (
            "[rollouts.a]\nreplicas = { max = 2 }\n",
            1,
            "rollouts.a.node_hours: missing; an elastic pool needs a budget: node_hours = ... (node hours over the"
            " whole run)",
        ),
        ("[rollouts.a]\nreplicas = 2\nnode_hours = 1\n", 3, f"rollouts.a.node_hours: {HAS_NO_EFFECT} 2 }}"),
        ('[rollouts.a]\nwalltime = "1h"\n', 2, f"rollouts.a.walltime: {HAS_NO_EFFECT} 1 }}"),
        (
            BURST + 'walltime = "5h"\n',
            4,
            'rollouts.burst.walltime: "5h" is more than [cluster] walltime = "4h"; lower it or raise the walltime of'
            " the run",
        ),
        (
            BURST + BURST.replace("burst", "more"),
            5,
            "rollouts.more.replicas: a run has one elastic pool, and [rollouts.burst] is elastic; write a number",
        ),
        (
            BURST + 'ranks = 2\ncommand = ["mine"]\n',
            4,
            "rollouts.burst.ranks: a replica of an elastic pool has one node; write ranks_per_node = 2, or a number of"
            " replicas",
        ),
        (
            POOL + "ranks = 2\n",
            2,
            "rollouts.a.ranks: the built-in a is one process; write replicas = ..., or set a command that supports"
            " ranks",
        ),
        (
            "[roles.rollout]\nreplicas = 0\n",
            2,
            "roles.rollout.replicas: no rollout would generate; write at least 1, add a pool [rollouts.NAME], or let"
            ' the trainer\'s nodes generate: trainer = ["rollout"] in [tags]',
        ),
        # the nodes
        (
            POOL + "min_replicas = 1\n",
            2,
            "rollouts.a.min_replicas: a run neither waits for a further pool nor ends without it; remove this key",
        ),
        (
            POOL + "exclusive = false\n",
            2,
            "rollouts.a.exclusive: the nodes of a further pool host nothing else; remove this key",
        ),
        # names
        (
            "[rollouts.trainer]\nreplicas = 2\n",
            1,
            "rollouts: 'trainer' is reserved by rrl; choose another name for your role",
        ),
        (
            "[rollouts.pool]\nreplicas = 2\n",
            1,
            "rollouts: 'pool' is reserved by rrl; choose another name for your role",
        ),
        (
            '[rollouts.x]\n[commands.x]\ncommand = ["y"]\n',
            1,
            "rollouts.x: there is a role [commands.x], too; choose another name for the pool",
        ),
        # what a pool shares with [roles.rollout]
        (
            POOL + 'engine = "vlm"\n',
            2,
            'rollouts.a.engine: "vlm" is no engine of rrl; write "torch", "vllm", or "module:function" of your own',
        ),
        (
            POOL + 'engine = "vllm"\nvllm = { model = "x" }\n',
            3,
            "rollouts.a.vllm.model: cannot be set: rrl sets it from [model]; remove this key",
        ),
        (
            POOL + 'engine = "vllm"\ngpus = 8\n',
            3,
            "rollouts.a.gpus: vLLM would compute on 1 of the GPUs of each replica, but gpus = 8; make"
            " tensor_parallel_size and gpus the same number",
        ),
        (
            POOL + 'launcher = "apptainer"\n',
            2,
            'rollouts.a.launcher: "apptainer" needs an image; set [container] image',
        ),
        # tags
        (
            '[tags]\nrollout = ["rollout"]\n',
            2,
            'tags.rollout: "rollout" has no effect: every node has the tag of its own role; remove it',
        ),
        (
            '[tags]\nspare = ["rolout"]\n',
            2,
            'tags.spare[0]: must be "rollout" or "train", not "rolout"; did you mean "rollout"?',
        ),
        ('[tags]\nrollout = ["trian"]\n', 2, 'tags.rollout[0]: must be "train", not "trian"; did you mean "train"?'),
        ('[tags]\nspares = ["train"]\n', 2, 'tags.spares: unknown key; did you mean "spare"?'),
        ('[tags]\nspare = "train"\n', 2, 'tags.spare: must be a list, as in ["a", "b"], not "train"'),
        # who names a pool
        (PHASE % "b", 4, 'phases.mine.waits_for: no role "b"; there are trajectories, reward, trainer, rollout'),
        (POOL + PHASE % "a", 5, 'phases.mine.waits_for: a role waits for the rollouts of any pool; write "rollout"'),
        (
            BURST + FAULT % "burst/4",
            6,
            'faults.planned[0].target: no replica "burst/4"; role burst has 4, the last is "burst/3"',
        ),
        (
            "[roles.rollout]\nreplicas = 0\n" + POOL + FAULT % "rollout/0",
            6,
            "faults.planned[0].target: role rollout has no replicas",
        ),
    ],
)
def test_mistake_in_a_pool_is_one_line(text: str, line: int, complaint: str) -> None:
    with pytest.raises(SpecError) as raised:
        load(SLURM + text)
    assert str(raised.value) == f"job:{LINES + line}: {complaint}"


def test_fault_of_an_elastic_pool_hits_one_of_the_replicas_that_it_may_have() -> None:
    (fault,) = spec(SLURM + BURST + FAULT % "burst").faults
    assert fault.target in {f"burst/{index}" for index in range(4)}


@pytest.mark.parametrize(
    ("base", "text", "line", "complaint"),
    [
        (LOCAL, '[rollouts.a]\nslurm = { partition = "x" }\n', LINES + 2, "rollouts.a.slurm"),
        (LOCAL, BURST + 'walltime = "1h"\n', LINES + 4, "rollouts.burst.walltime"),
    ],
)
def test_options_of_slurm_have_no_effect_on_the_local_cluster(base: str, text: str, line: int, complaint: str) -> None:
    with pytest.raises(SpecError) as raised:
        load(base + text)
    assert str(raised.value) == f'job:{line}: {complaint}: has no effect with [cluster] kind = "local"; remove this key'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (NO_TASK + "[rollouts.a]\n", "job:5: rollouts.a: needs a [task]; remove this table"),
        (
            NO_TASK + "[tags]\nrollout = []\n",
            "job:5: tags: are of rollouts and the trainer, but there is no [task]; remove this table",
        ),
        (
            SLURM.replace("[cluster]", '[cluster]\nform = "replica"') + '[tags]\nspare = ["rollout"]\n',
            'job:13: tags.spare: "rollout" has no effect: form = "replica" has no spare nodes; remove this key',
        ),
        (
            SLURM.replace("[cluster]", '[cluster]\nform = "hetjob"') + "[roles.rollout]\nreplicas = 0\n" + POOL,
            'job:13: roles.rollout.replicas: form = "hetjob" needs a component of rollouts; write at least 1, or form ='
            ' "replica" in [cluster]',
        ),
    ],
)
def test_pools_and_tags_need_what_they_are_of(text: str, complaint: str) -> None:
    with pytest.raises(SpecError) as raised:
        load(text)
    assert str(raised.value) == complaint


def test_wrong_setting_of_a_pool_names_the_setting() -> None:
    for option, complaint in (
        ("rollouts.burst.replicas.mx=3", 'unknown key; did you mean "max"?'),
        ("rollouts.burst.replicas.max=abc", 'must be a whole number, not "abc"'),
    ):
        with pytest.raises(SpecError) as raised:
            load(SLURM + BURST, option)
        assert str(raised.value) == f"--set {option}: {complaint}"


_OPTIONS = {
    "cpus": st.integers(1, 4),
    "mem": st.sampled_from(["1GiB", "2GiB"]),
    "lease": st.integers(1, 99),
    "env": st.dictionaries(
        st.sampled_from(["A", "B"]), st.text(st.characters(codec="ascii", exclude_categories=["Cc"]))
    ),
    "slurm": st.dictionaries(st.sampled_from(["partition", "qos"]), st.sampled_from(["x", "y"])),
    "command": st.just(["mine"]),
}
_POOL = st.fixed_dictionaries({"replicas": st.integers(1, 9)}, optional=_OPTIONS)
_ELASTIC = st.fixed_dictionaries(
    {
        "replicas": st.builds(
            lambda least, more: {"min": least, "max": least + more}, st.integers(0, 3), st.integers(1, 3)
        )
    },
    optional=_OPTIONS | {"walltime": st.just("1h")},
).map(lambda table: table | {"node_hours": 0.5})


@settings(deadline=None)
@given(st.fixed_dictionaries({}, optional=_OPTIONS), st.lists(_POOL, max_size=2), st.none() | _ELASTIC)
def test_job_with_pools_is_written_and_read_again(
    base: dict[str, Any], pools: list[dict[str, Any]], elastic: dict[str, Any] | None
) -> None:
    tables = {f"p{number}": pool for number, pool in enumerate(pools)} | ({"e": elastic} if elastic else {})
    text = SLURM.replace("[cluster]", '[cluster]\nform = "replica"')
    before = load(text + merged_toml({"roles": {"rollout": base}, "rollouts": tables}))
    after = load(as_toml(before))
    assert (resolve(after, "python"), as_toml(after)) == (resolve(before, "python"), as_toml(before))


def test_job_without_a_task_is_written_without_tags() -> None:
    before = load(NO_TASK)
    assert resolve(load(as_toml(before)), "python") == resolve(before, "python")


@pytest.mark.parametrize(
    ("tables", "varies"),
    [("", False), ("[rollouts.fast]\n", True), (BURST, True), ('[tags]\nspare = ["rollout"]\n', True)],
)
def test_work_ahead_may_rise_only_where_the_number_of_rollouts_varies(tables: str, varies: bool) -> None:
    assert spec(LOCAL + tables).fleet_varies is varies
