"""Grammars over small vocabularies against lists of all texts they admit, and walks whose outcome json and re judge."""

from __future__ import annotations

import builtins
import json
import logging
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pieces import Pieces
from small_checkpoint import END_OF_TEXT, byte_tokenizer
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel

from specdec.checkpoint.tokenizer import Tokenizer
from specdec.errors import UsageError
from specdec.serving import grammar as module
from specdec.serving.grammar import Grammar, GrammarCompiler, GrammarState
from specdec.serving.request import Request

LETTERS = Pieces([b"a", b"b", b"c", b"x", b"ab", b"ca"])
A, B, C, X, AB, CA, NONE = range(7)


def tokens_of(mask: bytes) -> set[int]:
    """Ids whose bit is set."""
    return {8 * place + bit for place, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1}


def regex(text: str) -> Grammar:
    return Grammar(kind="regex", text=text)


@pytest.fixture(scope="module")
def letters() -> GrammarCompiler:
    return GrammarCompiler(LETTERS.tokenizer, 7)


@pytest.fixture(scope="module")
def bytes_() -> tuple[Tokenizer, GrammarCompiler]:
    """The tokenizer of the small checkpoints and a vocabulary that is padded."""
    tokenizer = Tokenizer(byte_tokenizer())
    return tokenizer, GrammarCompiler(tokenizer, 515)


# --- what is allowed ------------------------------------------------------------------------------------------------------


def allowed_after(pieces: Pieces, texts: Iterable[str], text: bytes, stop: int) -> set[int]:
    """The oracle: tokens that continue ``text`` towards one of ``texts``, and the stop id where it is one of them."""
    whole = [one.encode() for one in texts]
    found = {token for piece, token in pieces.ids.items() if piece and any(w.startswith(text + piece) for w in whole)}
    return found | ({stop} if text in whole else set())


def walk(pieces: Pieces, state: GrammarState, texts: Sequence[str], text: bytes, stop: int) -> int:
    """Compares the masks of all reachable states with the oracle; returns how many there were."""
    wanted = allowed_after(pieces, texts, text, stop)
    assert tokens_of(state.mask()) == wanted
    assert state.terminated is (wanted == {stop})
    assert state.dead_end is None or not wanted
    seen = 1
    for token in range(len(pieces.ids) + 2):
        after = state.fork()
        assert after.accept(token) is (token in wanted)
        if token in wanted and token != stop:
            piece = next(p for p, number in pieces.ids.items() if number == token)
            seen += walk(pieces, after, texts, text + piece, stop)
    assert tokens_of(state.mask()) == wanted, "a fork changed its origin"
    return seen


FINITE = {
    "regex": (regex("a(b|ca?)?x|ab"), ["ax", "abx", "acx", "acax", "ab"]),
    "ebnf": (Grammar(kind="ebnf", text='root ::= "a" tail | "ab"\ntail ::= "b"? "x"'), ["ax", "abx", "ab"]),
    "repetition": (regex("(ab){1,3}c"), ["abc", "ababc", "abababc"]),
}


@pytest.mark.parametrize("name", FINITE)
def test_masks_of_every_state_of_a_finite_grammar(letters: GrammarCompiler, name: str) -> None:
    grammar, texts = FINITE[name]
    # several tokenisations of one text, none of them preferred
    assert walk(LETTERS, letters.state(grammar, stop_ids=[NONE]), texts, b"", NONE) > 5


def test_ebnf_without_recursion_is_exact(letters: GrammarCompiler) -> None:
    """What follows a repetition may be what it repeats: texts of up to seven letters, judged by re."""
    text = '# the end is\nroot ::= any-of* last # fixed\n last ::= "ab" | "a"{2} "\\x78"\nany-of ::= [a-c\\u0078]'
    start = letters.state(Grammar(kind="ebnf", text=text), stop_ids=[NONE])
    for number in range(300):
        draw = random.Random(number)
        pieces = draw.choices("abcx", weights=[4, 3, 1, 2], k=draw.randint(1, 7))
        state = start.fork()
        assert all(state.accept(LETTERS.ids[piece.encode()]) for piece in pieces)
        assert state.accept(NONE) is bool(re.fullmatch("[abcx]*(ab|aax)", "".join(pieces)))


