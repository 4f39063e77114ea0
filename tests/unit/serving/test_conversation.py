"""Tokens of a chat: every prompt begins with the tokens of the turns before it and stands for the template's text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_checkpoint import byte_tokenizer

from specdec.checkpoint.chat import ChatTemplate
from specdec.checkpoint.tokenizer import Tokenizer
from specdec.errors import UsageError
from specdec.serving.conversation import Conversation

BEGIN, END = "<|reserved_0|>", "<|reserved_1|>"
SOURCE = f"{{% for m in messages %}}{BEGIN}{{{{ m.role }}}} {{{{ m.content }}}}{END}{{% endfor %}}{BEGIN}assistant "
LIBRARY = byte_tokenizer()
TOKENIZER = Tokenizer(LIBRARY)
END_ID = LIBRARY.token_to_id(END)
#: Any token of text, so also such as spell a text otherwise than encoding it does, and cut characters.
ANSWERS = st.lists(st.integers(0, 499), max_size=8)
TEXTS = st.text(max_size=6)


def template(source: str = SOURCE) -> ChatTemplate:
    found = ChatTemplate.of({"chat_template": source})
    assert found is not None
    return found


def decoded(tokens: list[int] | tuple[int, ...]) -> str:
    return LIBRARY.decode(list(tokens), skip_special_tokens=False)


@settings(max_examples=200, deadline=None)
@given(turns=st.lists(st.tuples(TEXTS, ANSWERS, st.booleans()), min_size=1, max_size=4))
def test_a_prompt_begins_with_the_chat_as_it_was(turns: list[tuple[str, list[int], bool]]) -> None:
    conversation = Conversation(TOKENIZER, template(), system="s")
    past: tuple[int, ...] = ()
    for text, answer, stopped in turns:
        prompt = conversation.ask(text)
        assert prompt[: len(past)] == past
        # the rest is the template's, encoded by itself: marks are one token each
        rest = f"{BEGIN}user {text}{END}{BEGIN}assistant "
        if past:
            rest = rest if past[-1] == END_ID else END + rest
        else:
            rest = f"{BEGIN}system s{END}{rest}"
        assert decoded(prompt[len(past) :]) == rest
        assert prompt[len(past) :] == tuple(LIBRARY.encode(rest, add_special_tokens=False).ids)
        tokens = [*answer, END_ID] if stopped else answer
        conversation.answered(tokens, LIBRARY.decode(answer), stopped=stopped)
        past = (*prompt, *tokens)


@settings(max_examples=100, deadline=None)
@given(turns=st.lists(st.tuples(TEXTS, ANSWERS, st.booleans()), min_size=1, max_size=4))
def test_without_a_template_texts_follow_each_other(turns: list[tuple[str, list[int], bool]]) -> None:
    conversation = Conversation(TOKENIZER)
    past: tuple[int, ...] = ()
    for text, answer, stopped in turns:
        prompt = conversation.ask(text)
        assert prompt == past + tuple(LIBRARY.encode(text, add_special_tokens=False).ids)
        conversation.answered([*answer, 500] if stopped else answer, LIBRARY.decode(answer), stopped=stopped)
        past = (*prompt, *answer)


def test_a_turn_that_is_taken_back_leaves_nothing() -> None:
    conversation = Conversation(TOKENIZER, template())
    conversation.ask("a")
    conversation.answered([5, 6], LIBRARY.decode([5, 6]), stopped=False)
    expected = conversation.ask("b")
    conversation.withdraw()
    conversation.ask("something else")
    conversation.withdraw()
    assert conversation.ask("b") == expected


def test_a_turn_that_the_template_refuses_leaves_nothing() -> None:
    source = f"{{% if messages[-1].content == 'no' %}}{{{{ raise_exception('no') }}}}{{% endif %}}{SOURCE}"
    conversation, other = Conversation(TOKENIZER, template(source)), Conversation(TOKENIZER, template(source))
    with pytest.raises(UsageError, match="refuses this chat: no"):
        conversation.ask("no")
    assert conversation.ask("yes") == other.ask("yes")


def test_a_cut_answer_is_its_text() -> None:
    """Behind a stop string there are tokens that the chat does not go on with."""
    conversation = Conversation(TOKENIZER, template())
    first = conversation.ask("a")
    tokens = LIBRARY.encode("one two three", add_special_tokens=False).ids
    conversation.answered(tokens, "one ", stopped=False)
    rest = f"one {END}{BEGIN}user b{END}{BEGIN}assistant "
    assert decoded(conversation.ask("b")[len(first) :]) == rest


def test_answers_that_the_template_changes_are_encoded_anew() -> None:
    conversation = Conversation(TOKENIZER, template(SOURCE.replace("m.content", "m.content | trim")))
    first = conversation.ask("a")
    tokens = LIBRARY.encode(" one ", add_special_tokens=False).ids
    conversation.answered(tokens, " one ", stopped=False)
    second = conversation.ask("b")
    assert second[: len(first)] == first
    assert decoded(second[len(first) :]) == f"one{END}{BEGIN}user b{END}{BEGIN}assistant "
