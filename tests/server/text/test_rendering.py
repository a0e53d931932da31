"""Chat templates are code of strangers: rendered where they can be stopped, with a limit of time and memory."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from neaptide.server.batches.lines import ContextCompiler
from neaptide.server.http.errors import ContextLengthError, InvalidRequestError
from neaptide.server.openai.endpoints import CHAT
from neaptide.server.text import rendering, tokenizer
from neaptide.server.text.chat_template import DEFAULT, TemplateFacts, TemplateInput
from neaptide.server.text.rendering import ChildRenderer, OwnRenderer
from neaptide.server.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL_DIR, make_context

GIVEN = TemplateInput(messages=[{"role": "user", "content": "caf\u00e9 \U00100000"}], variables={"a": [1, {"b": None}]})
PLAIN = "{{ bos_token }}{{ messages[0].content }}{{ a | tojson }}{{ tools is none }}"
HOSTILE = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "doubling": "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "nested": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
}


@contextmanager
def child(**sources: str) -> Iterator[ChildRenderer]:
    renderer = ChildRenderer(sources, {"bos_token": "<s>"})
    try:
        yield renderer
    finally:
        renderer.close()


def test_a_child_renders_the_same() -> None:
    own = OwnRenderer({DEFAULT: PLAIN}, {"bos_token": "<s>"})
    with child(default=PLAIN) as renderer:
        assert renderer.render(DEFAULT, GIVEN) == own.render(DEFAULT, GIVEN)
        assert renderer.render(DEFAULT, GIVEN).startswith("<s>caf\u00e9 \U00100000")
        short = TemplateInput(messages=GIVEN.messages, variables={"a": "x" * 100}, max_chars=20)
        with pytest.raises(ContextLengthError) as caught:
            renderer.render(DEFAULT, short)
        assert caught.value.code == "context_length_exceeded"


def test_what_a_template_refuses_is_the_callers_400() -> None:
    with child(default="{{ raise_exception(messages[0].content) }}") as renderer:
        with pytest.raises(InvalidRequestError) as caught:
            renderer.render(DEFAULT, GIVEN)
    assert (caught.value.param, caught.value.code) == ("messages", "invalid_value")
    assert caught.value.message == "The model's chat template does not accept this conversation."


def test_the_templates_own_reason_is_told() -> None:
    with child(default="{{ raise_exception('Roles must alternate user/assistant/...') }}") as renderer:
        with pytest.raises(InvalidRequestError) as caught:
            renderer.render(DEFAULT, GIVEN)
    assert caught.value.message == (
        "The model's chat template does not accept this conversation: Roles must alternate user/assistant/..."
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_takes_too_much_is_stopped_and_others_go_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "CPU_S", 0.2)
    monkeypatch.setattr(rendering, "LEAST_CPU_S", 0.2)
    with child(default=HOSTILE[name], other=PLAIN) as renderer:
        with pytest.raises(InvalidRequestError):
            renderer.render(DEFAULT, GIVEN)
        assert renderer.render("other", GIVEN).startswith("<s>")


def test_a_template_that_cannot_be_compiled_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match="the model's chat template cannot be used: No filter named 'nothing'"):
        ChildRenderer({DEFAULT: "{{ messages | nothing }}"}, {})


def test_a_batch_line_is_rendered_within_the_same_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "CPU_S", 0.2)
    monkeypatch.setattr(tokenizer, "ChildRenderer", ChildRenderer)  # Tests share a renderer of their own.
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_DIR / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(HOSTILE["loops"])
    compiler = ContextCompiler(make_context(Tokenizer(tmp_path))).recipe().compiler()
    with pytest.raises(InvalidRequestError, match="takes too much time or memory"):
        compiler.compile(CHAT, {"messages": GIVEN.messages})


CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|system|>Hi.{% endif %}"
    "{% set content = m.content | trim %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ '<|' + m.role + '|>' + content }}{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}"
    "{% for name, value in call.function.arguments | items %}{{ name }}{% endfor %}{% endfor %}"
    "{% if loop.index0 % 2 == 1 %}{{ raise_exception('roles') }}{% endif %}{% endfor %}"
    "{% set ns = namespace(last=0) %}{% if tools %}{{ tools | tojson(indent=4) }}{% endif %}"
)
NOT_PLAIN = {
    **HOSTILE,
    "product": "{{ 'a' * messages[0].n }}",
    "power": "{{ 10 ** 9 }}",
    "format": "{{ '%1000000000d' % 5 }}",
    "formatted": "{% set f = '%1000000000d' %}{{ f % 5 }}",
    "escaped": "{{ messages" + " | tojson" * 60 + " }}",
    "escaped in turns": "{% for m in messages %}{% set x = x | tojson %}{% set x = x %}{% endfor %}",
    "joined": "{{ messages[0].content" + " | join('--')" * 60 + " }}",
    "joined in a macro": "{% macro f(x) %}{{ x | join('--') }}{% endmacro %}{{ f(f(f('aa'))) }}",
    "listed": "{{ [[messages[0].content] ~ ''] ~ '' }}",
    "split": "{% for m in messages %}{% set y = x.split('a') %}{% set x = y ~ '' %}{% endfor %}",
    "split and joined": "{{ (m.content ~ '').split('a') ~ '' }}",
    "width": "{{ messages[0].content.ljust(1000000000) }}",
    "large split": "{{ messages[0].content | replace('a', messages[0].content) }}",
    "indent": "{{ messages | tojson(indent=1000000) }}",
    "unrolled": "{% set x = 'aaaa' %}" + "{% set x = x ~ x %}" * 60,
    "in turns": "{% for m in messages %}{% set y = [x, x] %}{% set x = y %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "loops over all": "{% for m in messages %}{% for n in messages %}{% endfor %}{% endfor %}",
    "a call block": "{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}x{% endcall %}",
    "a range": "{% for i in range(10) %}{% endfor %}",
    "long": " " * (1 << 17),
}


@pytest.mark.parametrize("source", [PLAIN, CHATML, (MODEL_DIR / "chat_template.jinja").read_text()])
def test_templates_that_join_messages_are_plain(source: str) -> None:
    assert TemplateFacts(source).is_plain


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_templates_that_may_do_more_are_not(name: str) -> None:
    assert not TemplateFacts(NOT_PLAIN[name]).is_plain


def test_closing_ends_the_process() -> None:
    with child(default=PLAIN) as renderer:
        process = renderer._child
        assert process is not None
        assert renderer.pid is not None
    assert process.poll() is not None
