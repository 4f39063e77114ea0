"""Chat templates against transformers' rendering of the same source, and what is refused."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from specdec.checkpoint.chat import ChatTemplate
from specdec.errors import CheckpointError, UsageError

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": "Be <b>brief</b> & kind."},
        {"role": "user", "content": "Grüße, 数\n{{ no template }}"},
        {"role": "assistant", "content": " Hello. "},
        {"role": "user", "content": '"quoted"'},
    ],
]

SOURCES = {
    "chatml": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "blocks on lines of their own": """{{ bos_token }}
{%- for message in messages %}
    {% if message.role == 'system' %}
System: {{ message.content }}
    {% else %}
{{ message.role | capitalize }}: {{ message.content | trim }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
Assistant:{% endif %}""",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "loop controls": "{% for message in messages %}{% if loop.index0 > 1 %}{% break %}{% endif %}{% if message.role == "
    "'system' %}{% continue %}{% endif %}{{ message.content }}{{ eos_token }}{% endfor %}",
    "generation": "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(found=false) %}{% for message in messages %}{% set ns.found = true %}{% endfor %}"
    "{{ ns.found }}{{ tools is none }}{{ documents is none }}{% if unset is defined %}no{% endif %}",
    "macro": "{% macro say(role, text) %}[{{ role }}]{{ text }}{% endmacro %}{% for m in messages %}{{ say(m.role, m.content) }}"
    "{% endfor %}{{ strftime_now('%Y') }}",
    "slices": "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{{ (m.role == 'user') ~ loop.last ~ m['content'].split('\n')[0] }}{% endfor %}",
}


@pytest.mark.parametrize("prompting", [True, False])
@pytest.mark.parametrize("chat", CHATS, ids=["one", "four"])
@pytest.mark.parametrize("source", SOURCES.values(), ids=list(SOURCES))
def test_renders_as_transformers(source: str, chat: list[dict[str, str]], prompting: bool) -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    (expected,), _ = render_jinja_template(
        conversations=[chat],
        chat_template=source,
        add_generation_prompt=prompting,
        tools=None,
        documents=None,
        **tokens,
    )
    config = {"chat_template": source, "bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    template = ChatTemplate.of(config)
    assert template is not None
    assert template.render(chat, add_generation_prompt=prompting) == expected


def test_a_configuration_without_a_template() -> None:
    assert ChatTemplate.of({}) is None
    assert ChatTemplate.of({"chat_template": None, "bos_token": "<s>"}) is None


def test_of_several_the_default_is_taken() -> None:
    def of(**named: str) -> ChatTemplate | None:
        return ChatTemplate.of({"chat_template": [{"name": n, "template": t} for n, t in named.items()]})

    for found, text in ((of(tools="a", default="b"), "b"), (of(only="c"), "c")):
        assert found is not None and found.render([]) == text
    with pytest.raises(CheckpointError, match="no template called 'default'; it has: tools, rag"):
        of(tools="a", rag="b")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ ('%s' | attr('format')).__self__ }}",
        # would be called by json, outside
        "{{ cycler | tojson(default=strftime_now) }}",
        "{{ messages | tojson(cls=cycler) }}",
    ],
)
def test_a_template_stays_in_its_sandbox(attack: str) -> None:
    template = ChatTemplate.of({"chat_template": attack})
    assert template is not None
    messages = [{"role": "user", "content": "a"}]
    with suppress(CheckpointError):
        assert template.render(messages) == ""
    assert messages == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("{% for %}", CheckpointError, "is no template, line 1"),
        ("a\n{% endif %}", CheckpointError, "line 2"),
        ("{{ 1 // 0 }}", CheckpointError, "fails with ZeroDivisionError"),
        ("{{ raise_exception('roles must alternate') }}", UsageError, "refuses this chat: roles must alternate"),
    ],
)
def test_errors_are_one_line(source: str, kind: type[Exception], words: str) -> None:
    def rendered() -> Any:
        template = ChatTemplate.of({"chat_template": source})
        assert template is not None
        return template.render(CHATS[0])

    with pytest.raises(kind, match=words):
        rendered()
