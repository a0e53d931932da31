"""Device profiles computed from public limits: memory bandwidth, matrix throughput, memory and links."""

from dataclasses import dataclass

from neaptide.engine.offline.density import kv_bytes_per_token
from neaptide.estimator.cost.step_cost import StepCost
from neaptide.estimator.device_profile import SLOW_CORE, DeviceProfile, Efficiencies, PlanningCost

GIB = 1 << 30
BYTES_PER_VALUE = 2
"""bf16 for weights and KV cache."""
BLOCK_SIZE = 16
MEMORY_SHARE = 0.9
"""Fraction of the device's memory that the engine uses."""
ACTIVATION_BYTES = 2 * GIB
"""Memory per device for activations and workspaces, taken from the engine's part."""
HOST_S = 7e-4
"""Host time per step: launches, and preparation that nothing hides."""
PLANNING = PlanningCost(SLOW_CORE.fixed_s / 2, SLOW_CORE.running_request_s / 2, SLOW_CORE.pooled_row_s / 2)
"""An assumption: a core of a GPU host is twice as fast as the measured one, and otherwise idle."""
ALL_REDUCE_LATENCY_S = 1e-5
EFFICIENCIES = Efficiencies(gemm=0.85, attention=0.55, bandwidth=0.88, link=0.75)
"""The first three are chosen with ``HOST_S`` so that Llama-3.1-8B on an H100 takes 6.4 / 9.6 / 19.4 ms at batch 1 / 64
/ 256 with contexts of 1k tokens. Good engines reach about that. The link efficiency of all-reduces is assumed."""


@dataclass(slots=True, frozen=True)
class Device:
    """A device's limits. Unless stated otherwise, they are what plain copies and large matrix products reach, not the
    data sheet."""

    name: str
    memory_bytes: int
    bandwidth_bytes_s: float
    flops: float
    host_link_bytes_s: float
    """Bandwidth to host memory, one direction."""
    peer_link_bytes_s: float = 0.0
    """Data-sheet bandwidth between the devices, one direction; 0 if no link is assumed."""


@dataclass(slots=True, frozen=True)
class ModelShape:
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    ffn_matrices: int = 3
    tied: bool = False

    @property
    def body_parameters(self) -> int:
        """Parameters of the matrices that every token passes: all but embedding and output projection."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + self.ffn_matrices * self.hidden * self.ffn)

    @property
    def head_parameters(self) -> int:
        """Parameters of the output projection."""
        return self.hidden * self.vocabulary

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights."""
        embeddings = 1 if self.tied else 2
        return BYTES_PER_VALUE * (self.body_parameters + embeddings * self.head_parameters)

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.layers, self.kv_heads, self.head_dim, value_bytes=BYTES_PER_VALUE)


# Data sheets: A100 80G SXM 2.04 TB/s, 40G 1.56 TB/s, both 312 TFLOP/s; H100 SXM 3.35 TB/s, 989 TFLOP/s; H200 4.8 TB/s,
# 989 TFLOP/s. H100 and H200 use public measurements. A100 is assumed at the same 0.86 of its data sheet. The PCIe card
# has a lower clock because of its 250 W limit.
A100_80G = Device("A100 80G SXM", 80 * GIB, 1.75e12, 270e12, 25e9, 300e9)
A100_40G_SXM = Device("A100 40G SXM", 40 * GIB, 1.33e12, 270e12, 25e9, 300e9)
A100_40G_PCIE = Device("A100 40G PCIe", 40 * GIB, 1.33e12, 240e12, 25e9)
H100_80G = Device("H100 80G SXM", 80 * GIB, 3.0e12, 798e12, 50e9, 450e9)
H200 = Device("H200 141G SXM", 140 * GIB, 4.3e12, 788e12, 50e9, 450e9)

