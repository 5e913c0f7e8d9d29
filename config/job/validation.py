"""Check the rules that concern several keys of job.toml; each mistake is reported at the key to change."""

from __future__ import annotations

import difflib
import json
import math

from ...cluster.traits import CLUSTERS
from ...core.faults import (
    FAULT_TRAITS,
    FaultKind,
    FaultProblem,
    InvalidFault,
    TargetKind,
    parse_trigger,
    validate_fault,
)
from ...core.phases import PHASES
from ...core.role_environment import RENDEZVOUS_VARIABLES
from ...core.run_spec import MAX_SEGMENT_EXTRAS
from ...core.units import duration_text, size_text
from ..import_paths import ENGINES
from ..model_folder import BUILT_MAX_LENGTH, SHAPE_KEYS
from .base import mistake
from .resolve import node_groups
from .roles import AgentsRole, CommandRole, ReplicaRange, Role, RolloutPool, TrainerRole, TrajectoriesRole
from .schema import Job, PhaseTable, SamplingTable
from .task_rules import check_held_out, check_task
from .trainer_rules import check_trainer

MAX_BATCH_BYTES = 256 * 2**20
"""Maximum size of a batch in bytes, since a batch is one message
(:data:`rrl.transport.control.sockets.CONTROL_BOUNDS`)."""
_PROMPTS_BYTES = 32 * 2**20
"""Bytes of a batch that are reserved for its prompts (one per group, 4 bytes per token), because the lengths of the
prompts are not known yet."""
_TOKEN_BYTES = 8
"""Bytes of a sampled token: its id and its log-probability."""
_TRAJECTORY_BYTES = 1024
"""Further bytes of a trajectory: its score, and the weight versions that sampled it, 16 bytes each."""
_ENDPOINT_SETTINGS = {"replicas", "foreign", "constraints", "untrained"}
"""Keys of [roles.endpoint] that also apply to the agents of the run."""


def check(job: Job) -> None:
    """Check the rules between the tables of a job. Each table must already be valid.

    Raises:
        PydanticCustomError: The first mistake, with the key at which it is reported.
    """
    _work(job)
    _pools(job)
    if job.task is not None:
        check_task(job.task, ("task",))
    _eval(job)
    _model(job)
    check_trainer(job)
    _late(job)
    _ahead(job)
    _refill(job.sampling)
    _extras(job)
    _batch(job)
    _form(job)
    _agents(job)
    _endpoint(job)
    for name, phase in job.phases.items():
        _phase(job, name, phase)
    for name, role in job.every_role().items():
        _gang(job.table_of(name), role)
        _role(job, name, role)
    _passed(job)
    _notify(job)
    _engine(job)
    _faults(job)
    _track(job)


_SET_BY_JOIN = "rrl.join() sets this variable for each incarnation of a replica"


def _passed(job: Job) -> None:
    """Reject variables of the submitting shell that would say where the ranks of a replica meet."""
    for place, variable in enumerate(job.env.passed):
        if variable in RENDEZVOUS_VARIABLES:
            raise mistake(("env", "passed", place), f'"{variable}": {_SET_BY_JOIN}; remove it')


def _work(job: Job) -> None:
    """Check that the run has something to do, and that the built-in roles have what they need."""
    if job.task is None:
        if not job.commands:
            raise mistake(
                ("run",), "has nothing to do: add a [task] for the trainer and the rollouts, or a [commands.NAME]"
            )
        built_in = [name for name in type(job.roles).model_fields if name in job.roles.model_fields_set]
        if built_in:
            raise mistake(("roles", built_in[0]), "needs a [task]; a role of your own goes under [commands.NAME]")
        if all(role.service for role in job.commands.values()):
            raise mistake(("commands",), "are all services: the run would never end; set service = false for one")
        if job.run.steps is not None:
            raise mistake(("run", "steps"), "counts the trainer's steps, but there is no [task]; remove this key")
        return
    if job.run.steps is None:
        raise mistake(("run", "steps"), "missing; add steps = ... in [run] (optimizer steps of a complete run)")
    built_in = [name for name, role in job.roles.named().items() if role.program is None]
    if job.model is None and built_in:
        needs = f"the built-in role {built_in[0]} needs path in [model], or [model.tokenizer] with pieces"
        raise mistake(("model",), f"missing; {needs}; or set command in [roles.{built_in[0]}]")


