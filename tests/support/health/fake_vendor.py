"""A reader of another vendor's GPUs, as much as a vendor needs: two GPUs, of which the second computes and is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rrl.health.readers.base import ReaderOptions
from rrl.health.readers.samples import Accelerator, AcceleratorData

FAKE_ROW = "rrl.tests.support.health.fake_vendor:FakeReader"
"""Row of the table of readers."""


class FakeReader:
    name: ClassVar[str] = "fake"
    interval_s: ClassVar[float] = 1.0
    timeout_s: ClassVar[float] = 10.0

    def __init__(self, options: ReaderOptions) -> None:
        pass

    def read(self) -> AcceleratorData:
        hot = Accelerator(index=0, uuid="FAKE-0", temperature=95, temperature_slowdown=90)
        return AcceleratorData(driver="1", gpus=(hot, Accelerator(index=1, uuid="FAKE-1", lost="gone")))

    def read_use(self, names: Sequence[str] | None) -> tuple[Accelerator, ...]:
        known = {name: index for index in range(2) for name in (str(index), f"FAKE-{index}")}
        found = (known[name] for name in (("0", "1") if names is None else names))
        return tuple(Accelerator(index=index, uuid=f"FAKE-{index}", utilization=90 * index) for index in found)

    def close(self) -> None:
        pass