def test_recursive_ebnf(letters: GrammarCompiler) -> None:
    grammar = Grammar(kind="ebnf", text='root ::= "a" root "b" | "x" | other\nother ::= "c" root')
    for text, whole in (("aaxbb", True), ("acxb", True), ("x", True), ("aaxb", False), ("c", False)):
        state = letters.state(grammar, stop_ids=[NONE])
        assert all(state.accept(LETTERS.ids[letter.encode()]) for letter in text)
        assert state.accept(NONE) is whole
    assert tokens_of(letters.state(grammar, output=[A, X]).mask()) == {B}


def test_pieces_of_characters() -> None:
    """Tokens that hold a part of a character, or the end of one and the beginning of the next."""
    e, face = "é".encode(), "😀".encode()
    pieces = Pieces([e[:1], e[1:], face[:2], face[2:], face[:1], face[1:3], face[3:], e[1:] + face[:1], b"a"])
    compiler = GrammarCompiler(pieces.tokenizer, len(pieces.ids))
    texts = ["é", "é😀", "aé", "😀a"]
    stop = pieces.ids[b""]
    for grammar in (
        regex("é😀?|aé|😀a"),
        Grammar(kind="ebnf", text='root ::= "é" "😀"? | "aé" | [\\U0001f600] "\\u0061"'),
    ):
        assert walk(pieces, compiler.state(grammar, stop_ids=[stop]), texts, b"", stop) > 10


def test_json_schema_on_the_tokenizer_of_the_checkpoints(bytes_: tuple[Tokenizer, GrammarCompiler]) -> None:
    """Random walks end in values of the schema; no id without text is ever allowed, nor a padded one."""
    tokenizer, compiler = bytes_
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "kind": {"enum": ["é", "世界"]},
            "n": {"type": "integer"},
        },
        "required": ["name", "kind"],
        "additionalProperties": False,
    }
    for grammar in (Grammar.json_schema(schema), Grammar.json_schema(json.dumps(schema)), Grammar(kind="json")):
        ended = 0
        for seed in range(20):
            state, draw, text = compiler.state(grammar, stop_ids=[END_OF_TEXT]), random.Random(seed), []
            while not state.ended and len(text) < 150:
                choices = tokens_of(state.mask())
                assert all(token < END_OF_TEXT or token == END_OF_TEXT for token in choices)
                token = END_OF_TEXT if END_OF_TEXT in choices else draw.choice(sorted(choices))
                assert state.accept(token)
                text.append(token)
            if state.ended:
                value = json.loads(tokenizer.decode(text))
                ended += 1
                assert isinstance(value, dict)
                if grammar.kind == "json_schema":
                    assert {"name", "kind"} <= value.keys() <= {"name", "kind", "n"}
                    assert len(value["name"]) <= 6 and value["kind"] in ("é", "世界")
        assert ended >= 5


def test_acceptance_and_mask_agree_on_every_id(bytes_: tuple[Tokenizer, GrammarCompiler]) -> None:
    tokenizer, compiler = bytes_
    state = compiler.state(regex(r'\{"(é|[a-z ])+": -?[0-9]{1,3}(\.5)?\}'), stop_ids=[END_OF_TEXT])
    for token in tokenizer.encode('{"b é": -12.5}'):
        allowed = tokens_of(state.mask())
        assert allowed == {one for one in range(-1, 600) if state.fork().accept(one)}
        assert token in allowed
        assert state.accept(token)
    assert tokens_of(state.mask()) == {END_OF_TEXT}


# --- the end ----------------------------------------------------------------------------------------------------------------