def _eval(job: Job) -> None:
    """Check that the prompts of evaluations are held out, and that every answer can be sampled and scored."""
    evaluation = job.eval
    if evaluation is None:
        return
    if job.task is None:
        raise mistake(("eval",), "evaluates the trainer's steps, but there is no [task]; remove this table")
    if evaluation.task is None and job.task.dataset is None:
        source = "function" if job.task.function is not None else "file"
        raise mistake(
            ("eval", "task"),
            f"missing; the {source} of [task] is trained on: write a table [eval.task] with other prompts",
        )
    if evaluation.task is not None:
        check_held_out(evaluation.task, job.task)
    if evaluation.samples > 1 and not evaluation.temperature:
        raise mistake(
            ("eval", "samples"), "would all be equal at temperature = 0; write samples = 1, or a temperature above 0"
        )


def _model(job: Job) -> None:
    model = job.model
    if model is None:
        return
    if model.path is not None:
        conflicts = [key for key in (*SHAPE_KEYS, "tokenizer") if key in model.model_fields_set]
        if conflicts:
            source = "the model folder" if conflicts[0] == "tokenizer" else "config.json of the model folder"
            raise mistake(("model", conflicts[0]), f"comes from {source}; remove this key, or remove path")
    elif model.tokenizer is None:
        message = "missing; add a table [model.tokenizer] with pieces, or path in [model] to a Hugging Face folder"
        raise mistake(("model", "tokenizer"), message)
    elif model.chat:
        raise mistake(("model", "chat"), "needs path: a model that rrl builds has no chat template; remove this key")
    if model.tool_parser is not None and not model.chat:
        message = "needs the chat template of the model folder; write chat = true, or remove this key"
        raise mistake(("model", "tool_parser"), message)
    if model.heads % model.kv_heads:
        raise mistake(("model", "kv_heads"), f"{model.kv_heads} does not divide heads = {model.heads}; use a divisor")
    max_length = BUILT_MAX_LENGTH if model.max_length is None and model.path is None else model.max_length
    if max_length is not None and job.sampling.max_new_tokens >= max_length:
        raise mistake(
            ("sampling", "max_new_tokens"),
            f"{job.sampling.max_new_tokens} leaves no space for a prompt in [model] max_length ="
            f" {max_length}; lower it or raise max_length",
        )


def _agents(job: Job) -> None:
    """Check that the model has a chat template if agents use it, and that the program of the job's agents is valid."""
    agents, endpoint, model = job.roles.agents, job.roles.endpoint, job.model
    if agents is None and endpoint is None:
        return
    if agents is not None:
        _agent_program(agents)
    if model is None:
        raise mistake(("model",), "missing; agents need path in [model], or [model.tokenizer] with pieces and chat")
    if model.path is not None and not model.chat:
        raise mistake(("model", "chat"), "agents hold conversations, which need a chat template; write chat = true")
    if model.tokenizer is not None and model.tokenizer.chat is None:
        raise mistake(
            ("model", "tokenizer", "chat"),
            "missing; agents hold conversations: write a piece of text for each role, for example"
            ' chat = { user = "{content}=", assistant = "{content}" }',
        )
    if job.roles.trainer.warm_start_steps and job.roles.trainer.command is None:
        raise mistake(
            ("roles", "trainer", "warm_start_steps"),
            "trains on the task's answers to its prompts, which agents do not send; remove this key",
        )


def _agent_program(agents: AgentsRole) -> None:
    """Check that agents are given as a function or as a command."""
    at = ("roles", "agents")
    if agents.function is None and agents.command is None:
        raise mistake(at, 'needs function = "module:function" or command = ["program", "argument", ...]')
    if agents.function is not None and agents.command is not None:
        raise mistake((*at, "command"), "an agent is a function or a command; remove this key, or remove function")
    if agents.function is not None and "per" in agents.model_fields_set:
        raise mistake((*at, "per"), "has no effect without command; remove this key, or set command")
    if agents.failed_reward is not None and agents.per == "replica":
        problem = 'has no effect with per = "replica"; remove this key, and let the program finish such an episode'
        raise mistake((*at, "failed_reward"), problem)


