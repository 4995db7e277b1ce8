"""An API server like Kubernetes' for tests: it holds objects, versions and merge patches as real ones do."""

from __future__ import annotations

import copy
import http.server
import json
import ssl
import threading
import urllib.parse
from pathlib import Path
from typing import Any

from aegis_elastic.bus.tls import make_certificate

Object = dict[str, Any]
NODE = "/api/v1/nodes/n1"
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
    """The server: `objects` by path, `read_only` or not; `rivals` change an object between our reading and
    our writing.
    """

    def __init__(self, folder: Path) -> None:
        self.objects: dict[str, Object] = {NODE: {"metadata": {"resourceVersion": "1"}, "spec": {}}}
        self.patches: list[tuple[str, Object]] = []
        self.rivals = 0
        self.chunked = False
        self.evicted: list[str] = []
        self.protected = False
        self.read_only = False
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

            def do_POST(self) -> None:
                assert self.headers["Content-Type"] == "application/json"
                api.evict(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

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
        path, _, query = request.path.partition("?")
        if path.endswith("/pods"):
            return self.list_pods(request, path, dict(urllib.parse.parse_qsl(query)))
        found = self.objects.get(path)
        if found is None:
            return self.send(request, 404, {"message": f'nodes "{request.path}" not found'})
        if patch is None:
            self.send(request, 200, copy.deepcopy(found))
            if self.rivals:
                self.rivals -= 1
                self.change(request.path, {"metadata": {"labels": {"rival": str(self.rivals)}}})
            return None
        if self.read_only:
            return self.send(request, 403, {"message": "this account may not patch it"})
        if patch["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
            return self.send(request, 409, {"message": "the object has been modified"})
        self.patches.append((request.path, patch))
        self.change(request.path, patch)
        return self.send(request, 200, self.objects[request.path])

    def list_pods(
        self, request: http.server.BaseHTTPRequestHandler, path: str, asked: dict[str, str]
    ) -> None:
        """Those with the labels that are asked for, two a page."""
        wanted = dict(part.split("=") for part in asked["labelSelector"].split(","))
        pods = [
            pod
            for place, pod in sorted(self.objects.items())
            if place.startswith(f"{path}/") and wanted.items() <= pod["metadata"].get("labels", {}).items()
        ]
        begin = int(asked.get("continue", "0"))
        more = {"continue": str(begin + 2)} if len(pods) > begin + 2 else {}
        self.send(request, 200, {"items": copy.deepcopy(pods[begin : begin + 2]), "metadata": more})

    def evict(self, request: http.server.BaseHTTPRequestHandler, body: Object) -> None:
        """Pods that are evicted are gone."""
        pod, _, what = request.path.rpartition("/")
        assert what == "eviction" and body["kind"] == "Eviction" and pod.endswith(body["metadata"]["name"])
        if self.protected:
            return self.send(request, 429, {"message": "it would violate the pod's disruption budget"})
        if self.objects.pop(pod, None) is None:
            return self.send(request, 404, {"message": "not found"})
        self.evicted.append(body["metadata"]["name"])
        return self.send(request, 201, {"status": "Success"})

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
