"""``POST /v1/chat/completions``"""

from fastapi import APIRouter, Request, Response

from neaptide.server.generation import answer
from neaptide.server.openapi import request_body
from neaptide.server.prepare import CHAT
from neaptide.server.schemas import ChatBody

router = APIRouter()


@router.post(CHAT, openapi_extra=request_body(ChatBody), response_model=None)
async def chat_completions(request: Request) -> Response:
    """Answers a conversation."""
    return await answer(request, CHAT)