def _endpoint(job: Job) -> None:
    """Check that every key of the endpoint has an effect, and that replicas on one machine do not share a port."""
    endpoint, at = job.roles.endpoint, ("roles", "endpoint")
    if endpoint is None:
        return
    if job.roles.agents is not None:
        for key in ("timeout", "retries", "reward_timeout"):
            if getattr(endpoint, key) is not None:
                raise mistake(
                    (*at, key), f"has no effect beside [roles.agents]; remove this key, or set {key} in [roles.agents]"
                )
    if not endpoint.replicas:
        if job.roles.agents is None:
            raise mistake((*at, "replicas"), "0 leaves no endpoint for agents; write 1 or more, or set [roles.agents]")
        for key in endpoint.model_fields_set - _ENDPOINT_SETTINGS:
            raise mistake((*at, key), "has no effect with replicas = 0; remove this key, or write replicas = 1")
    if endpoint.constraints == "enforce" and job.model is not None and job.model.path is None:
        raise mistake((*at, "constraints"), 'an engine needs the tokenizer of a folder to enforce; write "ask"')
    if endpoint.port and endpoint.replicas > 1 and (not endpoint.exclusive or job.cluster.traits.roles_run_here):
        raise mistake(
            (*at, "port"),
            f"{endpoint.replicas} replicas may share a machine, where only one of them can listen on port"
            f" {endpoint.port}; write port = 0, or replicas = 1",
        )


def _notify(job: Job) -> None:
    """Reject the notification ``stalled`` in a job that does not train, since only training steps show a stall."""
    notify = job.notify
    if notify is not None and job.task is None and "on" in notify.model_fields_set and "stalled" in notify.on:
        raise mistake(("notify", "on"), '"stalled" counts training steps, but there is no [task]; remove "stalled"')


def _late(job: Job) -> None:
    """Require a limit on staleness if ``late`` is set: without a limit no group is ever too old."""
    if job.sampling.staleness == "unlimited" and "late" in job.sampling.model_fields_set:
        raise mistake(
            ("sampling", "late"),
            'has no effect with staleness = "unlimited"; remove this key, or set staleness to a number',
        )


def _ahead(job: Job) -> None:
    """Reject ``ahead`` if ``staleness`` is 0, because working ahead yields tokens of older weights."""
    sampling = job.sampling
    if sampling.staleness == 0 and sampling.ahead > 0 and "ahead" in sampling.model_fields_set:
        raise mistake(
            ("sampling", "ahead"),
            "has no effect with staleness = 0, which lets no rollout work ahead; remove this key, or raise staleness",
        )


def _refill(sampling: SamplingTable) -> None:
    """Reject refilling where every group is without signal, and its limit where nothing is dropped."""
    if sampling.refill and sampling.group_size == 1:
        raise mistake(
            ("sampling", "refill"),
            "would drop every group, because the only answer of a group is compared with none; raise group_size, or"
            " remove this key",
        )
    if not sampling.refill and sampling.refill_limit != SamplingTable.model_fields["refill_limit"].default:
        raise mistake(("sampling", "refill_limit"), "has no effect without refill = true; remove this key, or add that")


def extras_bytes(sampling: SamplingTable) -> int:
    """Return the maximum bytes of the extras of a trajectory."""
    extras = sampling.extras.values()
    per_token = sum(extra.per_token or 0 for extra in extras)
    return per_token * sampling.max_new_tokens + sum(extra.per_trajectory or 0 for extra in extras)


def extras_of_step(sampling: SamplingTable) -> int:
    """Return the maximum bytes of the extras of a step."""
    return sampling.prompts_per_step * sampling.group_size * extras_bytes(sampling)


