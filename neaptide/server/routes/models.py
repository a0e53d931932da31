"""Routes ``GET /v1/models`` and ``GET /v1/models/{id}``."""

from fastapi import APIRouter, Request

from neaptide.server.context import ServingContext
from neaptide.server.http.errors import model_not_found
from neaptide.server.openai.openapi import replies
from neaptide.server.openai.replies import Model, ModelList

router = APIRouter()


def _describe(model_id: str, context: ServingContext) -> Model:
    return {
        "id": model_id,
        "object": "model",
        "created": context.created,
        "owned_by": "neaptide",
        "root": context.model_id,
        "parent": None,
        "max_model_len": context.max_model_len,
    }


@router.get("/v1/models", responses=replies(ModelList), response_model=None)
async def list_models(request: Request) -> ModelList:
    """The served model, and its aliases."""
    context: ServingContext = request.app.state.context
    names = (context.model_id, *context.model_aliases)
    return {"object": "list", "data": [_describe(name, context) for name in names]}


@router.get("/v1/models/{model_id:path}", responses=replies(Model, 404), response_model=None)
async def retrieve_model(request: Request, model_id: str) -> Model:
    """One model; ids may contain slashes."""
    context: ServingContext = request.app.state.context
    if not model_id or not context.serves(model_id):
        raise model_not_found(context.model_id)
    return _describe(model_id, context)
