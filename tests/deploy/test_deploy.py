"""The files under deploy/ that no engine here reads: the Kubernetes manifest against Kubernetes' own schemas, the unit."""

from __future__ import annotations

import configparser
import re
import shlex
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from nolocod import __version__
from nolocod.cli import _parser
from nolocod.commands.node import node_config
from nolocod.node.config import NodeConfig

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RESOURCES = list(yaml.safe_load_all((DEPLOY / "kubernetes/nolocod.yaml").read_text(encoding="utf-8")))
KINDS = {resource["kind"]: resource for resource in RESOURCES}


def validate(resource: dict[str, Any]) -> None:
    kubernetes_validate.validate(resource, "1.31", strict=True)


def configured(arguments: list[str]) -> NodeConfig:
    """What the daemon makes of a command line."""
    return node_config(_parser().parse_args(arguments))


@pytest.mark.parametrize("resource", RESOURCES, ids=lambda resource: str(resource["kind"]))
def test_the_kubernetes_manifest_is_one(resource: dict[str, Any]) -> None:
    validate(resource)


def test_a_misspelt_field_is_found() -> None:
    with pytest.raises(kubernetes_validate.ValidationError):
        validate({**KINDS["Service"], "spec": {**KINDS["Service"]["spec"], "selektor": {}}})


def test_the_pods_command_line_is_one_of_ours() -> None:
    (container,) = KINDS["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    bootstrap = KINDS["ConfigMap"]["data"]["BOOTSTRAP"]
    config = configured([word.replace("$(BOOTSTRAP)", bootstrap) for word in container["args"]])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {"peers": config.mesh.listen[0].port, "http": config.http.port} == ports
    assert config.mesh.bootstrap == (bootstrap,)
    assert config.http_open_metrics, "Prometheus has no token"
    assert {port["name"]: port["port"] for port in KINDS["Service"]["spec"]["ports"]} == ports
    annotations = KINDS["StatefulSet"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(config.http.port)


def test_the_unit_runs_a_command_of_ours_and_waits_for_its_word() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign] # systemd's keys have capitals
    unit.read_string((DEPLOY / "systemd/nolocod.service").read_text(encoding="utf-8"))
    service = unit["Service"]
    command = service["ExecStart"].replace("$NOLOCOD_ARGUMENTS", f"--bootstrap {KINDS['ConfigMap']['data']['BOOTSTRAP']}")
    program, *arguments = shlex.split(command)
    assert program.endswith("/nolocod")
    configured(arguments)
    assert service["Type"] == "notify"
    assert int(service["TimeoutStopSec"]) > NodeConfig.grace


def test_the_image_compiles_modules_that_there_are() -> None:
    script = (DEPLOY / "image/prune.sh").read_text(encoding="utf-8")
    modules = re.findall(r"nolocod(?:\.\w+)+", script)
    assert modules
    assert [name for name in modules if find_spec(name) is None] == []


def test_the_images_labels_are_the_packages_own() -> None:
    text = (DEPLOY.parent / "Dockerfile").read_text(encoding="utf-8")
    told = dict(re.findall(r"org\.opencontainers\.image\.([\w.]+)=(\"[^\"]+\"|\S+)", text))
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert told["version"] == __version__
    assert (told["title"], told["licenses"]) == (project["name"], project["license"])
    assert project["description"].startswith(told["description"].strip('"'))
    assert {"revision", "created", "base.name"} <= set(told)
    assert text.rindex("FROM ") < text.index("LABEL ") < text.index("ENTRYPOINT"), "they are of the last image"
