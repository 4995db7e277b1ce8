"""Compares the environment records of all workers, as the bootcheck collects them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from aegis_elastic.checks.contract.child_process import Scalar

_NAMED_MAX = 8
_TITLES = {"python": "Python", "cuda": "CUDA", "nccl": "NCCL", "cudnn": "cuDNN", "cuda_devices": "GPU count"}

Differing = dict[str, dict[str, list[str]]]


def summarise(records: Mapping[str, Mapping[str, Scalar]]) -> tuple[str, Differing]:
    """A summary in one line, and for each key that differs: value -> the workers that have it.

    The most common value comes first; a worker without a value has "absent".
    """
    differing: Differing = {}
    for key in sorted({key for record in records.values() for key in record}):
        values: dict[str, list[str]] = {}
        for worker in sorted(records):
            value = records[worker].get(key)
            values.setdefault("absent" if value is None else str(value), []).append(worker)
        if len(values) > 1:
            differing[key] = dict(sorted(values.items(), key=lambda item: -len(item[1])))
    if not records:
        return "no worker has reported its environment", differing
    if not differing:
        return (
            f"{len(records)} worker{'s' if len(records) > 1 else ''} alike: {_describe(records)}",
            differing,
        )
    parts = [f"{_title(key)} {_share(values)}" for key, values in differing.items()]
    return f"multiple versions: {'; '.join(parts)}", differing


def _share(values: dict[str, list[str]]) -> str:
    return ", ".join(f"{value} ({_names(workers)})" for value, workers in values.items())


def _names(workers: list[str]) -> str:
    if len(workers) <= _NAMED_MAX:
        return ", ".join(workers)
    return f"{', '.join(workers[: _NAMED_MAX - 1])} and {len(workers) - _NAMED_MAX + 1} more"


def _describe(records: Mapping[str, Mapping[str, Scalar]]) -> str:
    record = next(iter(records.values()))
    shown = [f"{_title(key)} {record[key]}" for key in ("torch", "python", "cuda", "nccl") if record.get(key)]
    devices = record.get("cuda_devices")
    shown.append(f"{devices} x {record.get('cuda_device_name')}" if devices else "no GPU")
    return ", ".join(shown)


def _title(key: str) -> str:
    return _TITLES.get(key, key.removeprefix("lib_").replace("_", " "))
