"""Judge a Slurm cluster. The functions are pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from math import inf

from ...cluster.slurm.requests import Partition, Shape, eligible
from ...cluster.slurm.site import Accounts, JobLimits
from ...core.command_runner import CommandResult
from ...core.units import duration_text
from .catalogue import MEANINGS, Answer, check, fail, ok, unknown, warn
from .facts import Check, Config, DoctorOptions, Facts, Reader, Slurm, Trials
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
FORMS = ("pool", "replica", "hetjob")
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
        return [check("slurm.here", warn, f'{facts.no_slurm}: kind = "local" works, kind = "slurm" does not')]
    config, partition = slurm.config, chosen_partition(slurm, wanted)
    number, text = partial(_number, config), partial(_text, config)
    return [
        check("slurm.here", ok, "sbatch and scontrol are on PATH"),
        check("slurm.version", _version, text("SLURM_VERSION")),
        check("slurm.answers", partial(_answers, config)),
        check("slurm.reader", _reader, slurm.reader),
        *(check(f"slurm.{form}", partial(_form, form, partition), _trial(slurm, form)) for form in FORMS),
        check("slurm.manager", _manager, slurm.trials),
        check("slurm.gpus", _gpus, slurm.partitions),
        check("slurm.walltime", _walltime, partition),
        check("slurm.preemption", partial(_preemption, partition), config),
        check("slurm.accounting", partial(_accounting, slurm.accounts), config),
        check("slurm.account", partial(_account, wanted, slurm)),
        check("slurm.limits", _limits, slurm.limits),
        check("slurm.drain", partial(_drain, facts, slurm)),
        check("slurm.confined", partial(_confined, slurm)),
        check("slurm.hold", _hold, number("InactiveLimit")),
        check("slurm.select", _select, text("SelectType"), config),
        check("slurm.requeue", _requeue, text("JobRequeue")),
        check("slurm.killwait", _killwait, number("KillWait")),
        check("slurm.steps", _steps, number("MaxStepCount")),
        check("slurm.deadnodes", _deadnodes, number("SlurmdTimeout")),
        check("slurm.private", _private, config),
        check("slurm.filters", _filters, config),
        check("slurm.prolog", _prolog, config),
    ]


def chosen_partition(slurm: Slurm, wanted: DoctorOptions) -> Partition | Unavailable:
    """Return the partition for the user's jobs: the partition that the user named, else Slurm's default partition."""
    if isinstance(slurm.partitions, Unavailable):
        return slurm.partitions
    if found := eligible(slurm.partitions, wanted.given()):
        return found[0]
    if wanted.partition:
        return Unavailable(f"there is no partition {wanted.partition}, or it is hidden")
    return Unavailable("there is no default partition: name yours with --partition")


def gpu_shapes(shapes: Sequence[Shape]) -> str:
    """Return a text about the GPUs of some nodes: ``16 nodes with 8 h100``."""
    kinds: Counter[str] = Counter()
    for shape in shapes:
        kinds[" + ".join(f"{count} {kind or 'GPU'}" for kind, count in sorted(shape.gpus.items()))] += shape.count
    return ", ".join(f"{count} node{'s' * (count > 1)} with {kind}" for kind, count in sorted(kinds.items()) if kind)


def account_for(slurm: Slurm, wanted: DoctorOptions) -> str:
    """Return the account that the user named, else the user's only account, else an empty string."""
    if wanted.account or isinstance(slurm.accounts, Unavailable):
        return wanted.account
    return slurm.accounts.names[0] if len(slurm.accounts.names) == 1 else ""


def _reader(reader: Reader) -> Answer:
    return (warn if reader.rejected else ok)(reader.reason)


# ── answers of sbatch --test-only ──────────────────────────────────────────────────────────────────────────────────
def _trial(slurm: Slurm, form: str) -> CommandResult | Unavailable:
    return slurm.trials if isinstance(slurm.trials, Unavailable) else slurm.trials.forms[form]


