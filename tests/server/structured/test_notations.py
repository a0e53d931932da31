"""The same document in another notation is accepted where that is cheap, and nothing that another validator refuses."""

import json
from itertools import permutations
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from neaptide.server.structured.lengths import max_document_bytes
from neaptide.server.structured.notations import MAX_PARTS, MAX_SAFE, num_parts
from neaptide.server.structured.schemas import SchemaError, prepare_schema
from tests.server.structured.test_schemas import is_valid

OLD = {"$schema": "http://json-schema.org/draft-07/schema#"}
WHOLE = st.integers(-(1 << 46) + 1, (1 << 46) - 1)
FLOATS = st.floats(-100, 100).map(lambda x: round(x, 2) + 0.0)  # no negative zero
LEAVES = st.none() | st.booleans() | WHOLE | FLOATS | st.text("aü ", max_size=2)


def _around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)


VALUES = st.recursive(LEAVES, _around, max_leaves=5)


def as_fractions(value: Any) -> Any:
    """Whole numbers as ``1.0``."""
    match value:
        case bool():
            return value
        case int():
            return float(value)
        case list():
            return [as_fractions(item) for item in value]
        case dict():
            return {key: as_fractions(item) for key, item in value.items()}
    return value


@settings(max_examples=60, deadline=None)
@given(VALUES, st.sampled_from([{}, OLD]))
def test_a_constant_may_be_written_with_or_without_a_fraction(value: Any, dialect: dict[str, Any]) -> None:
    assume(num_parts(value) < MAX_PARTS)
    for schema in (dialect | {"const": value}, dialect | {"enum": ["other", value]}):
        assert is_valid(schema, json.dumps(value, ensure_ascii=False))
        assert is_valid(schema, json.dumps(as_fractions(value), ensure_ascii=False))


def test_a_constant_of_too_many_orders_is_written_in_one_way() -> None:
    value = {"a": [], "b": 0.0, "c": {"a": None, "b": [], "c": [None, None, None]}}
    assert num_parts(value) > MAX_PARTS
    text = json.dumps(value)
    assert [is_valid({"const": value}, one) for one in (text.replace("0.0", "0"), text)] == [True, False]


@settings(max_examples=60, deadline=None)
@given(VALUES, VALUES)
def test_what_is_another_value_to_other_validators_is_none_of_it(value: Any, other: Any) -> None:
    schema = {"enum": [value, "x"]}
    for document in (other, [value], {"a": value}, [*value, 0] if isinstance(value, list) else None):
        if is_valid(schema, json.dumps(document, ensure_ascii=False)):
            jsonschema_rs.validator_for(schema).validate(document)


@settings(max_examples=40, deadline=None)
@given(WHOLE)
def test_a_whole_number_has_two_notations_and_no_neighbours(number: int) -> None:
    others = (f"{number + 1}", f"{number - 1}", f"{number}.1", f"{number}.9", f"{number}.00", f"{number + 1}.9")
    schema = {"const": number}
    assert [is_valid(schema, text) for text in (f"{number}", f"{number}.0", *others)] == [True] * 2 + [False] * 6


def test_where_an_integer_is_asked_for_it_is_written_as_one() -> None:
    for schema in ({"type": "integer"}, {"type": "integer", "enum": [1, 2]}, {"type": ["integer", "null"], "const": 1}):
        assert is_valid(schema, "1")
        assert not is_valid(schema, "1.0")


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"const": MAX_SAFE + 1}, "const"),
        ({"enum": [1, {"a": [-MAX_SAFE - 1]}]}, "enum"),
        ({"properties": {"a": {"multipleOf": MAX_SAFE + 2}}}, "multipleOf"),
    ],
)
def test_numbers_that_a_double_takes_for_others_are_refused(schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(SchemaError, match=f"'{keyword}'"):
        prepare_schema(schema)


@pytest.mark.parametrize(("keyword", "sign"), [("minimum", 1), ("maximum", -1)])
def test_bounds_that_are_no_doubles_let_nothing_more_pass(keyword: str, sign: int) -> None:
    for number in (MAX_SAFE + 2, MAX_SAFE + 6):
        schema = {"type": "integer", keyword: sign * number}
        assert not is_valid(schema, str(sign * (number - 1)))
        assert is_valid(schema, str(sign * (number + 1)))


def test_members_of_a_constant_come_in_any_order() -> None:
    constant = {"a": 1, "b": ["x"], "c": None}
    for order in permutations(constant.items()):
        assert is_valid({"const": constant}, json.dumps(dict(order)))
    assert not is_valid({"const": constant}, json.dumps({"a": 1, "b": ["x"]}))
    assert not is_valid({"const": constant}, json.dumps(constant | {"d": 1}))


def test_members_of_members_are_written_in_one_order_before_they_become_too_many() -> None:
    def nested(levels: int) -> Any:
        return {"a": nested(levels - 1), "b": 1, "c": 2} if levels else 3

    def has_orders(levels: int) -> bool:
        constant = nested(levels)
        assert is_valid({"const": constant}, json.dumps(constant))
        return is_valid({"const": constant}, json.dumps(dict(reversed(constant.items()))))

    assert [has_orders(levels) for levels in (1, 2, 3, 30)] == [True, True, False, False]


PART_A = {"properties": {"a": {"type": "boolean"}}, "required": ["a"]}
PART_B = {"properties": {"b": {"type": "null"}}, "required": ["b"]}
PART_C = {"properties": {"c": {"type": "boolean"}}, "required": ["c"]}


@pytest.mark.parametrize("schema", [{"allOf": [PART_A, PART_B]}, PART_A | {"allOf": [PART_B]}])
def test_an_object_of_parts_may_begin_with_any_of_them(schema: dict[str, Any]) -> None:
    document = {"a": True, "b": None}
    for order in permutations(document.items()):
        assert is_valid(schema, json.dumps(dict(order)))
    assert not is_valid(schema, '{"b": null}')
    assert not is_valid(schema, '{"b": null, "a": null}')


def test_parts_with_more_conditions_beside_them_keep_them() -> None:
    schema = {"$defs": {"x": {}}, "type": "object", "anyOf": [{}, {}]} | PART_A | {"allOf": [PART_B, PART_C]}
    assert is_valid(schema, '{"a": true, "b": null, "c": false}')
    assert not is_valid(schema, '{"a": true, "b": null}')
    referred = PART_A | {"allOf": [PART_B, {"$ref": "#/properties/a"}]}
    assert prepare_schema(referred)["allOf"] == referred["allOf"]


def test_beside_a_reference_counts_what_the_draft_says() -> None:
    schema = {"$defs": {"a": {"type": "array"}}, "properties": {"x": {"$ref": "#/$defs/a", "maxItems": 1}}}
    assert is_valid(OLD | schema, '{"x": [1, 2]}')
    assert not is_valid(schema, '{"x": [1, 2]}')
    assert not is_valid(OLD | schema, '{"x": 1}')


def test_how_long_it_gets_is_still_known() -> None:
    for value in (17, [1, "ab"], {"a": 1, "b": [None]}):
        bound = max_document_bytes(prepare_schema({"const": value}))
        assert bound is not None
        assert len(json.dumps(as_fractions(value))) <= bound < 100
