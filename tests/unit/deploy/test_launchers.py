"""Files that start a node elsewhere: their structure, the published schemas where those are installed, the shell.

No cluster and no container engine here: nothing of this is run. `kubernetes_validate` and `compose_spec` (from PyPI)
hold the schemas that Kubernetes and compose publish; they are no part of fedgraft's environment.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises
from typer.testing import CliRunner

from fedgraft.cli.main import app
from fedgraft.deploy.launchers import Site, compose_file, kubernetes_manifest, slurm_script

yaml = pytest.importorskip("yaml", reason="reads what was written")

ODD = "/data/images of 'north' # \"x\": [y], $HOME\u00e9"
SITE = Site("north", "server.example:9400", 2, "folder", "cuda", cpus=8, memory_gb=32, gpus=1)
DIRECTIVES = {
    "job-name",
    "ntasks",
    "cpus-per-task",
    "mem",
    "time",
    "signal",
    "requeue",
    "open-mode",
    "output",
    "gres",
    "partition",
}
"""Options of sbatch's manual page that are used here."""


def slurm() -> str:
    return slurm_script(SITE, Path("/fed/ca.crt"), Path("/keys/north.key"), Path(ODD), 24, "gpu")


def compose() -> str:
    return compose_file(SITE, "registry/fedgraft:0.3", Path("/srv/north"), Path(ODD))


def kubernetes() -> str:
    return kubernetes_manifest(SITE, "registry/fedgraft:0.3", "xrays", "images of 'north'", 10)


def expected(authority: str, key: str, data: str) -> list[str]:
    """Return the arguments that every launcher must start the node with."""
    arguments = ["node", "--superlink", "server.example:9400", "--ca", authority, "--key", key, "--id", "2"]
    return [*arguments, "--data", data, "--source", "folder", "--device", "cuda"]


def test_the_slurm_script_is_bash_and_starts_the_node_with_its_arguments(tmp_path: Path) -> None:
    script = tmp_path / "node.sbatch"
    script.write_text(slurm())
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    # Run it with a `fedgraft` that prints its arguments: quoting is bash's to judge.
    stub = tmp_path / "bin" / "fedgraft"
    stub.parent.mkdir()
    stub.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    path = {"PATH": f"{stub.parent}:/usr/bin:/bin"}
    shown = subprocess.run(["bash", str(script)], capture_output=True, text=True, env=path, check=True).stdout
    assert shown.splitlines() == ["deploy", *expected("/fed/ca.crt", "/keys/north.key", ODD)]


def test_slurms_directives_stand_before_the_first_command_and_exist() -> None:
    lines = slurm().splitlines()
    assert lines[0] == "#!/bin/bash"
    directives = [line for line in lines if line.startswith("#SBATCH")]
    assert lines[1 : 1 + len(directives)] == directives
    for line in directives:
        option, _, value = shlex.split(line)[1].partition("=")
        assert option.removeprefix("--") in DIRECTIVES
        assert value or option == "--requeue"
    assert "#SBATCH --gres=gpu:1" in directives


def test_the_compose_file_confines_the_node() -> None:
    service = yaml.safe_load(compose())["services"]["node"]
    assert service["command"] == expected("ca.crt", "north.key", "/data")
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    mounts = {mount["target"]: mount for mount in service["volumes"]}
    assert mounts["/data"]["source"] == ODD and mounts["/data"]["read_only"] is True
    assert mounts["/state"]["source"] == "/srv/north" and mounts["/state"]["read_only"] is False
    assert "ports" not in service  # a node has no port
    shared = yaml.safe_load((Path(__file__).parents[3] / "containers" / "compose.yaml").read_text())["x-node"]
    for key in ("read_only", "cap_drop", "security_opt", "tmpfs", "restart"):
        assert service[key] == shared[key]  # as the guide's containers


def documents() -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(kubernetes())}


