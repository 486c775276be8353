"""Stand-ins for the images that the Dockerfile and the compose file begin from, where no registry can be asked.

The rule: they have the very names that users pull, so that both files are checked as users build them. Each is a small
Debian with what the real image has and the check needs. How this machine's pip finds packages goes into the stand-in
for Python, so that nothing of it has to be in the Dockerfile.
"""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.containers.engine import CLIENT, CheckFailed, Unavailable, mirror, run

if TYPE_CHECKING:
    from tests.containers.engine import Engine

_SECONDS = 300.0
_BASE = "nolocod-stand-in"
_PACKAGES = "ca-certificates,python3,python3-dev,python3-venv,prometheus,prometheus-alertmanager"
_PROMETHEUS = ("USER nobody", 'ENTRYPOINT ["/usr/bin/prometheus"]', "WORKDIR /prometheus")
_ALERTMANAGER = ("USER nobody", 'ENTRYPOINT ["/usr/bin/prometheus-alertmanager"]', "WORKDIR /alertmanager")
_PYTHON = ("ENV PATH=/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin", 'CMD ["python3"]')


@dataclass(frozen=True)
class Names:
    """What the images are called in the files that are checked."""

    python: str
    prometheus: str
    alertmanager: str

    @classmethod
    def read(cls, root: Path) -> Names:
        """Find them in the checkout `root`, so that a changed version needs no change here."""
        dockerfile = (root / "Dockerfile").read_text(encoding="utf-8")
        compose = (root / "deploy/docker-compose.yml").read_text(encoding="utf-8")
        return cls(
            _one(r"^ARG PYTHON_IMAGE=(\S+)$", dockerfile),
            _one(r"image: (prom/prometheus:\S+)$", compose),
            _one(r"image: (prom/alertmanager:\S+)$", compose),
        )


def _one(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        raise CheckFailed(f"no image is named by {pattern}")
    return found.group(1)


def make(engine: Engine, names: Names, folder: Path) -> None:
    """Make one root, and from it the images, which differ in what they run."""
    root = folder / "root"
    command = ["mmdebstrap", "--variant=minbase", "--mode=root", f"--include={_PACKAGES}", "bookworm", str(root), mirror()]
    try:
        run(command, _SECONDS)
    except CheckFailed as error:
        raise Unavailable(f"no Debian can be made for the images: {str(error).splitlines()[-1]}") from error
    for name in ("python", "python3"):
        (root / "usr/local/bin" / name).symlink_to("/usr/bin/python3")
    for name in ("prometheus", "alertmanager"):
        (root / name).mkdir()
        shutil.chown(root / name, "nobody", "nogroup")
    _lay_pip(root)
    run(["bash", "-o", "pipefail", "-ec", f"tar -C {root} -c . | {CLIENT} import - {_BASE}"], _SECONDS, engine.environment)
    shutil.rmtree(root)
    for name, lines in ((names.python, _PYTHON), (names.prometheus, _PROMETHEUS), (names.alertmanager, _ALERTMANAGER)):
        recipe = folder / "recipe"
        recipe.mkdir(exist_ok=True)
        (recipe / "Dockerfile").write_text("\n".join([f"FROM {_BASE}", *lines]) + "\n", encoding="utf-8")
        engine.docker("build", "--quiet", "--tag", name, str(recipe), settings={"DOCKER_BUILDKIT": "0"})


def _lay_pip(root: Path) -> None:
    """The machine's certificates and pip settings, and the files and the folders of wheels that those name."""
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    if certificates.exists():
        shutil.copy(certificates, root / "etc/ssl/certs/ca-certificates.crt")
    listed = run([sys.executable, "-m", "pip", "config", "list"], 60.0)
    settings = dict(re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", listed, re.MULTILINE))
    settings.pop("extra-index-url", None)  # on this machine's disk, if anywhere
    lines = ["[global]", *(f"{key} = {value}" for key, value in settings.items())]
    (root / "etc/pip.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for file in map(Path, settings.get("constraint", "").split()):
        (place := root / file.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
    for folder in map(Path, settings.get("find-links", "").split()):
        place = root / folder.relative_to("/") if folder.is_absolute() else root
        place.mkdir(parents=True, exist_ok=True)
        for wheel in folder.glob("*.whl"):
            shutil.copy(wheel, place)
