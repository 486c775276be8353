"""The files under deploy/ that no engine here reads: the Kubernetes manifest against Kubernetes' own schemas, the unit."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
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
from nolocod.doctor.local import room_for
from nolocod.node.config import NodeConfig
from nolocod.run.announcements import read_link
from nolocod.run.run_file import read_run_file
from nolocod.trainer.estimate import Machine, estimate, needs_on

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RESOURCES = list(yaml.safe_load_all((DEPLOY / "kubernetes/nolocod.yaml").read_text(encoding="utf-8")))
RUN = "nolocod:0123456789abcdef@192.0.2.1:4001/12D3KooWGzBo2pRfPc2MqRWGXUdLnS1WbmQAgNRRVYCuqSWBTnAo"
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
    config = configured(container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {"peers": config.mesh.listen[0].port, "http": config.http.port} == ports
    assert config.http_open_metrics, "Prometheus has no token"
    assert {port["name"]: port["port"] for port in KINDS["Service"]["spec"]["ports"]} == ports
    annotations = KINDS["StatefulSet"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(config.http.port)


def test_a_node_s_volume_holds_the_largest_run_of_the_docs() -> None:
    """At its peak: three checkpoints, and the weights that are served beside those that are written or fetched."""
    parameters = max(estimate(read_run_file(run)).parameters for run in (DEPLOY.parent / "docs/runs").glob("*.toml"))
    (claim,) = KINDS["StatefulSet"]["spec"]["volumeClaimTemplates"]
    room = int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) << 30
    assert room >= room_for(parameters), f"{parameters:,} parameters"


def test_a_node_of_the_largest_run_file_stays_below_its_limit_of_memory() -> None:
    """With a GPU, as it writes a checkpoint; libraries take less than a GB."""
    machine = Machine(step=1.0, down=1e7, up=1e7, network=1 << 28, trainer=1 << 30, on_cpu=False)
    runs = [estimate(read_run_file(run)) for run in (DEPLOY.parent / "docs/runs").glob("*.toml")]
    needs = [needs_on(run, machine, 3.0) for run in runs]
    (container,) = KINDS["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    assert limit >= max(one.network_memory + one.saving_memory for one in needs)


def test_the_number_of_nodes_and_the_run_are_one_variable_each_in_kubernetes() -> None:
    text = (DEPLOY / "kubernetes/nolocod.yaml").read_text(encoding="utf-8")
    run = KINDS["ConfigMap"]["data"]["RUN"]
    assert read_link(run)[1].startswith("/dns/bootstrap.example.org/tcp/4001/p2p/")
    assert (text.count(run), text.count("$(RUN)")) == (1, 2), "the nodes and the observer have it from the ConfigMap"
    for kind, command in (("StatefulSet", "join"), ("Deployment", "watch")):
        (container,) = KINDS[kind]["spec"]["template"]["spec"]["containers"]
        assert container["args"][:2] == [command, "$(RUN)"]
        assert _parser().parse_args(container["args"])
        assert container["envFrom"] == [{"configMapRef": {"name": KINDS["ConfigMap"]["metadata"]["name"]}}]
    claim = KINDS["PersistentVolumeClaim"]["metadata"]["name"]
    assert {"name": "data", "persistentVolumeClaim": {"claimName": claim}} in KINDS["Deployment"]["spec"]["template"]["spec"][
        "volumes"
    ]


def test_the_number_of_nodes_and_the_run_are_one_variable_each_in_compose() -> None:
    text = (DEPLOY / "docker-compose.nodes.yml").read_text(encoding="utf-8")
    services = yaml.safe_load(text)["services"]
    assert services["node"]["deploy"]["replicas"] == "${NODES:-2}"
    assert text.count("${NODES") == 1
    for name in ("node", "watch"):
        command = services[name]["command"]
        assert command[1].startswith("${RUN:?"), "compose refuses to start without it"
        assert _parser().parse_args([command[0], RUN, *command[2:]])
    config = configured(["join", RUN, *services["node"]["command"][2:]])
    assert int(services["node"]["stop_grace_period"].removesuffix("s")) > config.stop_within
    assert services["node"]["environment"]["NOLOCOD_HOME"] == services["node"]["entrypoint"][-1]
    script, place = next(volume.split(":")[:2] for volume in services["node"]["volumes"] if "slot" in volume)
    assert (DEPLOY / script).exists()
    assert place in services["node"]["entrypoint"]


def started(folder: Path, script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """One of our scripts, with the stand-ins in `folder`/bin before the system's programs."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    line = ["bash" if script.endswith("sbatch") else "sh", str(DEPLOY / script), *arguments]
    return subprocess.Popen(line, env={**os.environ, "PATH": path, **environment}, stdout=subprocess.PIPE, text=True)


