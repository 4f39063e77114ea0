"""Constrained output: what a grammar allows after the text so far, as bit masks over the vocabulary. Torch-free.

The parser is llguidance's (extra ``grammar``). It was chosen over xgrammar because the torch-free scheduler holds it: llguidance
imports without torch and needs no other package, while xgrammar 0.2.9 imports torch and requires transformers and triton. Both
mask by bytes, so that a token may hold a part of a character, and a state is copied in microseconds.

Two of its habits are switched off. Where the text is forced it would allow one spelling only; here every token is allowed whose
bytes the grammar admits. And its end-of-text token is one that no model has: output ends with the request's own stop ids, which
are allowed exactly where the text so far is complete, whatever text they stand for elsewhere.

A state speaks of the text of all emitted tokens, the pending one included. A round verifies row 0 under ``state.mask()`` and row
j under the mask after j drafts (``GrammarState.rows``); afterwards the state takes the emitted tokens, and those alone.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from specdec.errors import UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from specdec.checkpoint.tokenizer import Tokenizer

__all__ = ["GRAMMAR_KINDS", "Grammar", "GrammarCompiler", "GrammarState"]

#: What the text of a grammar may be; see ``Grammar``.
GRAMMAR_KINDS = ("json_schema", "json", "regex", "ebnf")
#: Parsers kept for requests to come; texts are the caller's, so their number has to be bounded.
_CACHED = 64
# a number for the parser's own end of text, behind every id of the tokenizer
_END = "<|end of constrained text|>"
_HEADER = '%llguidance {"no_forcing": true}\n'
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")
_ROOT = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


@frozen(kw_only=True)
class Grammar:
    """What the output of a request must be.

    ``json_schema``  a JSON value that the schema ``text`` admits; keywords that the parser does not know are refused
    ``json``         any JSON object; no ``text``
    ``regex``        a text that the regular expression matches as a whole; no look-around, no back references
    ``ebnf``         a text of the rule ``root``; rules are written ``name ::= …`` as in llama.cpp's GBNF

    Where EBNF rules call themselves, directly or through others, each rule that does not is matched as a lexer matches: as long
    as its text can go on, it does. Such a grammar admits less where a rule could go on with the beginning of what follows it.

    The text is what the emitted tokens stand for, special tokens excluded: they stand for no text and are never allowed, unless
    they are stop ids. Raises UsageError for an unknown kind or a text that is missing, superfluous or no string.
    """

    kind: str = field()
    text: str = field(default="", repr=False)

    def __attrs_post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise UsageError(f"grammar kind is {self.kind!r}; it must be one of {', '.join(GRAMMAR_KINDS)}")
        if not isinstance(self.text, str):
            raise UsageError(f"grammar {self.kind}: the text is {self.text!r}; it must be a string")
        if self.kind == "json" and self.text:
            raise UsageError("grammar json takes no text; use kind json_schema to say which JSON")
        if self.kind != "json" and not self.text.strip():
            raise UsageError(f"grammar {self.kind}: the text is empty; give the {self.kind.replace('_', ' ')}")

    @classmethod
    def json_schema(cls, schema: str | bool | Mapping[str, Any]) -> Grammar:
        """A grammar of a schema given as JSON text or as the value it stands for. Raises UsageError if it is not JSON."""
        if isinstance(schema, str):
            return cls(kind="json_schema", text=schema)
        try:
            return cls(kind="json_schema", text=json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"grammar json_schema: the schema is not JSON: {error}; give JSON text") from error


@frozen(kw_only=True)
class _Vocabulary:
    """size: V of the target. known: bits of ids that are text or special tokens of the tokenizer, below V."""

    size: int
    known: int

    @property
    def bytes(self) -> int:
        """Of one mask: ceil(V / 32) words."""
        return 4 * -(-self.size // 32)


class GrammarState:
    """Where one request's output stands in its grammar. Get it from ``GrammarCompiler.state``; one thread at a time.

    tokens: how many it took. ended: a stop id was taken, so nothing follows. over: the output is complete and nothing may follow,
    because it ended or because the request has no stop id to end with. terminated: the text is complete and no text may follow;
    then stop ids alone are allowed.
    """

    def __init__(self, vocabulary: _Vocabulary, matcher: LLMatcher, stops: int, minimum: int) -> None:
        """stops: bits of the request's stop ids. minimum: tokens before stop ids are allowed."""
        self.tokens = 0
        self.ended = False
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._stops = stops
        self._minimum = minimum
        self._text: int | None = None
        self._gave_up = ""

    def mask(self) -> bytes:
        """Tokens that may come next: ceil(V / 32) little-endian 32-bit words, bit v % 32 of word v // 32 for token v.

        All zero where the state is over or at a dead end.
        """
        return self._allowed().to_bytes(self._vocabulary.bytes, "little")

    def accept(self, token: int) -> bool:
        """Takes the next token if it is allowed; otherwise returns False and changes nothing."""
        if token < 0 or not self._vocabulary.known >> token & 1 or self.ended:
            return False
        if self._stops >> token & 1:
            self.ended = self._may_end()
            self.tokens += self.ended
            return self.ended
        if self._matcher.try_consume_tokens([token]) != 1:
            return False
        self.tokens += 1
        self._text = None
        return True

    def rollback(self, tokens: int) -> None:
        """Takes back the last tokens. Raises ValueError for more than were taken."""
        if not 0 <= tokens <= self.tokens:
            raise ValueError(f"{tokens} tokens cannot be taken back of {self.tokens}")
        self.tokens -= tokens
        if self.ended and tokens:
            self.ended, tokens = False, tokens - 1
        if tokens:
            self._matcher.rollback(tokens)
            self._text = None

    def fork(self) -> GrammarState:
        """An independent state of the same position."""
        copy = GrammarState(self._vocabulary, self._matcher.deep_copy(), self._stops, self._minimum)
        copy.tokens, copy.ended = self.tokens, self.ended
        copy._text, copy._gave_up = self._text, self._gave_up
        return copy

    def rows(self, copies: Sequence[int] = ()) -> list[bytes]:
        """Masks of the rows of a round: the one after all taken tokens, then one after each copied draft. Changes nothing.

        They end before the first copy that is not allowed, or after which the grammar would be at a dead end, so 1 + the number
        of copies that are worth verifying; the last is the bonus row's. After a stop id the row allows everything: nothing drawn
        there is ever emitted, but a row must have a law.
        """
        found = [self.mask()]
        ahead = self.fork() if copies else self
        for token in copies:
            if not ahead.accept(token):
                break
            if ahead.ended:
                found.append(b"\xff" * self._vocabulary.bytes)
                break
            if not ahead._allowed():
                break
            found.append(ahead.mask())
        return found

    @property
    def terminated(self) -> bool:
        """See the class."""
        return self.ended or (self._matcher.is_accepting() and not self._may_continue())

    @property
    def over(self) -> bool:
        """See the class."""
        return self.ended or (not self._stops and self.terminated)

    @property
    def dead_end(self) -> str | None:
        """Why no token may follow although the output is not over, one line; None while one may."""
        if self.over or self._allowed():
            return None
        if self._gave_up:
            return f"the grammar's parser gave up after {self.tokens} tokens: {self._gave_up}"
        if self.terminated:
            return f"the grammar is complete after {self.tokens} tokens and allows no more, but min_new_tokens is {self._minimum}"
        return f"the grammar allows no token of the vocabulary after {self.tokens} tokens"

    def _may_end(self) -> bool:
        return self.tokens >= self._minimum and self._matcher.is_accepting()

    def _may_continue(self) -> int:
        """Bits of text tokens that may come next."""
        if self._text is None:
            # on a copy: looking at a dead end leaves a parser that cannot be rolled back
            parser = self._matcher.deep_copy()
            found = int.from_bytes(parser.compute_bitmask(), "little")
            # where nothing follows, the answer is the parser's own end of text, which is no known id
            self._text = found & self._vocabulary.known & ~self._stops
            error = parser.get_error()
            # "NoExtension…" is its word for a dead end, anything else a limit
            self._gave_up = _first_line(error) if error and not error.startswith("NoExtension") else ""
        return self._text

    def _allowed(self) -> int:
        if self.ended:
            return 0
        return self._may_continue() | (self._stops if self._may_end() else 0)


