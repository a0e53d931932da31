#!/usr/bin/env bash
# What a GPU can do, whether the executor and its kernels are right on it, and its measured profile: under 10 minutes, no
# network. Then, where an interpreter has vLLM, the vllm executor: its steps, and W5 in four stages, each ended after 570 s.
#
#   benchmarks/gpu/run.sh [--dry] [--limit-s S] [--stages correctness,kernels,steps,ceilings,calibration,live,vllm,vllm_w5_ceiling,...]
#
# vllm_w5 is its four stages. Each goes on from where the one before left off, by vllm_w5_state.json in the folder of results: they may be
# run one by one, into the same $OUT.
#
# Needs python3 with torch and numpy, and this checkout; the stage kernels Triton, which torch's builds for CUDA bring.
# msgspec, safetensors and rich (with markdown-it-py, mdurl and pygments) may be missing there: put their wheels into
# benchmarks/gpu/wheels/. Results go to $OUT, or to
# benchmarks/results/<date>-<device>/; the commit is git's, or $COMMIT where the checkout has no history. vLLM's interpreter
# is $PYTHON_VLLM, or .vllm/bin/python, or $PYTHON itself; W5 needs all packages of the server beside it.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=$repository/.venv/bin/python
    [[ -x $PYTHON ]] || PYTHON=python3
fi

export PYTHONPATH=$repository${PYTHONPATH:+:$PYTHONPATH}
wheels=("$here"/wheels/*.whl)
if [[ -e ${wheels[0]} ]]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$site" "${wheels[@]}"
    export PYTHONPATH=$site:$PYTHONPATH
fi

for module in torch numpy msgspec safetensors rich; do
    "$PYTHON" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$module') is None)" || {
        echo "run.sh: $PYTHON has no $module; put its wheel into benchmarks/gpu/wheels/" >&2
        exit 2
    }
done
cd "$repository"
# On a CPU Triton interprets its kernels; it reads that when it is imported.
for argument in "$@"; do
    [[ $argument != --dry ]] || export TRITON_INTERPRET=1
done
PYTHONUNBUFFERED=1 "$PYTHON" -m benchmarks.gpu.main "$@"
