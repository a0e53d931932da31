"""Marks of reasoning, one entry for each way in which model families set it apart."""

from neaptide.server.parsers.core import ReasoningFormat

THINK = ReasoningFormat("qwen3", ("<think>",), ("</think>",))
"""The model or its template opens reasoning."""
THINK_IMPLIED = ReasoningFormat("deepseek_r1", ("<think>",), ("</think>",), is_implied=True)
"""The model always thinks first, and may leave out the mark that opens it."""


def hunyuan(suffix: str) -> ReasoningFormat:
    """Marks of Hunyuan V3 and V4, in checkpoints whose tags have a suffix."""
    return ReasoningFormat("hy_v3", (f"<think{suffix}>",), (f"</think{suffix}>",))


SEED = ReasoningFormat("seed_oss", ("<seed:think>",), ("</seed:think>",))
MISTRAL = ReasoningFormat("mistral", ("[THINK]", "<think>"), ("[/THINK]", "</think>"))
GRANITE = ReasoningFormat(
    "granite",
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
    at_start=True,
)
_ANSWER = ("<answer>", "\n</answer>", "</answer>")
_RESPONSE = ("<response>", "\n</response>", "</response>")
GRANITE_TAGS = ReasoningFormat("granite_thinking_parser", ("<think>",), ("</think>",), silent=_RESPONSE)
HUNYUAN = ReasoningFormat("hunyuan_a13b", ("<think>",), ("</think>",), silent=_ANSWER)
ERNIE = ReasoningFormat("ernie45", ("<think>",), ("</think>",), is_implied=True, silent=_RESPONSE)
COHERE = ReasoningFormat(
    "cohere_command3",
    ("<|START_THINKING|>",),
    ("<|END_THINKING|>",),
    silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
GPT_OSS = ReasoningFormat(
    "openai_gptoss",
    ("<|channel|>analysis<|message|>",),
    ("<|end|>",),
    silent=(
        "<|channel|>final<|message|>",
        "<|channel|>final <|constrain|>json<|message|>",
        "<|channel|>commentary<|message|>",
        "<|start|>assistant",
        "<|end|>",
        "<|return|>",
    ),
)
GEMMA4 = ReasoningFormat("gemma4", ("<|channel>thought",), ("<channel|>",))
MINIMAX_M3 = ReasoningFormat("minimax_m3", ("<mm:think>",), ("</mm:think>",))
KIMI_K3 = ReasoningFormat(
    "kimi_k3",
    ("<|open|>think<|sep|>",),
    ("<|close|>think<|sep|>",),
    silent=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
)
K2_HORIZON = ReasoningFormat(
    "k2_horizon",
    ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
    ("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
)
PLAMO3 = ReasoningFormat("plamo3", ("<|plamo:begin_think:plamo|>",), ("<|plamo:end_think:plamo|>",))
INKLING = ReasoningFormat(
    "inkling",
    ("<|content_thinking|>",),
    ("<|end_message|>", "<|content_model_end_sampling|>"),
    silent=("<|message_model|>", "<|content_text|>", "<|end_message|>", "<|content_model_end_sampling|>"),
)