def test_a_complete_text_allows_the_stop_ids_of_the_request_only(letters: GrammarCompiler) -> None:
    """Stop ids may be the checkpoint's, any other token, or ids that the tokenizer lacks."""
    wide = GrammarCompiler(LETTERS.tokenizer, 40)
    for stops in ([NONE], [X, NONE], [B, 38], [C]):
        state = wide.state(regex("ab?"), stop_ids=[*stops, -1, 4000])
        assert not tokens_of(state.mask()) & set(stops)
        assert state.accept(A)
        # a stop id that could be text as well ends the output here, and could not before
        assert tokens_of(state.mask()) == {*stops, B}
        if B in stops:
            continue
        assert state.accept(B)
        assert state.terminated and not state.over and state.dead_end is None
        assert tokens_of(state.mask()) == set(stops)
        assert not state.accept(A)
        assert state.accept(stops[-1])
        assert state.ended and state.over and state.tokens == 3
        assert not tokens_of(state.mask()) and not state.accept(stops[-1]) and not state.accept(A)


def test_a_stop_id_is_no_text(letters: GrammarCompiler) -> None:
    """Where the grammar wants the text of a stop id, emitting it would end the output before it is complete."""
    with pytest.raises(UsageError, match="allows no token of the vocabulary after 1 tokens"):
        letters.state(regex("ax"), stop_ids=[X], output=[A])
    state = letters.state(regex("aab"), stop_ids=[B])
    assert state.accept(A)
    # "ab" is another token, which is no stop id
    assert tokens_of(state.mask()) == {A, AB}


def test_minimum_length_forbids_the_end(letters: GrammarCompiler) -> None:
    state = letters.state(regex("a*"), stop_ids=[NONE], min_new_tokens=2)
    seen = []
    for _ in range(4):
        seen.append(tokens_of(state.mask()))
        assert state.accept(A)
    assert seen == [{A}, {A}, {A, NONE}, {A, NONE}]
    early = letters.state(regex("a"), stop_ids=[NONE], min_new_tokens=2)
    assert early.accept(A) and not early.accept(NONE)
    assert early.dead_end == "the grammar is complete after 1 tokens and allows no more, but min_new_tokens is 2"


def test_without_stop_ids_the_output_is_over_when_nothing_may_follow(letters: GrammarCompiler) -> None:
    state = letters.state(regex("ab?"))
    assert state.accept(A)
    assert not state.over and tokens_of(state.mask()) == {B}
    assert state.accept(B)
    assert state.over and not state.ended and state.dead_end is None and not tokens_of(state.mask())
    with pytest.raises(UsageError, match="regex: the output is complete after 0 tokens; nothing may follow"):
        letters.state(regex("()"))


# --- prefixes -----------------------------------------------------------------------------------------------------------------


def test_rows_are_the_masks_after_each_copy_up_to_the_first_that_is_refused(letters: GrammarCompiler) -> None:
    state = letters.state(regex("[ab]*xc*"), stop_ids=[NONE])
    before, after = {A, B, X, AB}, {C, NONE}
    cases: list[tuple[list[int], list[set[int]]]] = [
        ([], [before]),
        ([A, X, B, C], [before, before, after]),
        ([A, X, C], [before, before, after, after]),
        ([C, A], [before]),
        ([99], [before]),
        ([-1], [before]),
        # nothing that is drawn after a stop id is emitted, so its row needs a law and no particular one
        ([X, NONE, A], [before, after, set(range(32))]),
    ]
    for copies, wanted in cases:
        assert [tokens_of(row) for row in state.rows(copies)] == wanted
        assert state.tokens == 0 and tokens_of(state.mask()) == before


def test_copies_into_a_dead_end_are_not_verified(letters: GrammarCompiler) -> None:
    """No token writes d: after ca, in one token or in two, nothing may come."""
    state = letters.state(regex("cad|cx"), stop_ids=[NONE])
    assert tokens_of(state.mask()) == {C, CA}
    assert len(state.rows([CA])) == 1
    assert [tokens_of(row) for row in state.rows([C, A])] == [{C, CA}, {A, X}]
    assert state.accept(CA)
    assert state.dead_end == "the grammar allows no token of the vocabulary after 1 tokens"
    state.rollback(1)
    assert state.dead_end is None and tokens_of(state.mask()) == {C, CA}


