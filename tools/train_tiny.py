"""Trains neaptide-tiny from scratch on one small CPU and writes a Hugging Face directory.

    python -m tools.train_tiny --out DIR --minutes 60
    python -m tools.train_tiny --out DIR --minutes 43 --bf16 --init neaptide/data/neaptide-tiny --lr 0.012
    python -m tools.train_tiny --out DIR --smoke

Rows are packed with short chats (`tools/tiny_data.py`). Every third step takes long chats with many turns instead, so
that few-shot prompts work. The loss covers answers only. Muon updates the matrices and Adam the rest; the learning
rate falls linearly to zero over the wall time. Skills that the last steps got wrong are drawn more often.
"""

import argparse
import copy
import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from neaptide.data import structured_skills
from tools.tiny_data import (
    BOS,
    CHAT_TEMPLATE,
    END,
    PAD,
    SPECIALS,
    Batch,
    Chats,
    Packer,
    build_tokenizer,
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """The numbers of a Llama model."""

    vocab: int
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 384
    theta: float = 10000.0
    eps: float = 1e-5


QUERIES = 128
"""Queries per row that attend at a time; the keys after them are skipped."""


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, start: int) -> Tensor:
    """Attention output of the queries from `start` on: [rows, heads, queries, head_dim].

    q is [rows, kv heads, group, width, head_dim], k and v [rows, kv heads, width, head_dim]. The query heads of one KV
    head are stacked along the rows, which needs one matmul per KV head.
    """
    rows, kv_heads, group, width, size = q.shape
    end = min(start + QUERIES, width)
    some = q[:, :, :, start:end].reshape(rows, kv_heads, -1, size)
    scores = (some @ k[:, :, :end].transpose(-1, -2)).view(rows, kv_heads * group, end - start, end)
    weights = (scores + bias[:, :, start:end, :end]).softmax(-1).view(rows, kv_heads, -1, end)
    return (weights @ v[:, :, :end]).view(rows, kv_heads * group, end - start, size)


class Block(nn.Module):
    """Attention and gated feed-forward, each after an RMS norm."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.norm1, self.norm2 = (nn.Parameter(torch.ones(s.hidden)) for _ in range(2))
        self.q = nn.Parameter(torch.randn(s.heads * s.head_dim, s.hidden) * s.hidden**-0.5)
        self.k = nn.Parameter(torch.randn(s.kv_heads * s.head_dim, s.hidden) * s.hidden**-0.5)
        self.v = nn.Parameter(torch.randn(s.kv_heads * s.head_dim, s.hidden) * s.hidden**-0.5)
        self.o = nn.Parameter(torch.zeros(s.hidden, s.heads * s.head_dim))
        self.gate = nn.Parameter(torch.randn(s.ffn, s.hidden) * s.hidden**-0.5)
        self.up = nn.Parameter(torch.randn(s.ffn, s.hidden) * s.hidden**-0.5)
        self.down = nn.Parameter(torch.zeros(s.hidden, s.ffn))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor) -> Tensor:
        s, (rows, width, _) = self.s, x.shape
        h = F.rms_norm(x, (s.hidden,), self.norm1, s.eps)

        def heads(weight: Tensor, count: int) -> Tensor:
            return F.linear(h, weight).view(rows, width, count, s.head_dim).transpose(1, 2)

        def rotate(t: Tensor) -> Tensor:
            a, b = t.chunk(2, -1)
            return t * cos + torch.cat((-b, a), -1) * sin

        q, k = rotate(heads(self.q, s.heads)), rotate(heads(self.k, s.kv_heads))
        v = heads(self.v, s.kv_heads)
        q = q.view(rows, s.kv_heads, s.heads // s.kv_heads, width, s.head_dim) * s.head_dim**-0.5
        parts = [attend(q, k, v, bias, start) for start in range(0, width, QUERIES)]
        x = x + F.linear(torch.cat(parts, 2).transpose(1, 2).reshape(rows, width, -1), self.o)
        h = F.rms_norm(x, (s.hidden,), self.norm2, s.eps)
        return x + F.linear(F.silu(F.linear(h, self.gate)) * F.linear(h, self.up), self.down)


class Model(nn.Module):
    """The Llama architecture with tied embeddings; returns the last hidden states."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.embed = nn.Parameter(torch.randn(s.vocab, s.hidden) * 0.03)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = nn.Parameter(torch.ones(s.hidden))

    def forward(self, tokens: Tensor, chat: Tensor) -> Tensor:
        s, width = self.s, tokens.shape[1]
        turn = s.theta ** -(torch.arange(0, s.head_dim, 2) / s.head_dim)
        angle = torch.outer(torch.arange(width), turn).repeat(1, 2)
        cos, sin = angle.cos(), angle.sin()
        seen = (chat[:, :, None] == chat[:, None, :]) & torch.ones(width, width).tril().bool()
        bias = torch.where(seen, 0.0, -1e9)[:, None]
        x = F.embedding(tokens, self.embed)
        for block in self.blocks:
            x = block(x, cos, sin, bias)
        return F.rms_norm(x, (s.hidden,), self.norm, s.eps)


