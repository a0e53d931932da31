"""The image's steps, run without docker; and that the files which docker reads have the form that it takes.

Not run here: docker itself, the base image ``python:3.11-slim`` (this machine's own Python stands for it), the
downloads (the packages of this environment stand for them, and this machine's compiler for Debian's), the entry point
and the health check.
"""

import importlib.metadata
import os
import shutil
import site
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.image import PYTHON_HOME, REPOSITORY, Instruction, Stage, can_make_roots, follow, instructions
from tools import licences

DOCKERFILE = REPOSITORY / "deploy" / "Dockerfile"
COMPOSE = REPOSITORY / "deploy" / "compose.yaml"
SERVICE_KEYS = {
    "build", "image", "restart", "environment", "volumes", "ports", "stop_grace_period", "depends_on", "command",
    "healthcheck", "user",
}  # fmt: skip
TOP_KEYS = {"name", "services", "volumes", "networks"}
COMPILER_PACKAGES = {"gcc", "libc6-dev"}
COMPILES = "echo '#include <stdio.h>\nint main(void) { return 0; }' > /tmp/a.c && gcc -o /tmp/a /tmp/a.c && /tmp/a"
"""With what ``COMPILER_PACKAGES`` bring: a C compiler and the headers of the C library."""


# ---- the form --------------------------------------------------------------------------------------------


def test_continued_lines_are_one_instruction_and_comments_none() -> None:
    text = '# a\nFROM base AS build\nRUN a && \\\n    b\nCMD ["x", "y z"]\n'
    assert instructions(text) == [
        Instruction("FROM", "base AS build"),
        Instruction("RUN", "a &&  b"),
        Instruction("CMD", '["x", "y z"]'),
    ]
    assert instructions(text)[2].words == ["x", "y z"]


def test_every_instruction_of_the_image_is_one_that_the_test_follows() -> None:
    names = {step.name for step in instructions(DOCKERFILE.read_text())}
    assert names == {
        "FROM", "ARG", "COPY", "RUN", "ENV", "USER", "VOLUME", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT",
    }  # fmt: skip


