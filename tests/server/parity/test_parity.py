"""The page of OpenAI parity is what a server does."""

from pathlib import Path

import pytest

from neaptide.server.openai.endpoints import CHAT
from neaptide.server.openai.responses.bodies import ResponsesBody
from neaptide.server.openai.schemas import Body, ChatBody, CompletionBody
from tests.server.parity.asking import Outcome, asking
from tests.server.parity.cases import GENERATION, OPENAI, OTHERS, PLAIN, stored_forms
from tests.server.parity.client_fields import fields_of
from tools import parity_page


async def test_the_page_is_what_a_server_does() -> None:
    assert parity_page.PAGE.read_text(encoding="utf-8") == await parity_page.page()


@pytest.mark.parametrize("call", GENERATION)
def test_every_field_of_the_client_is_asked_for(call: str) -> None:
    assert fields_of(call).keys() - {case.field for case in OPENAI} == set()


def test_every_field_of_files_and_batches_is_asked_for() -> None:
    asked = {(form.case.calls[0], form.place) for form in stored_forms("file", "batch")}
    calls = {call for call, _ in asked}
    assert len(calls) == 4
    assert {(call, name) for call in calls for name in fields_of(call)} == asked


@pytest.mark.parametrize("model", [ChatBody, CompletionBody, ResponsesBody])
def test_every_field_that_the_server_knows_is_asked_for(model: type[Body]) -> None:
    assert model.model_fields.keys() - {case.field for case in (*OPENAI, *OTHERS)} == set()


async def test_the_three_outcomes_are_told_apart(tmp_path: Path) -> None:
    plain = PLAIN[CHAT]
    async with asking(tmp_path) as asked:
        asked.say("Yes.")
        found = [
            await asked.outcome(CHAT, name, plain, {**plain, name: value})
            for name, value in (("seed", 7), ("nonsense", 7), ("suffix", "a"))
        ]
    assert found == [Outcome.TAKEN, Outcome.IGNORED, Outcome.REFUSED]
