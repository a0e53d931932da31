"""Route ``POST /v1/chat/completions``."""

from fastapi import APIRouter, Request, Response

from neaptide.server.openai.endpoints import CHAT
from neaptide.server.openai.generation import answer
from neaptide.server.openai.openapi import JSON_BODY_ERRORS, replies, request_body
from neaptide.server.openai.replies import ChatCompletion, ChatCompletionChunk
from neaptide.server.openai.schemas import ChatBody

router = APIRouter()


@router.post(
    CHAT,
    openapi_extra=request_body(ChatBody),
    responses=replies(ChatCompletion, *JSON_BODY_ERRORS, *(403, 404, 429, 503), events=ChatCompletionChunk),
    response_model=None,
)
async def chat_completions(request: Request) -> Response:
    """Answers a conversation."""
    return await answer(request, CHAT)
