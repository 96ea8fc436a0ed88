"""Files with which other programs start a data owner's node: a Slurm script, a compose file, a Kubernetes manifest.

All are plain text that the owner reads and changes. None holds a secret: the node's private key stays a file of the
owner's machine, or a Kubernetes secret that the owner makes. They were checked against the published schemas and never
run by us (docs/deploy.md).
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from fedgraft.core.errors import FedgraftError
from fedgraft.deploy.run_node import DATA_SOURCES

DNS_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")
"""Names that Kubernetes, compose and Slurm all take."""
_USER = 10001  # of containers/node.Dockerfile


@dataclass(frozen=True)
class Site:
    """One node: what `fedgraft deploy node` is started with, and what it may use."""

    name: str
    """Name of the job, the service or the deployment."""
    superlink: str
    """HOST:PORT of the server."""
    client: int
    source: str | None = None
    """Format of the images; None: detected."""
    device: str | None = None
    cpus: int = 4
    memory_gb: int = 16
    gpus: int = 0

    def check(self) -> None:
        """Refuse values that one of the files could not hold, or that no node could be started with."""
        if not DNS_NAME.fullmatch(self.name):
            raise FedgraftError(
                "E-DEPLOY-LAUNCH-NAME",
                f"{self.name!r} cannot be the name of a job or a service",
                "use --name with lower-case letters, digits and dashes",
                name=self.name,
            )
        host, _, port = self.superlink.rpartition(":")
        if not re.fullmatch(r"[A-Za-z0-9._\[\]:-]+", host) or not port.isdigit() or not 0 < int(port) < 65536:
            raise FedgraftError(
                "E-DEPLOY-SUPERLINK",
                f"--superlink {self.superlink!r} is not HOST:PORT",
                "use for example server.example:9000",
                superlink=self.superlink,
            )
        if self.source is not None and self.source not in DATA_SOURCES:
            raise FedgraftError(
                "E-DEPLOY-SOURCE",
                f"--source {self.source!r} is not a format of a node's data",
                f"use one of {', '.join(DATA_SOURCES)}",
                source=self.source,
            )
        if self.client < 0 or self.cpus < 1 or self.memory_gb < 1 or self.gpus < 0:
            raise FedgraftError(
                "E-DEPLOY-LAUNCH-NUMBER",
                "--id and --gpus are 0 or more, --cpus and --memory 1 or more",
                client=self.client,
                cpus=self.cpus,
                memory_gb=self.memory_gb,
                gpus=self.gpus,
            )

    def arguments(self, authority: str, key: str, data: str) -> list[str]:
        """Return the arguments of `fedgraft deploy` that start the node.

        `authority`, `key` and `data` are the paths at which the node finds the server's certificate authority, its own
        key and its images.
        """
        arguments = ["node", "--superlink", self.superlink, "--ca", authority, "--key", key, "--id", str(self.client)]
        arguments += ["--data", data]
        if self.source is not None:
            arguments += ["--source", self.source]
        if self.device is not None:
            arguments += ["--device", self.device]
        return arguments

    @property
    def port(self) -> int:
        """The server's port."""
        return int(self.superlink.rpartition(":")[2])


def slurm_script(site: Site, authority: Path, key: Path, data: Path, hours: int, partition: str | None) -> str:
    """Return a script for `sbatch` that runs the node until its time is over.

    `hours` is the job's longest time. Slurm's signal before the end lets the node sign off; whatever it worked on it
    continues in the next job (`local.checkpoint_seconds`).
    """
    directives = [
        f"--job-name=fedgraft-{site.name}",
        "--ntasks=1",
        f"--cpus-per-task={site.cpus}",
        f"--mem={site.memory_gb}G",
        f"--time={hours}:00:00",
        "--signal=B:TERM@120",
        "--requeue",
        "--open-mode=append",
        f"--output=fedgraft-{site.name}.out",
    ]
    if site.gpus:
        directives.append(f"--gres=gpu:{site.gpus}")
    if partition is not None:
        directives.append(f"--partition={partition}")
    arguments = site.arguments(str(authority), str(key), str(data))
    command = shlex.join(["fedgraft", "deploy", *arguments])
    lines = [
        "#!/bin/bash",
        *[f"#SBATCH {directive}" for directive in directives],
        "# A node of a federation (fedgraft deploy slurm). It needs no port of its own; it must reach",
        f"# {site.superlink}. Activate the environment that has fedgraft here, if it is not the default one.",
        "set -euo pipefail",
        'export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"',
        "# `exec`: Slurm's signal reaches the node itself, two minutes before the end.",
        f"exec {command}",
    ]
    return "\n".join(lines) + "\n"


