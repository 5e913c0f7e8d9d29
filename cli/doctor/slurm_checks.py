"""Judge a Slurm cluster. The functions are pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from ...core.command_runner import CommandResult
from ...core.units import duration_text
from .catalogue import MEANINGS, fail, ok, unknown, warn
from .facts import Check, Config, DoctorOptions, Facts, Node, Nodes, Partition, Slurm
from .node_probe.host import Unavailable

OLDEST_VERSION, NEWEST_VERSION = (22, 5), (26, 5)
"""Oldest and newest version of Slurm with which rrl is tested."""
SLOW_ANSWER_S = 2.0
"""Time (s) above which an answer of slurmctld is slow. A manager queries slurmctld up to 60 times a minute."""
MAX_POOL_JOBS = 3
"""Maximum number of jobs that a run of form ``pool`` has at a time: its pool, its manager, a replacement node."""
DEFAULT_KILL_WAIT_S = 30
"""Slurm's default of KillWait (s)."""
MIN_STEP_LIMIT = 1000
"""MaxStepCount below which the check warns, since all agents and, over days, all incarnations are steps of one job."""
_NO_ACCOUNT = "ask the admin of the cluster for an account"
_NO_HOLD = "nohold_on_prolog_fail"
DEFAULT_WALLTIME_S = 86400.0
"""Default walltime (s) of a run."""
_HETJOB_WARNING = (
    "accepted, but when a node of one component fails, Slurm kills every other component that has one node"
    " (measured on 22.05, 24.11 and 26.05)"
)


def slurm_checks(facts: Facts) -> list[Check]:
    """Return the checks of Slurm."""
    slurm, wanted = facts.slurm, facts.wanted
    if slurm is None:
        return [warn("slurm.here", f'{facts.no_slurm}: kind = "local" works, kind = "slurm" does not')]
    configured = [_check_config(name, judge, slurm.config) for name, judge in _CONFIGURED.items()]
    return [
        ok("slurm.here", "sbatch and scontrol are on PATH"),
        *configured[:2],
        _reader(slurm),
        *(_form(slurm, wanted, form) for form in ("pool", "replica", "hetjob")),
        _manager(slurm),
        _gpus(slurm, wanted),
        _walltime(slurm, wanted),
        _preemption(slurm, wanted),
        _accounting(slurm),
        _account(slurm, wanted),
        _limits(slurm),
        _drain(facts, slurm),
        _confined(slurm),
        *configured[2:],
    ]


def chosen_partition(slurm: Slurm, wanted: DoctorOptions) -> Partition | Unavailable:
    """Return the partition for the user's jobs: the partition that the user named, else Slurm's default partition."""
    if isinstance(slurm.partitions, Unavailable):
        return slurm.partitions
    for one in slurm.partitions.partitions:
        if one.name == wanted.partition if wanted.partition else one.default:
            return one
    if wanted.partition:
        return Unavailable(f"there is no partition {wanted.partition}, or it is hidden")
    return Unavailable("there is no default partition: name yours with --partition")


def gpu_shapes(nodes: tuple[Node, ...]) -> str:
    """Return a text about the GPUs of the nodes: ``16 nodes with 8 h100``."""
    kinds = Counter(" + ".join(f"{count} {kind or 'GPU'}" for kind, count in sorted(one.gpus.items())) for one in nodes)
    return ", ".join(f"{count} node{'s' * (count > 1)} with {kind}" for kind, count in sorted(kinds.items()) if kind)


def account_for(slurm: Slurm, wanted: DoctorOptions) -> str:
    """Return the account that the user named, else the user's only account, else an empty string."""
    if wanted.account or isinstance(slurm.accounts, Unavailable):
        return wanted.account
    return slurm.accounts.names[0] if len(slurm.accounts.names) == 1 else ""


def _reader(slurm: Slurm) -> Check:
    reader = slurm.reader
    if isinstance(reader, Unavailable):
        return unknown("slurm.reader", reader)
    return warn("slurm.reader", reader.reason) if reader.rejected else ok("slurm.reader", reader.reason)


