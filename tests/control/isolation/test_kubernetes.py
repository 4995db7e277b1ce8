"""Isolation in Kubernetes: an API server that holds objects, versions and merge patches as real ones do."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest

from aegis_elastic.bus.tls import make_certificate
from aegis_elastic.control.isolation import drivers, kubernetes
from aegis_elastic.control.isolation.contract import Driver, Outcome, call_driver
from tests.control.kube import NODE, Api, Object

SET = "apis/apps/v1/namespaces/team/statefulsets/train"


def do(action: str, named: str = "kubernetes", node: str = "n1", timeout_s: float = 10.0) -> Outcome:
    driver = drivers.make(named, timeout_s=timeout_s)
    assert driver is not None
    return asyncio.run(call_driver(driver, action, node, "gpu.missing"))


def test_a_node_is_cordoned_and_tainted_once_and_given_back(api: Api) -> None:
    before = copy.deepcopy(api.spec)
    assert do("isolate").ok
    assert api.spec["unschedulable"] is True
    taint = {"key": kubernetes.TAINT_KEY, "value": "true", "effect": "NoSchedule"}
    assert api.spec["taints"] == [taint]
    assert api.objects[NODE]["metadata"]["annotations"][kubernetes.REASON_NOTE] == "aegis: gpu.missing"
    assert do("isolate").ok and len(api.patches) == 1
    assert do("release").ok
    assert {key: value for key, value in api.spec.items() if value} == before
    assert do("release").ok and len(api.patches) == 2


def test_what_others_did_to_the_node_stays(api: Api) -> None:
    theirs = {"key": "maintenance", "effect": "NoExecute"}
    api.objects[NODE]["spec"] = {"unschedulable": True, "taints": [theirs]}
    assert do("isolate").ok
    assert theirs in api.spec["taints"] and len(api.spec["taints"]) == 2
    assert do("release").ok
    assert api.spec == {"unschedulable": True, "taints": [theirs]}


def test_a_change_in_between_is_not_lost(api: Api) -> None:
    api.rivals = 3
    assert do("isolate").ok
    assert api.objects[NODE]["metadata"]["labels"] == {"rival": "0"}
    assert api.spec["unschedulable"] is True
    api.rivals = 99
    outcome = do("release")
    assert not outcome.ok and "others changed" in outcome.message


def test_a_large_answer_may_come_in_chunks(api: Api) -> None:
    api.chunked = True
    assert do("isolate").ok and do("release").ok


def workload(strategy: str, terms: list[Object] | None = None) -> Object:
    affinity = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms or []}}
    }
    return {
        "metadata": {"resourceVersion": "1"},
        "spec": {
            "updateStrategy": {"type": strategy},
            "template": {"spec": {"affinity": affinity if terms else {}}},
        },
    }


def terms_of(api: Api) -> Any:
    affinity = api.objects[f"/{SET}"]["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    return required and required["nodeSelectorTerms"]


def test_a_workload_avoids_the_node_in_every_alternative(api: Api) -> None:
    zones = [
        {"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in ("a", "b")
    ]
    api.objects[f"/{SET}"] = workload("OnDelete", zones)
    api.objects["/api/v1/nodes/n2"] = {"metadata": {"resourceVersion": "1"}, "spec": {}}
    named = f"kubernetes:{SET}"
    assert do("isolate", named).ok and do("isolate", named, "n2").ok
    avoided = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n1", "n2"]}
    assert [term["matchExpressions"][1] for term in terms_of(api)] == [avoided, avoided]
    assert do("release", named).ok and do("release", named, "n2").ok
    assert terms_of(api) == zones


def test_a_workload_without_any_affinity_gets_one_and_loses_it(api: Api) -> None:
    api.objects[f"/{SET}"] = workload("OnDelete")
    assert do("isolate", f"kubernetes:{SET}").ok
    avoided = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n1"]}
    assert terms_of(api) == [{"matchExpressions": [avoided]}]
    assert do("release", f"kubernetes:{SET}").ok
    assert not terms_of(api)


def test_a_workload_that_would_restart_all_its_pods_is_left_alone(api: Api) -> None:
    api.objects[f"/{SET}"] = workload("RollingUpdate")
    outcome = do("isolate", f"kubernetes:{SET}")
    assert not outcome.ok and "would restart all pods; want OnDelete" in outcome.message
    assert api.spec["unschedulable"] is True  # what could be done is done


def test_what_the_server_says_no_to_is_said(api: Api, tmp_path: Path) -> None:
    outcome = do("isolate", node="n7")
    assert not outcome.ok and "answers 404" in outcome.message
    (tmp_path / "token").write_text("stale")
    outcome = do("isolate")
    assert not outcome.ok and "answers 401: Unauthorized" in outcome.message
    assert "stale" not in outcome.message


def test_a_server_that_is_not_the_one_of_the_account_gets_no_token(api: Api, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "ca.crt").write_text(make_certificate(other, ["127.0.0.1"]).pem)
    outcome = do("isolate")
    assert not outcome.ok and "certificate verify failed" in outcome.message
    assert api.patches == []


def test_a_server_that_says_nothing_costs_the_timeout(monkeypatch: pytest.MonkeyPatch, api: Api) -> None:
    async def whole() -> Outcome:
        silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(silent.sockets[0].getsockname()[1]))
        driver: Driver | None = drivers.make("kubernetes", timeout_s=0.3)
        assert driver is not None
        async with silent:
            return await call_driver(driver, "isolate", "n1", "x")

    outcome = asyncio.run(whole())
    assert not outcome.ok and "in 0.3 s" in outcome.message