def test_fork_and_rollback_return_to_every_earlier_position(bytes_: tuple[Tokenizer, GrammarCompiler]) -> None:
    tokenizer, compiler = bytes_
    state = compiler.state(Grammar(kind="json"), stop_ids=[END_OF_TEXT])
    tokens = [*tokenizer.encode('{"a": [1, {"é": null}], "b": "x"}'), END_OF_TEXT]
    masks = []
    for token in tokens:
        masks.append(state.mask())
        assert state.accept(token)
    for back in range(len(tokens) + 1):
        again = state.fork()
        again.rollback(back)
        rest = tokens[len(tokens) - back :]
        assert again.tokens == len(tokens) - back
        for token, mask in zip(rest, masks[len(masks) - back :], strict=True):
            assert again.mask() == mask
            assert again.accept(token)
        assert again.ended
    for wrong in (-1, len(tokens) + 1):
        with pytest.raises(ValueError, match="cannot be taken back"):
            state.rollback(wrong)


def test_earlier_output_is_taken_first(letters: GrammarCompiler) -> None:
    grammar = regex("[ab]*xc*")
    resumed = letters.state(grammar, stop_ids=[NONE], output=[A, B, X])
    assert resumed.tokens == 3 and tokens_of(resumed.mask()) == {C, NONE}
    with pytest.raises(UsageError, match="grammar regex: it does not allow token 2 at place 1 of the earlier output"):
        letters.state(grammar, output=[A, C])


