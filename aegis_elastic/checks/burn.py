"""A stress test: multiply the same matrices repeatedly, and compare every element of every product.

A GPU or core that fails only when hot, or that sometimes computes wrong without any error, is found by its
own results: the same operation on the same device gives the same bits. The first product is verified
independently (Freivalds: C x = A (B x), in double precision).

`python -m aegis_elastic.checks.burn` reads one `Request` from standard input and writes one `OutputLine` per
line: progress once a second, and at the end one result for each device. It ends with its parent.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pynvml
import torch

from aegis_elastic.checks.contract.burn_protocol import OutputLine, Progress, Request
from aegis_elastic.checks.contract.child_process import die_with_parent
from aegis_elastic.checks.gpu.nvml import query
from aegis_elastic.core.model import CheckResult

# Side of the square matrices: large enough to keep every unit busy, small enough to be compared often.
SIZE_CPU, SIZE_GPU = 1024, 8192
REPORT_S = 1.0
# Products between two readings of the number of wrong elements: reading waits for the device.
PASSES_PER_READING = 8
# A device is slow below this share of its siblings' median; with fewer siblings none is called slow.
SLOW_SHARE, SIBLINGS_MIN = 0.9, 3
# Rounding errors allowed, relative to a product's largest element: bfloat16 keeps 8 bits, float32 24; sums
# are over `size` terms.
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> object:
    return torch.mm(a, b, out=out)


class Burner:
    """One device under load."""

    def __init__(self, device: torch.device, size: int, multiply: Multiply = _multiply) -> None:
        self.name = str(device)
        self.description = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        self.passes = 0
        self.temperature_c_max: int | None = None
        self.error = ""
        self._multiply = multiply
        self._size = size
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        make = torch.Generator().manual_seed(2718)
        a, b = (torch.rand(size, size, generator=make) - 0.5 for _ in range(2))
        self._a, self._b = (each.to(device=device, dtype=dtype) for each in (a, b))
        # One buffer for all products: another alignment may be computed by another kernel.
        self._product = torch.empty(size, size, device=device, dtype=dtype)
        self._multiply(self._a, self._b, self._product)
        self._reference = self._product.clone()
        self._wrong = torch.zeros((), dtype=torch.int64, device=device)
        self._handle = _nvml_handle(device)
        self._started = time.monotonic()

    def is_reference_right(self) -> bool:
        """Whether the product that all others are compared with is right."""
        a, b, c = (each.to(device="cpu", dtype=torch.float64) for each in (self._a, self._b, self._reference))
        probe = torch.rand(self._size, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(31))
        difference = (c @ probe - a @ (b @ probe)).abs().max()
        scale = (c.abs() @ probe).max()
        return bool(difference <= _TOLERANCE[self._a.dtype] * scale)

    def launch(self) -> None:
        """Start some products and their comparison; on a GPU this doesn't wait for them."""
        for _ in range(PASSES_PER_READING):
            self._multiply(self._a, self._b, self._product)
            self._wrong += (self._product != self._reference).sum()
        self.passes += PASSES_PER_READING

    def read_progress(self) -> Progress:
        """Wait for the products that were started, and return the progress."""
        wrong = int(self._wrong)
        elapsed_s = time.monotonic() - self._started
        tflops = 2 * self._size**3 * self.passes / max(elapsed_s, 1e-9) / 1e12
        now = self._temperature_c()
        if now is not None:
            self.temperature_c_max = max(now, self.temperature_c_max or now)
        return Progress(self.name, round(elapsed_s, 3), self.passes, wrong, round(tflops, 4), now)

    def _temperature_c(self) -> int | None:
        if self._handle is None:
            return None
        now: int | None = query(pynvml.nvmlDeviceGetTemperature, self._handle, pynvml.NVML_TEMPERATURE_GPU)
        return now


