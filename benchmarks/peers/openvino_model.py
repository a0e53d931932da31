"""Converts a checkpoint in Hugging Face layout, with its tokenizer, to OpenVINO's format; run by ``install.sh``.

python benchmarks/peers/openvino_model.py MODEL_DIR OUT_DIR
"""

import sys
from pathlib import Path

import openvino
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from transformers import AutoTokenizer


def main() -> None:
    model_dir, out_dir = map(Path, sys.argv[1:])
    model = OVModelForCausalLM.from_pretrained(model_dir, export=True, load_in_8bit=False, compile=False)
    model.save_pretrained(out_dir)
    converted = convert_tokenizer(AutoTokenizer.from_pretrained(model_dir), with_detokenizer=True)
    for name, part in zip(("tokenizer", "detokenizer"), converted, strict=True):
        openvino.save_model(part, out_dir / f"openvino_{name}.xml")


if __name__ == "__main__":
    main()
