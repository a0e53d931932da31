"""Converts a Llama checkpoint in Hugging Face layout to llama.cpp's format, with the converter in llama.cpp's sources.
``install.sh`` runs it with those on the path.

    python benchmarks/peers/llama_cpp_model.py MODEL_DIR --outfile FILE --outtype bf16
"""

import convert_hf_to_gguf
from conversion.base import TextModel
from conversion.llama import LlamaModel


def words_as_gpt2(model: TextModel, tokenizer: object) -> str:
    """The tokenizer's kind of pre-splitting. The converter recognizes only published models, by a hash of some text's
    tokens. The benchmark model's byte-level BPE splits like GPT-2's."""
    return "gpt-2"


if __name__ == "__main__":
    TextModel.get_vocab_base_pre = words_as_gpt2
    LlamaModel.set_vocab = TextModel._set_vocab_gpt2  # the default tries sentencepiece first
    convert_hf_to_gguf.main()
