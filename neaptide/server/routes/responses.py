"""Route ``POST /v1/responses``."""

from fastapi import APIRouter, Request, Response

from neaptide.server.openai.endpoints import RESPONSES
from neaptide.server.openai.generation import answer
from neaptide.server.openai.openapi import JSON_BODY_ERRORS, replies, request_body
from neaptide.server.openai.responses.bodies import ResponsesBody
from neaptide.server.openai.responses.replies import ResponseEvent, ResponseObject

router = APIRouter()


@router.post(
    RESPONSES,
    openapi_extra=request_body(ResponsesBody),
    responses=replies(ResponseObject, *JSON_BODY_ERRORS, *(403, 404, 429, 503), events=ResponseEvent),
    response_model=None,
)
async def responses(request: Request) -> Response:
    """Answers an input; nothing is stored."""
    return await answer(request, RESPONSES)