def _form(form: str, partition: Partition | Unavailable, answer: CommandResult) -> Answer:
    if answer.code == 0:
        return warn(_HETJOB_WARNING) if form == "hetjob" else ok(f"accepted; {_answer_text(answer)}")
    refused = f"refused: {_answer_text(answer)}"
    if isinstance(partition, Partition) and not partition.usable:
        return warn(f"{refused}; but no node of {partition.name} is up now", f"sinfo -R -p {partition.name}")
    return fail(refused) if form == "pool" else warn(refused, None if form == "replica" else "")


def _answer_text(answer: CommandResult) -> str:
    """Return sbatch's message without the number of the test job, which was never created."""
    return re.sub(r"^sbatch: Job \d+ to start at .*? using", "would use", answer.message)[:200]


def _manager(trials: Trials) -> Answer:
    answers = {one: answer for one, answer in trials.manager.items() if isinstance(answer, CommandResult)}
    taken = [partition for partition, answer in answers.items() if answer.code == 0]
    refused = [f"{one or 'default'}: {_answer_text(answer)}" for one, answer in answers.items() if answer.code]
    if taken:
        text = f"{taken[0] or 'the default partition'} accepts it"
        if taken[0] == next(iter(trials.manager)):
            return ok(text)
        return warn(f"{text}; {refused[0]}", f'[manager] slurm = {{ partition = "{taken[0]}" }}')
    unread = [answer for answer in trials.manager.values() if isinstance(answer, Unavailable)]
    if unread or not refused:
        return unknown(unread[0] if unread else "there was no partition to test")
    return warn("; ".join(refused)[:300])


# ── partitions ─────────────────────────────────────────────────────────────────────────────────────────────────────
def _gpus(partitions: Sequence[Partition]) -> Answer:
    with_gpus = {one.name: [shape for shape in one.shapes if shape.gpus] for one in partitions}
    text = "; ".join(
        f"{name}: {gpu_shapes(shapes)} ({sum(shape.count for shape in shapes if shape.usable)} usable now)"
        for name, shapes in with_gpus.items()
        if shapes
    )
    mixed = [name for name, shapes in with_gpus.items() if len({kind for shape in shapes for kind in shape.gpus}) > 1]
    if mixed:
        return warn(f"{text}; gpus = N may get any type of {', '.join(mixed)}")
    return ok(text or "no partition has GPUs")


def _walltime(partition: Partition) -> Answer:
    if partition.max_walltime_s == inf:
        return ok(f"{partition.name} has no time limit")
    longest = duration_text(partition.max_walltime_s)
    text = f"{partition.name}: at most {longest}"
    if partition.max_walltime_s < DEFAULT_WALLTIME_S:
        fix = f'[cluster] walltime = "{longest}"'
        return warn(f"{text}, less than the default walltime of a day", fix)
    return ok(text)


def _preemption(partition: Partition | Unavailable, config: Config) -> Answer:
    kind = config.values.get("PreemptType", "")
    if kind in ("preempt/none", ""):
        return ok("none (PreemptType)")
    if isinstance(partition, Unavailable):
        return unknown(partition)
    text = f"{kind}; jobs in {partition.name}"
    if partition.preempted:
        return warn(f"{text} may be preempted")
    return ok(f"{text} are not preempted, since its PreemptMode is OFF")


# ── accounting and rights ──────────────────────────────────────────────────────────────────────────────────────────
def _accounting(accounts: Accounts | Unavailable, config: Config) -> Answer:
    kind = config.values.get("AccountingStorageType") or "accounting_storage/none"
    if not kind.endswith("slurmdbd"):
        return ok(f"{kind}: Slurm stores no accounting; rrl's steps write exit records of their own")
    if isinstance(accounts, Unavailable):
        return unknown(f"{kind}, but sacctmgr does not answer: {accounts.why}")
    return ok(f"{kind}; enforced: {config.values.get('AccountingStorageEnforce') or 'nothing'}")