class Muon:
    """Momentum with orthogonalised matrices (five Newton-Schulz steps), batched by shape."""

    def __init__(self, params: list[nn.Parameter], dtype: torch.dtype, momentum: float = 0.95) -> None:
        self.momentum, self.dtype = momentum, dtype
        self.groups: dict[torch.Size, list[nn.Parameter]] = {}
        for p in params:
            self.groups.setdefault(p.shape, []).append(p)
        self.state = {s: torch.zeros(len(ps), *s) for s, ps in self.groups.items()}

    @torch.no_grad()
    def step(self, lr: float, decay: float = 0.01) -> None:
        """Updates every matrix from its gradient."""
        for shape, params in self.groups.items():
            grad = torch.stack([p.grad for p in params if p.grad is not None])
            state = self.state[shape].lerp_(grad, 1 - self.momentum)
            x = grad.lerp(state, self.momentum)
            flip = shape[0] > shape[1]
            x = x.mT if flip else x
            x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(self.dtype)
            for _ in range(5):
                a = x @ x.mT
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
            x = x.mT if flip else x
            scale = lr * max(1.0, shape[0] / shape[1]) ** 0.5
            for p, update in zip(params, x, strict=True):
                p.mul_(1 - lr * decay).add_(update, alpha=-scale)


def loss_of(model: nn.Module, embed: Tensor, batch: Batch, bf16: bool = False) -> tuple[Tensor, np.ndarray]:
    """Mean loss over answer tokens, and for every answer whether all its tokens are right.

    Right means under greedy decoding: each token is the most likely after the true ones. With `bf16` the blocks'
    products are computed in bf16.
    """
    inputs, targets, chat, answer = map(torch.from_numpy, (batch.inputs, batch.targets, batch.chat, batch.answer))
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        hidden = model(inputs, chat)
    marked = answer > 0
    logits = hidden[marked] @ embed.T
    wanted = targets[marked]
    wrong = (logits.detach().argmax(-1) != wanted).numpy()
    errors = np.bincount(answer[marked].numpy(), weights=wrong, minlength=len(batch.skills) + 1)
    return F.cross_entropy(logits, wanted), errors[1:] == 0


def evaluate(model: nn.Module, embed: Tensor, packer: Packer) -> dict[str, float]:
    """Fraction of held-out single questions answered exactly, per skill (a small sample)."""
    right: dict[str, list[bool]] = {name: [] for name in structured_skills.ALL}
    with torch.no_grad():
        for _ in range(10):
            batch = packer.batch(48, 128, False)
            for name, ok in zip(batch.skills, loss_of(model, embed, batch)[1], strict=True):
                right[name].append(bool(ok))
    return {name: float(np.mean(v)) if v else 0.0 for name, v in right.items()}


NAMES = {
    "norm1": "input_layernorm", "norm2": "post_attention_layernorm", "q": "self_attn.q_proj",
    "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip


def exported(model: Model) -> Iterator[tuple[str, Tensor]]:
    """The weights under their Hugging Face names."""
    yield "model.embed_tokens.weight", model.embed.detach()
    yield "model.norm.weight", model.norm.detach()
    for i, block in enumerate(model.blocks):
        for short, name in NAMES.items():
            yield f"model.layers.{i}.{name}.weight", getattr(block, short).detach()


def save(model: Model, out: Path) -> None:
    """Writes the Hugging Face directory."""
    out.mkdir(parents=True, exist_ok=True)
    s = model.s
    rope = {"rope_theta": s.theta, "rope_type": "default"}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "vocab_size": s.vocab, "hidden_size": s.hidden, "intermediate_size": s.ffn,
        "num_hidden_layers": s.layers, "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads, "head_dim": s.head_dim, "hidden_act": "silu",
        "max_position_embeddings": 8192, "rms_norm_eps": s.eps, "rope_theta": s.theta,
        "rope_parameters": rope, "attention_bias": False, "attention_dropout": 0.0,
        "mlp_bias": False, "initializer_range": 0.02, "tie_word_embeddings": True,
        "use_cache": True, "bos_token_id": BOS, "eos_token_id": END, "pad_token_id": PAD,
    }  # fmt: skip
    generation = {
        "bos_token_id": BOS, "eos_token_id": END, "pad_token_id": PAD, "do_sample": False,
    }  # fmt: skip
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIALS[BOS],
        "eos_token": SPECIALS[END], "pad_token": SPECIALS[PAD], "padding_side": "left",
        "model_max_length": 8192, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    for name, value in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer),
    ):
        (out / name).write_text(json.dumps(value, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    build_tokenizer().save(str(out / "tokenizer.json"))
    tensors = {name: t.to(torch.bfloat16).contiguous() for name, t in exported(model)}
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})


