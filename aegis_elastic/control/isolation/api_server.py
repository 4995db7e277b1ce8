"""Client of Kubernetes' API server, as the pod's service account: a call, or a change that loses nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from aegis_elastic.control.isolation import https

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CONFLICTS_MAX = 5
_OK, _CONFLICT = 200, 409
_CONTENT = {"PATCH": "application/merge-patch+json", "POST": "application/json"}

Object = dict[str, Any]
# From an object as it is to the patch for it; None: it is as wanted. ValueError: it can't be had.
Edit = Callable[[Object], Object | None]


class Api(NamedTuple):
    """Where the API server is and how we prove who we are. The token is read at each call: it is renewed."""

    host: str
    port: int
    ca_file: Path
    token_file: Path


class Client:
    """Calls one API server. Nothing here raises for what it answers or doesn't answer."""

    def __init__(self, api: Api, timeout_s: float) -> None:
        self._api = api
        self._timeout_s = timeout_s

    async def edit(self, path: str, edit: Edit) -> str:
        """Read, change, write if nobody else has meanwhile; returns why it can't be done, or ""."""
        for _ in range(CONFLICTS_MAX):
            status, found = await self.call("GET", path)
            if status != _OK:
                return describe_answer(status, found)
            try:
                change = edit(found)
            except ValueError as error:
                return str(error)
            if change is None:
                return ""
            version = (found.get("metadata") or {}).get("resourceVersion")
            change.setdefault("metadata", {})["resourceVersion"] = version
            status, found = await self.call("PATCH", path, change)
            if status == _OK:
                return ""
            if status != _CONFLICT:
                return describe_answer(status, found)
        return f"others changed {path} {CONFLICTS_MAX} times in between"

    async def call(self, method: str, path: str, body: Object | None = None) -> tuple[int, Object]:
        """Status 0 if there was no answer: the object then holds the reason as a "message"."""
        headers = {"Accept": "application/json"}
        try:
            headers["Authorization"] = f"Bearer {self._api.token_file.read_text(encoding='utf-8').strip()}"
            if body is not None:
                headers["Content-Type"] = _CONTENT[method]
            answer = await https.request(
                method,
                (self._api.host, self._api.port),
                f"/{path}",
                headers=headers,
                body=msgspec.json.encode(body) if body is not None else b"",
                ca_file=self._api.ca_file,
                timeout_s=self._timeout_s,
            )
            return answer.status, msgspec.json.decode(answer.body, type=Object)
        except (https.NoAnswer, OSError, UnicodeDecodeError) as error:
            return 0, {"message": str(error)}
        except msgspec.MsgspecError:
            return answer.status, {"message": answer.body[:200].decode(errors="replace")}


def from_pod(wanted_for: str) -> Api:
    """The API server as every pod's environment names it. ValueError outside of a cluster, naming what it was
    `wanted_for`.
    """
    host, port = (
        os.environ.get("KUBERNETES_SERVICE_HOST", ""),
        os.environ.get("KUBERNETES_SERVICE_PORT", "443"),
    )
    folder = Path(os.environ.get("AEGIS_KUBERNETES_ACCOUNT", ACCOUNT))
    if not host or not port.isdigit() or not (folder / "token").is_file():
        raise ValueError(
            f"cannot {wanted_for}: this is no pod with a service account (KUBERNETES_SERVICE_HOST "
            f"and {folder}/token are wanted)"
        )
    return Api(host, int(port), folder / "ca.crt", folder / "token")


def describe_answer(status: int, found: Object) -> str:
    """In words, what the server answered."""
    message = " ".join(str(found.get("message", "")).split())[:200]
    return f"the API server answers {status}: {message}" if status else message