def _nvml_handle(device: torch.device) -> Any:
    """NVML's handle of a CUDA device; None, and then no temperatures, if NVML has none."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None) if device.type == "cuda" else None
    if uuid is None:
        return None
    try:
        pynvml.nvmlInit()
        return query(pynvml.nvmlDeviceGetHandleByUUID, f"GPU-{uuid}")
    except pynvml.NVMLError:
        return None


def devices() -> list[torch.device]:
    """All GPUs, or the CPU where there is none."""
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or [torch.device("cpu")]


def burn(burners: Sequence[Burner], duration_s: float) -> Iterator[Progress]:
    """Load all devices at once for `duration_s`; yields the progress of each about once a second, and at the
    end.

    A device whose driver fails is left out from then on, its `error` set.
    """
    deadline = time.monotonic() + duration_s
    next_report = 0.0
    while True:
        now = time.monotonic()
        is_due = now >= next_report or now >= deadline
        if is_due:
            next_report = now + REPORT_S
        for phase in ("launch", "read"):
            for burner in burners:
                if burner.error:
                    continue
                try:
                    if phase == "launch":
                        burner.launch()
                    else:
                        progress = burner.read_progress()
                        if is_due:
                            yield progress
                except (RuntimeError, pynvml.NVMLError) as error:
                    # torch raises CUDA errors as RuntimeError
                    burner.error = _first_line(error)
        if now >= deadline or all(burner.error for burner in burners):
            return


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def judge(burners: Sequence[Burner], last: dict[str, Progress]) -> list[CheckResult]:
    """One result for each device: wrong, failed, slow against its siblings, or fine."""
    speeds = [progress.tflops for progress in last.values()]
    median = statistics.median(speeds) if len(speeds) >= SIBLINGS_MIN else 0.0
    return [_verdict(burner, last.get(burner.name), median) for burner in burners]


def _verdict(burner: Burner, progress: Progress | None, median: float) -> CheckResult:
    finding, scope = "", ""
    speed = progress.tflops if progress else 0.0
    figures = f"{burner.passes} products at {speed:.2f} TFLOP/s"
    if burner.temperature_c_max is not None:
        figures += f", up to {burner.temperature_c_max} C"
    if burner.error:
        finding, scope, text = "burn.error", "hardware", f"gave up after {figures}: {burner.error}"
    elif progress is None or progress.wrong or not burner.is_reference_right():
        wrong = f"{progress.wrong} elements wrong" if progress and progress.wrong else "the product is wrong"
        finding, scope, text = "burn.wrong_result", "hardware", f"computes wrong: {wrong} in {figures}"
    elif progress.tflops < SLOW_SHARE * median:
        finding, scope, text = "burn.slow", "slow", f"{figures}, its siblings' median is {median:.2f}"
    else:
        text = f"{figures}, every element right"
    return CheckResult(
        check_type=f"burn {burner.name}",
        passed=not finding,
        result=f"burn: {burner.name} ({burner.description}): {text}",
        time_stamp=time.time(),
        duration_s=progress.elapsed_s if progress else 0.0,
        finding=finding,
        scope=scope,
        details={
            "passes": burner.passes,
            "wrong": progress.wrong if progress else None,
            "tflops": speed,
            "temperature_c_max": burner.temperature_c_max,
        },
    )


def serve(request: Request) -> Iterator[OutputLine]:
    """All output, as it comes."""
    if request.threads:
        torch.set_num_threads(request.threads)
    burners = []
    for device in devices():
        try:
            burners.append(Burner(device, request.size or (SIZE_GPU if device.type == "cuda" else SIZE_CPU)))
        except RuntimeError as error:
            text = f"burn: {device}: cannot begin: {_first_line(error)}"
            failure = CheckResult(f"burn {device}", False, text, time.time(), 0.0, "burn.error", "hardware")
            yield OutputLine(result=failure)
    last: dict[str, Progress] = {}
    for progress in burn(burners, request.duration_s):
        last[progress.device] = progress
        yield OutputLine(progress=progress)
    for result in judge(burners, last):
        yield OutputLine(result=result)


def main() -> int:
    """Serve one request; returns the exit code."""
    die_with_parent(os.getppid())
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    for line in serve(request):
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
