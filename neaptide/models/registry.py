"""The model families, by the architecture in ``config.json``.

A new family needs one line here and a parser in ``neaptide.models.families``. If the traits of ``DecoderConfig`` do not
describe it, it also needs a field there and its meaning in ``neaptide.executors.torch.models.decoder``.
"""

from collections.abc import Callable
from typing import NamedTuple

from neaptide.models.config import VLLM, ModelConfig, UnsupportedModelError
from neaptide.models.families import layer_norms, llama
from neaptide.models.fields import RawConfig


class Family(NamedTuple):
    parse_config: Callable[[RawConfig, tuple[int, ...]], ModelConfig]
    """Makes the configuration from ``config.json`` and the end-of-sequence tokens."""
    torch_class: str = "neaptide.executors.torch.models.decoder:Decoder"
    """``module:class`` of its ``TorchModel``, imported by the torch executor only."""


FAMILIES: dict[str, Family] = {
    "ArceeForCausalLM": Family(llama.arcee),
    "CohereForCausalLM": Family(layer_norms.cohere),
    "Ernie4_5ForCausalLM": Family(llama.ernie),
    "Ernie4_5_ForCausalLM": Family(llama.ernie),  # as the model's authors spell it
    "Exaone4ForCausalLM": Family(llama.exaone4),
    "GPT2LMHeadModel": Family(layer_norms.gpt2),
    "GPTNeoXForCausalLM": Family(layer_norms.gpt_neox),
    "Glm4ForCausalLM": Family(llama.glm4),
    "GlmForCausalLM": Family(llama.glm),
    "GraniteForCausalLM": Family(llama.granite),
    "HeliumForCausalLM": Family(llama.helium),
    "HunYuanDenseV1ForCausalLM": Family(llama.hunyuan),
    "HyperCLOVAXForCausalLM": Family(llama.hyperclovax),
    "InternLM3ForCausalLM": Family(llama.internlm3),
    "LlamaForCausalLM": Family(llama.llama),
    "MistralForCausalLM": Family(llama.mistral),
    "NemotronForCausalLM": Family(layer_norms.nemotron),
    "OPTForCausalLM": Family(layer_norms.opt),
    "Olmo2ForCausalLM": Family(llama.olmo2),
    "OlmoForCausalLM": Family(layer_norms.olmo),
    "Phi3ForCausalLM": Family(llama.phi3),
    "PhiForCausalLM": Family(layer_norms.phi),
    "Qwen2ForCausalLM": Family(llama.qwen2),
    "Qwen3ForCausalLM": Family(llama.qwen3),
    "SeedOssForCausalLM": Family(llama.seed_oss),
    "SmolLM3ForCausalLM": Family(llama.smollm3),
    "StableLmForCausalLM": Family(layer_norms.stablelm),
    "Starcoder2ForCausalLM": Family(layer_norms.starcoder2),
}


def family_of(architectures: object) -> Family:
    """The family of a model.

    Args:
        architectures: the entry of ``config.json``, a list with one name.

    Raises:
        UnsupportedModelError: the architecture is not supported.
    """
    if isinstance(architectures, list) and len(architectures) == 1:
        (name,) = architectures
        if isinstance(name, str) and name in FAMILIES:
            return FAMILIES[name]
    if not architectures:
        raise UnsupportedModelError("config.json names no architecture; save_pretrained of the model's class writes it")
    named = ", ".join(map(str, architectures)) if isinstance(architectures, list) else architectures
    raise UnsupportedModelError(
        f"architecture {named} is not supported by our own executor (docs/models.md lists what is); {VLLM}"
    )
