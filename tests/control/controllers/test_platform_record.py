"""A job's record on Kubernetes, kept by a real plane against an API server: what it says, who is remade."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aegis_elastic.core.accounts import journal
from aegis_elastic.core.protocol.orders import Action, Order
from tests.control.conftest import Hold, MakeAgent
from tests.control.kube import Api, Object
from tests.control.planes import Held, config, wait_for

NAMED = "configmap:training/llama-aegis"
RECORD = "/api/v1/namespaces/training/configmaps/llama-aegis"
PODS = "/api/v1/namespaces/training/pods"
LABELS = {"job-name": "llama"}


def pod(name: str, address: str, labels: dict[str, str] = LABELS, **status: str) -> Object:
    where = {"podIP": address} if address else {}
    return {
        "metadata": {"name": name, "labels": labels, "resourceVersion": "1"},
        "status": {"phase": "Running", **where, **status},
    }


def create(api: Api, controlled: str, *pods: Object, selector: str = "job-name=llama") -> None:
    """What the job's creator does."""
    data = {"controlled": controlled, "selector": selector}
    api.objects[RECORD] = {"metadata": {"resourceVersion": "1"}, "data": data}
    for one in pods:
        api.objects[f"{PODS}/{one['metadata']['name']}"] = one


def start(hold: Hold, join_timeout_s: float = 3.0, **spec: Any) -> Held:
    nodes = config(Path("unused")).nodes
    two = {"worker_num": 2, "min_worker_num": 2, "join_timeout_s": join_timeout_s, **spec}
    return hold(spec=two, nodes=type(nodes)(record=NAMED))


def status(api: Api) -> Object:
    told: Object = json.loads(api.objects[RECORD]["data"].get("status", "{}"))
    return told


def test_the_record_follows_the_job(api: Api, hold: Hold, agent: MakeAgent) -> None:
    create(api, "true")
    plane = start(hold, join_timeout_s=60)
    agents = [agent(plane, name, None, f"10.0.0.{number}") for number, name in enumerate("ab", 1)]
    for one in agents:
        one.join()
    for action in (Action.READY, Action.BOOTCHECK, Action.RUN):
        for one in agents:
            one.obey(action)
    told = wait_for(lambda: status(api) if status(api).get("phase") == "RunCommand" else None, "the record")
    assert told is not None
    assert (told["recoverCount"], told["maxRetry"], told["shouldQuit"]) == (0, 2, False)
    assert sorted(worker["name"] for worker in told["workers"]) == ["a", "b"]
    plane.ask("quit", reason="enough")
    wait_for(lambda: status(api).get("phase") == "Failed", "the end in the record")
    assert status(api)["failReason"] == "enough"
    assert api.evicted == []
    assert api.objects[RECORD]["data"]["controlled"] == "true", "its creator's word stays"


def test_a_pod_that_never_comes_is_made_anew_and_waited_for(api: Api, hold: Hold, agent: MakeAgent) -> None:
    others = pod("other-job-0", "10.0.0.9", {"job-name": "other"})
    gone = pod("llama-0-old", "10.0.0.7", phase="Failed")
    create(api, "true", pod("llama-0", "10.0.0.1"), pod("llama-1", "10.0.0.2"), others, gone)
    plane = start(hold)
    one = agent(plane, "a", None, "10.0.0.1")
    one.join()
    one.obey(Action.READY)
    wait_for(lambda: api.evicted, "an eviction")
    # Its creator makes another, and this one comes.
    api.objects[f"{PODS}/llama-1-new"] = pod("llama-1-new", "10.0.0.3")
    two = agent(plane, "b", None, "10.0.0.3")
    two.join()
    two.obey(Action.READY)
    for action in (Action.BOOTCHECK, Action.RUN):
        for each in (one, two):
            each.obey(action)
    assert api.evicted == ["llama-1"]
    assert plane.ask()["recoverCount"] == 0
    wait_for(lambda: api.objects[RECORD]["data"].get("rounds") == "0", "the rounds' end")
    assert journal.replay(plane.journal()).ok


def test_out_of_control_all_are_cleared_one_retry_is_counted_and_a_plain_job_runs(
    api: Api, hold: Hold, agent: MakeAgent
) -> None:
    # The plane's own pod goes last: with it goes the plane.
    create(api, "false", pod("llama-0", "127.0.0.1"), pod("llama-1", "10.0.0.2"), pod("llama-2", ""))
    plane = start(hold)
    one = agent(plane, "a")
    one.join()
    one.obey(Action.READY)
    wait_for(lambda: len(api.evicted) == 3, "evictions")
    assert api.evicted == ["llama-1", "llama-2", "llama-0"]
    assert one.wait(Order, lambda order: order.action is Action.INDEPENDENT)
    assert plane.ask()["recoverCount"] == 1
    assert journal.replay(plane.journal()).ok


@pytest.mark.parametrize(
    ("controlled", "selector", "why"),
    [
        ("perhaps", "job-name=llama", "want true or false"),
        ("true", "", "it has no selector"),
        ("true", "job-name=another", "the platform knows no machines"),
    ],
)
def test_a_record_that_says_nothing_of_use_leaves_it_to_the_join_timeout(
    api: Api, hold: Hold, agent: MakeAgent, controlled: str, selector: str, why: str
) -> None:
    create(api, controlled, pod("llama-0", "127.0.0.1"), pod("llama-1", "10.0.0.2"), selector=selector)
    plane = start(hold, join_timeout_s=1.5)
    one = agent(plane, "a")
    one.join()
    one.obey(Action.READY)
    assert one.wait(Order, lambda order: order.action is Action.INDEPENDENT)
    assert api.evicted == []
    assert plane.ask()["recoverCount"] == 0
    assert why in (plane.config.path / "plane.log").read_text()


def test_rounds_that_cannot_be_counted_are_none(api: Api, hold: Hold, agent: MakeAgent) -> None:
    """Without the right to write, pods would be evicted at every join timeout, for ever."""
    create(api, "true", pod("llama-0", "127.0.0.1"), pod("llama-1", "10.0.0.2"))
    api.read_only = True
    plane = start(hold, join_timeout_s=1.5)
    one = agent(plane, "a")
    one.join()
    one.obey(Action.READY)
    assert one.wait(Order, lambda order: order.action is Action.INDEPENDENT)
    assert api.evicted == []
    assert "that can't be counted" in (plane.config.path / "plane.log").read_text()


def test_a_server_that_is_away_costs_nothing_but_a_line(
    api: Api, hold: Hold, agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "9")
    plane = start(hold, join_timeout_s=1.5)
    one = agent(plane, "a")
    one.join()
    one.obey(Action.READY)
    assert one.wait(Order, lambda order: order.action is Action.INDEPENDENT)
    assert "cannot write the job's record" in (plane.config.path / "plane.log").read_text()


def test_nothing_is_asked_when_enough_came_in_time(api: Api, hold: Hold, agent: MakeAgent) -> None:
    create(api, "false", pod("llama-0", "127.0.0.1"), pod("llama-1", "10.0.0.2"))
    plane = start(hold, join_timeout_s=3.0, worker_num=2, min_worker_num=1, last_call_s=1.0)
    one = agent(plane, "a")
    one.run()
    wait_for(lambda: status(api).get("phase") == "RunCommand", "the record")
    assert api.evicted == []
