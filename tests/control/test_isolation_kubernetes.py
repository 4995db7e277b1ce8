"""Isolation in Kubernetes: an API server that holds objects, versions and merge patches as real ones do."""

from __future__ import annotations

import asyncio
import copy
import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aegis_elastic.bus.tls import make_certificate
from aegis_elastic.control.isolation import drivers, kubernetes
from aegis_elastic.control.isolation.contract import Driver, Outcome, ask

Object = dict[str, Any]
NODE = "/api/v1/nodes/n1"
SET = "apis/apps/v1/namespaces/team/statefulsets/train"
TOKEN = "token-of-the-pod"


def merged(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    out = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            out.pop(key, None)
        else:
            out[key] = merged(out.get(key), value)
    return out


class Api:
    """The server: `objects` by path; `rivals` change an object between our reading and our writing."""

    def __init__(self, folder: Path) -> None:
        self.objects: dict[str, Object] = {NODE: {"metadata": {"resourceVersion": "1"}, "spec": {}}}
        self.patches: list[tuple[str, Object]] = []
        self.rivals = 0
        self.chunked = False
        certificate = make_certificate(folder, ["localhost", "127.0.0.1"])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.cert_path, certificate.key_path)
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                api.answer(self, None)

            def do_PATCH(self) -> None:
                assert self.headers["Content-Type"] == "application/merge-patch+json"
                api.answer(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, *words: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()
        (folder / "token").write_text(TOKEN + "\n")
        (folder / "ca.crt").write_text(certificate.pem)

    def answer(self, request: http.server.BaseHTTPRequestHandler, patch: Object | None) -> None:
        if request.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.send(request, 401, {"message": "Unauthorized"})
        found = self.objects.get(request.path)
        if found is None:
            return self.send(request, 404, {"message": f'nodes "{request.path}" not found'})
        if patch is None:
            self.send(request, 200, copy.deepcopy(found))
            if self.rivals:
                self.rivals -= 1
                self.change(request.path, {"metadata": {"labels": {"rival": str(self.rivals)}}})
            return None
        if patch["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
            return self.send(request, 409, {"message": "the object has been modified"})
        self.patches.append((request.path, patch))
        self.change(request.path, patch)
        return self.send(request, 200, self.objects[request.path])

    def change(self, path: str, patch: Object) -> None:
        version = int(self.objects[path]["metadata"]["resourceVersion"]) + 1
        self.objects[path] = merged(self.objects[path], patch)
        self.objects[path]["metadata"]["resourceVersion"] = str(version)

    def send(self, request: http.server.BaseHTTPRequestHandler, status: int, body: Object) -> None:
        raw = json.dumps(body).encode()
        request.send_response(status)
        if self.chunked:
            request.send_header("Transfer-Encoding", "chunked")
            parts = [raw[at : at + 7] for at in range(0, len(raw), 7)] + [b""]
            raw = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
        else:
            request.send_header("Content-Length", str(len(raw)))
        request.end_headers()
        request.wfile.write(raw)

    @property
    def spec(self) -> Object:
        spec: Object = self.objects[NODE]["spec"]
        return spec


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    made = Api(tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(made.server.server_port))
    monkeypatch.setenv("AEGIS_KUBERNETES_ACCOUNT", str(tmp_path))
    yield made
    made.server.shutdown()
    made.thread.join()
    made.server.server_close()


def do(action: str, named: str = "kubernetes", node: str = "n1", timeout_s: float = 10.0) -> Outcome:
    driver = drivers.make(named, timeout_s=timeout_s)
    assert driver is not None
    return asyncio.run(ask(driver, action, node, "gpu.missing"))


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
            return await ask(driver, "isolate", "n1", "x")

    outcome = asyncio.run(whole())
    assert not outcome.ok and "in 0.3 s" in outcome.message