# ── answers of sbatch --test-only ──────────────────────────────────────────────────────────────────────────────────
def _form(slurm: Slurm, wanted: DoctorOptions, form: str) -> Check:
    name, tested = f"slurm.{form}", slurm.trials
    answer = tested if isinstance(tested, Unavailable) else tested.forms[form]
    if isinstance(answer, Unavailable):
        return unknown(name, answer)
    if answer.code == 0:
        return warn(name, _HETJOB_WARNING) if form == "hetjob" else ok(name, f"accepted; {_answer_text(answer)}")
    refused, partition = f"refused: {_answer_text(answer)}", chosen_partition(slurm, wanted)
    if isinstance(slurm.nodes, Nodes) and isinstance(partition, Partition) and not usable_nodes(slurm, wanted):
        return warn(name, f"{refused}; but no node of {partition.name} is up now", f"sinfo -R -p {partition.name}")
    return fail(name, refused) if form == "pool" else warn(name, refused, None if form == "replica" else "")


def _answer_text(answer: CommandResult) -> str:
    """Return sbatch's message without the number of the test job, which was never created."""
    return re.sub(r"^sbatch: Job \d+ to start at .*? using", "would use", answer.message)[:200]


def _manager(slurm: Slurm) -> Check:
    name, tested = "slurm.manager", slurm.trials
    if isinstance(tested, Unavailable):
        return unknown(name, tested)
    answers = {one: answer for one, answer in tested.manager.items() if isinstance(answer, CommandResult)}
    taken = [partition for partition, answer in answers.items() if answer.code == 0]
    refused = [f"{one or 'default'}: {_answer_text(answer)}" for one, answer in answers.items() if answer.code]
    if taken:
        first = next(iter(tested.manager))
        text = f"{taken[0] or 'the default partition'} accepts it"
        if taken[0] == first:
            return ok(name, text)
        return warn(name, f"{text}; {refused[0]}", f'[manager] slurm = {{ partition = "{taken[0]}" }}')
    unread = [text for text in tested.manager.values() if isinstance(text, Unavailable)]
    if unread or not refused:
        return unknown(name, unread[0] if unread else "there was no partition to test")
    return warn(name, "; ".join(refused)[:300])


# ── partitions ─────────────────────────────────────────────────────────────────────────────────────────────────────
def _gpus(slurm: Slurm, wanted: DoctorOptions) -> Check:
    name, nodes = "slurm.gpus", slurm.nodes
    if isinstance(nodes, Unavailable) or isinstance(slurm.partitions, Unavailable):
        return unknown(name, nodes if isinstance(nodes, Unavailable) else slurm.partitions)  # type: ignore[arg-type]
    found = []
    mixed = []
    for partition in slurm.partitions.partitions:
        gpu_nodes = tuple(one for one in nodes.nodes if partition.name in one.partitions and one.gpus)
        if gpu_nodes:
            usable = sum(one in nodes.usable(partition.name) for one in gpu_nodes)
            found.append(f"{partition.name}: {gpu_shapes(gpu_nodes)} ({usable} usable now)")
        if len({kind for one in gpu_nodes for kind in one.gpus}) > 1:
            mixed.append(partition.name)
    if not found:
        return ok(name, "no partition has GPUs")
    if mixed:
        return warn(name, f"{'; '.join(found)}; gpus = N may get any type of {', '.join(mixed)}")
    return ok(name, "; ".join(found))


def _walltime(slurm: Slurm, wanted: DoctorOptions) -> Check:
    partition = chosen_partition(slurm, wanted)
    if isinstance(partition, Unavailable):
        return unknown("slurm.walltime", partition)
    if partition.max_time is None:
        return ok("slurm.walltime", f"{partition.name} has no time limit")
    text = f"{partition.name}: at most {duration_text(partition.max_time)}"
    if partition.max_time < DEFAULT_WALLTIME_S:
        fix = f'[cluster] walltime = "{duration_text(partition.max_time)}"'
        return warn("slurm.walltime", f"{text}, less than the default walltime of a day", fix)
    return ok("slurm.walltime", text)


