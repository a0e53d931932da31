"""The report at start: what was found in the model's files, in five lines."""

from pathlib import Path

from neaptide.models.checkpoint import weight_headers
from neaptide.models.config import DecoderConfig, ModelConfig, ModelFacts, UnsupportedModelError
from neaptide.models.weights_header import num_parameters
from neaptide.server.context import ServingContext
from neaptide.server.parsers.choose import NONE
from neaptide.server.settings import Settings
from neaptide.server.text.chat_template import DEFAULT
from neaptide.server.text.ends import EndTokens


def start_report(context: ServingContext, model: ModelFacts, ends: EndTokens, settings: Settings) -> list[str]:
    """Lines for the log: model and dtype, context, end tokens, templates and parsers, and what is off."""
    tokenizer = context.tokenizer
    return [
        f"model: {context.model_id}, {_kind(model, tokenizer.directory, settings)}",
        f"context: {context.max_model_len} tokens{_reach(context, model)}",
        f"ends: {ends.described(tokenizer)}",
        f"template: {', '.join(tokenizer.facts) or 'none'}; {_parsers(context)}",
        f"off: {'; '.join(_off(context, ends)) or 'nothing'}",
    ]


def _kind(model: ModelFacts, directory: Path, settings: Settings) -> str:
    if isinstance(model, ModelConfig):
        return f"{model.architecture}, {_size(directory)} in {model.dtype}, dtype {settings.dtype}"
    return f"{_size(directory)}, dtype {settings.dtype}"


def _size(directory: Path) -> str:
    try:
        count = num_parameters(weight_headers(directory))
    except UnsupportedModelError:  # Other executors read other files.
        count = 0
    if not count:
        return "weights of unknown size"
    return f"{count / 1e6:.0f}M parameters" if count < 1e9 else f"{count / 1e9:.1f}B parameters"


def _reach(context: ServingContext, model: ModelFacts) -> str:
    """Why the context has this length, and how far it could go."""
    rope = model.rope if isinstance(model, DecoderConfig) else None
    scaling = "" if rope is None else f", rope {rope.rope_type}"
    longest = model.max_position_embeddings
    return scaling + (f", up to {longest} by max_model_len" if longest > context.max_model_len else "")


def _parsers(context: ServingContext) -> str:
    found, template = context.parsers, context.tokenizer.template
    tools = NONE if template is not None and not template.shows_tools else found.tool_name
    return f"tool calls: {tools}; reasoning: {found.reasoning_name}"


def _off(context: ServingContext, ends: EndTokens) -> list[str]:
    """Features that this model lacks, each with the reason."""
    facts, template = context.tokenizer.facts, context.tokenizer.template
    found = []
    if not facts:
        found.append("chats (there is no chat template)")
    elif DEFAULT not in facts:
        found.append("chats that name no template (there is no default)")
    if template is not None and not template.shows_tools:
        found.append("tools (the chat template shows none)")
    if not context.follows_grammars:
        found.append("structured output (the executor enforces none)")
    elif not ends.ids:
        found.append("structured output (no file names an end token)")
    if not ends.ids:
        found.append("stopping by itself (no file names an end token)")
    return found
