"""Models that vLLM may serve but that our step plans cannot drive. Does not import vLLM; the caller passes its
objects."""

from collections.abc import Iterable
from typing import Any

from neaptide.models.config import UnsupportedModelError

_SERVED_CACHES = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec")
"""Caches that need only a block table with every block of a request.

Exact names: vLLM derives others from them that reserve blocks (``SinkFullAttentionSpec``), which we would give to
requests.
"""


def refuse_model(vllm_config: Any) -> None:
    """Refuses unsupported models before their weights are read.

    Args:
        vllm_config: vLLM's ``VllmConfig``.

    Raises:
        UnsupportedModelError: the model is not supported.
    """
    model = vllm_config.model_config
    reasons = {
        "it generates no text": model.runner_type != "generate",
        "it is multimodal": model.is_multimodal_model,
        "it has an encoder": model.is_encoder_decoder,
        "it has layers without attention": model.is_hybrid or model.is_attention_free,
        # We request chunked prefill. If vLLM turns it off by itself, the text would be wrong without an error.
        "vLLM cannot compute its prompts in chunks here": not vllm_config.scheduler_config.enable_chunked_prefill,
    }
    for reason, applies in reasons.items():
        if applies:
            raise _refused(model.model, reason)


def refuse_cache(model: str, groups: Iterable[Any]) -> None:
    """Refuses unsupported KV caches.

    Args:
        model: its name, for the message.
        groups: vLLM's ``KVCacheGroupSpec`` of layers that share a block table.

    Raises:
        UnsupportedModelError: a request needs several tables, or more than its blocks.
    """
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if len(kinds) != 1 or kinds[0] not in _SERVED_CACHES:
        raise _refused(model, f"its KV cache is {', '.join(kinds) or 'none'}, not one kind of attention for all layers")


def _refused(model: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{model}: the vllm executor does not serve this model: {reason}")
