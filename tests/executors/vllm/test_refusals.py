"""Kinds of models that the vllm executor refuses, by what vLLM has made of them. No vLLM is needed for that."""

from types import SimpleNamespace
from typing import Any

import pytest

from neaptide.executors.vllm.refusals import refuse_cache, refuse_model
from neaptide.models.config import UnsupportedModelError


def config_of(chunks: bool = True, **model: Any) -> SimpleNamespace:
    """Of a model that is served, but for what is named."""
    flags = dict.fromkeys(("is_multimodal_model", "is_encoder_decoder", "is_hybrid", "is_attention_free"), False)
    return SimpleNamespace(
        model_config=SimpleNamespace(**{"model": "some/model", "runner_type": "generate"} | flags | model),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=chunks),
    )


def groups_of(*kinds: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(kv_cache_spec=type(kind, (), {})()) for kind in kinds]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (config_of(runner_type="pooling"), "it generates no text"),
        (config_of(is_multimodal_model=True), "it is multimodal"),
        (config_of(is_encoder_decoder=True, chunks=False), "it has an encoder"),
        (config_of(is_hybrid=True), "it has layers without attention"),
        (config_of(is_attention_free=True), "it has layers without attention"),
        (config_of(chunks=False), "vLLM cannot compute its prompts in chunks here"),
    ],
)
def test_a_kind_that_is_not_served(config: SimpleNamespace, reason: str) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        refuse_model(config)
    assert str(refused.value) == f"some/model: the vllm executor does not serve this model: {reason}"


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        ((), "none"),
        (("FullAttentionSpec", "SlidingWindowSpec"), "FullAttentionSpec, SlidingWindowSpec"),
        (("FullAttentionSpec", "FullAttentionSpec"), "FullAttentionSpec, FullAttentionSpec"),
        (("MambaSpec",), "MambaSpec"),
        (("ChunkedLocalAttentionSpec",), "ChunkedLocalAttentionSpec"),
        # vLLM derives it from the first: its blocks 1 to n would be requests' at the same time.
        (("SinkFullAttentionSpec",), "SinkFullAttentionSpec"),
    ],
)
def test_a_cache_that_no_plan_describes(kinds: tuple[str, ...], told: str) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        refuse_cache("some/model", groups_of(*kinds))
    reason = f"its KV cache is {told}, not one kind of attention for all layers"
    assert str(refused.value) == f"some/model: the vllm executor does not serve this model: {reason}"


@pytest.mark.parametrize("kind", ["FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec"])
def test_what_is_served_is_not_refused(kind: str) -> None:
    refuse_model(config_of())
    refuse_cache("some/model", groups_of(kind))
