"""What a handler is told, and what it reads between the lines."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.launcher.api import LaunchConfig

from aegis_elastic.control.host import addresses
from aegis_elastic.control.host.errors import UsageError
from aegis_elastic.rendezvous import caller_frames, entry, settings

LAUNCH = LaunchConfig(min_nodes=2, max_nodes=4, nproc_per_node=3, run_id="digits", max_restarts=5)


def read(endpoint: str = "127.0.0.1:29999", run_id: str = "digits", **conf: Any) -> settings.Surroundings:
    return settings.read(RendezvousParameters("aegis", endpoint, run_id, 2, 4, **conf), LAUNCH)


def test_the_job_is_what_torchrun_was_told() -> None:
    about = read(join_timeout="90", aegis_bootcheck="env", aegis_worker_name="a")
    spec = about.plane.spec
    assert (spec.job_name, spec.min_worker_num, spec.worker_num, spec.max_retry) == ("digits", 2, 4, 5)
    assert (spec.bootcheck, spec.join_timeout_s, about.join_timeout_s) == ("env", 90.0, 90.0)
    assert (about.identity.worker, about.identity.nproc, about.identity.node_ip) == ("a", 3, "127.0.0.1")
    assert (about.address, about.port, about.ours) == ("127.0.0.1", 29999, True)
    assert (about.meeting.port, about.meeting.hosting) == (30000, True)
    assert about.plane.resume


def test_a_plane_elsewhere_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host may be replaced, and then the name leads to another address."""
    monkeypatch.setattr(addresses, "resolve", lambda name: "192.0.2.7")
    monkeypatch.setattr(addresses, "address_towards", lambda address: "192.0.2.8")
    about = read("plane.example:29999")
    assert (about.address, about.ours, about.identity.node_ip) == ("plane.example", False, "192.0.2.8")


def test_a_job_without_a_name_is_never_resumed() -> None:
    about = read(run_id="none")
    assert (about.identity.job, about.plane.resume) == ("job-29999", False)


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ({"aegis_botcheck": "env"}, "'aegis_botcheck' in --rdzv-conf: ours are aegis_bootcheck, "),
        ({"aegis_bootcheck": "none"}, "aegis_bootcheck=none in --rdzv-conf: want off or env or full"),
        ({"join_timeout": "soon"}, "join_timeout=soon in --rdzv-conf: want a number of 0 or more"),
        ({"join_timeout": "-1"}, "join_timeout=-1"),
        ({"aegis_worker_name": ""}, "aegis_worker_name= in --rdzv-conf: want a text"),
        ({"aegis_join_secret_file": "/nonexistent"}, "cannot use the join secret /nonexistent"),
        ({"endpoint": "127.0.0.1:0"}, "port 0 means any free port"),
        ({"endpoint": "127.0.0.1:x"}, "cannot use the rendezvous endpoint '127.0.0.1:x'"),
    ],
)
def test_what_cannot_be_used_is_named(conf: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as error:
        read(**conf)
    assert said in str(error.value)


def test_other_backends_settings_are_none_of_our_business() -> None:
    assert read(is_host="1", read_timeout="60").join_timeout_s == 600.0


def test_the_launch_is_found_among_the_callers() -> None:
    def launch_agent(config: LaunchConfig) -> LaunchConfig | None:
        return caller_frames.launch_config()

    assert launch_agent(LAUNCH) is LAUNCH
    assert caller_frames.launch_config() is None
    with pytest.raises(UsageError, match="it works under torchrun's launcher"):
        entry.handler()(RendezvousParameters("aegis", "127.0.0.1:29999", "digits", 1, 1))


def test_failures_are_found_among_the_callers() -> None:
    failure = ProcessFailure(local_rank=1, pid=7, exitcode=-9, error_file="")

    def come_back(run_result: RunResult) -> tuple[ProcessFailure, ...]:
        return caller_frames.failures()

    assert come_back(RunResult(state=WorkerState.FAILED, failures={5: failure})) == (failure,)
    assert come_back(RunResult(state=WorkerState.HEALTHY)) == ()


def test_the_last_failures_are_found_while_torchrun_gives_up() -> None:
    failure = ProcessFailure(local_rank=0, pid=7, exitcode=3, error_file="")
    seen = []

    def give_up(error: Exception) -> None:
        try:
            raise error
        finally:
            seen.append(caller_frames.final_failures())

    for error in (ChildFailedError("train.py", {0: failure}), OSError()):
        with pytest.raises(type(error)):
            give_up(error)
    assert seen == [(failure,), ()]
    assert caller_frames.final_failures() is None
