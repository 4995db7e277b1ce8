"""Isolation in Kubernetes: the node is cordoned and tainted, and a workload may be changed to avoid it.

Plain HTTPS with the pod's service account, which needs the verbs `get` and `patch` on `nodes` (and on its
workload, see `deploy/kubernetes/`). Lists are changed with the object's resourceVersion in the patch, so that
what somebody else changes at the same time is never lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from aegis_elastic.control.isolation.api_server import Client, Object
from aegis_elastic.control.isolation.contract import MARK, Outcome

TAINT_KEY = "aegis-elastic/isolated"
REASON_NOTE = "aegis-elastic/reason"
HOSTNAME_LABEL = "kubernetes.io/hostname"


class Kubernetes:
    """`kubernetes[:PATH]`; PATH names a workload, `apis/apps/v1/namespaces/NS/statefulsets/NAME`."""

    name = "kubernetes"

    def __init__(self, client: Client, workload: str) -> None:
        self._client = client
        self._workload = workload

    async def isolate(self, node: str, reason: str) -> Outcome:
        """Cordon and taint the node, and have the workload avoid it. What is done already stays as it is."""

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

        why = await self._client.edit(_node_path(node), edit)
        if not why and self._workload:
            why = await self._client.edit(self._workload, lambda found: _avoiding(found, node, avoid=True))
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

        why = await self._client.edit(_node_path(node), edit)
        if not why and self._workload:
            why = await self._client.edit(self._workload, lambda found: _avoiding(found, node, avoid=False))
        if why:
            return Outcome(False, f"cannot release {node} in Kubernetes: {why}")
        return Outcome(True, f"{node} is released in Kubernetes")


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
