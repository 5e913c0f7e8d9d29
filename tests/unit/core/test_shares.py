from __future__ import annotations

from typing import Any

import pytest

from rrl.core.shares import checked_share


def test_share_of_a_rank_is_returned() -> None:
    assert checked_share((2, 3)) == (2, 3)


@pytest.mark.parametrize(
    "share", [(0, 0), (2, 2), (-1, 2), (0.0, 1), (0, 1.5), ("0", "1"), (True, 2), (0, 2**40), (0, 1, 2), 3, "01", None]
)
def test_wrong_share_is_refused(share: Any) -> None:
    with pytest.raises(ValueError, match=r"expected \(rank, world\) with 0 <= rank < world"):
        checked_share(share)