def test_the_health_check_asks_whether_the_server_works() -> None:
    (step,) = (s for s in instructions(DOCKERFILE.read_text()) if s.name == "HEALTHCHECK")
    command = Instruction("CMD", step.rest.partition(" CMD ")[2].strip()).words
    assert command[:2] == ["python", "-c"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        # A proxy of the environment is not asked: nothing listens there.
        own = {"NEAPTIDE_PORT": str(server.getsockname()[1]), "HTTP_PROXY": "http://127.0.0.1:9"}
        for status, is_well in ((b"200 OK", True), (b"503 Service Unavailable", False)):
            check = subprocess.Popen([sys.executable, *command[1:]], env=os.environ | own, stderr=subprocess.DEVNULL)
            connection, _ = server.accept()
            with connection:
                assert connection.recv(4096).startswith(b"GET /livez ")
                connection.sendall(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n")
                assert (check.wait() == 0) is is_well


def test_the_image_does_not_take_in_what_git_ignores() -> None:
    """``COPY .`` would: environments of gigabytes, keys, data."""
    ignored = set((REPOSITORY / ".dockerignore").read_text().split())
    assert {".git", ".venv", ".vllm", ".clients", ".demo", "neaptide-data"} <= ignored


def services() -> Any:
    return yaml.safe_load(COMPOSE.read_text())["services"]


def test_the_compose_file_has_keys_that_compose_knows() -> None:
    assert yaml.safe_load(COMPOSE.read_text()).keys() <= TOP_KEYS
    for service in services().values():
        assert service.keys() <= SERVICE_KEYS
        assert ("image" in service) or ("build" in service)
        assert service["restart"] in {"no", "always", "on-failure", "unless-stopped"}
        environment = service.get("environment", {})
        assert all(isinstance(value, str) for value in environment.values()), "YAML reads a bare word as something else"


def test_every_port_and_volume_has_the_short_form() -> None:
    for service in services().values():
        for port in service["ports"]:
            host, outside, inside = port.split(":")
            assert host == "127.0.0.1"
            assert 0 < int(outside) < 65536
            assert 0 < int(inside) < 65536
        for volume in service["volumes"]:
            source, target, *mode = volume.split(":")
            assert source
            assert target.startswith("/")
            assert mode in ([], ["ro"])


def test_ports_of_the_image_are_those_that_compose_opens() -> None:
    (exposed,) = (s.rest for s in instructions(DOCKERFILE.read_text()) if s.name == "EXPOSE")
    assert [port.split(":")[-1] for port in services()["neaptide"]["ports"]] == [exposed]
    (volume,) = (s.rest for s in instructions(DOCKERFILE.read_text()) if s.name == "VOLUME")
    assert [v.split(":")[1] for v in services()["neaptide"]["volumes"]] == [volume]


def test_a_compiler_is_all_that_is_installed_from_debian() -> None:
    """So that something can stand for it where nothing is downloaded."""
    lines = [step.rest for step in instructions(DOCKERFILE.read_text()) if "apt-get" in step.rest]
    (packages,) = (line.partition("--no-install-recommends ")[2].partition(" &&")[0].split() for line in lines)
    assert set(packages) == COMPILER_PACKAGES


def test_tests_and_headers_of_libraries_are_left_out(tmp_path: Path) -> None:
    (step,) = (s for s in instructions(DOCKERFILE.read_text()) if "torch/include" in s.rest)
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    kept = {"torch/bin/torch_shm_manager", "torch/testing/a.py", "numpy/a.py"}
    needless = {"torch/bin/test_jit", "torch/bin/TCPStoreTest", "torch/include/a.h", "torch/test/a", "numpy/tests/a.py"}
    for name in kept | needless:
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).touch()
    subprocess.run(["/bin/sh", "-c", step.rest.replace("/opt/neaptide", str(tmp_path))], check=True)
    assert {str(path.relative_to(packages)) for path in packages.rglob("*") if path.is_file()} == kept


def test_the_head_says_how_the_health_check_is_kept() -> None:
    """Images in the OCI format have none."""
    head = DOCKERFILE.read_text().partition("FROM")[0]
    assert "podman and buildah: add --format docker" in head
    assert '"--format", "docker"' in (REPOSITORY / "tools" / "image.py").read_text()


def test_every_package_has_a_line_with_its_licence() -> None:
    lines = [line for line in licences.lines() if not line.startswith(" ")]
    found = dict(line.split("\n")[0].split(": ", 1) for line in lines)
    assert found[f"starlette {importlib.metadata.version('starlette')}"] == "BSD-3-Clause"
    assert found[f"msgspec {importlib.metadata.version('msgspec')}"] == "BSD-3-Clause"
    assert all(found.values())


# ---- the steps -------------------------------------------------------------------------------------------


def site_directories() -> list[Path]:
    """Where the packages of this environment are, if they can stand for what the image downloads."""
    paths = {Path(path).resolve() for path in (*site.getsitepackages(), *sys.path)}
    return sorted(path for path in paths if path.name == "site-packages" and path.is_dir())


def has_build_tools() -> bool:
    try:
        return int(importlib.metadata.version("setuptools").split(".")[0]) >= 77
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    if not can_make_roots():
        pytest.skip("needs root, unshare and chroot")
    if shutil.which("gcc") is None:
        pytest.skip("needs a C compiler, which stands for the one that the image installs")
    if not has_build_tools():
        pytest.skip("needs setuptools >= 77 in this environment: nothing is downloaded")
    shared = site_directories()
    # pip reads the second as the value of its option: 0 is no isolation.
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    offline["TORCH"] = f"torch=={importlib.metadata.version('torch')}"
    # The new environment sees the packages here, as if they had been downloaded into it; the old setuptools that Python
    # puts into it would hide the one that torch asks for.
    seen = "/opt/neaptide/lib/python3.11/site-packages/seen.pth"
    steps = [
        Instruction("RUN", COMPILES) if step.rest.startswith("apt-get ") else step
        for step in instructions(DOCKERFILE.read_text())
    ]
    made = next(i for i, step in enumerate(steps) if step.name == "RUN" and "-m venv" in step.rest)
    lines = " ".join(str(path) for path in shared if path != PYTHON_HOME)
    steps.insert(
        made + 1,
        Instruction("RUN", f"/opt/neaptide/bin/pip uninstall -q -y setuptools && printf '%s\\n' {lines} > {seen}"),
    )
    return follow(steps, tmp_path_factory.mktemp("image"), shared, offline)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_image_holds_the_package_itself_and_its_data(image: Stage) -> None:
    program = "import neaptide, pathlib; p = pathlib.Path(neaptide.__file__).parent; print(p)\n"
    program += "assert (p / 'data' / 'neaptide-tiny' / 'model.safetensors').exists()\n"
    program += "assert (p / 'server' / 'routes' / 'dashboard.html').exists()\n"
    assert image.run(["python", "-c", program]).strip().startswith("/opt/neaptide/")
    assert image.run(["neaptide", "--version"]).startswith("neaptide ")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_data_directory_belongs_to_the_user_of_the_image(image: Stage) -> None:
    data = (image.root / "data").stat()
    assert (data.st_uid, data.st_gid, data.st_mode & 0o777) == (10001, 10001, 0o700)
    assert image.run(["id", "-u"]).strip() == "10001"


@pytest.mark.full
@pytest.mark.timeout(600)
def test_kernels_and_licences_are_in_the_image(image: Stage) -> None:
    program = "from neaptide.kernels import native; from pathlib import Path; "
    program += "print(len(list(native.PREBUILT.glob('*.so'))), len(list(Path(native.__file__).parent.glob('*/*.c'))))"
    compiled, sources = image.run(["python", "-c", program]).split()
    assert compiled == sources
    assert "torch 2." in image.run(["cat", "/opt/neaptide/LICENCES.txt"])
