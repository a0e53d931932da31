"""Phi-3 over a flat batch of tokens and a paged KV cache: Llama with stacked projections in the checkpoint."""

from typing import ClassVar

from neaptide.executors.torch.models.base import Destination, Rows, Stacked
from neaptide.executors.torch.models.llama import DecoderLayer, Llama


class Phi3Layer(DecoderLayer):
    """A Llama layer whose checkpoint stacks queries, keys and values, and the two halves of the gated product."""

    def destinations(self, prefix: str) -> dict[str, Destination]:
        assert self.qkv.weight is not None
        assert self.gate_up.weight is not None
        stacked = {f"{prefix}.self_attn.{name}_proj.weight" for name in "qkv"}
        stacked |= {f"{prefix}.mlp.{name}_proj.weight" for name in ("gate", "up")}
        found = {name: to for name, to in super().destinations(prefix).items() if name not in stacked}
        found[f"{prefix}.self_attn.qkv_proj.weight"] = Stacked(self.heads_of(self.qkv.weight))
        found[f"{prefix}.mlp.gate_up_proj.weight"] = Rows.of(self.gate_up.weight)
        return found


class Phi3(Llama):
    """A Phi-3 model."""

    layer_class: ClassVar[type[DecoderLayer]] = Phi3Layer
