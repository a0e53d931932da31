"""Commands that start the engines installed by ``install.sh``."""

import shlex
from pathlib import Path

_DTYPES = {"bfloat16": "bf16", "float32": "f32"}
_LLAMA_CPP_CACHE = {"bfloat16": "f16", "float32": "f32"}
"""Its default with 16-bit weights, and as wide as ours."""


def installed(directory: Path, threads: int, dtype: str, max_seqs: int, max_model_len: int) -> list[tuple[str, str]]:
    """Name and command of each engine, with ``{port}`` in place of its port.

    Args:
        directory: the argument given to ``install.sh``.
        threads: number of threads to compute with.
        dtype: torch's name of the dtype to compute in.
        max_seqs: most concurrent requests, for engines with such a setting.
        max_model_len: most tokens of a request, likewise.

    Raises:
        SystemExit: no engine is installed.
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
        raise SystemExit(f"{directory} has no engine: run benchmarks/peers/install.sh {directory}")
    return found


_Command = tuple[list[Path], list[object]]
"""Files that must exist, and the words of the command."""


def _openvino(directory: Path, threads: int, dtype: str) -> _Command:
    python, model = directory / "openvino" / "bin" / "python", directory / "openvino-111m"
    server = Path(__file__).with_name("openvino_server.py")
    words = [python, server, model, "--port", "{port}", "--threads", threads, "--dtype", _DTYPES[dtype]]
    return [python, model / "openvino_model.xml"], words


def _llama_cpp(directory: Path, threads: int, dtype: str, max_seqs: int, max_model_len: int) -> _Command:
    server, model = directory / "llama-server", directory / f"llama-cpp-111m-{_DTYPES[dtype]}.gguf"
    words: list[object] = [server, "--model", model, "--port", "{port}", "--threads", threads]
    # One slot per request, each with its part of the context. Ended prompts are not kept, because no turn repeats a
    # prompt.
    words += ["--parallel", max_seqs, "--ctx-size", max_seqs * max_model_len, "--cache-ram", 0, "--offline"]
    words += ["--cache-type-k", _LLAMA_CPP_CACHE[dtype], "--cache-type-v", _LLAMA_CPP_CACHE[dtype]]
    return [server, model], words
