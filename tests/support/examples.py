"""Sets the number of examples of property tests: few in ``make test``, many in ``make test-long``."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

EXAMPLES_ENV = "RRL_TEST_EXAMPLES"
"""Environment variable that ``make test-long`` sets to ``many``."""


def examples(few: int, many: int) -> settings:
    """Return settings with ``few`` examples, or ``many`` in ``make test-long``.

    No example has a deadline. Examples may share the folders of pytest, and may be slow to draw.
    """
    return settings(
        max_examples=many if os.environ.get(EXAMPLES_ENV) == "many" else few,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
