"""The manifests under deploy/kubernetes: what Kubernetes takes, with flags that our programs take."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from aegis_elastic.launch.flags.command_line import split
from aegis_elastic.launch.flags.parser import make_parser

Object = dict[str, Any]
FOLDER = Path(__file__).resolve().parent.parent.parent / "deploy" / "kubernetes"
DOCS = FOLDER.parent.parent / "docs" / "kubernetes.md"
FILES = sorted(FOLDER.glob("*.yaml"))
OPERATORS = ("jobset.x-k8s.io", "kubeflow.org")


def objects(file: Path) -> list[Object]:
    return [one for one in yaml.safe_load_all(file.read_text()) if one]


def pods(value: Any) -> Iterator[Object]:
    """Every pod's spec, however deep an operator keeps its template."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        else:
            for part in value.values():
                yield from pods(part)
    elif isinstance(value, list):
        for part in value:
            yield from pods(part)


def commands(pod: Object) -> list[list[str]]:
    """The command lines of ours in a pod, also behind a shell."""
    found = []
    for container in [*pod["containers"], *pod.get("initContainers", ())]:
        argv = [*container.get("command", ()), *container.get("args", ())]
        if argv and Path(argv[0]).name in ("aegis-run", "aegis-master"):
            found.append(argv)
        found += [
            shlex.split(argument.partition("exec ")[2]) for argument in argv if "exec aegis-run" in argument
        ]
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kubernetes_takes_it(file: Path, unmet: Callable[[str], None]) -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        unmet("kubernetes-validate isn't installed")
    kubernetes_validate = importlib.import_module("kubernetes_validate")

    for one in objects(file):
        if one["apiVersion"].partition("/")[0] not in OPERATORS:
            kubernetes_validate.validate(one, "1.31", strict=True)
            continue
        # An operator's own object has no schema here, but what it makes of it does: jobs and pods.
        for job in one["spec"].get("replicatedJobs", ()):
            made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "one"}}
            kubernetes_validate.validate({**made, "spec": job["template"]["spec"]}, "1.31", strict=True)
        for pod in pods(one):
            whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": pod}
            kubernetes_validate.validate(whole, "1.31", strict=True)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_our_programs_take_the_flags(file: Path) -> None:
    parser = make_parser()
    for one in objects(file):
        for pod in pods(one):
            assert commands(pod), f"{file.name}: nothing of ours in a pod"
            for argv in commands(pod):
                # What Kubernetes and the shell put in.
                given = [re.sub(r"\$\(?JOB_COMPLETION_INDEX\)?", "0", argument) for argument in argv[1:]]
                flags, training = split(given, parser)
                assert all(flag.action is not None for flag in flags), argv
                assert training == ([] if argv[0].endswith("aegis-master") else ["pretrain_gpt.py"])
                parser.parse_args([*given, *([] if training else ["nothing"])])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_pod_has_its_secret_by_file_and_volumes_for_its_mounts(file: Path) -> None:
    for one in objects(file):
        assert one["kind"] != "Secret"
        for pod in pods(one):
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            for container in [*pod["containers"], *pod.get("initContainers", ())]:
                assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes.keys()
                assert "AEGIS_JOIN_SECRET" not in {entry["name"] for entry in container.get("env", ())}
            assert volumes["join"]["secret"]["defaultMode"] == 0o400
            assert pod["serviceAccountName"] == "aegis"


# What the charts' own documentation names: etcd's as of its versions 10 to 12, NATS' as of 1.x. What stands
# below a `merge` goes into the server's configuration as it is.
CHART_VALUES = {
    "etcd": {
        "replicaCount",
        "auth.rbac.create",
        "auth.rbac.allowNoneAuthentication",
        "networkPolicy.enabled",
        "networkPolicy.allowExternal",
        "persistence.enabled",
        "persistence.size",
    },
    "nats": {
        "config.cluster.enabled",
        "config.cluster.replicas",
        "config.jetstream.enabled",
        "config.jetstream.fileStore.pvc.enabled",
        "config.jetstream.fileStore.pvc.size",
        "config.nats.tls.enabled",
        "config.nats.tls.secretName",
        "config.nats.tls.merge.handshake_first",
    },
}


@pytest.mark.parametrize("chart", CHART_VALUES)
def test_values_are_such_as_the_chart_knows(chart: str) -> None:
    """The charts themselves can't be had here: this holds what was read in their documentation."""

    def names(values: Object, above: str = "") -> Iterator[str]:
        for key, value in values.items():
            if isinstance(value, dict):
                yield from names(value, f"{above}{key}.")
            else:
                yield f"{above}{key}"

    assert set(names(objects(FOLDER / "charts" / f"{chart}.yaml")[0])) <= CHART_VALUES[chart]


def test_we_may_change_but_neither_create_nor_delete() -> None:
    """Who creates deletes: the pods are their controller's, the nodes the cluster's."""
    roles = [one for one in objects(FOLDER / "isolation.yaml") if one["kind"] in ("Role", "ClusterRole")]
    verbs = {verb for role in roles for rule in role["rules"] for verb in rule["verbs"]}
    assert verbs == {"get", "patch"}


@pytest.mark.full
def test_the_init_container_installs_only_what_the_image_lacks(tmp_path: Path) -> None:
    (job,) = (one for one in objects(FOLDER / "worker.yaml") if one["kind"] == "Job")
    install = job["spec"]["template"]["spec"]["initContainers"][0]
    shell, flags = install["command"]
    script = install["args"][0]
    # A package that is there for certain stands for ours and for the saver's: pip would reach for an index.
    script = re.sub(r"/aegis(?=[/\s])", str(tmp_path / "aegis"), script).replace("aegis-elastic", "pip", 1)
    env = {**os.environ, "SAVER_PACKAGE": "pip", "PIP_NO_INDEX": "1"}
    path = f"{tmp_path}:{env['PATH']}"
    (tmp_path / "python").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
    done = subprocess.run([shell, flags, script], env={**env, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Collecting" not in done.stdout and "already satisfied" not in done.stdout
    entry = tmp_path / "aegis" / "bin" / "aegis-run"
    assert os.access(entry, os.X_OK)
    assert entry.read_text() == (
        f'#!/bin/sh\nexec {tmp_path}/aegis/bin/python -m aegis_elastic.launch.run "$@"\n'
    )
    assert Path(job["spec"]["template"]["spec"]["containers"][0]["command"][0]).name == entry.name


def test_exit_codes_mean_in_each_policy_what_the_table_says() -> None:
    table = dict(re.findall(r"^\| (\d+)\b[^|]*\| `(\w+)`", DOCS.read_text(), flags=re.MULTILINE))
    assert table == {"1": "FailJob", "2": "FailJob", "75": "Ignore", "76": "Ignore"}
    for file in ("worker.yaml", "jobset.yaml"):
        found = {}
        for policy in _policies(objects(FOLDER / file)):
            for rule in policy["rules"]:
                for code in rule.get("onExitCodes", {}).get("values", ()):
                    found[str(code)] = rule["action"]
        assert found == table, file


def _policies(value: Any) -> Iterator[Object]:
    if isinstance(value, dict):
        for key, part in value.items():
            if key == "podFailurePolicy":
                yield part
            else:
                yield from _policies(part)
    elif isinstance(value, list):
        for part in value:
            yield from _policies(part)
