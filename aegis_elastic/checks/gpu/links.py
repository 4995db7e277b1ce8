"""Probes of the links between GPUs: NVLink and the NVSwitch fabric."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pynvml

from aegis_elastic.checks.gpu.nvml import Card, Probe, Problem, query

# Growth of counters since the last check that is tolerated. Replays and checksum errors are normal on a link;
# a recovery stops all traffic on it for a while.
NVLINK_GROWTH_MAX = {"recovery": 0, "replay": 1000, "crc_flit": 10_000, "crc_data": 100, "ecc_data": 100}
_COUNTERS = {
    "recovery": pynvml.NVML_NVLINK_ERROR_DL_RECOVERY,
    "replay": pynvml.NVML_NVLINK_ERROR_DL_REPLAY,
    "crc_flit": pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
    "crc_data": pynvml.NVML_NVLINK_ERROR_DL_CRC_DATA,
    "ecc_data": pynvml.NVML_NVLINK_ERROR_DL_ECC_DATA,
}
# With fewer GPUs there is no majority for how many links a GPU should have.
_SIBLINGS_MIN = 3

_COMPLETED = 3  # of NVML_GPU_FABRIC_STATE: 0 no fabric, 1 not started, 2 in progress
_TRUE = 1
_UNHEALTHY, _LIMITED = 2, 3


class _Part(NamedTuple):
    """A part of the fabric's health mask: where it is, which values are bad, and what they mean."""

    shift: int
    width_mask: int
    bad: frozenset[int]
    finding: str
    scope: str
    text: str
    advice: str


_YES = frozenset({_TRUE})
_HEALTH = (
    _Part(4, 0x3, _YES, "gpu.fabric_route", "hardware", "has an unhealthy route in the fabric", "drain"),
    _Part(6, 0x3, _YES, "gpu.fabric_timeout", "hardware", "recovers from timeouts in the fabric", "reset"),
    _Part(
        8, 0xF, frozenset(range(2, 16)), "gpu.fabric_config", "software",
        "is wrongly configured in the fabric", "drain",
    ),
    _Part(0, 0x3, _YES, "gpu.fabric_degraded", "slow", "has less bandwidth in the fabric", "drain"),
    _Part(2, 0x3, _YES, "gpu.fabric_recovery", "unknown", "recovers a route in the fabric", "watch"),
)  # fmt: skip


def nvlink(card: Card) -> list[Problem]:
    """Records how many links are up (`compare_links` judges that), and finds error counters that grew."""
    states = [
        query(pynvml.nvmlDeviceGetNvLinkState, card.handle, link)
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS)
    ]
    links = [link for link, state in enumerate(states) if state]
    known = [link for link, state in enumerate(states) if state is not None]
    if not known:
        return []
    card.facts["nvlinks_up"] = len(links)
    problems = []
    for name, counter in _COUNTERS.items():
        values = [query(pynvml.nvmlDeviceGetNvLinkErrorCounter, card.handle, link, counter) for link in links]
        counted = [value for value in values if value is not None]
        if not counted:
            continue
        grown = card.grown(f"nvlink_{name}", sum(counted))
        if grown > NVLINK_GROWTH_MAX[name]:
            text = f"had {grown} NVLink errors ({name}) since the last check"
            problems.append(Problem(f"gpu.nvlink_{name}", "hardware", text, "drain"))
    return problems


def compare_links(cards: Sequence[Card]) -> dict[int, Problem]:
    """By GPU: fewer links than its siblings or than at the last check.

    How many a GPU should have is known only from its siblings: GPUs without a bridge report all links down,
    and some machines bridge only some of their GPUs. So a GPU without any link is a fault only if it is the
    only one.
    """
    found: dict[int, Problem] = {}
    up = {card.index: card.facts["nvlinks_up"] for card in cards if "nvlinks_up" in card.facts}
    majority, holders = Counter(up.values()).most_common(1)[0] if up else (0, 0)
    clear = len(up) >= _SIBLINGS_MIN and holders > len(up) / 2
    only_one = holders == len(up) - 1
    for card in cards:
        now, then = up.get(card.index), card.previous.get("nvlinks_up")
        if not isinstance(now, int):
            continue
        if isinstance(then, int) and now < then:
            text = f"has {now} NVLinks up, at the last check there were {then}"
        elif clear and isinstance(majority, int) and now < majority and (now or only_one):
            text = f"has {now} NVLinks up, the other GPUs have {majority}"
        else:
            continue
        found[card.index] = Problem("gpu.nvlink_down", "hardware", text, "drain")
    return found


def fabric(card: Card) -> list[Problem]:
    """Whether the fabric manager has joined this GPU to the NVSwitches, and whether its fabric is healthy."""
    info = _fabric_info(card)
    if info is None or not info.state:
        return []
    if info.state < _COMPLETED:
        text = "is not joined to the NVSwitch fabric: restart the fabric manager"
        return [Problem("gpu.fabric", "software", text, "drain")]
    if info.status != pynvml.NVML_SUCCESS:
        text = f"could not be joined to the NVSwitch fabric (error {info.status})"
        return [Problem("gpu.fabric_error", "hardware", text, "reset")]
    mask, summary = info.healthMask, getattr(info, "healthSummary", 0)
    problems = [
        Problem(part.finding, part.scope, part.text, part.advice)
        for part in _HEALTH
        if mask >> part.shift & part.width_mask in part.bad
    ]
    if not problems and summary == _UNHEALTHY:
        problems.append(Problem("gpu.fabric_error", "hardware", "is unhealthy in the fabric", "reset"))
    elif not problems and summary == _LIMITED:
        problems.append(Problem("gpu.fabric_degraded", "slow", "has limited capacity in the fabric", "drain"))
    return problems


def _fabric_info(card: Card) -> Any:
    """The newest structure that client and driver both support, or None."""
    for name in ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t"):
        structure = getattr(pynvml, name, None)
        if structure is None:
            continue
        info = structure()
        if query(pynvml.nvmlDeviceGetGpuFabricInfoV, card.handle, ctypes.byref(info)) is not None:
            return info
    return None


PROBES: tuple[Probe, ...] = (nvlink, fabric)
