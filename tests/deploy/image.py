"""The steps of ``deploy/Dockerfile`` as a script in an empty root: a mount namespace and chroot in place of docker.

What stands in for the base image is this machine's ``/usr`` and Python, mounted read-only; users, ``/opt``, ``/data``
and ``/source`` are the root's own. Each stage begins with a root of its own.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PYTHON_HOME = Path(sys.base_prefix)
DEVICES = (Path("/proc"), Path("/dev"))
OWN_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
    "etc/group": "root:x:0:\n",
    "etc/shadow": "root:*:::::::\n",
    "etc/gshadow": "root:*::\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "etc/hosts": "127.0.0.1 localhost\n",
}
COPIED = ("login.defs", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "pam.d", "security", "alternatives")


@dataclass(slots=True, frozen=True)
class Instruction:
    name: str
    rest: str

    @property
    def words(self) -> list[str]:
        """Of the form in brackets, or of a shell line."""
        words: list[str] = json.loads(self.rest) if self.rest.startswith("[") else shlex.split(self.rest)
        return words


def instructions(text: str) -> list[Instruction]:
    """Without comments, continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [Instruction(*line.split(None, 1)) for line in joined.splitlines() if line.strip()]


@dataclass(slots=True)
class Stage:
    """A root, and what the instructions have set for it."""

    root: Path
    shared: Sequence[Path]
    """Directories of this machine that are seen at their own place, read-only."""
    environment: dict[str, str]
    user: str | None = None

    def __post_init__(self) -> None:
        for name in ("root", "tmp", "opt", "etc"):
            (self.root / name).mkdir(parents=True)
        (self.root / "tmp").chmod(0o1777)
        for mount in (*DEVICES, *self.shared):
            (self.root / mount.relative_to("/")).mkdir(parents=True, exist_ok=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            (self.root / name).symlink_to(f"usr/{name}")
        for name, text in OWN_FILES.items():
            (self.root / name).write_text(text)
        for name in COPIED:
            here = Path("/etc") / name
            if here.is_dir():
                shutil.copytree(here, self.root / "etc" / name, symlinks=True)
            elif here.exists():
                shutil.copy(here, self.root / "etc" / name)

    def command(self, words: Sequence[str]) -> list[str]:
        """As a command of this machine: in a mount namespace, which ends with it."""
        mounts = [f"mount --rbind {path} {self.root}{path}" for path in DEVICES]
        mounts += [f"mount --bind -o ro {path} {self.root}{path}" for path in self.shared]
        script = " && ".join([*mounts, 'exec chroot "$@"'])
        who = [f"--userspec={self.user}"] if self.user else []
        return ["unshare", "--mount", "sh", "-c", script, "sh", *who, str(self.root), *words]

    def run(self, words: Sequence[str]) -> str:
        """Raises AssertionError with what the command said."""
        done = subprocess.run(
            self.command(words), env=self.environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (REPOSITORY / name).exists()]


def follow(steps: Sequence[Instruction], directory: Path, shared: Sequence[Path], given: Mapping[str, str]) -> Stage:
    """Runs every instruction; returns the last stage. ``given`` is the environment of the build, such as pip's."""
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for number, step in enumerate(steps):
        if step.name == "FROM":
            environment = {"PATH": f"{PYTHON_HOME}/bin:/usr/bin:/usr/sbin", "HOME": "/root", **given}
            stage = Stage(directory / f"stage{number}", [Path("/usr"), PYTHON_HOME, *shared], environment)
            stages[step.words[-1]] = stage
            continue
        if stage is None:
            assert step.name == "ARG", "an instruction before FROM"  # of the base, which is this machine
            continue
        _follow_one(stage, step, stages)
    assert stage is not None
    return stage


def _follow_one(stage: Stage, step: Instruction, stages: Mapping[str, Stage]) -> None:
    if step.name in ("ARG", "ENV"):
        for word in step.words:
            name, _, value = word.partition("=")
            # An argument of the build that was given wins over the file's default.
            if step.name == "ENV" or name not in stage.environment:
                stage.environment[name] = value.replace("$PATH", stage.environment["PATH"])
    elif step.name == "RUN":
        stage.run(["/bin/sh", "-c", step.rest])
    elif step.name == "COPY":
        _copy(stage, step.words, stages)
    elif step.name == "USER":
        stage.user = step.rest
    else:
        assert step.name in ("ENTRYPOINT", "HEALTHCHECK", "VOLUME", "EXPOSE", "STOPSIGNAL"), (
            f"{step.name} is not known here"
        )


def _copy(stage: Stage, words: Sequence[str], stages: Mapping[str, Stage]) -> None:
    source, target = words[-2], stage.root / words[-1].lstrip("/")
    if words[0].startswith("--from="):
        shutil.copytree(stages[words[0].removeprefix("--from=")].root / source.lstrip("/"), target, symlinks=True)
        return
    for name in tracked_files():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, target / name)


def can_make_roots() -> bool:
    """Whether this user may mount and chroot."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0
