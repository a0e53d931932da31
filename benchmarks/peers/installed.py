"""How the engines are started that ``install.sh`` has installed."""

import shlex
from pathlib import Path

_DTYPES = {"bfloat16": "bf16", "float32": "f32"}
_LLAMA_CPP_CACHE = {"bfloat16": "f16", "float32": "f32"}
"""Its default beside 16-bit weights, and as wide as ours."""


def installed(directory: Path, threads: int, dtype: str, max_seqs: int, max_model_len: int) -> list[tuple[str, str]]:
    """Name and command of each, with ``{port}`` where it takes its port.

    Args:
        directory: as given to ``install.sh``.
        threads: to compute with.
        dtype: to compute in, a name of torch's.
        max_seqs: how many requests come at once, for engines that must be told.
        max_model_len: tokens a request may have, for the same.

    Raises:
        SystemExit: there is none.
    """
    directory = directory.absolute()
    commands = {
        "openvino": _openvino(directory, threads, dtype),
        "llama_cpp": _llama_cpp(directory, threads, dtype, max_seqs, max_model_len),
    }
    found = [
        (name, shlex.join(map(str, words)).replace("'{port}'", "{port}"))
        for name, (needed, words) in commands.items()
        if all(path.exists() for path in needed)
    ]
    if not found:
        raise SystemExit(f"{directory} holds no peer: benchmarks/peers/install.sh {directory}")
    return found


_Command = tuple[list[Path], list[object]]
"""What must be there, and the words."""


def _openvino(directory: Path, threads: int, dtype: str) -> _Command:
    python, model = directory / "openvino" / "bin" / "python", directory / "openvino-111m"
    server = Path(__file__).with_name("openvino_server.py")
    words = [python, server, model, "--port", "{port}", "--threads", threads, "--dtype", _DTYPES[dtype]]
    return [python, model / "openvino_model.xml"], words


def _llama_cpp(directory: Path, threads: int, dtype: str, max_seqs: int, max_model_len: int) -> _Command:
    server, model = directory / "llama-server", directory / f"llama-cpp-111m-{_DTYPES[dtype]}.gguf"
    words: list[object] = [server, "--model", model, "--port", "{port}", "--threads", threads]
    # A slot for each request, each with its own share of the context; prompts that have left a slot are not kept: no
    # turn has a prompt of one before.
    words += ["--parallel", max_seqs, "--ctx-size", max_seqs * max_model_len, "--cache-ram", 0, "--offline"]
    words += ["--cache-type-k", _LLAMA_CPP_CACHE[dtype], "--cache-type-v", _LLAMA_CPP_CACHE[dtype]]
    return [server, model], words
