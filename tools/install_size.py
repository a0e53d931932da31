"""How much an installation downloads: ``python -m tools.install_size [--check]``.

pip resolves the dependencies of ``pyproject.toml`` at the versions of ``requirements.lock`` and says which wheels it
would take (``--dry-run --report``). Their sizes are added up. Nothing is installed. ``--check`` compares with the
sentence in ``README.md``.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

REPOSITORY = Path(__file__).parents[1]
LOCK = REPOSITORY / "requirements.lock"
README = REPOSITORY / "README.md"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH = re.search(r"^TORCH \?= (torch==[\d.]+)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
TOLERANCE = 0.15
"""By which a stated size may be off: the package index moves on."""
SENTENCE = (
    "`neaptide` downloads {base}, `neaptide[server]` {server}, and `neaptide[torch]` {cpu} with torch for CPUs or "
    "{cuda} with CUDA."
)


def requirements(extra: str | None = None) -> Iterator[str]:
    """What the base or an extra needs, without references to other extras."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if extra is None:
        yield from project["dependencies"]
        return
    for requirement in project["optional-dependencies"][extra]:
        inner = re.fullmatch(r"neaptide\[([\w,]+)\]", requirement)
        if inner is None:
            yield requirement
        for name in inner[1].split(",") if inner else ():
            yield from requirements(name)


def download_bytes(
    wanted: Sequence[str], options: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> int:
    """The size of all wheels that pip would take for these requirements, in an empty environment."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    command += ["--only-binary", ":all:", "--constraint", str(LOCK), *options, *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    urls = [entry["download_info"]["url"] for entry in json.loads(done.stdout)["install"]]
    return sum(map(size_of, urls))


def size_of(url: str) -> int:
    """The size of a file on this machine or a server, in bytes."""
    if url.startswith("file:"):
        return Path(unquote(urlsplit(url).path)).stat().st_size
    if not url.startswith("https:"):
        raise ValueError(f"{url}: neither a file nor https")
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as reply:
        return int(reply.headers["Content-Length"])


def rounded(num_bytes: int) -> str:
    """A size for people, in two digits."""
    unit, power = ("GB", 9) if num_bytes >= 1e9 else ("MB", 6)
    return f"{float(f'{num_bytes / 10**power:.2g}'):g} {unit}"


def stated(page: str) -> list[int]:
    """The sizes of the sentence on a page, in bytes.

    Raises:
        ValueError: the sentence does not stand there.
    """
    pattern = re.sub(r"\\\{\w+\\\}", r"([\\d.]+) ([MG]B)", re.escape(SENTENCE)).replace(r"\ ", r"\s+")
    found = re.search(pattern, page)
    if found is None:
        raise ValueError(f"the page does not say: {SENTENCE}")
    groups = found.groups()
    return [
        int(float(number) * {"MB": 1e6, "GB": 1e9}[unit])
        for number, unit in zip(groups[::2], groups[1::2], strict=True)
    ]


def measured() -> dict[str, int]:
    """Bytes that each installation of the sentence downloads."""
    assert TORCH is not None
    base, server = list(requirements()), list(requirements("server"))
    ours = [*base, *(requirement for requirement in requirements("torch") if not requirement.startswith("torch"))]
    index_only = {name: value for name, value in os.environ.items() if name != "PIP_FIND_LINKS"}
    index_only["PIP_CONFIG_FILE"] = os.devnull
    cpu = ["--timeout", "10", "--retries", "1", "--extra-index-url", CPU_INDEX]
    return {
        "base": download_bytes(base),
        "server": download_bytes([*base, *server]),
        "cpu": download_bytes([*ours, f"{TORCH[1]}+cpu"], cpu),
        "cuda": download_bytes([*ours, TORCH[1]], environment=index_only),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="How much an installation downloads.")
    parser.add_argument("--check", action="store_true", help="compare with README.md")
    args = parser.parse_args()
    sizes = measured()
    print(SENTENCE.format(**{name: rounded(size) for name, size in sizes.items()}))
    if not args.check:
        return 0
    wrong = [
        f"{name}: README.md says {rounded(said)}, it is {rounded(size)}"
        for said, (name, size) in zip(stated(README.read_text(encoding="utf-8")), sizes.items(), strict=True)
        if abs(said - size) > TOLERANCE * size
    ]
    print(*wrong, sep="\n", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
