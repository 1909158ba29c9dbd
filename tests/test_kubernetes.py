"""The workflow on Kubernetes: the Job of snapmla.yaml runs Snakemake, whose jobs are pods, in a stand-in for a cluster.

The stand-in (kubernetes_stand_in.py) is a server for the plugin's API calls that runs pods as processes of this machine. The image is
what the Dockerfile says, with the toy project as its source folder and this Python's environment as its environment.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import toy_project
import yaml
from kubernetes_stand_in import Cluster, Image, Json, Pod

pytest.importorskip("snakemake_executor_plugin_kubernetes", reason="the extra `kubernetes` is not installed")

FOLDER = toy_project.REPOSITORY / "workflow" / "profiles" / "kubernetes"
PROFILE = yaml.safe_load((FOLDER / "config.yaml").read_text(encoding="utf-8"))
MANIFESTS = (FOLDER / "snapmla.yaml").read_text(encoding="utf-8")
DOCKERFILE = (toy_project.REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
IN_THE_TEST = ["--config", "tracking=disabled", "--jobs", "3", "--seconds-between-status-checks", "1"]


def manifests(*arguments: str) -> dict[str, Json]:
    """Kind -> object of snapmla.yaml; ``arguments``, where given, instead of ``all`` and in addition."""
    objects = {manifest["kind"]: manifest for manifest in yaml.safe_load_all(MANIFESTS)}
    assert len(objects) == MANIFESTS.count("\nkind: ")
    if arguments:
        (container,) = objects["Job"]["spec"]["template"]["spec"]["containers"]
        container["args"][1:2] = arguments
        container["args"] += IN_THE_TEST
    return objects


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return toy_project.build(tmp_path / "project")


@pytest.fixture
def cluster(tmp_path: Path, project: Path) -> Iterator[Cluster]:
    folders = {"/opt/snapmla": project, "/opt/venv": Path(sys.prefix)}
    with Cluster(tmp_path / "cluster", {PROFILE["container-image"]: Image.of(DOCKERFILE, folders)}) as found:
        yield found


def rule(pod: Pod) -> str:
    (name,) = re.findall(r"--allowed-rules (\w+)", pod.container["args"][-1])
    return name


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_the_manifests_agree_with_the_profile() -> None:
    from kubernetes import client

    objects = manifests()
    api, types = client.ApiClient(), {"Job": "V1Job", "Role": "V1Role", "RoleBinding": "V1RoleBinding"}
    for kind, manifest in objects.items():
        read = api.deserialize(SimpleNamespace(data=json.dumps(manifest)), types.get(kind, f"V1{kind}"))
        assert api.sanitize_for_serialization(read) == manifest  # a field that it does not know is lost
    pod = objects["Job"]["spec"]["template"]["spec"]
    (container,), (volume,) = pod["containers"], pod["volumes"]
    (mount,) = container["volumeMounts"]
    claim = volume["persistentVolumeClaim"]["claimName"]
    assert container["image"] == PROFILE["container-image"]
    assert pod["serviceAccountName"] == PROFILE["kubernetes-service-account-name"] == objects["ServiceAccount"]["metadata"]["name"]
    assert [f"{claim}:{mount['mountPath']}"] == PROFILE["kubernetes-persistent-volumes"]
    assert claim == objects["PersistentVolumeClaim"]["metadata"]["name"] and mount["name"] == volume["name"]
    assert objects["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    assert mount["mountPath"] == Image.of(DOCKERFILE, {}).environment["SNAPMLA_RESULTS"]


def test_the_job_runs_the_workflow_and_each_experiment_is_a_pod(cluster: Cluster, project: Path) -> None:
    sources = files(project)
    cluster.apply(*manifests("fig1", "fig4", "fig5", "table_serving").values())
    status, log = cluster.run("snapmla", 300)
    assert status == 0, log
    claim, mount_path = PROFILE["kubernetes-persistent-volumes"][0].split(":")
    results = cluster.claim(claim)
    assert (results / "figures" / "fig4.svg").is_file() and (results / "tables" / "table_serving.md").is_file()
    # The image's sources may be read-only. Snakemake's log of itself, which it does without there, is no result.
    assert {file for file in files(project) - sources if ".snakemake" not in file.parts} == set()

    main, *pods = cluster.started
    gpus = {rule(pod): pod.gpus for pod in pods}
    assert gpus == dict.fromkeys(("kernels", "probe", "latents", "fidelity")) | dict.fromkeys(toy_project.MEASURING, "1")
    assert len(pods) == len(gpus) and main.gpus is None
    for pod in pods:
        assert pod.container["image"] == PROFILE["container-image"]
        (volume,) = (v for v in pod.spec["volumes"] if v.get("persistentVolumeClaim") == {"claimName": claim})
        assert {"name": volume["name"], "mountPath": mount_path} in pod.container["volumeMounts"]
        limits, defaults = pod.container["resources"]["limits"], PROFILE["default-resources"]
        assert limits["memory"] == f"{defaults['mem_mb']}M" and limits["ephemeral-storage"] == f"{defaults['disk_mb']}M"
        assert limits["cpu"] == ("1000m" if gpus[rule(pod)] or rule(pod) == "kernels" else "2000m")  # the rules' threads
    assert len({pod.environment["SNAPMLA_RUN_GROUP"] for pod in pods}) == 1
    assert [*cluster.pods] == [main.name] and [*cluster.stored["Job"]] == ["snapmla"] and not cluster.stored["Secret"]


def test_a_failing_job_fails_the_workflow_and_its_log_is_shown(cluster: Cluster, project: Path) -> None:
    experiment = project / "snapmla" / "experiments" / "quality.py"
    experiment.write_text(experiment.read_text().replace("    begin =", '    raise RuntimeError("no luck")\n    begin ='))
    cluster.apply(*(objects := manifests("table1")).values())
    status, log = cluster.run("snapmla", 300)
    assert status == 1 and "Error in rule quality" in log
    assert "RuntimeError: no luck" in log
    results = cluster.claim(objects["PersistentVolumeClaim"]["metadata"]["name"])
    (pod_log,) = (results / ".snakemake" / "auxiliary" / "kubernetes-logs").glob("*.log")
    assert "RuntimeError: no luck" in pod_log.read_text()
    assert not (results / "tables" / "table1.md").exists() and not (results / "quality").exists()

    assert len(cluster.pods) == len(cluster.stored["Job"]) == 1 and not cluster.stored["Secret"]  # the workflow's own
    assert cluster.used == cluster.rights(PROFILE["kubernetes-service-account-name"])
