"""One line over the environments of all workers."""

from __future__ import annotations

from aegis_elastic.checks.contract.child_process import Scalar
from aegis_elastic.checks.contract.environments import summarise


def record(**changes: Scalar) -> dict[str, Scalar]:
    return {
        "torch": "2.13.0",
        "python": "3.11.7",
        "cuda": None,
        "cuda_devices": 0,
        "lib_numpy": "2.4.6",
        **changes,
    }


def test_equal_workers_are_alike() -> None:
    line, differing = summarise({"a": record(), "b": record()})
    assert line == "2 workers alike: torch 2.13.0, Python 3.11.7, no GPU"
    assert differing == {}


def test_differing_versions_are_named_with_their_workers_the_common_one_first() -> None:
    line, differing = summarise({"a": record(torch="2.12.1"), "b": record(), "c": record()})
    assert line == "multiple versions: torch 2.13.0 (b, c), 2.12.1 (a)"
    assert differing == {"torch": {"2.13.0": ["b", "c"], "2.12.1": ["a"]}}


def test_what_one_worker_lacks_differs_too() -> None:
    line, differing = summarise({"a": record(lib_triton="3.0"), "b": record(lib_triton=None), "c": record()})
    assert line == "multiple versions: triton absent (b, c), 3.0 (a)"
    assert list(differing) == ["lib_triton"]


def test_several_differences_stand_in_one_line() -> None:
    gpus = record(cuda="13.0", cuda_devices=8, cuda_device_name="H100")
    line, _ = summarise({"a": gpus, "b": gpus | {"cuda_devices": 7, "nccl": "2.29.3"}})
    assert line == "multiple versions: GPU count 8 (a), 7 (b); NCCL absent (a), 2.29.3 (b)"


def test_thousands_of_workers_still_make_one_line() -> None:
    records = {f"w{index:05}": record() for index in range(5000)} | {"odd": record(torch="2.12.1")}
    line, differing = summarise(records)
    assert line.endswith("w00006 and 4993 more), 2.12.1 (odd)")
    assert len(line) < 200
    assert len(differing["torch"]["2.13.0"]) == 5000


def test_no_record_is_said() -> None:
    assert summarise({})[0] == "no worker has reported its environment"