def _has_no_accounting(slurm: Slurm) -> bool:
    return isinstance(slurm.config, Config) and not slurm.config.values.get("AccountingStorageType", "").endswith("dbd")


def _account(wanted: DoctorOptions, slurm: Slurm) -> Answer:
    accounts = slurm.accounts
    if _has_no_accounting(slurm):
        return ok("no account is needed: there is no accounting")
    if isinstance(accounts, Unavailable):
        return unknown(accounts)
    names = accounts.names
    enforced = slurm.settings.get("AccountingStorageEnforce", "")
    if wanted.account and wanted.account not in names:
        text = f"{wanted.account} is not one of your accounts ({', '.join(names) or 'you have none'})"
        return fail(text, f'[slurm] account = "{names[0]}"' if names else _NO_ACCOUNT)
    if not names:
        text = "Slurm's accounting has no account for you"
        if "associations" in enforced:
            return fail(text, _NO_ACCOUNT)
        return warn(f"{text}, but Slurm accepts jobs without an account", "")
    if len(names) > 1 and not wanted.account:
        return ok(f"{', '.join(names)}; jobs that name no account use {accounts.default or 'none of them'}")
    return ok(", ".join(names))


def _limits(found: JobLimits) -> Answer:
    if found.unknown:
        return unknown(found.unknown)
    text = ", ".join(f"{one.name} = {one.max_jobs}{'' if one.per_user else ' (shared)'}" for one in found.limits)
    if not text:
        return ok("no limits apply to this user and these options")
    if min(one.max_jobs for one in found.limits) < MAX_POOL_JOBS:
        return warn(f"{text}; a run has up to {MAX_POOL_JOBS} jobs at a time")
    return ok(f"{text}; rrl check counts the jobs that a run may need")


def _drain(facts: Facts, slurm: Slurm) -> Answer:
    accounts = slurm.accounts
    owner = slurm.settings.get("SlurmUser", "").partition("(")[0]
    if facts.uid == 0 or facts.user == owner:
        return ok(f"{facts.user} may drain nodes: {'root' if facts.uid == 0 else 'SlurmUser'}")
    text = f"only root and SlurmUser ({owner or '?'}) may drain nodes"
    fix = MEANINGS["slurm.drain"].fix.replace("NAME", facts.user)
    if isinstance(accounts, Unavailable):
        if _has_no_accounting(slurm):
            return warn(f"{text}: without accounting, no user has an admin level", fix.partition(". ")[0])
        return unknown(accounts)
    if accounts.admin == "Administrator":
        return ok(f"{facts.user} is {accounts.admin}")
    return warn(f"{facts.user} has admin level {accounts.admin or 'None'}, but needs Administrator", fix)


def _confined(slurm: Slurm) -> Answer:
    cgroups = slurm.cgroups
    plugins = slurm.settings.get("TaskPlugin", "")
    if plugins and "cgroup" not in plugins:
        return warn(f"TaskPlugin={plugins}: nothing is confined")
    if isinstance(cgroups, Unavailable):
        return unknown(f"cgroup.conf cannot be read here: {cgroups.why}")
    settings = {key: cgroups.values.get(key, "no") for key in ("ConstrainDevices", "ConstrainRAMSpace")}
    text = f"{', '.join(f'{key}={value}' for key, value in settings.items())} ({cgroups.source})"
    return ok(text) if all(one.lower() == "yes" for one in settings.values()) else warn(text)


# ── scontrol show config ───────────────────────────────────────────────────────────────────────────────────────────
def _text(config: Config | Unavailable, key: str) -> str | Unavailable:
    if isinstance(config, Unavailable):
        return config
    return config.values.get(key) or Unavailable(f"scontrol show config shows no {key}")


