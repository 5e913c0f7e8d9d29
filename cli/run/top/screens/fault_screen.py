"""The form in which the user describes a fault to inject into a run."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label, Select, Static

from .....api.fault_requests import check_fault, fault_of
from .....api.watching.runs_watcher import WatchedRun
from .....core.faults import FAULT_TRAITS, FaultKind, TargetKind
from .....core.types import UsageError
from .....manager.model.state import State
from ....common.output import Escaped
from ..changes import Change, ChangeRequested, injection_of


class FaultScreen(ModalScreen[None]):
    """Asks for kind, target, duration and amount of a fault, and then has the fault confirmed.

    Args:
        watched: The run.
        state: The state of the run.
        target: The target that is proposed: a replica or a node.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "app.pop_screen", "Cancel")]

    def __init__(self, watched: WatchedRun, state: State, target: str) -> None:
        super().__init__()
        self._watched, self._state, self._target = watched, state, target

    def compose(self) -> ComposeResult:
        """Create the fields and the buttons."""
        kind = FaultKind.KILL if "/" in self._target else FaultKind.CRASH
        with VerticalScroll(classes="dialog"):
            yield Static(Escaped(Text(f"Inject a fault into {self._watched.run.id}", "bold")), classes="heading")
            yield Select([(one.value, one) for one in FaultKind], value=kind, allow_blank=False, id="kind")
            yield Label("target: a replica, a role, a node, or manager")
            yield Input(self._target, id="target")
            yield Label("for how long, such as 10s; empty: it does not end")
            yield Input(id="seconds")
            yield Label("amount: slow: share of the time it runs; exit: code; delay: ms")
            yield Input(type="number", id="amount")
            yield Static(id="complaint")
            with Horizontal(classes="buttons"):
                yield Button("Continue", variant="warning", id="continue")
                yield Button("Cancel", variant="primary", id="cancel")

    def on_mount(self) -> None:
        """Focus the field for the kind of the fault, so that it receives the keys."""
        self.query_one("#kind").focus()

    @on(Button.Pressed, "#cancel")
    def _cancelled(self) -> None:
        self.dismiss()

    @on(Button.Pressed, "#continue")
    @on(Input.Submitted)
    def _continued(self) -> None:
        try:
            change = self._change()
        except UsageError as error:
            self.query_one("#complaint", Static).update(Escaped(Text(str(error), "red", overflow="fold")))
            return
        self.app.post_message(ChangeRequested(change))
        self.dismiss()

    def _change(self) -> Change:
        """Return the injection that the fields describe. Raises UsageError for an invalid field."""
        kind = FaultKind(str(self.query_one("#kind", Select).value))
        target = "" if FAULT_TRAITS[kind].target_kind is TargetKind.RUN else self._field("target")
        amount = self._field("amount") or "0"
        try:
            number = float(amount)
        except ValueError:
            raise UsageError(f'the amount must be a number, not "{amount}"') from None
        fault = fault_of(self._state.job, kind, target, seconds=self._field("seconds") or None, amount=number)
        check_fault(self._watched.run, self._state.job, self._state, fault)
        return injection_of(self._watched, self._state, fault)

    def _field(self, id: str) -> str:
        return self.query_one(f"#{id}", Input).value.strip()
