"""TensorBoard as a tracker: event files in the run directory, one for each process that sent steps.

Each step is one record with a checksum, so that a file contains a step completely or not at all. A new process first
reads all files to learn which steps they contain. If a process is killed, its file may end with a torn record, which
TensorBoard and this module ignore.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from ...core.sample_texts import DecodedSample
from ...core.types import Outcome
from ..reporting.step_metrics import StepRow
from .base import PREFIX, SAMPLE_COLUMNS, SAMPLES, TrackedRun, annotation, sample_rows, scalars

FILE_PATTERN = "events.out.tfevents.*"


class TensorBoardFiles:
    """Writes a new event file beside the existing event files."""

    def __init__(self, run: TrackedRun) -> None:
        self.newest_step = self._sent = newest_step(run.folder)
        self.place = f"tensorboard --logdir {run.folder}"
        self._writer = EventFileWriter(str(run.folder))
        if run.changed:
            self._add(self._sent, time.time(), [_text(f"{PREFIX}job", _code(json.dumps(run.job, indent=2)))])

    def send(self, row: StepRow, samples: Sequence[DecodedSample]) -> None:
        """Add the record of a step."""
        assert row.step is not None
        self._sent = row.step
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(row).items()]
        if marks := annotation(row):
            values.append(_text(f"{PREFIX}marks", marks.replace("\n", "\n\n")))
        if samples:
            values.append(_text(SAMPLES, "\n\n".join(map(_described, sample_rows(samples)))))
        self._add(row.step, row.at, values)

    def flush(self) -> None:
        """Write all records to the file."""
        self._writer.flush()

    def finish(self, outcome: Outcome, last: StepRow | None) -> None:
        """Add the outcome of the run, unless a file has it already."""
        marks = annotation(last) if last is not None else ""
        if last is not None and marks and last.at not in set(_end_times(Path(self._writer.get_logdir()))):
            self._add(self._sent, last.at, [_text(f"{PREFIX}end", marks.replace("\n", "\n\n"))])
        self.flush()

    def close(self) -> None:
        """Write all records to the file and close it."""
        self._writer.close()

    def _add(self, step: int, at: float, values: list[Summary.Value]) -> None:
        self._writer.add_event(Event(wall_time=at, step=max(0, step), summary=Summary(value=values)))


def newest_step(folder: Path) -> int:
    """Return the newest step in the event files of a folder; -1 if there is none."""
    with_numbers = (event for event in events(folder) if any(not value.HasField("tensor") for value in _values(event)))
    steps: Iterator[int] = (event.step for event in with_numbers)
    return max(steps, default=-1)


def _values(event: Event) -> list[Summary.Value]:
    return list(event.summary.value)


def events(folder: Path) -> Iterator[Event]:
    """Yield all complete records of the event files of a folder, file by file."""
    for path in sorted(folder.glob(FILE_PATTERN)):
        for record in RawEventFileLoader(str(path)).Load():
            yield Event.FromString(record)


def _end_times(folder: Path) -> Iterator[float]:
    """Yield the times (s) at which the run ended, according to the event files."""
    for event in events(folder):
        if any(value.tag == f"{PREFIX}end" for value in event.summary.value):
            yield event.wall_time


def _described(row: Sequence[Any]) -> str:
    """Return a row of a table of samples as Markdown, in which the texts are code, and are not interpreted."""
    *scores, prompt, answer = zip(SAMPLE_COLUMNS, row, strict=True)
    title = ", ".join(f"{name} {value}" for name, value in scores if value not in ("", None))
    return "\n\n".join([title, *(f"{name}:\n\n{_code(text)}" for name, text in (prompt, answer))])


def _code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))


def _text(tag: str, text: str) -> Summary.Value:
    """Return TensorBoard's value for a text, which it shows as Markdown."""
    data = SummaryMetadata.PluginData(plugin_name="text", content=TextPluginData(version=0).SerializeToString())
    tensor = TensorProto(
        dtype=DT_STRING, string_val=[text.encode()], tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    )
    return Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=data), tensor=tensor)