def _number(config: Config | Unavailable, key: str) -> int | Unavailable:
    """Return the number with which a setting begins (``30 sec``)."""
    text = _text(config, key)
    match = re.match(r"\d+", text) if isinstance(text, str) else None
    return int(match[0]) if match else text if isinstance(text, Unavailable) else Unavailable(f"{key} is {text}")


def _version(text: str) -> Answer:
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        return unknown(f"SLURM_VERSION is {text}")
    version = int(match[1]), int(match[2])
    if not OLDEST_VERSION <= version <= NEWEST_VERSION:
        tested = " to ".join(f"{year}.{month:02}" for year, month in (OLDEST_VERSION, NEWEST_VERSION))
        return warn(f"{text}; rrl is tested on {tested}")
    return ok(text)


def _answers(config: Config | Unavailable) -> Answer:
    if isinstance(config, Unavailable):
        return unknown(config, None)
    limited = "rl_enable" in config.values.get("SlurmctldParameters", "")
    text = f"in {1000 * config.seconds:.0f} ms{'; the rate of requests is limited (rl_enable)' if limited else ''}"
    return warn(text, '[limits] poll = "10s"') if config.seconds > SLOW_ANSWER_S else ok(text)


def _hold(seconds: int) -> Answer:
    if seconds:
        return warn(f"InactiveLimit={seconds} s: a batch script holds the pool")
    return ok("InactiveLimit=0: salloc --no-shell holds the pool")


def _select(kind: str, config: Config) -> Answer:
    parameters = config.values.get("SelectTypeParameters", "")
    text = f"{kind} {parameters}".strip()
    if "linear" in kind:
        fix = '[manager] where = "pool", or rrl submit --foreground'
        return warn(f"{text}: every job gets whole nodes, the manager's job too", fix)
    if "MEMORY" not in parameters.upper():
        return warn(f"{text}: Slurm does not allocate memory, so other jobs may use yours")
    return ok(text)


def _requeue(value: str) -> Answer:
    if value != "1":
        return warn(f"JobRequeue={value}; the manager's job requests a requeue, which may be refused")
    return ok("JobRequeue=1; a requeued job waits about 120 s")


def _killwait(seconds: int) -> Answer:
    if seconds < DEFAULT_KILL_WAIT_S:
        return warn(f"{seconds} s, less than Slurm's default")
    return ok(f"{seconds} s")


def _steps(count: int) -> Answer:
    return (warn if count < MIN_STEP_LIMIT else ok)(str(count))


def _deadnodes(seconds: int) -> Answer:
    return ok(
        f"SlurmdTimeout={seconds} s; rrl's agents notice a dead node sooner"
        if seconds
        else "SlurmdTimeout=0: Slurm never notices a dead node; rrl's own agents do"
    )


def _private(config: Config) -> Answer:
    hidden = config.values.get("PrivateData", "") or "none"
    text = f"PrivateData={hidden}"
    return warn(text) if "nodes" in hidden else ok(text)


def _filters(config: Config) -> Answer:
    plugins = config.values.get("JobSubmitPlugins", "")
    if plugins:
        return warn(f"JobSubmitPlugins={plugins}: it may change or refuse what rrl submits")
    return ok("none")


def _prolog(config: Config) -> Answer:
    """Check that Slurm does not hold a job whose prolog fails. By default, Slurm requeues and holds such a job.

    The prolog examples/health/prolog.sh fails on a node that fails its health check. The job should then start on other
    nodes.
    """
    if not any(value for name, value in config.values.items() if re.fullmatch(r"Prolog(\[\d+\])?", name)):
        return ok("no prolog")
    if _NO_HOLD in config.values.get("SchedulerParameters", "").split(","):
        return ok(f"{_NO_HOLD}: a job whose prolog fails is requeued and starts on other nodes")
    return warn(f"a job whose prolog fails is requeued and held: SchedulerParameters lacks {_NO_HOLD}")
