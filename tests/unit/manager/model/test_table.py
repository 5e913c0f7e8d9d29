from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from rrl.manager.model.table import put, without


@pytest.mark.parametrize("seed", range(20))
def test_changes_at_random_give_the_items_and_order_of_a_dict_and_leave_earlier_tables_as_they_were(seed: int) -> None:
    dice = random.Random(seed)
    table: Mapping[int, int] = {key: key for key in range(dice.choice([0, 5, 60]))}
    model, versions = dict(table), []
    for value in range(300):
        key = dice.randrange(80)
        if dice.random() < 0.6:
            table, model = put(table, key, value), {**model, key: value}
        else:
            table, model = without(table, key), {other: at for other, at in model.items() if other != key}
        assert table.get(key) == model.get(key)
        assert (key in table) == (key in model)
        if dice.random() < 0.3:
            assert list(table.items()) == list(model.items())
        versions.append((table, model))
    assert all(list(table.items()) == list(model.items()) for table, model in versions)