def test_forbidden_tokens_are_refused_silently(
    letters: GrammarCompiler, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """B22: a hundred forbidden drafts are a hundred rejections, and nobody's log."""
    caplog.set_level(logging.DEBUG)
    state = letters.state(regex("[ab]*xc*"), stop_ids=[NONE])
    for _ in range(100):
        assert state.accept(A) and not state.accept(C) and len(state.rows([A, C])) == 2
    assert state.tokens == 100
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


# --- grammars that are refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "a(b", "regex is not valid: unclosed group"),
        ("regex", "a\\", "regex is not valid: it ends with an unfinished escape"),
        ("regex", "(?=a)b", "regex is not valid: look-around, including look-ahead and look-behind, is not supported"),
        ("regex", r"(a)\1", "regex is not valid: backreferences are not supported"),
        ("ebnf", 'root ::= "a" c', "ebnf is not valid: Rule 'c' not found"),
        ("ebnf", 'expr ::= "a"', "ebnf is not valid: it has no rule root; write root ::= …"),
        ("ebnf", 'root ::= "\\ud800"', r"ebnf is not valid: \\ud800 is no character"),
        ("ebnf", 'start: "a"', "ebnf is not valid: it has no rule root; write root ::= …"),
        ("json_schema", '{"type":', "json_schema is not valid: Expecting value"),
        ("json_schema", "[" * 100_000, "json_schema is not valid: "),
        ("json_schema", '{"type": "foo"}', "json_schema is not valid: .*Invalid type: foo"),
        ("json_schema", '{"not": {"type": "object"}}', r"json_schema is not valid: .*Unimplemented keys: \[.not.\]"),
        ("json_schema", "3", "json_schema is not valid: .*schema must be an object or boolean"),
    ],
)
def test_invalid_grammars(letters: GrammarCompiler, kind: str, text: str, words: str) -> None:
    with pytest.raises(UsageError, match="^grammar " + words) as raised:
        letters.state(Grammar(kind=kind, text=text), stop_ids=[NONE])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        # nothing at all, nothing for want of a base case, nothing that these six pieces can write
        ("regex", "[a&&b]", "the grammar allows no token of the vocabulary after 0 tokens; no output can satisfy it"),
        ("ebnf", 'root ::= root "a"', "the grammar allows no token of the vocabulary after 0 tokens"),
        ("regex", "[0-9]+", "the grammar allows no token of the vocabulary after 0 tokens"),
        ("json", "", "the grammar allows no token of the vocabulary after 0 tokens"),
        ("json_schema", "false", "schema is false"),
        ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}', "Unsatisfiable schema: minLength"),
    ],
)
def test_impossible_grammars(letters: GrammarCompiler, kind: str, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as raised:
        letters.state(Grammar(kind=kind, text=text), stop_ids=[NONE])
    assert "\n" not in str(raised.value)


def test_a_grammar_that_becomes_too_much_says_so(letters: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance

    limits = llguidance.LLParserLimits
    monkeypatch.setattr(llguidance, "LLParserLimits", lambda **options: limits(**options, step_max_items=3))
    compiler = GrammarCompiler(LETTERS.tokenizer, 7)
    with pytest.raises(UsageError, match=r"parser gave up after 0 tokens: .*[Tt]oo many items") as raised:
        compiler.state(Grammar(kind="ebnf", text='root ::= one | root root\none ::= "a" | "b" root | "c" root "x"'))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "lark", "text": "x"}, "grammar kind is 'lark'; it must be one of json_schema, json, regex, ebnf"),
        ({"kind": "regex"}, "grammar regex: the text is empty; give the regex"),
        ({"kind": "json_schema", "text": " "}, "grammar json_schema: the text is empty; give the json schema"),
        ({"kind": "json", "text": "{}"}, "grammar json takes no text"),
        ({"kind": "regex", "text": 3}, "grammar regex: the text is 3; it must be a string"),
    ],
)
def test_what_is_no_grammar(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Grammar(**options)


def test_requests_name_their_grammar() -> None:
    grammar = Grammar.json_schema({"type": "object"})
    request = Request(prompt=(1,), grammar=grammar)
    assert dict(request.options_in_use) == {"grammar": grammar} and not request.extended
    assert grammar == Grammar(kind="json_schema", text='{"type": "object"}')
    with pytest.raises(UsageError, match=r"grammar is '\[a-z\]'; it must be a Grammar, such as"):
        Request(prompt=(1,), grammar="[a-z]")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the schema is not JSON"):
        Grammar.json_schema({"type": {1, 2}})  # type: ignore[dict-item]


# --- the compiler -------------------------------------------------------------------------------------------------------------


def test_recent_grammars_are_kept_and_states_are_independent(
    letters: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    compile_ = GrammarCompiler._compile
    monkeypatch.setattr(GrammarCompiler, "_compile", lambda self, one: compiled.append(one) or compile_(self, one))
    monkeypatch.setattr(module, "_CACHED", 2)
    compiler = GrammarCompiler(LETTERS.tokenizer, 7)
    one, two, three = (regex(text) for text in ("a+", "b+", "c+"))
    first, second = compiler.state(one), compiler.state(one)
    assert first.accept(A) and second.tokens == 0 and compiled == [one]
    for grammar in (two, one, three, one, two):
        compiler.state(grammar)
    # two was the one that had not been used for longest
    assert compiled == [one, two, three, two]


def test_states_from_many_threads(letters: GrammarCompiler) -> None:
    def run(number: int) -> list[set[int]]:
        state, seen = letters.state(regex(f"(a|b){{{number % 5 + 1}}}x"), stop_ids=[NONE]), []
        while not state.ended:
            seen.append(tokens_of(state.mask()))
            assert state.accept(max(seen[-1] & {A, X, NONE}))
        return seen

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(run, range(200)))
    for number, seen in enumerate(found):
        length = number % 5 + 1
        assert seen[-2:] == [{X}, {NONE}] and len(seen) == length + 2


def test_a_missing_extra_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return load(name, *arguments, **options)

    monkeypatch.delitem(sys.modules, "llguidance", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=re.escape("pip install 'specdec-core[grammar]'")):
        GrammarCompiler(LETTERS.tokenizer, 7)


def test_a_vocabulary_without_bytes_is_refused() -> None:
    library = Library(WordLevel({"one": 0, "two": 1}, unk_token="one"))
    with pytest.raises(UsageError, match=r"cannot be constrained by a grammar: .*byte-level") as raised:
        GrammarCompiler(Tokenizer(library), 2)
    assert "\n" not in str(raised.value)


def test_grammars_need_no_torch() -> None:
    program = (
        "import sys; from specdec.serving.grammar import *; from specdec.checkpoint.tokenizer import Tokenizer;"
        "from tokenizers import Tokenizer as T, models, decoders;"
        "t = T(models.BPE(vocab={'a': 0}, merges=[])); t.decoder = decoders.ByteLevel();"
        "s = GrammarCompiler(Tokenizer(t), 1).state(Grammar(kind='regex', text='a+'));"
        "assert s.accept(0) and s.mask() == bytes([1, 0, 0, 0]); print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"