def compose_file(site: Site, image: str, state: Path, data: Path) -> str:
    """Return a compose file with the node as its one service.

    Args:
        image: the container image with fedgraft, such as `containers/node.Dockerfile` makes.
        state: folder of the host with `ca.crt` and NAME.key, where the node keeps its ledger and its work; its owner
            must be the image's user.
        data: folder or file of the host with the images; mounted so that nothing can be written to it.
    """
    arguments = site.arguments("ca.crt", f"{site.name}.key", "/data")
    lines = [
        "# A node of a federation (fedgraft deploy compose): docker compose -f THIS_FILE up --detach",
        f"name: {_quoted('fedgraft-' + site.name)}",
        "services:",
        "  node:",
        f"    image: {_quoted(image)}",
        f"    command: {_quoted(arguments)}",
        "    read_only: true",
        '    cap_drop: ["ALL"]',
        '    security_opt: ["no-new-privileges:true"]',
        '    tmpfs: ["/tmp"]',
        "    restart: unless-stopped",
        "    stop_grace_period: 60s",
        "    deploy:",
        "      resources:",
        "        limits:",
        f"          cpus: {_quoted(str(site.cpus))}",
        f"          memory: {_quoted(f'{site.memory_gb}G')}",
    ]
    if site.gpus:
        lines += [
            "        reservations:",
            "          devices:",
            "            - driver: nvidia",
            f"              count: {site.gpus}",
            '              capabilities: ["gpu"]',
        ]
    lines += [
        "    volumes:",
        *_bind(state, "/state", read_only=False),
        *_bind(data, "/data", read_only=True),
    ]
    return "\n".join(lines) + "\n"


def _bind(host: Path, place: str, read_only: bool) -> list[str]:
    """Return the lines that mount the path `host` at `place` in the container; `host` is never made if missing."""
    return [
        "      - type: bind",
        f"        source: {_quoted(str(host))}",
        f"        target: {place}",
        f"        read_only: {json.dumps(read_only)}",
        "        bind: {create_host_path: false}",
    ]


def kubernetes_manifest(site: Site, image: str, claim: str, path: str, state_gb: int) -> str:
    """Return a manifest: a volume for the node's state, a deployment of one pod, a policy for its network.

    Args:
        image: the container image with fedgraft.
        claim: name of the volume claim with the images, which must exist.
        path: path of the images inside that volume; empty: its root.
        state_gb: size of the node's own volume: its key, ledger and work.

    The secret `fedgraft-NAME` with `ca.crt` and `node.key` is the owner's to make; the key is copied to the state's
    volume with the permissions that fedgraft asks for.
    """
    name = f"fedgraft-{site.name}"
    arguments = site.arguments("/state/ca.crt", f"/state/{site.name}.key", "/data")
    resources = {"cpu": str(site.cpus), "memory": f"{site.memory_gb}Gi"}
    if site.gpus:
        resources["nvidia.com/gpu"] = str(site.gpus)
    confined = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    copy = f"install -m 600 /secret/node.key /state/{site.name}.key && install -m 644 /secret/ca.crt /state/ca.crt"
    state_mount = {"name": "state", "mountPath": "/state"}
    data_mount: dict[str, object] = {"name": "data", "mountPath": "/data", "readOnly": True}
    if path:
        data_mount["subPath"] = path
    node_container = {
        "name": "node",
        "image": image,
        "args": arguments,
        "resources": {"requests": resources, "limits": resources},
        "securityContext": confined,
        "volumeMounts": [state_mount, data_mount, {"name": "tmp", "mountPath": "/tmp"}],
    }
    key_container = {
        "name": "key",
        "image": image,
        "command": ["sh", "-c", copy],
        "securityContext": confined,
        "volumeMounts": [state_mount, {"name": "secret", "mountPath": "/secret", "readOnly": True}],
    }
    pod = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 60,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [key_container],
        "containers": [node_container],
        "volumes": [
            {"name": "state", "persistentVolumeClaim": {"claimName": name}},
            {"name": "data", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}},
            {"name": "secret", "secret": {"secretName": name}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    labels = {"app": name}
    volume_claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": f"{state_gb}Gi"}}},
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    outgoing = [
        {"ports": [{"protocol": "TCP", "port": site.port}]},
        {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]},
    ]
    network = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": {
            "podSelector": {"matchLabels": labels},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": outgoing,
        },
    }
    head = [
        "# A node of a federation (fedgraft deploy k8s). Nothing connects to it; it reaches DNS and the server's port.",
        "# Make its secret first:",
        f"#   kubectl create secret generic {name} --from-file=ca.crt --from-file=node.key={site.name}.key",
        "#   kubectl apply -f THIS_FILE",
        "# One pod at a time: two with one key would shut each other out.",
    ]
    documents = []
    for document in (volume_claim, deployment, network):
        documents.append("\n".join(_block(document, 0)))
    return "\n".join(head) + "\n" + "\n---\n".join(documents) + "\n"


def _quoted(value: object) -> str:
    """Return a value as JSON, which YAML reads as the same value, whatever characters are in it."""
    return json.dumps(value)


def _block(value: object, indent: int) -> list[str]:
    """Return a value of mappings, lists and scalars as lines of YAML in block style; leaves are JSON."""
    space = " " * indent
    lines = []
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, dict | list) and item:
                lines.append(f"{space}{key}:")
                lines += _block(item, indent + 2)
            else:
                lines.append(f"{space}{key}: {_quoted(item)}")
        return lines
    assert isinstance(value, list)
    for item in value:
        if isinstance(item, dict):
            inner = _block(item, indent + 2)
            lines.append(f"{space}- {inner[0].strip()}")
            lines += inner[1:]
        else:
            lines.append(f"{space}- {_quoted(item)}")
    return lines
