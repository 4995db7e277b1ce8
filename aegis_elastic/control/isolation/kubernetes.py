"""Isolation in Kubernetes: the node is cordoned and tainted, and a workload may be told to avoid it.

Plain HTTPS with the pod's service account, which needs the verbs `get` and `patch` on `nodes` (and on its
workload, see `deploy/kubernetes/`). Lists are changed with the object's resourceVersion in the patch, so that
what somebody else changes at the same time is never lost.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from aegis_elastic.control.isolation import https
from aegis_elastic.control.isolation.contract import MARK, Outcome

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TAINT_KEY = "aegis-elastic/isolated"
REASON_NOTE = "aegis-elastic/reason"
HOSTNAME_LABEL = "kubernetes.io/hostname"
CONFLICTS_MAX = 5
_MERGE_PATCH = "application/merge-patch+json"
_OK, _CONFLICT = 200, 409

Object = dict[str, Any]


class Api(NamedTuple):
    """Where the API server is and how we prove who we are. The token is read at each call: it is renewed."""

    host: str
    port: int
    ca_file: Path
    token_file: Path


class Kubernetes:
    """`kubernetes[:PATH]`; PATH names a workload, `apis/apps/v1/namespaces/NS/statefulsets/NAME`."""

    name = "kubernetes"

    def __init__(self, api: Api, workload: str, timeout_s: float) -> None:
        self._api = api
        self._workload = workload
        self._timeout_s = timeout_s

    async def isolate(self, node: str, reason: str) -> Outcome:
        """Cordon and taint the node, and have the workload avoid it. What is done already is left alone."""

        def edit(found: Object) -> Object | None:
            spec, taints = found.get("spec") or {}, _taints(found)
            notes = (found.get("metadata") or {}).get("annotations") or {}
            if spec.get("unschedulable") and any(map(_ours, taints)):
                return None
            change: Object = {"spec": {"unschedulable": True}}
            if not any(map(_ours, taints)):
                change["spec"]["taints"] = [
                    *taints,
                    {"key": TAINT_KEY, "value": "true", "effect": "NoSchedule"},
                ]
            # A node that others have cordoned is not ours to uncordon.
            if not spec.get("unschedulable") or REASON_NOTE in notes:
                change["metadata"] = {"annotations": {REASON_NOTE: reason}}
            return change

        why = await self._edit(_node_path(node), edit)
        if not why and self._workload:
            why = await self._edit(self._workload, lambda found: _avoiding(found, node, avoid=True))
        if why:
            return Outcome(False, f"cannot isolate {node} in Kubernetes: {why}")
        avoided = " and avoided by the workload" if self._workload else ""
        return Outcome(True, f"{node} is cordoned and tainted in Kubernetes{avoided}")

    async def release(self, node: str) -> Outcome:
        """Take taint, cordon and affinity back, each if it is ours."""

        def edit(found: Object) -> Object | None:
            taints = _taints(found)
            notes = (found.get("metadata") or {}).get("annotations") or {}
            ours = str(notes.get(REASON_NOTE, "")).startswith(MARK)
            if not ours and not any(map(_ours, taints)):
                return None
            change: Object = {"spec": {"taints": [taint for taint in taints if not _ours(taint)]}}
            if ours:
                change["spec"]["unschedulable"] = None
                change["metadata"] = {"annotations": {REASON_NOTE: None}}
            return change

        why = await self._edit(_node_path(node), edit)
        if not why and self._workload:
            why = await self._edit(self._workload, lambda found: _avoiding(found, node, avoid=False))
        if why:
            return Outcome(False, f"cannot release {node} in Kubernetes: {why}")
        return Outcome(True, f"{node} is released in Kubernetes")

    async def _edit(self, path: str, edit: Any) -> str:
        """Read, change, write if nobody else has meanwhile; returns why it can't be done, or ""."""
        for _ in range(CONFLICTS_MAX):
            status, found = await self._call("GET", path)
            if status != _OK:
                return _said(status, found)
            try:
                change = edit(found)
            except ValueError as error:
                return str(error)
            if change is None:
                return ""
            version = (found.get("metadata") or {}).get("resourceVersion")
            change.setdefault("metadata", {})["resourceVersion"] = version
            status, found = await self._call("PATCH", path, change)
            if status == _OK:
                return ""
            if status != _CONFLICT:
                return _said(status, found)
        return f"others changed {path} {CONFLICTS_MAX} times in between"

    async def _call(self, method: str, path: str, body: Object | None = None) -> tuple[int, Object]:
        """Status 0 if there was no answer: the object then holds the reason as a "message"."""
        headers = {"Accept": "application/json"}
        try:
            headers["Authorization"] = f"Bearer {self._api.token_file.read_text(encoding='utf-8').strip()}"
            if body is not None:
                headers["Content-Type"] = _MERGE_PATCH
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