def _extras(job: Job) -> None:
    """Check that the rollouts can make and send the extras, and that those of a step are not too large."""
    sampling = job.sampling
    for name, extra in sampling.extras.items():
        for pool, rollout in job.rollout_roles().items():
            row = ENGINES.get(rollout.engine) if rollout.command is None else None
            if row is not None and name not in row.extras:
                makes = f"makes only {', '.join(row.extras)}" if row.extras else "makes none"
                table = ".".join(job.table_of(pool))
                raise mistake(
                    ("sampling", "extras", name),
                    f'[{table}] engine = "{rollout.engine}" {makes}; remove this table, or set an engine or a command'
                    " of your own that makes it",
                )
        if max(extra.per_token or 0, extra.per_trajectory or 0) > MAX_SEGMENT_EXTRAS:
            key = "per_token" if extra.per_trajectory is None else "per_trajectory"
            text = f"is more than {size_text(MAX_SEGMENT_EXTRAS)}, which fit into a message to the store; lower it"
            raise mistake(("sampling", "extras", name, key), text)
    answers = sampling.prompts_per_step * sampling.group_size
    if (size := extras_of_step(sampling)) > sampling.extras_limit:
        raise mistake(
            ("sampling", "extras_limit"),
            f"{answers} answers of {sampling.max_new_tokens} tokens have extras of up to {size / 2**20:.0f} MiB in a"
            f" step, more than {size_text(sampling.extras_limit)}; raise it if the store's node has the memory (rrl"
            " check then says how much), or lower prompts_per_step, group_size or max_new_tokens",
        )


def _batch(job: Job) -> None:
    """Check that a batch fits into one message from the store to the trainer; a larger batch would never arrive.

    With ``stream = true`` only a single group must fit, because the store sends parts of one group or more.
    """
    if job.task is None:
        return
    sampling = job.sampling
    groups = 1 if sampling.stream else sampling.prompts_per_step
    answer_bytes = _TOKEN_BYTES * sampling.max_new_tokens + _TRAJECTORY_BYTES + extras_bytes(sampling)
    max_bytes = groups * sampling.group_size * answer_bytes
    if max_bytes > MAX_BATCH_BYTES - _PROMPTS_BYTES:
        size = (
            f"of up to {math.ceil(max_bytes / 2**20)} MiB; the limit is {(MAX_BATCH_BYTES - _PROMPTS_BYTES) >> 20} MiB"
        )
        extras = " with their extras" if sampling.extras else ""
        answers = f"{sampling.group_size} answers of {sampling.max_new_tokens} tokens{extras}"
        if sampling.stream:
            raise mistake(
                ("sampling", "group_size"),
                f"a group of {answers} is a message {size}; lower group_size or max_new_tokens",
            )
        raise mistake(
            ("sampling", "prompts_per_step"),
            f"{groups} groups of {answers} make a batch {size}; write stream = true, or lower prompts_per_step,"
            " group_size or max_new_tokens",
        )


def _form(job: Job) -> None:
    """Check that the other settings fit the form of the allocations."""
    cluster = job.cluster
    if cluster.job_walltime and cluster.job_walltime < cluster.walltime and job.manager.where == "pool":
        message = (
            "a manager that runs in the pool ends with the pool's first job;"
            ' write where = "job" in [manager], or remove this key'
        )
        raise mistake(("cluster", "job_walltime"), message)
    if cluster.form == "pool":
        return
    if cluster.form not in cluster.traits.forms:
        fitting = " or ".join(f'"{name}"' for name, traits in CLUSTERS.items() if cluster.form in traits.forms)
        raise mistake(("cluster", "form"), f'"{cluster.form}" needs kind = {fitting}; set `kind`, or remove this key')
    if "spares" in cluster.model_fields_set and cluster.spares:
        message = f'form = "{cluster.form}" has no spares: it requests a new node for each lost one; remove this key'
        raise mistake(("cluster", "spares"), message)
    if job.manager.where == "pool":
        raise mistake(("manager", "where"), f'form = "{cluster.form}" has no pool; write where = "job"')
    if cluster.form == "hetjob" and not cluster.one_node_components:
        groups = [group for group in node_groups(job) if not group.dedicated]
        small = [group.name for group in groups if group.nodes == 1]
        if small and len(groups) > 1:
            raise mistake(
                ("cluster", "form"),
                f"the components {', '.join(small)} would have one node each: Slurm kills them when a node of another"
                ' component fails (measured); write form = "replica", or consent with one_node_components = true',
            )