def _preemption(slurm: Slurm, wanted: DoctorOptions) -> Check:
    name, partition, config = "slurm.preemption", chosen_partition(slurm, wanted), slurm.config
    if isinstance(config, Unavailable):
        return unknown(name, config)
    if config.values.get("PreemptType", "preempt/none") in ("preempt/none", ""):
        return ok(name, "none (PreemptType)")
    if isinstance(partition, Unavailable):
        return unknown(name, partition)
    text = f"{config.values['PreemptType']}; jobs in {partition.name}"
    if partition.preempted:
        return warn(name, f"{text} may be preempted")
    return ok(name, f"{text} are not preempted, since its PreemptMode is OFF")


# ── accounting and rights ──────────────────────────────────────────────────────────────────────────────────────────
def _accounting(slurm: Slurm) -> Check:
    name = "slurm.accounting"
    if isinstance(slurm.config, Unavailable):
        return unknown(name, slurm.config)
    kind = slurm.config.values.get("AccountingStorageType") or "accounting_storage/none"
    if not kind.endswith("slurmdbd"):
        return ok(name, f"{kind}: Slurm stores no accounting; rrl's steps write exit records of their own")
    if isinstance(slurm.accounts, Unavailable):
        return unknown(name, f"{kind}, but sacctmgr does not answer: {slurm.accounts.why}")
    enforced = slurm.config.values.get("AccountingStorageEnforce") or "nothing"
    return ok(name, f"{kind}; enforced: {enforced}")


def _has_no_accounting(slurm: Slurm) -> bool:
    return isinstance(slurm.config, Config) and not slurm.config.values.get("AccountingStorageType", "").endswith("dbd")


def _account(slurm: Slurm, wanted: DoctorOptions) -> Check:
    name, accounts = "slurm.account", slurm.accounts
    if _has_no_accounting(slurm):
        return ok(name, "no account is needed: there is no accounting")
    if isinstance(accounts, Unavailable):
        return unknown(name, accounts)
    names = accounts.names
    enforced = "" if isinstance(slurm.config, Unavailable) else slurm.config.values.get("AccountingStorageEnforce", "")
    if wanted.account and wanted.account not in names:
        text = f"{wanted.account} is not one of your accounts ({', '.join(names) or 'you have none'})"
        return fail(name, text, f'[slurm] account = "{names[0]}"' if names else _NO_ACCOUNT)
    if not names:
        text = "Slurm's accounting has no account for you"
        if "associations" in enforced:
            return fail(name, text, _NO_ACCOUNT)
        return warn(name, f"{text}, but Slurm accepts jobs without an account", "")
    if len(names) > 1 and not wanted.account:
        return ok(name, f"{', '.join(names)}; jobs that name no account use {accounts.default or 'none of them'}")
    return ok(name, ", ".join(names))


def _limits(slurm: Slurm) -> Check:
    name, limits = "slurm.limits", slurm.limits
    if isinstance(limits, Unavailable) or limits.unknown:
        return unknown(name, limits if isinstance(limits, Unavailable) else limits.unknown)
    text = ", ".join(f"{one.name} = {one.max_jobs}{'' if one.per_user else ' (shared)'}" for one in limits.limits)
    if not text:
        return ok(name, "no limits apply to this user and these options")
    if min(one.max_jobs for one in limits.limits) < MAX_POOL_JOBS:
        return warn(name, f"{text}; a run has up to {MAX_POOL_JOBS} jobs at a time")
    return ok(name, f"{text}; rrl check counts the jobs that a run may need")


