"""Route ``POST /v1/completions``."""

from fastapi import APIRouter, Request, Response

from neaptide.server.openai.endpoints import COMPLETIONS
from neaptide.server.openai.generation import answer
from neaptide.server.openai.openapi import JSON_BODY_ERRORS, replies, request_body
from neaptide.server.openai.replies import Completion, CompletionChunk
from neaptide.server.openai.schemas import CompletionBody

router = APIRouter()


@router.post(
    COMPLETIONS,
    openapi_extra=request_body(CompletionBody),
    responses=replies(Completion, *JSON_BODY_ERRORS, *(403, 404, 429, 503), events=CompletionChunk),
    response_model=None,
)
async def completions(request: Request) -> Response:
    """Continues texts or token ids."""
    return await answer(request, COMPLETIONS)
