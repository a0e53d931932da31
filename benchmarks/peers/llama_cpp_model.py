"""Writes a Llama checkpoint in Hugging Face layout as llama.cpp's, with the converter of its sources; ``install.sh``
runs it with those on the path.

python benchmarks/peers/llama_cpp_model.py MODEL_DIR --outfile FILE --outtype bf16
"""

import convert_hf_to_gguf
from conversion.base import TextModel
from conversion.llama import LlamaModel


def words_as_gpt2(model: TextModel, tokenizer: object) -> str:
    """How the tokenizer splits words: the converter knows that of published models alone, by a hash of some text's
    tokens. Byte-level BPE with the library's own split, as the benchmark model has it, splits as GPT-2 does."""
    return "gpt-2"


if __name__ == "__main__":
    TextModel.get_vocab_base_pre = words_as_gpt2
    LlamaModel.set_vocab = TextModel._set_vocab_gpt2  # it would ask sentencepiece first
    convert_hf_to_gguf.main()
