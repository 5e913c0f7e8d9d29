"""``rrl inject``: requests a fault. A fault that the manager would refuse is refused here, by the same rules."""

from __future__ import annotations

import sys
import time

import msgspec

from ...api.command_sender import POLL_INTERVAL_S, ManagerPresence, wait_until_taken
from ...api.fault_requests import check_fault, fault_of, request_fault
from ...api.runs import StateReader, find_run, job_of
from ...core.faults import Fault, FaultTrigger
from ...core.run_dir import RunDir
from ...core.types import OperationFailed
from ...manager.model import events as ev
from ...manager.model.actions import fault_tag
from ...manager.model.state import State
from ...manager.storage.journal import replay
from ..common.output import print_json, print_line
from .json_documents import RequestedFault


def inject(
    name: str,
    kind: str,
    target: str,
    at: str | None,
    seconds: str | None,
    amount: float,
    seed: int | None,
    *,
    wait: bool,
    json: bool,
) -> int:
    """Request a fault from the run's manager.

    Returns exit code 0 once the request is written for the manager, or, with ``wait``, once the fault was performed.
    """
    run = find_run(name)
    reader = StateReader(run)
    state = reader.state()
    job = state.job if state is not None else job_of(run)
    if job is None:
        raise OperationFailed(f"{run.run_spec} cannot be read")
    fault = fault_of(job, kind, target, at=at, seconds=seconds, amount=amount, seed=seed)
    check_fault(run, job, state, fault)
    file_name = request_fault(run, fault)
    if not wait:
        _print_request(run, fault, "requested", json)
        return 0
    wait_until_taken(run, file_name, "accept the request")
    result = _await_result(run, reader, fault, verbose=not json)
    done = result.ok or (result.unknown and _targets_manager(fault))
    if json:
        print_json(result)
    elif done:
        print_line(f"{run.id}: {_fault_text(fault)}: {result.detail}")
    elif result.unknown:
        raise OperationFailed(f"{run.id}: it is unknown whether {_fault_text(fault)} was performed: {result.detail}")
    else:
        raise OperationFailed(f"{run.id}: {_fault_text(fault)} was not performed: {result.detail}")
    return 0 if done else 1


def _await_result(run: RunDir, reader: StateReader, fault: Fault, verbose: bool) -> ev.FaultInjected:
    """Wait for the first report of the fault and return it.

    Raises OperationFailed if the run or its last manager ends before this report.
    """
    announced = not verbose
    manager = ManagerPresence(run)
    while True:
        state = reader.state()
        if state is not None and fault.id in state.triggered_faults and fault_tag(fault.id) not in state.intents:
            for stamped in replay(run):
                if isinstance(stamped.event, ev.FaultInjected) and stamped.event.fault == fault.id:
                    return stamped.event
        if state is not None and state.outcome is not None:
            raise OperationFailed(f"{run.id} has ended ({state.outcome.value}) before {_fault_text(fault)} was due")
        if manager.is_gone():
            if state is not None and fault.id in state.triggered_faults and _targets_manager(fault):
                return _unrecorded_result(run, fault)
            raise OperationFailed(manager.absent_message(f"report the result of {_fault_text(fault)}"))
        if state is not None and not announced:
            print(f"{run.id}: {_fault_text(fault)} {_pending_text(state, fault)} ...", file=sys.stderr, flush=True)
            announced = True
        time.sleep(POLL_INTERVAL_S)


def _targets_manager(fault: Fault) -> bool:
    """Return whether the fault hits the manager.

    Such a fault kills the manager before it journals a result, so the command can only notice that the manager has
    ended.
    """
    return fault.target == "manager"


def _unrecorded_result(run: RunDir, fault: Fault) -> ev.FaultInjected:
    """Return "unknown", the result that the next manager will journal for a fault without a journaled result."""
    detail = f"no manager is running now; the roles keep running, and the next manager takes over: rrl manage {run.id}"
    return ev.FaultInjected(fault.id, None, False, detail, fault.kind, fault.target, unknown=True)


def _pending_text(state: State, fault: Fault) -> str:
    if fault.id in state.triggered_faults:
        return "is being performed"
    return "is requested" if fault.at == FaultTrigger() else f"waits for {fault.at}"


def _fault_text(fault: Fault) -> str:
    return f"{fault.kind.value} {fault.target}".strip()


def _print_request(run: RunDir, fault: Fault, status: str, json: bool) -> None:
    if json:
        print_json(RequestedFault(**msgspec.structs.asdict(fault), run=run.id))
    else:
        when = "" if fault.at == FaultTrigger() else f" at {fault.at}"
        print(f"{run.id}: {_fault_text(fault)}{when} is {status} ({fault.id})")