class GrammarCompiler:
    """Turns grammars into states over one model's vocabulary and keeps recent ones. Any thread may call it.

    Building it reads the whole vocabulary, for a second or so: once per model.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """vocab_size: V of the target; ids that the tokenizer lacks are never allowed, nor are its ids from V on.

        Raises UsageError if the extra is not installed or the tokenizer has no byte-level vocabulary.
        """
        try:
            import llguidance
        except ImportError as error:
            raise UsageError("grammars need llguidance; install it: pip install 'specdec-core[grammar]'") from error
        from tokenizers import Tokenizer as Vocabulary

        self._library = llguidance
        extended = Vocabulary.from_str(tokenizer.to_json())
        end = _END
        while extended.token_to_id(end) is not None:
            end += "|"
        ids = extended.get_vocab(with_added_tokens=True).values()
        bits = bytearray(-(-vocab_size // 8))
        for token in ids:
            if token < vocab_size:
                bits[token // 8] |= 1 << token % 8
        extended.add_special_tokens([end])
        try:
            self._tokenizer = llguidance.LLTokenizer(extended.to_str(), eos_token=extended.token_to_id(end))
        except (
            Exception
        ) as error:  # a vocabulary that llguidance cannot read as bytes is a bare ValueError or a Rust panic
            raise UsageError(
                f"this tokenizer cannot be constrained by a grammar: {_first_line(str(error))}; use a byte-level tokenizer"
            ) from error
        self._vocabulary = _Vocabulary(size=vocab_size, known=int.from_bytes(bits, "little"))
        self._matchers: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def state(
        self, grammar: Grammar, *, stop_ids: Iterable[int] = (), min_new_tokens: int = 0, output: Sequence[int] = ()
    ) -> GrammarState:
        """A state after ``output``, tokens that the request has emitted already.

        stop_ids, min_new_tokens: what the request's rounds use. Raises UsageError for a grammar that is not valid, that no output
        can satisfy, or that does not allow ``output``.
        """
        stops = sum(1 << token for token in set(stop_ids) if 0 <= token < self._vocabulary.size)
        # the model can draw a stop id even if the tokenizer lacks it
        vocabulary = _Vocabulary(size=self._vocabulary.size, known=self._vocabulary.known | stops)
        state = GrammarState(vocabulary, self._matcher(grammar), stops, min_new_tokens)
        for place, token in enumerate(output):
            if not state.accept(token):
                raise UsageError(
                    f"grammar {grammar.kind}: it does not allow token {token} at place {place} of the earlier output; "
                    "resume with the grammar that it was made with"
                )
        if state.dead_end is not None:
            raise UsageError(f"grammar {grammar.kind}: {state.dead_end}; no output can satisfy it")
        if state.over:
            raise UsageError(
                f"grammar {grammar.kind}: the output is complete after {state.tokens} tokens; nothing may follow"
            )
        return state

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        """A parser of one's own at the grammar's beginning."""
        with self._lock:
            kept = self._matchers.get(grammar)
        if kept is None:
            # without the lock: a large grammar takes a second, in which others go on
            kept = self._compile(grammar)
        with self._lock:
            self._matchers[grammar] = kept
            self._matchers.move_to_end(grammar)
            while len(self._matchers) > _CACHED:
                self._matchers.popitem(last=False)
            return kept.deep_copy()

    def _compile(self, grammar: Grammar) -> LLMatcher:
        try:
            rules = self._rules(grammar)
        except (ValueError, RecursionError) as error:
            cause = _first_line(str(error)).removeprefix("Failed to convert the grammar from GBNF to Lark: ")
            raise UsageError(f"grammar {grammar.kind} is not valid: {cause}") from error
        limits = self._library.LLParserLimits(verbose_errors=False)
        matcher = self._library.LLMatcher(
            self._tokenizer, self._library.LLMatcher.grammar_from_lark(_HEADER + rules), log_level=0, limits=limits
        )
        if matcher.is_error():
            raise UsageError(f"grammar {grammar.kind} is not valid: {_reason(matcher.get_error())}")
        return matcher

    def _rules(self, grammar: Grammar) -> str:
        """The grammar in llguidance's own notation. Raises ValueError if it cannot be written in it."""
        if grammar.kind == "regex":
            if (len(grammar.text) - len(grammar.text.rstrip("\\"))) % 2:
                raise ValueError("it ends with an unfinished escape")
            return f"start: /{self._library.regex_to_lark(grammar.text)}/"
        if grammar.kind == "ebnf":
            if not _ROOT.search(grammar.text):
                raise ValueError("it has no rule root; write root ::= …")
            # The converter makes one expression of a rule that does not call itself, but for the rule called root. Under another
            # name root is no exception; a grammar without recursion then is one expression, which needs no lexer.
            text = _ROOT.sub("specdec-root ::=", _ESCAPE.sub(_character, grammar.text))
            # it begins with a header of its own, which would take the place of ours
            lines = self._library.grammar_from("gbnf", f"root ::= specdec-root\n{text}").splitlines()
            return "\n".join(line for line in lines if not line.startswith("%llguidance"))
        schema = json.loads(grammar.text) if grammar.kind == "json_schema" else {"type": "object"}
        return f"start: %json {json.dumps(schema)}"


def _character(escape: re.Match[str]) -> str:
    """A character for its number, which the converter would not pass on whole; ASCII keeps its escape, for it may be a quote."""
    number = int(escape[1] or escape[2] or "0", 16)
    if 0xD800 <= number < 0xE000 or number > 0x10FFFF:
        raise ValueError(f"{escape[0]} is no character")
    if number >= 0x80:
        return chr(number)
    return f"\\x{number:02x}" if escape[1] or escape[2] else escape[0]


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0].strip() if message.strip() else "no reason given"


def _reason(message: str) -> str:
    """One line of llguidance's message, which goes on with an excerpt of rules that the caller did not write."""
    cause = [line.removeprefix("error: ") for line in message.splitlines() if line.startswith("error: ")]
    return cause[0] if cause else _PLACE.sub("", _first_line(message))