def _gang(at: tuple[str, str], role: Role) -> None:
    """Check the number of processes of a replica, and that its role supports several processes."""
    if isinstance(role, TrainerRole) and role.replicas > 1:
        message = f"a run has one trainer; for {role.replicas} processes of it write ranks = {role.replicas}"
        raise mistake((*at, "replicas"), message)
    if role.ranks_per_node > role.ranks:
        message = f"{role.ranks_per_node} is more than ranks = {role.ranks}; lower it or raise ranks"
        raise mistake((*at, "ranks_per_node"), message)
    if role.ranks == 1:
        return
    if isinstance(role, TrajectoriesRole):
        raise mistake((*at, "ranks"), "the store is one process; remove this key")
    if role.program is None and not isinstance(role, TrainerRole):
        message = f"the built-in {at[1]} is one process; write replicas = ..., or set a command that supports ranks"
        raise mistake((*at, "ranks"), message)
    if isinstance(role, CommandRole) and role.watch != "api":
        message = 'a process learns its rank only through rrl.join(); write watch = "api", or replicas = ...'
        raise mistake((*at, "ranks"), message)


def _pools(job: Job) -> None:
    """Check the further rollout pools, and that some rollout generates."""
    if job.task is None:
        if job.rollouts:
            raise mistake(("rollouts", next(iter(job.rollouts))), "needs a [task]; remove this table")
        if "tags" in job.model_fields_set:
            raise mistake(("tags",), "are of rollouts and the trainer, but there is no [task]; remove this table")
        return
    elastic = [name for name, pool in job.rollouts.items() if pool.is_elastic]
    if not job.roles.rollout.replicas and job.cluster.form == "hetjob":
        text = 'form = "hetjob" needs a component of rollouts; write at least 1, or form = "replica" in [cluster]'
        raise mistake(("roles", "rollout", "replicas"), text)
    for name, pool in job.rollouts.items():
        _pool(job, ("rollouts", name), pool)
    if not job.roles.rollout.replicas and not job.rollouts and "rollout" not in job.tags.trainer:
        text = (
            "no rollout would generate; write at least 1, add a pool [rollouts.NAME], or let the trainer's nodes"
            ' generate: trainer = ["rollout"] in [tags]'
        )
        raise mistake(("roles", "rollout", "replicas"), text)
    if len(elastic) > 1:
        text = f"a run has one elastic pool, and [rollouts.{elastic[0]}] is elastic; write a number"
        raise mistake(("rollouts", elastic[1], "replicas"), text)
    if "rollout" in (job.tags.spare or ()) and job.cluster.form != "pool":
        text = f'"rollout" has no effect: form = "{job.cluster.form}" has no spare nodes; remove this key'
        raise mistake(("tags", "spare"), text)


def _pool(job: Job, at: tuple[str, str], pool: RolloutPool) -> None:
    """Check one further rollout pool as the job has it, without the keys that it takes from [roles.rollout]."""
    bounds = pool.replicas
    if isinstance(bounds, ReplicaRange) and bounds.min > bounds.max:
        text = f"min = {bounds.min} is more than max = {bounds.max}; lower min, or raise max"
        raise mistake((*at, "replicas"), text)
    if at[1] in job.commands:
        raise mistake(at, f"there is a role [commands.{at[1]}], too; choose another name for the pool")
    merged = job.every_role()[at[1]]
    if pool.is_elastic and merged.command is not None and merged.ranks > merged.ranks_per_node:
        text = (
            f"a replica of an elastic pool has one node; write ranks_per_node = {merged.ranks}, or a number of replicas"
        )
        raise mistake((*at, "ranks"), text)
    if pool.is_elastic and pool.node_hours is None:
        text = "missing; an elastic pool needs a budget: node_hours = ... (node hours over the whole run)"
        raise mistake((*at, "node_hours"), text)
    for key in ("node_hours", "walltime"):
        if getattr(pool, key) is not None and not pool.is_elastic:
            text = "has no effect on a fixed number of replicas; remove this key, or write replicas = { min = 0, max = "
            raise mistake((*at, key), f"{text}{max(1, pool.most)} }}")
    for key in ("slurm", "walltime"):
        if getattr(pool, key) and job.cluster.traits.roles_run_here:
            raise mistake((*at, key), f'has no effect with [cluster] kind = "{job.cluster.kind}"; remove this key')
    if not pool.exclusive:
        raise mistake((*at, "exclusive"), "the nodes of a further pool host nothing else; remove this key")
    if pool.min_replicas:
        text = "a run neither waits for a further pool nor ends without it; remove this key"
        raise mistake((*at, "min_replicas"), text)


