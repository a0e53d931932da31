"""Models that vLLM may serve, but no plan of ours can drive. No vLLM here: what it has made of a model is handed in."""

from collections.abc import Iterable
from typing import Any

from neaptide.models.config import UnsupportedModelError

_SERVED_CACHES = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec")
"""A block table that holds every block of a request is all that these want. By their exact names: vLLM derives others
from them that keep blocks of their own (``SinkFullAttentionSpec``), which we would give to requests."""


def refuse_model(vllm_config: Any) -> None:
    """
    Args:
        vllm_config: vLLM's ``VllmConfig``.

    Raises:
        UnsupportedModelError: no weights have been read yet.
    """
    model = vllm_config.model_config
    reasons = {
        "it generates no text": model.runner_type != "generate",
        "it is multimodal": model.is_multimodal_model,
        "it has an encoder": model.is_encoder_decoder,
        "it has layers without attention": model.is_hybrid or model.is_attention_free,
        # We ask for them. Where vLLM turns them off by itself, another text comes, and no error.
        "vLLM cannot compute its prompts in chunks here": not vllm_config.scheduler_config.enable_chunked_prefill,
    }
    for reason, applies in reasons.items():
        if applies:
            raise _refused(model.model, reason)


def refuse_cache(model: str, groups: Iterable[Any]) -> None:
    """
    Args:
        model: its name, for the message.
        groups: vLLM's ``KVCacheGroupSpec`` of layers that share a block table.

    Raises:
        UnsupportedModelError: several tables a request, or one that wants more than the blocks of the request.
    """
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if len(kinds) != 1 or kinds[0] not in _SERVED_CACHES:
        raise _refused(model, f"its KV cache is {', '.join(kinds) or 'none'}, not one kind of attention for all layers")


def _refused(model: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{model}: the vllm executor does not serve this model: {reason}")