def test_the_manifest_confines_the_node() -> None:
    found = documents()
    assert list(found) == ["PersistentVolumeClaim", "Deployment", "NetworkPolicy"]
    spec = found["Deployment"]["spec"]
    assert spec["replicas"] == 1 and spec["strategy"] == {"type": "Recreate"}
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"] == expected("/state/ca.crt", "/state/north.key", "/data")
    assert "ports" not in container and pod["automountServiceAccountToken"] is False
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert mounts["/data"] == {"name": "data", "mountPath": "/data", "readOnly": True, "subPath": "images of 'north'"}
    for part in (container, *pod["initContainers"]):
        assert part["securityContext"]["readOnlyRootFilesystem"] is True
    volumes = {volume["name"] for volume in pod["volumes"]}
    for part in (container, *pod["initContainers"]):
        assert {mount["name"] for mount in part["volumeMounts"]} <= volumes
    policy = found["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    assert policy["ingress"] == [] and {"protocol": "TCP", "port": 9400} in policy["egress"][0]["ports"]


def test_kubernetes_schema_takes_the_manifest() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="not installed: pip install kubernetes-validate")
    for document in documents().values():
        validator.validate(document, validator.latest_version(), strict=True)
    broken = documents()["Deployment"]
    broken["spec"]["template"]["spec"]["containers"][0]["argz"] = []
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, validator.latest_version(), strict=True)


def test_compose_schema_takes_the_file() -> None:
    schema_package = pytest.importorskip("compose_spec", reason="not installed: pip install compose-spec")
    schema_package.PyCompose.from_yaml(compose()).validate()
    broken = compose().replace("    read_only: true\n", "    reed_only: true\n", 1)
    assert broken != compose()
    with pytest.raises(ValueError, match="reed_only"):
        schema_package.PyCompose.from_yaml(broken)


def test_no_file_holds_a_secret(tmp_path: Path) -> None:
    """The key's path and not its content, whatever lies there."""
    for text in (slurm(), compose(), kubernetes()):
        assert "PRIVATE KEY" not in text and "kind: Secret" not in text


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"name": "North"}, "E-DEPLOY-LAUNCH-NAME"),
        ({"name": "north\n#SBATCH --uid=0"}, "E-DEPLOY-LAUNCH-NAME"),
        ({"superlink": "server"}, "E-DEPLOY-SUPERLINK"),
        ({"superlink": "a b:9400"}, "E-DEPLOY-SUPERLINK"),
        ({"source": "dicom"}, "E-DEPLOY-SOURCE"),
        ({"client": -1}, "E-DEPLOY-LAUNCH-NUMBER"),
        ({"cpus": 0}, "E-DEPLOY-LAUNCH-NUMBER"),
    ],
)
def test_what_cannot_be_written_is_refused(changes: dict[str, Any], code: str) -> None:
    options: dict[str, Any] = {"name": "north", "superlink": "server:9400", "client": 0}
    with raises(code):
        Site(**{**options, **changes}).check()


@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("slurm", ["--ca", "ca.crt", "--key", "north.key", "--data", "images"]),
        ("compose", ["--image", "fedgraft-node", "--state", "north", "--data", "images"]),
        ("k8s", ["--image", "fedgraft-node", "--claim", "xrays"]),
    ],
)
def test_the_commands_write_a_file_once(tmp_path: Path, command: str, more: list[str]) -> None:
    file = tmp_path / "node"
    words = ["deploy", command, str(file), "--superlink", "server:9400", "--name", "north", "--id", "0", *more]
    first = CliRunner().invoke(app, words)
    assert first.exit_code == 0, first.output
    assert "not run on our machines" in re.sub(r"\s+", " ", first.output)
    text = file.read_text()
    assert json.dumps("server:9400") in text or "server:9400" in text
    assert CliRunner().invoke(app, words).exit_code != 0  # an owner may have changed it
    assert file.read_text() == text