def _engine(job: Job) -> None:
    """Reject arguments and a number of GPUs that the engine of the rollouts cannot use."""
    for name, rollout in {"rollout": job.roles.rollout, **job.rollout_roles()}.items():
        if job.rollouts and not rollout.most:  # its keys are only those of further pools
            continue
        at = job.table_of(name)
        row = ENGINES.get(rollout.engine) if rollout.command is None else None
        if row is None and rollout.command is None and rollout.vllm:
            raise mistake((*at, "vllm"), "has no effect with an engine of your own; remove this key")
        if row is not None and (wrong := row.check(rollout.vllm, rollout.gpus)) is not None:
            raise mistake((*at, *wrong[0]), wrong[1])


def _role(job: Job, name: str, role: Role) -> None:
    at, form = job.table_of(name), job.cluster.form
    for variable in RENDEZVOUS_VARIABLES if getattr(role, "watch", "api") == "api" else ():
        if variable in role.env:
            raise mistake((*at, "env", variable), f"{_SET_BY_JOIN}; remove it")
    if role.min_replicas is not None and role.min_replicas > role.fewest:
        raise mistake(
            (*at, "min_replicas"),
            f"{role.min_replicas} is more than replicas = {role.fewest}; lower it or raise replicas",
        )
    further = isinstance(role, RolloutPool)
    for key in ("slurm", "walltime") if not further else ():
        if getattr(role, key) and form == "pool":
            problem = 'form = "pool" has one allocation for all roles'
            fix = 'write it under [slurm] or [cluster], or set [cluster] form = "replica"'
            raise mistake((*at, key), f"{problem}; {fix}")
        if getattr(role, key) and not role.exclusive:
            raise mistake(
                (*at, key),
                "this role shares its nodes with others; remove this key, or set exclusive = true for the role",
            )
    if role.walltime and role.walltime > job.cluster.walltime:
        raise mistake(
            (*at, "walltime"),
            f'"{duration_text(role.walltime)}" is more than [cluster] walltime ='
            f' "{duration_text(job.cluster.walltime)}"; lower it or raise the walltime of the run',
        )
    if role.launcher != "direct" and not (role.image or job.container.image):
        raise mistake((*at, "launcher"), f'"{role.launcher}" needs an image; set [container] image')
    if role.launcher == "pyxis" and not job.cluster.traits.has_pyxis:
        raise mistake((*at, "launcher"), '"pyxis" is a plugin of Slurm; write "apptainer" or "direct"')
    if (form == "pool" and not further and role.most) or not role.exclusive:
        _fits_a_node(job, name, role)


def _fits_a_node(job: Job, name: str, role: Role) -> None:
    """Check that a node can hold one rank of a role that shares nodes, or the ranks per node of an exclusive role."""
    ranks = role.ranks_per_node if role.exclusive else 1
    for resource in ("cpus", "gpus", "mem"):
        wanted, has = ranks * getattr(role, resource), getattr(job.cluster.node, resource)
        if wanted > has:
            amount, fix = _amount(resource, wanted), "lower it"
            if ranks > 1:
                amount, fix = f"{ranks} ranks on a node need {amount}, which", "lower it, lower ranks_per_node"
            raise mistake(
                (*job.table_of(name), resource),
                f"{amount} is more than a node has ([cluster.node] {resource} = {_amount(resource, has)}); {fix} or"
                f" raise {resource} of the node",
            )


