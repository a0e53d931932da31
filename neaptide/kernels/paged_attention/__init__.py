"""Attention over a paged KV cache for a ragged batch of decodes and prefill chunks."""

from neaptide.kernels.paged_attention.planner import AttentionPlanner, Shape, StepAttention
from neaptide.kernels.paged_attention.reference import AttentionPlan, paged_attention, plan_attention, write_kv
from neaptide.kernels.paged_attention.tables import StepTables

__all__ = [
    "AttentionPlan",
    "AttentionPlanner",
    "Shape",
    "StepAttention",
    "StepTables",
    "paged_attention",
    "plan_attention",
    "write_kv",
]
