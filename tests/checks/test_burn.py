"""The stress test on a real device, healthy and computing wrong."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
import torch

from aegis_elastic.checks import burn
from aegis_elastic.checks.burn import Burner
from aegis_elastic.checks.contract.burn_protocol import OutputLine, Progress, Request
from tests.checks.support import ROOT

CPU = torch.device("cpu")
SIZE = 64


class Flaky:
    """A multiplication that is right but for one bit in one of its products."""

    def __init__(self, wrong_at: int) -> None:
        self._wrong_at = wrong_at
        self._count = 0

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(a, b, out=out)
        if self._count == self._wrong_at:
            out.view(torch.int32)[3, 5] ^= 1 << 22
        self._count += 1


def ran(*burners: Burner, duration_s: float = 0.05) -> dict[str, Progress]:
    return {progress.device: progress for progress in burn.burn(burners, duration_s)}


def test_a_healthy_device_is_right_in_every_element() -> None:
    burner = Burner(CPU, SIZE)
    last = ran(burner)
    (result,) = burn.judge([burner], last)
    assert result.passed, result.result
    assert result.details["passes"] == last["cpu"].passes >= burn.PASSES_PER_READING
    assert result.details["wrong"] == 0
    assert result.result.endswith("every element right")


def test_one_wrong_bit_in_one_of_many_products_is_found() -> None:
    burner = Burner(CPU, SIZE, Flaky(wrong_at=5))
    (result,) = burn.judge([burner], ran(burner))
    assert (result.finding, result.scope) == ("burn.wrong_result", "hardware")
    assert "1 elements wrong" in result.result


def test_a_device_that_is_always_wrong_is_found_though_all_its_products_agree() -> None:
    def always(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(a, b, out=out)
        out[3, 5] += 1.0

    burner = Burner(CPU, SIZE, always)
    last = ran(burner)
    assert last["cpu"].wrong == 0
    (result,) = burn.judge([burner], last)
    assert (result.finding, result.scope) == ("burn.wrong_result", "hardware")
    assert "the product is wrong" in result.result


def test_a_device_that_gives_up_does_not_take_the_others_along() -> None:
    calls = 0

    def gives_up(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nat some line")
        torch.mm(a, b, out=out)

    broken, fine = Burner(CPU, SIZE, gives_up), Burner(CPU, SIZE)
    broken.name = "cuda:3"
    lost, kept = burn.judge([broken, fine], ran(broken, fine))
    assert (lost.finding, lost.scope) == ("burn.error", "hardware")
    assert lost.result.endswith("CUDA error: an illegal memory access was encountered")
    assert kept.passed


def test_a_device_is_slow_only_against_siblings() -> None:
    burners = [Burner(CPU, SIZE) for _ in range(4)]
    for index, burner in enumerate(burners):
        burner.name = f"cuda:{index}"

    def judged(*tflops: float) -> list[str]:
        last = {
            burner.name: Progress(burner.name, 1.0, 8, 0, speed, None)
            for burner, speed in zip(burners, tflops, strict=False)
        }
        return [result.finding for result in burn.judge(burners[: len(tflops)], last)]

    assert judged(600.0, 601.0, 520.0, 603.0) == ["", "", "burn.slow", ""]
    assert judged(600.0, 601.0, 585.0, 603.0) == ["", "", "", ""]
    assert judged(600.0, 300.0) == ["", ""]


def test_its_process_says_where_it_is_and_ends_with_a_result() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "aegis_elastic.checks.burn"],
        input=msgspec.json.encode(Request(0.2, SIZE, 1)),
        capture_output=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    lines = [msgspec.json.decode(line, type=OutputLine) for line in done.stdout.splitlines()]
    assert lines[0].progress is not None and lines[0].progress.passes == burn.PASSES_PER_READING
    assert lines[-1].result is not None and lines[-1].result.passed


def test_a_request_without_sense_is_refused() -> None:
    for request in ({"durationS": 0}, {"durationS": 1, "size": -1}, {"durationS": 1, "threads": -1}):
        with pytest.raises(msgspec.ValidationError, match="duration must be above 0 s"):
            msgspec.convert(request, Request)
