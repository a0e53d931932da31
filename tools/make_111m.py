"""Writes the benchmark model: a random 111M-parameter Llama with a byte-level BPE tokenizer.

    python tools/make_111m.py --out DIR

Hidden 576, 30 layers, 9 heads, 3 KV heads, ffn 1536, vocabulary 8,192, tied embeddings, bf16, seed 1234, 8,192
positions. Its text is noise; its step times are those of a real model of that shape. The tokenizer is trained on the
standard library's sources of the running interpreter: token ids differ between Python versions, weights do not.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 1234
VOCAB_SIZE = 8192
MAX_POSITIONS = 8192
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    sources = sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(sources, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
    )


def build_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config.do_sample = False
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    out: Path = parser.parse_args().out
    model = build_model()
    model.save_pretrained(out)
    build_tokenizer().save_pretrained(out)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"{out}: {millions:.1f}M parameters, vocabulary {VOCAB_SIZE}")


if __name__ == "__main__":
    main()
