"""Routes ``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, with which remote clients count tokens like the
server."""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from neaptide.server.context import ServingContext
from neaptide.server.http.auth import principal_of
from neaptide.server.http.errors import ContextLengthError, InvalidRequestError
from neaptide.server.http.jsonbody import parse_aside, read_json
from neaptide.server.openai.openapi import JSON_BODY_ERRORS, replies, request_body
from neaptide.server.openai.prepare import check_model, parse_body
from neaptide.server.openai.replies import Detokenized, Tokenized, TokenizerInfo
from neaptide.server.openai.schemas import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from neaptide.server.text.prompts import MAX_CHARS_PER_TOKEN, encode_conversation

router = APIRouter()


def _tokenize(body: dict[str, Any], context: ServingContext) -> Response:
    parsed: TokenizeTextBody | TokenizeChatBody
    if body.get("messages") is not None:
        parsed = parse_body(TokenizeChatBody, body)
        check_model(parsed.model, context)
        ids = encode_conversation(parsed, body.get("tools"), context)
    else:
        parsed = parse_body(TokenizeTextBody, body)
        check_model(parsed.model, context)
        # A document may exceed the context here; the limit only bounds the tokenizer's time.
        if len(parsed.prompt) > 4 * MAX_CHARS_PER_TOKEN * context.max_model_len:
            raise ContextLengthError("The text is too long.", param="prompt")
        ids = context.tokenizer.encode(parsed.prompt, add_special_tokens=parsed.add_special_tokens)
    strings = [context.tokenizer.token_string(i) for i in ids] if parsed.return_token_strs else None
    return _json(Tokenized(count=len(ids), max_model_len=context.max_model_len, tokens=ids, token_strs=strings))


def _detokenize(body: dict[str, Any], context: ServingContext) -> Response:
    parsed = parse_body(DetokenizeBody, body)
    check_model(parsed.model, context)
    if len(parsed.tokens) > MAX_CHARS_PER_TOKEN * context.max_model_len:
        raise ContextLengthError("Too many tokens.", param="tokens")
    if any(token_id >= context.vocab_size for token_id in parsed.tokens):
        raise InvalidRequestError("A token id is outside the vocabulary.", param="tokens", code="invalid_value")
    return _json(Detokenized(prompt=context.tokenizer.decode(parsed.tokens)))


async def _answer(request: Request, work: Callable[[dict[str, Any], ServingContext], Response]) -> Response:
    context: ServingContext = request.app.state.context
    raw = await read_json(request)
    tenant = principal_of(request).share
    body = await parse_aside(raw, context.bodies, tenant)
    return await context.bodies.run(partial(work, body, context), len(raw), tenant)


def _json(reply: Tokenized | Detokenized) -> Response:
    """Encodes in the thread, because a list of a million ids takes a while."""
    return Response(msgspec.json.encode(reply), media_type="application/json")


@router.post(
    "/tokenize",
    openapi_extra=request_body(TokenizeTextBody, TokenizeChatBody),
    responses=replies(Tokenized, *JSON_BODY_ERRORS, 404),
    response_model=None,
)
async def tokenize(request: Request) -> Response:
    """Token ids of a text or of a conversation."""
    return await _answer(request, _tokenize)


@router.post(
    "/detokenize",
    openapi_extra=request_body(DetokenizeBody),
    responses=replies(Detokenized, *JSON_BODY_ERRORS, 404),
    response_model=None,
)
async def detokenize(request: Request) -> Response:
    """Text of token ids."""
    return await _answer(request, _detokenize)


@router.get("/tokenizer_info", responses=replies(TokenizerInfo), response_model=None)
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """The tokenizer's configuration."""
    context: ServingContext = request.app.state.context
    return context.tokenizer.info()
