"""How the engines are started that ``install.sh`` has installed."""

import shlex
from pathlib import Path

_DTYPES = {"bfloat16": "bf16", "float32": "f32"}


def installed(directory: Path, threads: int, dtype: str) -> list[tuple[str, str]]:
    """Name and command of each, with ``{port}`` where it takes its port.

    Args:
        directory: as given to ``install.sh``.
        threads: to compute with.
        dtype: to compute in, a name of torch's.

    Raises:
        SystemExit: there is none.
    """
    python, model = directory.absolute() / "openvino" / "bin" / "python", directory.absolute() / "openvino-111m"
    if not python.exists() or not (model / "openvino_model.xml").exists():
        raise SystemExit(f"{directory} holds no peer: benchmarks/peers/install.sh {directory}")
    server = Path(__file__).with_name("openvino_server.py")
    words = [python, server, model, "--port", "{port}", "--threads", threads, "--dtype", _DTYPES[dtype]]
    return [("openvino", shlex.join(map(str, words)).replace("'{port}'", "{port}"))]