LLAMA_3_1_8B = ModelShape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256)
LLAMA_2_7B = ModelShape("Llama-2-7B", 32, 4096, 32, 32, 128, 11008, 32000)
LLAMA_3_70B = ModelShape("Llama-3-70B", 80, 8192, 64, 8, 128, 28672, 128256)
QWEN2_5_7B = ModelShape("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064)
QWEN2_5_72B = ModelShape("Qwen2.5-72B", 80, 8192, 64, 8, 128, 29568, 152064)
DEEPSEEK_67B = ModelShape("DeepSeek-67B", 95, 8192, 64, 8, 128, 22016, 102400)
OPT_13B = ModelShape("OPT-13B", 40, 5120, 40, 40, 128, 20480, 50272, ffn_matrices=2, tied=True)
OPT_30B = ModelShape("OPT-30B", 48, 7168, 56, 56, 128, 28672, 50272, ffn_matrices=2, tied=True)

_PROFILES: dict[str, tuple[Device, ModelShape, int]] = {
    "a100-40g-llama-3.1-8b": (A100_40G_PCIE, LLAMA_3_1_8B, 1),
    "a100-80g-llama-3.1-8b": (A100_80G, LLAMA_3_1_8B, 1),
    "a100-80g-qwen2.5-7b": (A100_80G, QWEN2_5_7B, 1),
    "a100-80g-llama-2-7b": (A100_80G, LLAMA_2_7B, 1),
    "a100-40g-sxm-opt-13b-tp2": (A100_40G_SXM, OPT_13B, 2),
    "a100-40g-sxm-opt-30b-tp4": (A100_40G_SXM, OPT_30B, 4),
    "a100-80g-llama-3-70b-tp8": (A100_80G, LLAMA_3_70B, 8),
    "a100-80g-qwen2.5-72b-tp8": (A100_80G, QWEN2_5_72B, 8),
    "a100-80g-deepseek-67b-tp8": (A100_80G, DEEPSEEK_67B, 8),
    "h100-80g-llama-3.1-8b": (H100_80G, LLAMA_3_1_8B, 1),
    "h200-llama-3.1-8b": (H200, LLAMA_3_1_8B, 1),
}
ANALYTIC_NAMES = frozenset(_PROFILES)


def analytic_cost(
    device: Device, model: ModelShape, tensor_parallel: int, efficiencies: Efficiencies, host_s: float
) -> StepCost:
    """Costs in seconds per unit of work on ``tensor_parallel`` devices, each with an equal part of every layer."""
    flops = tensor_parallel * device.flops
    bandwidth = tensor_parallel * device.bandwidth_bytes_s * efficiencies.bandwidth
    all_reduces = 2 * model.layers if tensor_parallel > 1 else 0
    # Ring all-reduce: every device sends and receives 2 (p - 1) / p of the bytes.
    reduced_bytes = 2 * (tensor_parallel - 1) / tensor_parallel * BYTES_PER_VALUE * model.hidden
    link_bytes_s = device.peer_link_bytes_s * efficiencies.link
    gemm_token_s = 2 * model.body_parameters / (flops * efficiencies.gemm)
    return StepCost(
        fixed_s=host_s + all_reduces * ALL_REDUCE_LATENCY_S,
        gemm_curve_s=(gemm_token_s, 2 * gemm_token_s),
        pair_s=4 * model.heads * model.head_dim * model.layers / (flops * efficiencies.attention),
        kv_token_s=model.kv_bytes_per_token / bandwidth,
        swap_block_s=BLOCK_SIZE * model.kv_bytes_per_token / (tensor_parallel * device.host_link_bytes_s),
        weights_s=BYTES_PER_VALUE * (model.body_parameters + model.head_parameters) / bandwidth,
        row_s=2 * model.head_parameters / (flops * efficiencies.gemm),
        token_s=all_reduces * reduced_bytes / link_bytes_s if all_reduces else 0.0,
    )


def analytic_profile(name: str, efficiencies: Efficiencies = EFFICIENCIES, host_s: float = HOST_S) -> DeviceProfile:
    """The profile of one of ``ANALYTIC_NAMES``.

    KV capacity = 0.9 of the memory - weights - 2 GiB for activations on each device.

    Raises:
        KeyError: there is no such profile.
    """
    device, model, tensor_parallel = _PROFILES[name]
    free_bytes = tensor_parallel * (MEMORY_SHARE * device.memory_bytes - ACTIVATION_BYTES) - model.weight_bytes
    cost = analytic_cost(device, model, tensor_parallel, efficiencies, host_s)
    return DeviceProfile(
        name=name,
        source="analytic",
        device=device.name,
        model=model.name,
        dtype="bfloat16",
        date="2026-11-21",
        commit="",
        kv_bytes_per_token=model.kv_bytes_per_token,
        num_blocks=int(free_bytes // (BLOCK_SIZE * model.kv_bytes_per_token)),
        block_size=BLOCK_SIZE,
        tensor_parallel=tensor_parallel,
        planning=PLANNING,
        efficiencies=efficiencies,
        costs={"prefill": cost, "decode": cost, "mixed": cost},
    )