def _drain(facts: Facts, slurm: Slurm) -> Check:
    name, accounts = "slurm.drain", slurm.accounts
    config = {} if isinstance(slurm.config, Unavailable) else slurm.config.values
    owner = config.get("SlurmUser", "").partition("(")[0]
    if facts.uid == 0 or facts.user == owner:
        return ok(name, f"{facts.user} may drain nodes: {'root' if facts.uid == 0 else 'SlurmUser'}")
    text = f"only root and SlurmUser ({owner or '?'}) may drain nodes"
    fix = MEANINGS[name].fix.replace("NAME", facts.user)
    if isinstance(accounts, Unavailable):
        if config and _has_no_accounting(slurm):
            return warn(name, f"{text}: without accounting, no user has an admin level", fix.partition(". ")[0])
        return unknown(name, accounts)
    if accounts.admin == "Administrator":
        return ok(name, f"{facts.user} is {accounts.admin}")
    return warn(name, f"{facts.user} has admin level {accounts.admin or 'None'}, but needs Administrator", fix)


def _confined(slurm: Slurm) -> Check:
    name, cgroups = "slurm.confined", slurm.cgroups
    plugins = "" if isinstance(slurm.config, Unavailable) else slurm.config.values.get("TaskPlugin", "")
    if plugins and "cgroup" not in plugins:
        return warn(name, f"TaskPlugin={plugins}: nothing is confined")
    if isinstance(cgroups, Unavailable):
        return unknown(name, f"cgroup.conf cannot be read here: {cgroups.why}")
    settings = {key: cgroups.values.get(key, "no") for key in ("ConstrainDevices", "ConstrainRAMSpace")}
    text = f"{', '.join(f'{key}={value}' for key, value in settings.items())} ({cgroups.where})"
    return ok(name, text) if all(one.lower() == "yes" for one in settings.values()) else warn(name, text)


# ── scontrol show config ───────────────────────────────────────────────────────────────────────────────────────────
def _check_config(name: str, judge: Callable[[Config], Check], config: Config | Unavailable) -> Check:
    if isinstance(config, Unavailable):
        return unknown(name, config, MEANINGS[name].fix if name == "slurm.answers" else "")
    return judge(config)


def _number(config: Config, key: str) -> int | None:
    match = re.match(r"\d+", config.values.get(key, ""))
    return int(match[0]) if match else None


def _version(config: Config) -> Check:
    text = config.values.get("SLURM_VERSION", "")
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        return unknown("slurm.version", "scontrol show config shows no SLURM_VERSION")
    version = int(match[1]), int(match[2])
    if not OLDEST_VERSION <= version <= NEWEST_VERSION:
        tested = " to ".join(f"{year}.{month:02}" for year, month in (OLDEST_VERSION, NEWEST_VERSION))
        return warn("slurm.version", f"{text}; rrl is tested on {tested}")
    return ok("slurm.version", text)


def _answers(config: Config) -> Check:
    limited = "rl_enable" in config.values.get("SlurmctldParameters", "")
    text = f"in {1000 * config.seconds:.0f} ms{'; the rate of requests is limited (rl_enable)' if limited else ''}"
    return (
        warn("slurm.answers", text, '[limits] poll = "10s"')
        if config.seconds > SLOW_ANSWER_S
        else ok("slurm.answers", text)
    )


def _hold(config: Config) -> Check:
    seconds = _number(config, "InactiveLimit")
    if seconds is None:
        return unknown("slurm.hold", "scontrol show config shows no InactiveLimit")
    if seconds:
        return warn("slurm.hold", f"InactiveLimit={seconds} s: a batch script holds the pool")
    return ok("slurm.hold", "InactiveLimit=0: salloc --no-shell holds the pool")


def _select(config: Config) -> Check:
    kind, parameters = config.values.get("SelectType", ""), config.values.get("SelectTypeParameters", "")
    text = f"{kind} {parameters}".strip()
    if not text:
        return unknown("slurm.select", "scontrol show config shows no SelectType")
    if "linear" in kind:
        return warn(
            "slurm.select",
            f"{text}: every job gets whole nodes, the manager's job too",
            '[manager] where = "pool", or rrl submit --foreground',
        )
    if "MEMORY" not in parameters.upper():
        return warn("slurm.select", f"{text}: Slurm does not allocate memory, so other jobs may use yours")
    return ok("slurm.select", text)