def load(model: Model, directory: Path) -> None:
    """Reads weights that `save` wrote. A token new to the tokenizer keeps its initial embedding."""
    tensors = load_file(str(directory / "model.safetensors"))
    old = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab()
    new = build_tokenizer().get_vocab()
    both = [token for token in new if token in old]
    name = "model.embed_tokens.weight"
    embed = model.embed.detach().clone()
    embed[[new[t] for t in both]] = tensors[name].float()[[old[t] for t in both]]
    tensors[name] = embed
    with torch.no_grad():
        for name, target in exported(model):
            target.copy_(tensors[name].float())


LEAST_WEIGHT = {"json": 1.6, "call": 1.0}


def steer(chats: Chats, right: dict[str, float]) -> None:
    """Draws a skill more often the more often it goes wrong, and compound skills more often."""
    for name, share in right.items():
        chats.weights[name] = LEAST_WEIGHT.get(name, 0.4) + min(3.0, 6.0 * (1 - share))


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--minutes", type=float, default=60.0, help="wall time to train for")
    parser.add_argument("--smoke", action="store_true", help="a tiny run of about a minute")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of the matrices")
    parser.add_argument("--rows", type=int, default=32, help="rows of 128 tokens a step")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--init", type=Path, help="start from the weights in this directory")
    parser.add_argument("--bf16", action="store_true", help="compute most products in bfloat16")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    args = parser.parse_args()
    if args.smoke:
        args.minutes, args.rows, args.layers = 0.8, 12, 2
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    tokenizer = build_tokenizer()
    vocab = -(-tokenizer.get_vocab_size() // 16) * 16
    shape = Shape(vocab, args.hidden, args.layers, args.hidden // 32, ffn=-(-args.hidden * 8 // 192) * 64)
    model = Model(shape)
    if args.init:
        load(model, args.init)
    average = copy.deepcopy(model)  # average of the weights over about the last fifty steps, which is what is saved
    net = torch.compile(model, dynamic=False) if args.compile else model
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    muon = Muon(matrices, torch.bfloat16 if args.bf16 else torch.float32)
    adam = torch.optim.Adam(others, lr=0.0, betas=(0.9, 0.98))
    chats = Chats(tokenizer, random.Random(args.seed))
    packer = Packer(chats)
    probe = Chats(tokenizer, random.Random(args.seed + 1))
    probe.held_out = True
    size = sum(p.numel() for p in model.parameters())
    print(json.dumps({"parameters": size, **asdict(shape)}), flush=True)

    right = dict.fromkeys(structured_skills.ALL, 0.0)
    start = last = time.monotonic()
    budget, tokens, step, window = args.minutes * 60, 0, 0, []
    while (done := (time.monotonic() - start) / budget) < 1:
        kind = 0 if args.smoke else (0, 0, 1, 0, 0, 2)[step % 6]
        if kind == 0:
            batch = packer.batch(args.rows, 128, False)
        elif kind == 1:
            batch = packer.batch(args.rows // 3, 320, True)
        else:
            batch = packer.batch(args.rows // 6, 704, True)
        loss, ok = loss_of(net, model.embed, batch, args.bf16)
        loss.backward()
        if not all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None):
            print(f"step {step}: gradient not finite, batch skipped", flush=True)
            model.zero_grad(set_to_none=True)
            continue
        rate = args.lr * (1 - done) * min(1.0, (step + 1) / 20)
        muon.step(rate)
        adam.param_groups[0]["lr"] = rate * 0.25
        adam.step()
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for kept, p in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(p, max(0.02, 1 / (step + 1)))
        for name, good in zip(batch.skills, ok, strict=True):
            right[name] += 0.01 * (float(good) - right[name])
        steer(chats, right)
        step, tokens = step + 1, tokens + int((batch.chat > 0).sum())
        window.append(float(loss.detach()))
        if step % 20 == 0 or step == 1:
            minutes = (time.monotonic() - start) / 60
            mean, window = float(np.mean(window)), []
            weak = sorted(right, key=right.__getitem__)[:6]
            print(
                f"step {step} min {minutes:.1f} loss {mean:.4f} tokens {tokens / 1e6:.2f}M "
                f"tok/s {tokens / minutes / 60:.0f} weak " + " ".join(f"{n}:{right[n] * 100:.0f}" for n in weak),
                flush=True,
            )
        if time.monotonic() - last > 300:
            last = time.monotonic()
            save(average, args.out)
            scores = evaluate(average, average.embed, Packer(probe))
            print("held out " + " ".join(f"{n}:{v * 100:.0f}" for n, v in scores.items()), flush=True)
    save(average, args.out)
    scores = evaluate(average, average.embed, Packer(probe))
    print(json.dumps({"steps": step, "tokens": tokens, "held_out": scores}), flush=True)


if __name__ == "__main__":
    main()
