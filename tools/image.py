"""Builds the image of ``deploy/Dockerfile`` with buildah, and tries it: no daemon, no registry of images, no cluster.

    python -m tools.image build                     # for CPUs; --variant cuda for a GPU
    python -m tools.image try                       # start, one chat, SIGTERM; prints sizes and times as JSON

It needs root, ``buildah``, and ``debootstrap`` unless ``--base`` names an image (Debian: ``apt-get install buildah
debootstrap``). The base is then Debian 12 with its own Python 3.11. Commands of the build run in a chroot, with this
machine's network. ``--volume`` shows them a directory of this machine, such as pip's settings or wheels.

Where a registry can be reached, ``docker build`` and ``podman build`` do the same, as the head of the Dockerfile says.
"""

import argparse
import http.client
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
BASE = "localhost/neaptide-base"
BUILDAH = ("buildah", "--storage-driver", "vfs")
RELEASE, PACKAGES = "bookworm", "python3,python3-venv,ca-certificates"
LEFT_OUT = ("usr/share/locale", "usr/share/man")
USER = "10001:10001"
START_S = 600.0
CHAT = {"messages": [{"role": "user", "content": "What is 2+2?"}], "max_tokens": 8}


def buildah(*words: str) -> str:
    """Runs buildah; returns what it printed. Raises CalledProcessError."""
    return subprocess.run([*BUILDAH, *words], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def make_base(mirror: str | None) -> None:
    """Makes a base image of Debian, unless there is one."""
    if buildah("images", "--quiet", "--filter", f"reference={BASE}"):
        return
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "root"
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", RELEASE, str(root)]
        subprocess.run([*command, *([mirror] if mirror else [])], stdout=sys.stderr, check=True)
        # As Debian's own slim images: also what is installed later comes without.
        (root / "etc/dpkg/dpkg.cfg.d/slim").write_text("".join(f"path-exclude /{one}/*\n" for one in LEFT_OUT))
        for one in LEFT_OUT:
            shutil.rmtree(root / one)
        for cache in ("var/cache/apt/archives", "var/lib/apt/lists"):
            shutil.rmtree(root / cache)
            (root / cache / "partial").mkdir(parents=True)
        container = buildah("from", "scratch")
        buildah("add", "--quiet", container, str(root), "/")
        buildah("commit", "--rm", "--quiet", container, BASE)


def build(args: argparse.Namespace) -> int:
    """Builds the image and prints its size."""
    base = args.base
    if base is None:
        make_base(args.mirror)
        base = BASE
    start_s = time.monotonic()
    dockerfile = str(REPOSITORY / "deploy" / "Dockerfile")
    words = ["build", "--isolation", "chroot", "--format", "docker", "--file", dockerfile]
    words += ["--build-arg", f"BASE={base}", "--build-arg", f"VARIANT={args.variant}", "--tag", args.tag]
    words += [word for volume in args.volume for word in ("--volume", volume)]
    words += [word for argument in args.build_arg for word in ("--build-arg", argument)]
    subprocess.run([*BUILDAH, *words, str(REPOSITORY)], stdout=sys.stderr, check=True)
    print(json.dumps({"tag": args.tag, "build_s": round(time.monotonic() - start_s), **sizes(args.tag)}))
    return 0


def sizes(tag: str) -> dict[str, int]:
    """Size of the image without compression, in MB of 10^6 bytes."""
    found = json.loads(buildah("images", "--json", tag))[0]
    container = buildah("from", tag)
    try:
        root = buildah("mount", container)
        size = subprocess.run(["du", "-sbx", root], capture_output=True, text=True, check=True).stdout.split()[0]
    finally:
        buildah("rm", container)
    return {"size_mb": round(int(size) / 1e6), "shown_by_buildah": found.get("size", "")}


def try_it(args: argparse.Namespace) -> int:
    """Starts the image as its user with nothing that can be written but ``/data``, and stops it again."""
    container = buildah("from", args.tag)
    try:
        print(json.dumps(_tried(container, args.port)))
    finally:
        buildah("rm", container)
    return 0


def _tried(container: str, port: int) -> dict[str, object]:
    image = json.loads(buildah("inspect", container))["Docker"]["config"]
    # Not with a shell between: signals go to the server itself.
    words = ["run", "--isolation", "chroot", "--user", USER, "--env", f"NEAPTIDE_PORT={port}", container, "--"]
    start_s = time.monotonic()
    server = subprocess.Popen([*BUILDAH, *words, *image["Entrypoint"], "--host", "127.0.0.1"], stderr=subprocess.PIPE)
    try:
        while request(port, "GET", "/ready")[0] != 200:
            if server.poll() is not None or time.monotonic() - start_s > START_S:
                raise SystemExit(f"the server did not start:\n{_rest_of(server)}")
            time.sleep(0.2)
        ready_s = time.monotonic() - start_s
        check = [*BUILDAH, "run", "--isolation", "chroot", "--user", USER, "--env", f"NEAPTIDE_PORT={port}", container]
        health = subprocess.run([*check, "--", *image["Healthcheck"]["Test"][1:]], check=False).returncode
        status, body = request(port, "POST", "/v1/chat/completions", CHAT)
        stop_s = time.monotonic()
        _signal_server(server.pid)
        log = _rest_of(server)
        return {
            "ready_s": round(ready_s, 1),
            "compiled_at_start": log.count("compiling "),
            "health": health,
            "chat_status": status,
            "chat": json.loads(body)["choices"][0]["message"]["content"],
            "stop_s": round(time.monotonic() - stop_s, 1),
            "exit_status": server.returncode,
        }
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def _rest_of(server: "subprocess.Popen[bytes]") -> str:
    return server.communicate(timeout=START_S)[1].decode(errors="replace")


def _signal_server(pid: int) -> None:
    """SIGTERM for the server below buildah's own processes, which do not pass signals on."""
    # A process of Go starts children from any of its threads.
    children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split()
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    if b"python" in words[0] and words[1:3] == [b"/opt/neaptide/bin/neaptide", b"serve"]:
        subprocess.run(["kill", f"-{signal.SIGTERM.value}", str(pid)], check=True)
        return
    for child in children:
        _signal_server(int(child))


def request(port: int, method: str, path: str, body: object = None) -> tuple[int, str]:
    """Status and text of a reply; status 0 without one."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    except OSError:
        return 0, ""
    finally:
        connection.close()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    builder = commands.add_parser("build", help="build the image")
    builder.add_argument("--variant", choices=("cpu", "cuda"), default="cpu")
    builder.add_argument("--base", help="base image; by default one that debootstrap makes")
    builder.add_argument("--mirror", help="Debian's mirror for debootstrap")
    builder.add_argument("--volume", action="append", default=[], metavar="HERE:THERE:ro")
    builder.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    builder.set_defaults(func=build)
    trier = commands.add_parser("try", help="start it, chat, stop it")
    trier.add_argument("--port", type=int, default=18_000)
    trier.set_defaults(func=try_it)
    for command in (builder, trier):
        command.add_argument("--tag", default="localhost/neaptide")
    args = parser.parse_args(words)
    status: int = args.func(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
