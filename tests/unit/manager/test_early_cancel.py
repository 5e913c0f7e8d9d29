"""A manager that is cancelled before it has opened its run cancels the run after it has opened it."""

from __future__ import annotations

import pytest

from rrl.core.types import Outcome
from rrl.manager import runtime
from rrl.manager.model import events as ev
from rrl.tests.support.manager import site as virtual_site
from rrl.tests.support.manager.scripted_runs import COMPLETES, run_to_end
from rrl.tests.support.manager.site import FakeListener, Site

KILLED_AFTER = 20
"""Record after which the first manager is killed: the run has started, and has not ended."""


@pytest.mark.parametrize("epoch", [1, 2], ids=["first manager", "successor"])
def test_cancel_during_the_opening_of_a_run_takes_effect_afterwards(
    epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    managers: list[runtime.Manager] = []

    class KnownManager(runtime.Manager):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            managers.append(self)

    class InterruptedListener(FakeListener):
        """Delivers Ctrl-C while the manager opens its listener, when the manager's components do not exist yet."""

        def __init__(self, site: Site, listener_epoch: int) -> None:
            super().__init__(site, listener_epoch)
            if listener_epoch == epoch:
                managers[-1].cancel("anna (Ctrl-C)")

    def killed_first(site: Site) -> None:
        if epoch == 2:
            site.kill_at = KILLED_AFTER

    monkeypatch.setattr(runtime, "Manager", KnownManager)
    monkeypatch.setattr(virtual_site, "FakeListener", InterruptedListener)
    site, outcome, _ = run_to_end(COMPLETES, killed_first)
    commands = [stamped.event for stamped in site.records if isinstance(stamped.event, ev.CommandReceived)]
    assert commands == [ev.CommandReceived("cancel", "anna (Ctrl-C)", f"signal-{epoch}")]
    assert (outcome, len(managers)) == (Outcome.CANCELLED, epoch)
