"""`fedgraft deploy slurm`, `compose`, `k8s`: files with which other programs start a data owner's node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedgraft.cli.console import print_line
from fedgraft.cli.overrides import DeviceName
from fedgraft.core.errors import FedgraftError

File = Annotated[Path, typer.Argument(metavar="FILE", help="the file to write; it must not exist")]
Server = Annotated[str, typer.Option("--superlink", help="HOST:PORT of the coordinator's server")]
Name = Annotated[str, typer.Option("--name", help="this node's name; its key is NAME.key")]
Number = Annotated[int, typer.Option("--id", help="this node's client number, from the coordinator")]
Source = Annotated[str | None, typer.Option("--source", help="format of the images: folder, parquet or npz")]
Cpus = Annotated[int, typer.Option("--cpus", help="processors that the node may use")]
Memory = Annotated[int, typer.Option("--memory", help="gigabytes that the node may use")]
Gpus = Annotated[int, typer.Option("--gpus", help="GPUs that the node may use")]
Image = Annotated[str, typer.Option("--image", help="a container image with fedgraft (containers/node.Dockerfile)")]
UNTRIED = "checked by schema, not run on our machines: read it before you use it"


def slurm(
    file: File,
    superlink: Server,
    name: Name,
    id: Number,
    ca: Annotated[Path, typer.Option("--ca", help="the federation's ca.crt, on the cluster")],
    key: Annotated[Path, typer.Option("--key", help="the node's private key, on the cluster")],
    data: Annotated[Path, typer.Option("--data", help="the node's images, on the cluster")],
    source: Source = None,
    device: DeviceName = None,
    cpus: Cpus = 4,
    memory: Memory = 16,
    gpus: Gpus = 0,
    hours: Annotated[int, typer.Option("--hours", help="longest time of a job", min=1)] = 24,
    partition: Annotated[str | None, typer.Option("--partition", help="the cluster's partition")] = None,
) -> None:
    """Node: write a script for `sbatch` that runs this node on a cluster."""
    from fedgraft.deploy.launchers import DNS_NAME, Site, slurm_script

    if partition is not None and not DNS_NAME.fullmatch(partition.lower().replace("_", "-")):
        raise FedgraftError("E-CLI-PARTITION", f"{partition!r} cannot be the name of a partition", partition=partition)
    site = Site(name, superlink, id, source, device, cpus, memory, gpus)
    site.check()
    _write(file, slurm_script(site, ca.absolute(), key.absolute(), data.absolute(), hours, partition))
    print_line(f"submit it with: sbatch {file}")
    print_line(f"and once more with --dependency=singleton, so that another job follows after {hours} hours")


def compose(
    file: File,
    superlink: Server,
    name: Name,
    id: Number,
    image: Image,
    state: Annotated[Path, typer.Option("--state", help="folder with ca.crt and NAME.key; the node writes there")],
    data: Annotated[Path, typer.Option("--data", help="the node's images; mounted read-only")],
    source: Source = None,
    device: DeviceName = None,
    cpus: Cpus = 4,
    memory: Memory = 16,
    gpus: Gpus = 0,
) -> None:
    """Node: write a compose file that runs this node in a container."""
    from fedgraft.deploy.launchers import Site, compose_file

    site = Site(name, superlink, id, source, device, cpus, memory, gpus)
    site.check()
    _write(file, compose_file(site, image, state.absolute(), data.absolute()))
    print_line(f"start it with: docker compose -f {file} up --detach")


def k8s(
    file: File,
    superlink: Server,
    name: Name,
    id: Number,
    image: Image,
    claim: Annotated[str, typer.Option("--claim", help="name of the volume claim with the images")],
    path: Annotated[str, typer.Option("--path", help="path of the images in that volume (default: its root)")] = "",
    source: Source = None,
    device: DeviceName = None,
    cpus: Cpus = 4,
    memory: Memory = 16,
    gpus: Gpus = 0,
    state: Annotated[int, typer.Option("--state", help="gigabytes for the node's own files", min=1)] = 10,
) -> None:
    """Node: write a Kubernetes manifest that runs this node in a cluster."""
    from fedgraft.deploy.launchers import Site, kubernetes_manifest

    site = Site(name, superlink, id, source, device, cpus, memory, gpus)
    site.check()
    _write(file, kubernetes_manifest(site, image, claim, path, state))
    secret = f"fedgraft-{name}"
    print_line("make its secret, then apply it:")
    print_line(f"   kubectl create secret generic {secret} --from-file=ca.crt --from-file=node.key={name}.key")
    print_line(f"   kubectl apply -f {file}")


def _write(file: Path, text: str) -> None:
    """Write a new file and say so; refuse one that exists, because its owner may have changed it."""
    if file.exists():
        raise FedgraftError(
            "E-CLI-LAUNCH-FILE", f"{file} exists already", "choose another name, or remove it", path=str(file)
        )
    file.write_text(text)
    print_line(f"written: {file} ({UNTRIED})")
