"""A stand-in for a Kubernetes cluster: the API calls of Snakemake's executor plugin, and pods that are processes of this machine.

It knows what decides whether the workflow's objects work together: who may call what (roles), which image, claims and service
accounts there are, where a pod has its volumes, and that Kubernetes takes no request for a GPU without an equal limit. It has no
nodes: a pod starts at once, and one whose image or claim is not there is refused, where a cluster lets it wait for ever.

In a pod, a path is the place on this machine of the volume or the image's folder that it lies in; any other lies in a folder of
that pod, which no other pod sees.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import threading
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

URL = re.compile(r"/(?:api/v1|apis/(batch)/v1)/namespaces/([^/]+)/(\w+)(?:/([^/]+))?(?:/(status|log))?")
VERBS = {"POST": "create", "DELETE": "delete", "GET": "get"}

Json = dict[str, Any]
Right = tuple[str, str, str]
"""API group, resource and verb."""


class Refused(Exception):
    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Image:
    """What a container gets of its image."""

    environment: Mapping[str, str]
    workdir: str
    entrypoint: list[str]
    folders: Mapping[str, Path]
    """Its folders, and where they are on this machine."""

    @classmethod
    def of(cls, dockerfile: str, folders: Mapping[str, Path]) -> Image:
        """As the last stage of ``dockerfile`` says."""
        last = re.sub(r"\\\n\s*", "", re.split(r"^FROM ", dockerfile, flags=re.MULTILINE)[-1])

        def instructions(name: str) -> list[str]:
            return re.findall(rf"^{name} (.*)", last, re.MULTILINE)

        variables = dict(word.split("=", 1) for line in instructions("ENV") for word in line.split())
        return cls(variables, instructions("WORKDIR")[-1], json.loads(instructions("ENTRYPOINT")[-1]), folders)


@dataclass
class Pod:
    name: str
    job: str
    spec: Json
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    @property
    def container(self) -> Json:
        (container,) = self.spec["containers"]
        return container

    @property
    def gpus(self) -> str | None:
        return self.container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu")

    def end(self) -> None:
        if self.exit_code is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def as_json(self) -> Json:
        code = self.exit_code
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        container = {key: self.container[key] for key in ("name", "image")}
        container |= {"imageID": "", "ready": code is None, "restartCount": 0, "state": state}
        return {
            "metadata": {"name": self.name, "labels": {"job-name": self.job}},
            "spec": self.spec,
            "status": {
                "phase": "Running" if code is None else "Failed" if code else "Succeeded",
                "containerStatuses": [container],
            },
        }


@dataclass
class Cluster:
    """One namespace; a context, at whose end its pods end, too."""

    folder: Path
    images: Mapping[str, Image]
    namespace: str = "team"
    stored: defaultdict[str, dict[str, Json]] = field(default_factory=lambda: defaultdict(dict))
    """The objects that are there, without pods: kind -> name -> object."""
    pods: dict[str, Pod] = field(default_factory=dict)
    started: list[Pod] = field(default_factory=list)
    """Every pod that has been there."""
    used: set[Right] = field(default_factory=set)

    def __enter__(self) -> Self:
        cluster, self._lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length)) if length else {}
                account = self.headers.get("Authorization", "").removeprefix("Bearer ")
                status, text = 500, "{}"  # without an answer the plugin would ask again after five minutes
                try:
                    status, text = 200, cluster._answer(self.command, self.path, account, body)
                except Refused as refusal:
                    status, text = refusal.status, json.dumps({"kind": "Status", "message": str(refusal)})
                finally:
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json" if text.startswith("{") else "text/plain")
                    self.send_header("Content-Length", str(len(text.encode())))
                    self.end_headers()
                    self.wfile.write(text.encode())

            do_GET = do_POST = do_DELETE = answer

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        for pod in self.started:
            pod.end()
        self._server.shutdown()
        self._server.server_close()

    def apply(self, *manifests: Json) -> None:
        """``kubectl apply``."""
        for manifest in manifests:
            self._create(manifest["kind"], manifest)

    def run(self, job: str, seconds: float) -> tuple[int, str]:
        """Waits for a job's pod, ends it after ``seconds``, and returns its exit status and log."""
        (pod,) = (pod for pod in self.pods.values() if pod.job == job)
        with suppress(subprocess.TimeoutExpired):
            pod.process.wait(seconds)
        pod.end()
        return pod.process.returncode, pod.log.read_text()

    def claim(self, name: str) -> Path:
        """The folder that is a claim's volume."""
        return self.folder / "claims" / name

    def rights(self, account: str) -> set[Right]:
        bound = {
            binding["roleRef"]["name"]
            for binding in self.stored["RoleBinding"].values()
            if {"kind": "ServiceAccount", "name": account} in binding["subjects"]
        }
        return {
            (group, resource, verb)
            for name in bound
            for rule in self.stored["Role"][name]["rules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }

    def _answer(self, method: str, url: str, account: str, body: Json) -> str:
        address = urlsplit(url)
        if (found := URL.fullmatch(address.path)) is None:
            raise Refused(404, f"no such address: {url}")
        group, namespace, resource, name, part = found.groups()
        verb = VERBS[method] if name or method != "GET" else "list"
        right = (group or "", f"{resource}/{part}" if part else resource, verb)
        query = {key: values[-1] for key, values in parse_qs(address.query).items()}
        with self._lock:
            if namespace != self.namespace or right not in self.rights(account):
                raise Refused(403, f"{account!r} may not {verb} {right[1]} in {namespace!r}")
            self.used.add(right)
            match right[1:]:
                case ("secrets", "create"):
                    return json.dumps(self._create("Secret", body))
                case ("jobs", "create"):
                    return json.dumps(self._create("Job", body))
                case ("secrets", "delete"):
                    self._take(self.stored["Secret"], name)
                case ("jobs", "delete"):
                    self._take(self.stored["Job"], name)
                    for pod in [pod for pod in self.pods.values() if pod.job == name]:
                        self.pods.pop(pod.name).end()
                case ("pods", "delete"):
                    self._take(self.pods, name).end()
                case ("jobs/status", "get"):
                    return json.dumps({**self._found(self.stored["Job"], name), "status": self._job_status(name)})
                case ("pods", "list"):
                    key, value = query["labelSelector"].split("=")
                    pods = (pod.as_json() for pod in self.pods.values())
                    return json.dumps({"items": [pod for pod in pods if pod["metadata"]["labels"].get(key) == value]})
                case ("pods/log", "get"):
                    if query.get("previous", "false").lower() != "false":  # the log of a pod's container before its restart
                        raise Refused(400, f"previous terminated container in pod {name!r} not found")
                    return self._found(self.pods, name).log.read_text()
                case _:
                    raise Refused(405, f"{verb} {right[1]}")
            return json.dumps({"kind": "Status", "status": "Success"})

    def _job_status(self, name: str) -> Json:
        codes = [pod.exit_code for pod in self.pods.values() if pod.job == name]
        return {
            "active": codes.count(None),
            "succeeded": codes.count(0),
            "failed": sum(bool(code) for code in codes),
        }

    def _found(self, objects: Mapping[str, Any], name: str) -> Any:
        if name not in objects:
            raise Refused(404, f"{name!r} not found")
        return objects[name]

    def _take(self, objects: dict[str, Any], name: str) -> Any:
        self._found(objects, name)
        return objects.pop(name)

    def _create(self, kind: str, body: Json) -> Json:
        objects, name = self.stored[kind], body["metadata"]["name"]
        if name in objects:
            raise Refused(409, f"{kind} {name!r} already exists")
        if kind == "Job":
            self._start(name, body["spec"]["template"]["spec"])
        if kind == "PersistentVolumeClaim":
            self.claim(name).mkdir(parents=True)
        objects[name] = body
        return body

    def _start(self, job: str, spec: Json) -> None:
        name, (container,) = f"{job}-{len(self.started)}", spec["containers"]
        account = spec.get("serviceAccountName", "default")
        self._check(account, container)
        image = self.images[container["image"]]
        own = self.folder / "pods" / name
        own.mkdir(parents=True)
        volumes = {volume["name"]: self._volume(volume, own) for volume in spec.get("volumes", [])}
        places = {"/": own / "root", **image.folders}
        for mount in container.get("volumeMounts", []):
            places[mount["mountPath"]] = self._found(volumes, mount["name"])

        def place(path: str) -> str:
            inside = max((p for p in places if f"{path}/".startswith(f"{p.rstrip('/')}/")), key=len)
            return str(places[inside] / path.removeprefix(inside).lstrip("/"))

        environment = {
            key: ":".join(place(part) if part.startswith("/") else part for part in value.split(":"))
            for key, value in image.environment.items()
        }
        # ${…}: of the base image (PATH), whose place this machine takes; or of the build, which set none.
        environment = {
            key: re.sub(r"\$\{(\w+)\}", lambda found: os.environ.get(found[1], ""), value)
            for key, value in environment.items()
        }
        own_variables = {variable["name"]: self._value(variable) for variable in container.get("env", [])}
        environment |= own_variables | {"KUBECONFIG": str(self._kubeconfig(account))}
        command = [
            re.sub(r"\$\((\w+)\)", lambda found: own_variables.get(found[1], found[0]), word)
            for word in [*container.get("command", image.entrypoint), *container.get("args", [])]
        ]
        folder = Path(place(container.get("workingDir", image.workdir)))
        folder.mkdir(parents=True, exist_ok=True)
        log = own / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pods[name] = Pod(name, job, spec, environment, log, process)
        self.started.append(self.pods[name])

    def _check(self, account: str, container: Json) -> None:
        if account not in self.stored["ServiceAccount"]:
            raise Refused(403, f"no service account {account!r}")
        if container["image"] not in self.images:
            raise Refused(422, f"no image {container['image']!r}")
        resources = container.get("resources", {})
        for resource, quantity in resources.get("requests", {}).items():
            if "/" in resource and resources.get("limits", {}).get(resource) != quantity:
                raise Refused(422, f"{resource}: Limit must be set for non overcommitable resources")

    def _volume(self, volume: Json, own: Path) -> Path:
        if "persistentVolumeClaim" in volume:
            name = volume["persistentVolumeClaim"]["claimName"]
            self._found(self.stored["PersistentVolumeClaim"], name)
            return self.claim(name)
        assert "emptyDir" in volume, volume
        return own / "volumes" / volume["name"]

    def _value(self, variable: Json) -> str:
        match variable.get("valueFrom"):
            case None:
                return variable["value"]
            case {"fieldRef": {"fieldPath": "metadata.namespace"}}:
                return self.namespace
            case {"secretKeyRef": {"name": name, "key": key}}:
                return base64.b64decode(self._found(self.stored["Secret"], name)["data"][key]).decode()
            case other:
                raise Refused(422, f"valueFrom {other}")

    def _kubeconfig(self, account: str) -> Path:
        """The file by which a pod finds this server, where a cluster's pod has a token of its service account."""
        file = self.folder / f"{account}.kubeconfig"
        server = f"http://127.0.0.1:{self._server.server_port}"
        entries = {
            "clusters": [{"name": "stand-in", "cluster": {"server": server}}],
            "users": [{"name": account, "user": {"token": account}}],
            "contexts": [{"name": "stand-in", "context": {"cluster": "stand-in", "user": account}}],
            "current-context": "stand-in",
        }
        file.write_text(json.dumps(entries))  # JSON is YAML
        return file
