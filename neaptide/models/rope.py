"""Rotary embedding in ``config.json``, and the context length that follows from it.

Scaled embeddings serve longer contexts than ``max_position_embeddings``, or that entry is scaled already. Lengths are
those that vLLM gives.
"""

import math
from typing import NamedTuple

from neaptide.models.config import VLLM, RopeConfig, UnsupportedModelError
from neaptide.models.fields import RawConfig, entries, number, positive_int

_ALIASES = {"su": "longrope", "mrope": "default"}
"""Other names. The positions of ``mrope`` are equal in all its parts where there is only text."""
_KINDS = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")
MAX_CONTEXT_TOKENS = 1 << 23
"""Bounds the table of rotations to a few GB."""


class ContextLengths(NamedTuple):
    """Lengths in tokens."""

    default: int
    """Without a setting."""
    longest: int


def fields_of(raw: RawConfig) -> RawConfig:
    """Entries of the embedding, in both spellings: ``rope_theta`` + ``rope_scaling``, or ``rope_parameters``
    (transformers 5)."""
    fields = entries(raw, "rope_scaling") | entries(raw, "rope_parameters")
    if fields and all(isinstance(value, dict) for value in fields.values()):  # By layer type: all scale alike.
        fields = next(iter(fields.values()))
    return fields


def kind_of(fields: RawConfig) -> str:
    name = fields.get("rope_type", fields.get("type")) or "default"
    return _ALIASES.get(name, name) if isinstance(name, str) else str(name)


def context(raw: RawConfig, trained_tokens: int) -> ContextLengths:
    """Context lengths of a model.

    Args:
        raw: ``config.json``.
        trained_tokens: its ``max_position_embeddings``.

    Raises:
        UnsupportedModelError: a length is missing, invalid or too large.
    """
    fields = fields_of(raw)
    kind = kind_of(fields)
    found = ContextLengths(trained_tokens, trained_tokens)
    if kind == "longrope":
        found = ContextLengths(min(_original(raw, fields, trained_tokens), trained_tokens), trained_tokens)
    elif kind == "yarn":
        longest = int(_original(raw, fields, trained_tokens) * _factor(raw, fields, trained_tokens))
        found = ContextLengths(trained_tokens, max(trained_tokens, longest))
    elif kind not in ("default", "llama3") and fields.get("factor") is not None:
        scaled = int(trained_tokens * number(fields, "factor"))
        found = ContextLengths(scaled, scaled)
    if found.longest > MAX_CONTEXT_TOKENS:
        raise UnsupportedModelError(
            f"config.json: a context of {found.longest} tokens is not supported: at most {MAX_CONTEXT_TOKENS}"
        )
    return found


def rope(raw: RawConfig, rotary_dim: int, trained_tokens: int) -> RopeConfig:
    """The rotary embedding.

    Raises:
        UnsupportedModelError: its kind is unknown, or a value is missing or invalid.
    """
    fields = fields_of(raw)
    kind = kind_of(fields)
    if kind not in _KINDS:
        raise UnsupportedModelError(f"rope type {kind!r} is not supported: only {', '.join(_KINDS)}; {VLLM}")
    theta = number(fields, "rope_theta", number(raw, "rope_theta", 10_000.0))
    if kind == "default":
        return RopeConfig(kind, theta)
    if kind == "dynamic" and fields.get("alpha"):  # Stretched for all lengths (Hunyuan).
        return RopeConfig("default", theta * number(fields, "alpha") ** (rotary_dim / max(rotary_dim - 2, 1)))
    original = _original(raw, fields, trained_tokens)
    if kind == "linear":
        return RopeConfig(kind, theta, factor=number(fields, "factor"))
    if kind == "dynamic":
        return RopeConfig(kind, theta, factor=number(fields, "factor"), original_max_position_embeddings=trained_tokens)
    if kind == "llama3":
        return RopeConfig(
            kind,
            theta,
            factor=number(fields, "factor"),
            low_freq_factor=number(fields, "low_freq_factor"),
            high_freq_factor=number(fields, "high_freq_factor"),
            original_max_position_embeddings=positive_int(fields, "original_max_position_embeddings"),
        )
    factor = _factor(raw, fields, trained_tokens)
    if kind == "yarn":
        if theta <= 1:
            raise UnsupportedModelError(f"config.json: rope_theta {theta:g} is not supported with yarn")
        return RopeConfig(
            kind,
            theta,
            factor=factor,
            original_max_position_embeddings=original,
            attention_factor=_yarn_attention_factor(fields, factor),
            beta_fast=number(fields, "beta_fast", 32.0),
            beta_slow=number(fields, "beta_slow", 1.0),
            truncate=fields.get("truncate") is not False,
        )
    usual = 1.0 if factor <= 1 or original < 2 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeConfig(
        kind,
        theta,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=number(fields, "attention_factor", usual),
        short_factors=_factors(fields, "short_factor", rotary_dim),
        long_factors=_factors(fields, "long_factor", rotary_dim),
    )


def _original(raw: RawConfig, fields: RawConfig, trained_tokens: int) -> int:
    """Context of the training before the frequencies were stretched."""
    name = "original_max_position_embeddings"
    return positive_int(fields, name, positive_int(raw, name, trained_tokens))


def _factor(raw: RawConfig, fields: RawConfig, trained_tokens: int) -> float:
    return number(fields, "factor", trained_tokens / _original(raw, fields, trained_tokens))


def _yarn_attention_factor(fields: RawConfig, factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    usual = scale(1.0)
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        usual = scale(number(fields, "mscale")) / scale(number(fields, "mscale_all_dim"))
    return number(fields, "attention_factor", usual)


def _factors(fields: RawConfig, name: str, rotary_dim: int) -> tuple[float, ...]:
    values = fields.get(name)
    if not isinstance(values, list) or len(values) != rotary_dim // 2 or not all(map(_is_factor, values)):
        raise UnsupportedModelError(f"config.json: {name} must be {rotary_dim // 2} positive numbers")
    return tuple(map(float, values))


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
