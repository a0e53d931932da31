"""Builds the grammar of a request's output from its fields, or a 400 error if it cannot be enforced."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

from neaptide.server.context import ServingContext
from neaptide.server.http.errors import InvalidRequestError, UnavailableError, UnsupportedParameterError, printable
from neaptide.server.http.jsonbody import parse_json
from neaptide.server.openai.schemas import ChatBody, GenerationBody, Tool, ToolChoiceObject
from neaptide.server.structured.checker import TOO_LONG, CheckerBusyError, NoGrammarsError
from neaptide.server.structured.grammars import (
    Calls,
    OfferedTool,
    Part,
    after_reasoning,
    answer_grammar,
    calls_grammar,
    choice_part,
    lark_part,
    max_calls_bytes,
    regex_part,
    schema_part,
)
from neaptide.server.structured.lengths import max_document_bytes
from neaptide.server.structured.schemas import SchemaError, explain

_ANY_OBJECT = {"type": "object"}


class Thinking(Enum):
    """Whether an output has reasoning before what a grammar constrains."""

    NEVER = "never"
    MAY_BEGIN = "may begin"
    BEGUN = "begun"
    """The prompt has opened it."""


@dataclass(frozen=True, slots=True)
class Constraint:
    grammar: str
    param: str
    """Field of the request that sets it."""
    is_schema: bool
    """Whether complaints are about keywords of a schema."""
    max_bytes: int | None = None
    """Largest size of the output, if known."""
    forces_calls: bool = False
    """Whether the output, apart from reasoning, is calls alone."""


class _Answer(NamedTuple):
    part: Part
    param: str
    is_schema: bool
    max_bytes: int | None


def constraint_of(
    body: GenerationBody, tools: Sequence[Tool], context: ServingContext, thinking: Thinking = Thinking.NEVER
) -> Constraint | None:
    """The constraint that the body sets on the output; None without one. It begins after the model's reasoning.

    Args:
        tools: the tools that the model is shown.

    Raises:
        InvalidRequestError: two fields set one, or it is malformed.
    """
    answer = _answer(body)
    calls = _calls(body, tools, context) if isinstance(body, ChatBody) else None
    if calls is not None and not (calls.forced or answer is not None or _is_strict(calls, context)):
        calls = None  # Free text, searched for calls.
    if answer is None and calls is None:
        return None
    _check_company(body, "tools" if answer is None else answer.param, context)
    try:
        if calls is None:
            assert answer is not None
            found = Constraint(answer_grammar(answer.part), answer.param, answer.is_schema, answer.max_bytes)
        else:
            grammar = calls_grammar(calls, None if answer is None else answer.part)
            longest = max_calls_bytes(calls) if calls.forced else None
            found = Constraint(grammar, "tools", True, longest, forces_calls=calls.forced)
        return found if thinking is Thinking.NEVER else _after_reasoning(found, thinking, context)
    except SchemaError as error:
        raise InvalidRequestError(str(error), param="tools", code="invalid_value") from None


def _is_strict(calls: Calls, context: ServingContext) -> bool:
    """Whether arguments follow their schema in a call of the model's own accord, whose format then needs a grammar."""
    form = context.parsers.tools
    return any(tool.strict for tool in calls.tools) and form is not None and form.grammar is not None


def _after_reasoning(found: Constraint, thinking: Thinking, context: ServingContext) -> Constraint:
    form, tokenizer = context.parsers.reasoning, context.tokenizer
    assert form is not None
    begins = [] if thinking is Thinking.BEGUN else [(mark, tokenizer.added_id(mark)) for mark in form.begins]
    ends = [(mark, tokenizer.added_id(mark)) for mark in form.ends]
    return replace(found, grammar=after_reasoning(found.grammar, begins, ends), max_bytes=None)


def is_known_to_hold(constraint: Constraint, context: ServingContext) -> bool:
    """Whether the grammar has been compiled successfully before. Does not wait.

    Raises:
        InvalidRequestError: it has been compiled before and failed.
    """
    complaint = context.grammars.known(constraint.grammar)
    if complaint is not None:
        _refuse(complaint, constraint)
    return complaint is not None


def ensure_held(constraint: Constraint, context: ServingContext) -> None:
    """Compiles the grammar in the child process, unless the result is known. Blocks.

    Raises:
        InvalidRequestError: it cannot be enforced.
        UnavailableError: the machine is too busy to check it.
    """
    try:
        complaint = context.grammars.complaint(constraint.grammar)
    except NoGrammarsError:
        why = "The model's tokenizer does not allow it." if context.eos_token_ids else "The model has no end token."
        raise _not_served(why, constraint.param) from None
    except CheckerBusyError:
        raise UnavailableError("The grammar could not be checked in time; try again.", code="overloaded") from None
    _refuse(complaint, constraint)


def _refuse(complaint: str, constraint: Constraint) -> None:
    """Raises InvalidRequestError if there is a complaint."""
    if not complaint:
        return
    from neaptide.models.grammars import TOO_SLOW  # loads the compiler of grammars, which the gateway does without

    if complaint == TOO_LONG:
        message = "The schema or grammar is too complex: it took too much time or memory to compile."
    elif complaint == TOO_SLOW:
        message = "The schema or grammar is too complex: computing its first tokens takes too long."
    else:
        message = explain(complaint) if constraint.is_schema else "The grammar or regular expression is not valid."
    raise InvalidRequestError(message, param=constraint.param, code="invalid_value")


def _not_served(why: str, param: str) -> UnsupportedParameterError:
    return UnsupportedParameterError(f"Structured output is not supported by this server. {why}", param=param)