def _requeue(config: Config) -> Check:
    value = config.values.get("JobRequeue", "")
    if not value:
        return unknown("slurm.requeue", "scontrol show config shows no JobRequeue")
    if value != "1":
        return warn("slurm.requeue", f"JobRequeue={value}; the manager's job requests a requeue, which may be refused")
    return ok("slurm.requeue", "JobRequeue=1; a requeued job waits about 120 s")


def _killwait(config: Config) -> Check:
    seconds = _number(config, "KillWait")
    if seconds is None:
        return unknown("slurm.killwait", "scontrol show config shows no KillWait")
    text = f"{seconds} s"
    if seconds < DEFAULT_KILL_WAIT_S:
        return warn("slurm.killwait", f"{text}, less than Slurm's default")
    return ok("slurm.killwait", text)


def _steps(config: Config) -> Check:
    count = _number(config, "MaxStepCount")
    if count is None:
        return unknown("slurm.steps", "scontrol show config shows no MaxStepCount")
    return warn("slurm.steps", str(count)) if count < MIN_STEP_LIMIT else ok("slurm.steps", str(count))


def _deadnodes(config: Config) -> Check:
    seconds = _number(config, "SlurmdTimeout")
    if seconds is None:
        return unknown("slurm.deadnodes", "scontrol show config shows no SlurmdTimeout")
    return ok(
        "slurm.deadnodes",
        f"SlurmdTimeout={seconds} s; rrl's agents notice a dead node sooner"
        if seconds
        else "SlurmdTimeout=0: Slurm never notices a dead node; rrl's own agents do",
    )


def _private(config: Config) -> Check:
    hidden = config.values.get("PrivateData", "") or "none"
    text = f"PrivateData={hidden}"
    return warn("slurm.private", text) if "nodes" in hidden else ok("slurm.private", text)


def _filters(config: Config) -> Check:
    plugins = config.values.get("JobSubmitPlugins", "")
    if plugins:
        return warn("slurm.filters", f"JobSubmitPlugins={plugins}: it may change or refuse what rrl submits")
    return ok("slurm.filters", "none")


def _prolog(config: Config) -> Check:
    """Check that Slurm does not hold a job whose prolog fails. By default, Slurm requeues and holds such a job.

    The prolog examples/health/prolog.sh fails on a node that fails its health check. The job should then start on other
    nodes.
    """
    if not any(value for name, value in config.values.items() if re.fullmatch(r"Prolog(\[\d+\])?", name)):
        return ok("slurm.prolog", "no prolog")
    if _NO_HOLD in config.values.get("SchedulerParameters", "").split(","):
        return ok("slurm.prolog", f"{_NO_HOLD}: a job whose prolog fails is requeued and starts on other nodes")
    return warn("slurm.prolog", f"a job whose prolog fails is requeued and held: SchedulerParameters lacks {_NO_HOLD}")


_CONFIGURED: dict[str, Callable[[Config], Check]] = {
    "slurm.version": _version,
    "slurm.answers": _answers,
    "slurm.hold": _hold,
    "slurm.select": _select,
    "slurm.requeue": _requeue,
    "slurm.killwait": _killwait,
    "slurm.steps": _steps,
    "slurm.deadnodes": _deadnodes,
    "slurm.private": _private,
    "slurm.filters": _filters,
    "slurm.prolog": _prolog,
}


def usable_nodes(slurm: Slurm, wanted: DoctorOptions) -> tuple[Node, ...]:
    """Return the nodes that could run a job now, in the partition from :func:`chosen_partition`."""
    partition = chosen_partition(slurm, wanted)
    if isinstance(partition, Unavailable) or not isinstance(slurm.nodes, Nodes):
        return ()
    return slurm.nodes.usable(partition.name)
