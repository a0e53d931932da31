"""Attention over a paged KV cache for a ragged batch of decodes and prefill chunks."""

from neaptide.kernels.paged_attention.reference import AttentionPlan, paged_attention, plan_attention, write_kv

__all__ = ["AttentionPlan", "paged_attention", "plan_attention", "write_kv"]