def _check_company(body: GenerationBody, param: str, context: ServingContext) -> None:
    """Refuses fields that end an output, because a grammar ends it too."""
    if not context.follows_grammars:
        raise _not_served("Its executor does not enforce it.", param)
    for name in ("ignore_eos", "min_tokens"):
        if getattr(body, name):
            raise UnsupportedParameterError(f"Not allowed with {param}, which ends the output itself.", param=name)


# ---- the answer ------------------------------------------------------------------------------------------


def _answer(body: GenerationBody) -> _Answer | None:
    asked = [*_response_format(body), *_structured_outputs(body), *_guided(body)]
    if not asked:
        return None
    if len(asked) > 1:
        raise InvalidRequestError(
            "Only one field may constrain the output.", param=asked[1].param, code="invalid_value"
        )
    (param, make, value) = asked[0]
    try:
        part = make(value)
    except SchemaError as error:
        raise InvalidRequestError(str(error), param=param, code="invalid_value") from None
    if make is _schema:
        return _Answer(part, param, True, max_document_bytes(part["json_schema"]))
    longest = max(len(choice.encode()) for choice in value) if make is choice_part else None
    return _Answer(part, param, False, longest)


class _Wish(NamedTuple):
    param: str
    make: Callable[[Any], Part]
    value: Any


def _schema(schema: Any) -> Part:
    if isinstance(schema, str):  # vLLM takes both.
        schema = parse_json(schema.encode())
    return schema_part(schema)


_FORMAT_FIELDS = {"text": (), "json_object": ("schema",), "json_schema": ("json_schema",)}
"""Fields of ``response_format`` beside its type."""


def _response_format(body: GenerationBody) -> list[_Wish]:
    wanted = body.response_format
    if wanted is None:
        return []
    if wanted.type not in _FORMAT_FIELDS:
        raise InvalidRequestError("Unknown type.", param="response_format.type", code="invalid_value")
    given = {"json_schema": wanted.json_schema, "schema": wanted.schema_, **(wanted.model_extra or {})}
    for name, value in given.items():
        if value is not None and name not in _FORMAT_FIELDS[wanted.type]:
            raise UnsupportedParameterError(
                f"Not a field of the type '{wanted.type}'.", param=f"response_format.{printable(name)}"
            )
    if wanted.type == "text":
        return []
    if wanted.type == "json_object":
        place = "response_format" if wanted.schema_ is None else "response_format.schema"
        return [_Wish(place, _schema, _ANY_OBJECT if wanted.schema_ is None else wanted.schema_)]
    place = "response_format.json_schema"
    if wanted.json_schema is None:
        raise InvalidRequestError(
            f"Missing required parameter: '{place}'.", param=place, code="missing_required_parameter"
        )
    schema = wanted.json_schema.schema_
    return [_Wish(f"{place}.schema", _schema, _ANY_OBJECT if schema is None else schema)]


def _structured_outputs(body: GenerationBody) -> list[_Wish]:
    wanted = body.structured_outputs
    if wanted is None:
        return []
    if wanted.structural_tag is not None:
        raise UnsupportedParameterError("Structural tags are not supported.", param="structured_outputs.structural_tag")
    wishes = [
        _Wish("structured_outputs.json", _schema, wanted.json_),
        _Wish("structured_outputs.regex", regex_part, wanted.regex),
        _Wish("structured_outputs.choice", choice_part, wanted.choice),
        _Wish("structured_outputs.grammar", lark_part, wanted.grammar),
        _Wish("structured_outputs.json_object", _schema, _ANY_OBJECT if wanted.json_object else None),
    ]
    wishes = [wish for wish in wishes if wish.value is not None]
    if not wishes:
        raise InvalidRequestError(
            "One of json, regex, choice, grammar and json_object is needed.",
            param="structured_outputs",
            code="invalid_value",
        )
    return wishes


def _guided(body: GenerationBody) -> list[_Wish]:
    """Constraints set by vLLM's older field names."""
    wishes = [
        _Wish("guided_json", _schema, body.guided_json),
        _Wish("guided_regex", regex_part, body.guided_regex),
        _Wish("guided_choice", choice_part, body.guided_choice),
        _Wish("guided_grammar", lark_part, body.guided_grammar),
    ]
    return [wish for wish in wishes if wish.value is not None]


# ---- calls -----------------------------------------------------------------------------------------------


def _calls(body: ChatBody, tools: Sequence[Tool], context: ServingContext) -> Calls | None:
    if not tools:
        return None
    choice = body.tool_choice
    forced, several = choice == "required", body.parallel_tool_calls
    if isinstance(choice, ToolChoiceObject):
        tools, forced, several = [_named(choice, tools)], True, False
    form = context.call_format
    return Calls(
        [OfferedTool(t.function.name, t.function.parameters, t.function.strict is True) for t in tools],
        form,
        context.tokenizer.added_id(form.begin),
        context.tokenizer.added_id(form.end),
        forced,
        several,
    )


def _named(choice: ToolChoiceObject, tools: Sequence[Tool]) -> Tool:
    if choice.type != "function":
        raise UnsupportedParameterError("Only a function can be forced.", param="tool_choice.type")
    if choice.function is None:
        raise InvalidRequestError(
            "Missing required parameter: 'tool_choice.function'. In chats a function is named as "
            '{"type": "function", "function": {"name": "..."}}.',
            param="tool_choice.function",
            code="missing_required_parameter",
        )
    found = next((tool for tool in tools if tool.function.name == choice.function.name), None)
    if found is None:
        raise InvalidRequestError(
            "There is no such function in tools.", param="tool_choice.function.name", code="invalid_value"
        )
    return found