def from_pod() -> Api:
    """The API server as every pod is told of it. ValueError outside of a cluster."""
    host, port = (
        os.environ.get("KUBERNETES_SERVICE_HOST", ""),
        os.environ.get("KUBERNETES_SERVICE_PORT", "443"),
    )
    folder = Path(os.environ.get("AEGIS_KUBERNETES_ACCOUNT", ACCOUNT))
    if not host or not port.isdigit() or not (folder / "token").is_file():
        raise ValueError(
            "cannot isolate with kubernetes: this is no pod with a service account (KUBERNETES_SERVICE_HOST "
            f"and {folder}/token are wanted)"
        )
    return Api(host, int(port), folder / "ca.crt", folder / "token")


def workload(path: str) -> str:
    """The path of a workload whose pods must avoid isolated nodes; "" for none. ValueError for another
    path.
    """
    parts = path.strip("/").split("/") if path else []
    fine = len(parts) == 7 and parts[:2] == ["apis", "apps"] and parts[3] == "namespaces"
    if path and not (fine and parts[5] == "statefulsets"):
        raise ValueError(
            f"cannot use {path!r} as a workload: want apis/apps/v1/namespaces/NAMESPACE/statefulsets/NAME"
        )
    return "/".join(quote(part, safe="") for part in parts)


def _avoiding(found: Object, node: str, *, avoid: bool) -> Object | None:
    """The patch by which the workload's new pods avoid the node (or no longer do); None: it is so already.

    ValueError if the patch would restart the pods that run: that is what it is meant to save them from.
    """
    spec = found.get("spec") or {}
    strategy = (spec.get("updateStrategy") or {}).get("type", "RollingUpdate")
    if strategy != "OnDelete":
        raise ValueError(
            f"its workload has the update strategy {strategy}, and a new affinity would restart all pods; "
            "want OnDelete"
        )
    template = (spec.get("template") or {}).get("spec") or {}
    affinity = (template.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms: Sequence[Mapping[str, Any]] = required.get("nodeSelectorTerms") or [{}]
    changed = [_term(term, node, avoid=avoid) for term in terms]
    if changed == list(terms):
        return None
    kept = [term for term in changed if term]
    # Terms are alternatives, and an empty one matches nothing: without any, the whole requirement goes.
    needed = {"nodeSelectorTerms": kept} if kept else None
    return {
        "spec": {
            "template": {
                "spec": {
                    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": needed}}
                }
            }
        }
    }


def _term(term: Mapping[str, Any], node: str, *, avoid: bool) -> Object:
    """One alternative of an affinity with this node among, or no longer among, those that it rules out."""
    others, avoided = [], list[str]()
    for expression in term.get("matchExpressions") or ():
        if expression.get("key") == HOSTNAME_LABEL and expression.get("operator") == "NotIn":
            avoided += expression.get("values") or ()
        else:
            others.append(expression)
    if avoid and node not in avoided:
        avoided.append(node)
    elif not avoid:
        avoided = [name for name in avoided if name != node]
    ruled_out = [{"key": HOSTNAME_LABEL, "operator": "NotIn", "values": avoided}] if avoided else []
    rest = {key: value for key, value in term.items() if key != "matchExpressions"}
    expressions = [*others, *ruled_out]
    return {**rest, "matchExpressions": expressions} if expressions else rest


def _taints(found: Object) -> list[Object]:
    return list((found.get("spec") or {}).get("taints") or ())


def _ours(taint: Mapping[str, Any]) -> bool:
    return taint.get("key") == TAINT_KEY


def _node_path(node: str) -> str:
    return f"api/v1/nodes/{quote(node, safe='')}"


def _said(status: int, found: Object) -> str:
    message = " ".join(str(found.get("message", "")).split())[:200]
    return f"the API server answers {status}: {message}" if status else message
