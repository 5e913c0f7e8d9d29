"""NVLink of one GPU: the state of each link and its error counters."""

from __future__ import annotations

from ..samples import NvLink
from .names import SUCCESS, UNSUPPORTED_CODES
from .session import QueryResults

_LINK_COUNT = 91
"""Id of the field NVML_FI_DEV_NVLINK_LINK_COUNT."""
_MAX_LINKS = 36
"""Maximum number of links of a GPU (NVML_NVLINK_MAX_LINKS of r575)."""
_COUNTERS = (("replay", 161, 0), ("recovery", 162, 1), ("crc_flit", 163, 2), ("crc_data", 0, 3))
"""(field of NvLink, field id, counter id) of each error counter. The field id is one of
NVML_FI_DEV_NVLINK_ERROR_DL_{REPLAY,RECOVERY,CRC}, with the link as scope (Hopper and later). The counter id is one of
NVML_NVLINK_ERROR_DL_*, for nvmlDeviceGetNvLinkErrorCounter (before Hopper)."""
_ACTIVE = 1


def read_links(results: QueryResults) -> None:
    """Read all links and store them as ``nvlinks``.

    The values of a counter that no link has are ``None``, and ``unread`` has the reason under ``nvlinks.<counter>``. A
    state that cannot be read is ``None``, and ``unread`` has the reason under ``nvlinks.active``.
    """
    for field in [field for field in results.unread if field.startswith("nvlinks")]:
        del results.unread[field]
    states = _states(results)
    if not states:
        results.values["nvlinks"] = None
        results.unread.setdefault("nvlinks", "this GPU has no NVLink")
        return
    # a link that is down may not report counters, so an active link shows which query is supported
    sample = next((link for link, state in enumerate(states) if state), 0)
    counters = {
        name: _counter(results, name, field, counter, len(states), sample) for name, field, counter in _COUNTERS
    }
    results.values["nvlinks"] = tuple(
        NvLink(link=link, active=state, **{name: values[link] for name, values in counters.items()})
        for link, state in enumerate(states)
    )


def _states(results: QueryResults) -> list[bool | None]:
    """Return the state of each link; empty if there are no links, with the reason in ``unread``."""
    ((code, count),) = results.field_values([(_LINK_COUNT, 0)])
    count_known = code == SUCCESS
    if not count_known and code not in UNSUPPORTED_CODES:
        results.note("nvlinks", code)
        return []
    states: list[bool | None] = []
    for link in range(min(count, _MAX_LINKS) if count_known else _MAX_LINKS):
        code, state = _state(results, link)
        if code in UNSUPPORTED_CODES and not count_known:  # beyond the last link
            if not states:
                results.note("nvlinks", code)
            break
        if code != SUCCESS:
            results.note("nvlinks.active", code)
        states.append(state == _ACTIVE if code == SUCCESS else None)
    return states


def _state(results: QueryResults, link: int) -> tuple[int, int]:
    return results.call(lambda nvml, handle: nvml.nvmlDeviceGetNvLinkState(handle, link))


def _counter(results: QueryResults, name: str, field: int, counter: int, links: int, sample: int) -> list[int | None]:
    """Return the counter of each link. If link ``sample`` does not support the counter, no other link is queried."""
    if field:
        found = results.field_values([(field, link) for link in range(links)])
        if found[sample][0] not in UNSUPPORTED_CODES:
            return [_counter_value(results, name, code, number) for code, number in found]
    found = [_by_function(results, counter, sample)]
    if found[0][0] in UNSUPPORTED_CODES:
        results.note(f"nvlinks.{name}", found[0][0])
        return [None] * links
    found = [found[0] if link == sample else _by_function(results, counter, link) for link in range(links)]
    return [_counter_value(results, name, code, number) for code, number in found]


def _by_function(results: QueryResults, counter: int, link: int) -> tuple[int, int]:
    return results.call(lambda nvml, handle: nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter))


def _counter_value(results: QueryResults, name: str, code: int, number: int) -> int | None:
    if code == SUCCESS:
        return number
    results.note(f"nvlinks.{name}", code)
    return None