def _track(job: Job) -> None:
    """Check that no tracker is named twice, and that ``project`` is set only together with a tracker."""
    track = job.track
    if twice := [name for name in track.to if track.to.count(name) > 1]:
        raise mistake(("track", "to"), f'"{twice[0]}" is there twice; name each tracker once')
    if track.project and not track.to:
        raise mistake(("track", "project"), 'has no effect without trackers; write for example to = ["tensorboard"]')


def _phase(job: Job, name: str, table: PhaseTable) -> None:
    """Check one ``[phases.NAME]`` table.

    A name that is not a phase of rrl defines a new phase, which has required keys. So a mistyped name of an rrl phase
    is reported.
    """
    at, declared = ("phases", name), PHASES.get(name)
    if declared is None and (table.progresses is None or table.longest is None):
        near = difflib.get_close_matches(name, PHASES, 1)
        hint = f"did you mean {json.dumps(near[0])}? " if near else ""
        raise mistake(at, f"is not a phase of rrl; {hint}a phase of your own needs the keys `progresses` and `longest`")
    if declared is not None:
        for key in ("progresses", "waits_for"):
            if getattr(table, key) is not None:
                raise mistake((*at, key), "is fixed for a phase of rrl; remove this key, or name a phase of your own")
        if table.shortest is None and table.longest is None:
            raise mistake(at, "is empty; set `shortest`, `longest` or both")
        if declared.longest == math.inf and table.longest is not None:
            raise mistake((*at, "longest"), "this phase has no time limit; remove this key")
    if table.waits_for in job.rollouts:
        raise mistake((*at, "waits_for"), 'a role waits for the rollouts of any pool; write "rollout"')
    if table.waits_for is not None and table.waits_for not in (roles := job.every_role()):
        raise mistake((*at, "waits_for"), f'no role "{table.waits_for}"; there are {", ".join(roles)}')
    if table.waits_for is not None and table.progresses:
        raise mistake((*at, "progresses"), "must be false if waits_for is set: a waiting role makes no progress")
    merged = job.merged_limits().phase(name)
    if merged.shortest > merged.longest:
        key = "shortest" if table.shortest is not None else "longest"
        raise mistake(
            (*at, key),
            f'shortest = "{duration_text(merged.shortest)}" is more than longest ='
            f' "{duration_text(merged.longest)}"; set both',
        )


def _amount(resource: str, value: int) -> str:
    return f'"{value / 2**20:g}MiB"' if resource == "mem" else str(value)


def _faults(job: Job) -> None:
    """Check the values and the target of each fault of a job, and that the target can inject the fault."""
    replicas = {name: role.most for name, role in job.every_role().items()}
    ranks = {name: role.ranks for name, role in job.every_role().items()}
    for index, planned in enumerate(job.faults.planned):
        at = parse_trigger(planned.at)
        if invalid := validate_fault(
            planned.kind, planned.target, planned.seconds, planned.amount, replicas, at, ranks
        ):
            raise mistake(("faults", "planned", index, _key_of(invalid, "kind")), invalid.text)
        _needs_worker_api(job, planned.kind, planned.target, ("faults", "planned", index, "kind"))
    for index, entry in enumerate(job.faults.random):
        for kind in entry.kinds:
            if invalid := validate_fault(kind, entry.target, *entry.values_for(kind), replicas, ranks=ranks):
                raise mistake(("faults", "random", index, _key_of(invalid, "kinds")), invalid.text)
            _needs_worker_api(job, kind, entry.target, ("faults", "random", index, "kinds"))


def _key_of(invalid: InvalidFault, default: str) -> str:
    return "target" if invalid.problem is FaultProblem.NO_SUCH_TARGET else default


def _needs_worker_api(job: Job, kind: FaultKind, target: str, at: tuple[str | int, ...]) -> None:
    """Check that a role uses the worker API if it must inject the fault itself."""
    role = job.every_role().get(target.partition("/")[0])
    traits = FAULT_TRAITS[kind]
    if (
        traits.target_kind is TargetKind.REPLICA
        and not traits.by_signals
        and isinstance(role, CommandRole)
        and role.watch != "api"
    ):
        raise mistake(at, f'{kind} needs the worker API, but {target} does not use it (watch = "{role.watch}")')