def stand_in(folder: Path, name: str, text: str) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / "bin" / name).chmod(0o755)


def test_nodes_that_share_a_volume_have_a_directory_each_and_keep_it(tmp_path: Path) -> None:
    stand_in(tmp_path, "nolocod", 'echo "$(readlink "$NOLOCOD_HOME") ${CUDA_VISIBLE_DEVICES:-none} $*"; exec sleep 60')
    for _ in range(2):
        said, nodes = [], []
        for number in range(3):
            home, gpus = str(tmp_path / f"home-{number}"), str(number and 2)
            line = ["nodes/slot.sh", str(tmp_path), home, "join", "the run"]
            node = started(tmp_path, *line, GPUS=gpus)
            nodes.append(node)
            assert node.stdout is not None
            said.append(node.stdout.readline().split())
        assert said == [[str(tmp_path / str(n)), gpu, "join", "the", "run"] for n, gpu in ((1, "none"), (2, "1"), (3, "0"))]
        for node in nodes:
            node.kill()
            node.communicate(timeout=30)


SRUN = """
tasks=()
while [ "$1" != bash ]; do shift; done
for number in 0 1; do
    SLURM_PROCID=$number "$@" &
    tasks+=($!)
done
trap 'kill -TERM "${tasks[@]}"' TERM
for task in "${tasks[@]}"; do
    until wait "$task"; [ $? -le 128 ]; do :; done
done
"""
"""Stands in for srun: two tasks here, to which it hands a signal on, as srun's manual says. No Slurm was at hand."""


def test_a_slurm_job_stops_its_nodes_and_queues_itself_again(tmp_path: Path) -> None:
    stand_in(tmp_path, "srun", SRUN)
    stand_in(tmp_path, "scontrol", f'echo "$*" >>{tmp_path}/scontrol')
    node = f'printf "%s\\n" "$*" >>{tmp_path}/joined; trap "echo stopped >>{tmp_path}/stopped; exit 0" TERM; echo up; '
    stand_in(tmp_path, "nolocod", node + "while :; do sleep 0.05; done")
    job = started(tmp_path, "slurm/nolocod.sbatch", "--device", "cuda", RUN=RUN, NODES_DIR=str(tmp_path), SLURM_JOB_ID="7")
    assert job.stdout is not None
    assert [job.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    job.terminate()
    job.communicate(timeout=30)
    assert job.returncode == 0
    lines = sorted((tmp_path / "joined").read_text().splitlines())
    assert [config.paths.root for config in (configured(line.split()) for line in lines)] == [tmp_path / "0", tmp_path / "1"]
    assert all(RUN in line and line.endswith("--device cuda") for line in lines)
    assert (tmp_path / "stopped").read_text().split() == ["stopped"] * 2
    assert (tmp_path / "scontrol").read_text() == "requeue 7\n"


def test_a_slurm_job_ends_when_the_run_does(tmp_path: Path) -> None:
    stand_in(tmp_path, "srun", SRUN)
    stand_in(tmp_path, "scontrol", f"touch {tmp_path}/scontrol")
    stand_in(tmp_path, "nolocod", "exit 0")
    job = started(tmp_path, "slurm/nolocod.sbatch", RUN=RUN, NODES_DIR=str(tmp_path), SLURM_JOB_ID="7")
    job.communicate(timeout=30)
    assert job.returncode == 0
    assert not (tmp_path / "scontrol").exists()


@pytest.mark.parametrize("script", ["nodes/slot.sh", "slurm/nolocod.sbatch"])
def test_the_scripts_have_no_complaint_of_shellcheck(script: str) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("Debian's package shellcheck is not installed")
    told = subprocess.run(["shellcheck", DEPLOY / script], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (0, "")


def test_the_unit_runs_a_command_of_ours_and_waits_for_its_word() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign] # systemd's keys have capitals
    unit.read_string((DEPLOY / "systemd/nolocod.service").read_text(encoding="utf-8"))
    service = unit["Service"]
    command = service["ExecStart"].replace("$NOLOCOD_ARGUMENTS", "--bootstrap /dns4/example.org/tcp/4001/p2p/12D3KooW")
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
