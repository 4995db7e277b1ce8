"""What every test can count on: unmet needs are said the same way, and nothing outlives the session."""

from __future__ import annotations

import os
import selectors
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

_MARK = "AEGIS_TEST_SESSION"
_LEAVE_S = 5.0

# Deterministic by default: the same examples on every run. `make full` sets AEGIS_SEED (and pytest's own
# --hypothesis-seed) and looks wider. No deadline: two shared cores make single examples slow at times.
settings.register_profile("test", derandomize=True, deadline=None)
settings.register_profile("full", max_examples=1000, deadline=None)
settings.load_profile("full" if "AEGIS_SEED" in os.environ else "test")

# A shell starts what it runs in the background (`make test &`) with SIGINT ignored, and all that tests start
# would inherit that: nothing could be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def require_or_skip(why: str) -> None:
    """Skips the test for `why`; fails it where everything must be there (AEGIS_REQUIRE_ALL=1, as in CI)."""
    if os.environ.get("AEGIS_REQUIRE_ALL") == "1":
        pytest.fail(f"AEGIS_REQUIRE_ALL=1, but {why}")
    pytest.skip(why)


@pytest.fixture
def unmet() -> Callable[[str], None]:
    """`unmet(why)`: this machine can't run the test. See `require_or_skip`."""
    return require_or_skip


@pytest.fixture(scope="session", autouse=True)
def _nothing_outlives_the_session() -> Iterator[None]:
    """Marks everything that tests start by an inherited variable, and looks for it when all is over.

    pytest's own PYTEST_CURRENT_TEST is inherited likewise, so a survivor names the test that it is from.
    """
    mark = uuid.uuid4().hex
    os.environ[_MARK] = mark
    yield
    survivors = _marked(f"{_MARK}={mark}".encode())
    ended_late = _wait_gone(list(survivors), _LEAVE_S)
    left = {pid: about for pid, about in survivors.items() if pid not in ended_late}
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes outlived the tests (killed now):\n" + "\n".join(left.values())


def _marked(mark: bytes) -> dict[int, str]:
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # ended meanwhile, or not ours to read
        if mark in variables and command:
            test = next((v for v in variables if v.startswith(b"PYTEST_CURRENT_TEST=")), b"").decode()
            found[int(entry.name)] = f"  pid {entry.name} of {test.partition('=')[2] or '?'}: {command}"
    return found


def _wait_gone(pids: list[int], timeout_s: float) -> set[int]:
    """Which of `pids` have ended within `timeout_s` (what a test stopped may need a moment to be gone)."""
    gone: set[int] = set()
    with selectors.DefaultSelector() as selector:
        for pid in pids:
            try:
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
            except ProcessLookupError:
                gone.add(pid)
        while selector.get_map():
            ended = selector.select(timeout_s)
            if not ended:
                break
            for key, _ in ended:
                gone.add(key.data)
                selector.unregister(key.fileobj)
                os.close(key.fd)
    return gone
