"""rrl's losses are those of the installed TRL, and the recorded gradients are what it computes."""

from __future__ import annotations

import pytest

from rrl.tests.support.roles.trainer import trl_losses

pytestmark = pytest.mark.trainers


@pytest.mark.parametrize("name", trl_losses.CASES)
def test_gradient_of_a_loss_is_that_of_trls_own_code(name: str) -> None:
    case = trl_losses.CASES[name]
    loss, gradient = trl_losses.trls(case)
    assert trl_losses.error(trl_losses.ours(case)[1], gradient) < 1e-5
    recorded = trl_losses.recorded(name)
    assert recorded[0] == pytest.approx(loss)
    assert trl_losses.error(recorded[1], gradient) < 1e-6
