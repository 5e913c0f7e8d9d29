"""NVLink of one GPU: the state of each link and its error counters."""

from __future__ import annotations

from ..samples import NvLink
from .names import CANNOT, SUCCESS
from .session import Answers

_LINK_COUNT = 91
"""NVML_FI_DEV_NVLINK_LINK_COUNT"""
_MAX_LINKS = 36
"""NVML_NVLINK_MAX_LINKS of r575"""
_COUNTERS = (("replay", 161, 0), ("recovery", 162, 1), ("crc_flit", 163, 2), ("crc_data", 0, 3))
"""field of NvLink; NVML_FI_DEV_NVLINK_ERROR_DL_{REPLAY,RECOVERY,CRC}, scope: the link (Hopper and later);
NVML_NVLINK_ERROR_DL_* of nvmlDeviceGetNvLinkErrorCounter (before)"""
_ACTIVE = 1


def read_links(answers: Answers) -> None:
    """Puts ``nvlinks`` into the answers. A counter that no link has is ``None`` in all, with ``nvlinks.<counter>``
    among the unread; so is the state of one link that does not tell, with ``nvlinks.active``."""
    for field in [field for field in answers.unread if field.startswith("nvlinks")]:
        del answers.unread[field]
    states = _states(answers)
    if not states:
        answers.values["nvlinks"] = None
        answers.unread.setdefault("nvlinks", "this GPU has no NVLink")
        return
    # counters of a link that is down may not be told, so an active one says which way there is to ask
    sample = next((link for link, state in enumerate(states) if state), 0)
    counters = {
        name: _counter(answers, name, field, counter, len(states), sample) for name, field, counter in _COUNTERS
    }
    answers.values["nvlinks"] = tuple(
        NvLink(link=link, active=state, **{name: values[link] for name, values in counters.items()})
        for link, state in enumerate(states)
    )


def _states(answers: Answers) -> list[bool | None]:
    """Empty: there are no links, and ``unread`` says why that is known."""
    ((code, count),) = answers.field_values([(_LINK_COUNT, 0)])
    told = code == SUCCESS
    if not told and code not in CANNOT:
        answers.note("nvlinks", code)
        return []
    states: list[bool | None] = []
    for link in range(min(count, _MAX_LINKS) if told else _MAX_LINKS):
        code, state = _state(answers, link)
        if code in CANNOT and not told:  # beyond the last link
            if not states:
                answers.note("nvlinks", code)
            break
        if code != SUCCESS:
            answers.note("nvlinks.active", code)
        states.append(state == _ACTIVE if code == SUCCESS else None)
    return states


def _state(answers: Answers, link: int) -> tuple[int, int]:
    return answers.call(lambda nvml, handle: nvml.nvmlDeviceGetNvLinkState(handle, link))


def _counter(answers: Answers, name: str, field: int, counter: int, links: int, sample: int) -> list[int | None]:
    """Of each link. One that cannot be told of ``sample`` is asked of no other."""
    if field:
        found = answers.field_values([(field, link) for link in range(links)])
        if found[sample][0] not in CANNOT:
            return [_kept(answers, name, code, number) for code, number in found]
    found = [_by_function(answers, counter, sample)]
    if found[0][0] in CANNOT:
        answers.note(f"nvlinks.{name}", found[0][0])
        return [None] * links
    found = [found[0] if link == sample else _by_function(answers, counter, link) for link in range(links)]
    return [_kept(answers, name, code, number) for code, number in found]


def _by_function(answers: Answers, counter: int, link: int) -> tuple[int, int]:
    return answers.call(lambda nvml, handle: nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter))


def _kept(answers: Answers, name: str, code: int, number: int) -> int | None:
    if code == SUCCESS:
        return number
    answers.note(f"nvlinks.{name}", code)
    return None
