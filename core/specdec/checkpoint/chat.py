"""The chat template of a checkpoint: from messages to the text of a prompt, as transformers renders it. Imports no torch.

A template is a program in Jinja's language that comes with the checkpoint, so it runs in Jinja's sandbox. jinja2 (extra
``chat``) is imported when a template is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from attrs import frozen

from specdec.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from jinja2 import Environment, Template

__all__ = ["JINJA_FLOOR", "ChatTemplate"]

#: Earlier releases have known ways out of the sandbox.
JINJA_FLOOR = "3.1.6"
#: Keys of ``tokenizer_config.json`` that a template may use by their names.
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@frozen(kw_only=True, eq=False)
class ChatTemplate:
    """A compiled template. Build it with :meth:`of`.

    special_tokens: spellings by name, as the checkpoint's tokenizer configuration gives them.
    """

    special_tokens: Mapping[str, str]
    _template: Template

    @classmethod
    def of(cls, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
        """The template of a ``tokenizer_config.json`` (``Checkpoint.tokenizer_config``), None without one.

        Of several named ones it is that called ``default``. Raises CheckpointError if it is no text or no template, and
        UsageError if jinja2 is not installed or too old to be safe.
        """
        found = tokenizer_config.get("chat_template")
        if found is None:
            return None
        source, environment = _default(found), _environment()
        try:
            compiled = environment.from_string(source)
        except Exception as error:  # whatever the compiler makes of it
            line = getattr(error, "lineno", None)
            where = f", line {line}" if line else ""
            raise CheckpointError(f"the checkpoint's chat_template is no template{where}: {error}") from error
        return cls(special_tokens=_special_tokens(tokenizer_config), template=compiled)

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation. messages: each with ``role`` (system, user or assistant) and ``content``;
        add_generation_prompt: end where the assistant's answer begins.

        Special tokens are part of the text by their spelling, the first one of the sequence included, so it is encoded without
        adding any. Raises UsageError if the template refuses the messages, CheckpointError if it fails.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self.special_tokens,
            )
        except _Refusal as refusal:
            raise UsageError(f"the checkpoint's chat template refuses this chat: {refusal}") from refusal
        except Exception as error:  # the template is a program of the checkpoint's
            raise CheckpointError(
                f"the checkpoint's chat_template fails with {type(error).__name__}: {error}"
            ) from error


class _Refusal(Exception):
    """What a template raises with ``raise_exception``."""


def _default(found: Any) -> str:
    """The template's text where there may be several by name."""
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, Mapping)}
        found = named.get("default", next(iter(named.values())) if len(named) == 1 else None)
        if found is None:
            names = ", ".join(map(str, named)) or "none"
            raise CheckpointError(
                f"the checkpoint's chat_template has no template called 'default'; it has: {names}; "
                "put one into a file chat_template.jinja"
            )
    if not isinstance(found, str):
        raise CheckpointError(f"the checkpoint's chat_template is a {type(found).__name__}, needs text")
    return found


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Spellings of those that are set; a token may be an object with its spelling as ``content``."""
    found = {}
    for name in _SPECIAL_TOKENS:
        value = tokenizer_config.get(name)
        value = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(value, str):
            found[name] = value
    return found


def _environment() -> Environment:
    """The language as transformers has it: loop controls, ``tojson`` without HTML escapes, ``raise_exception``,
    ``strftime_now`` and ``{% generation %}``, which marks an answer and changes no text."""
    try:
        import jinja2
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from packaging.version import Version
    except ImportError as error:
        raise UsageError(
            "the checkpoint's chat template needs jinja2; install it: pip install 'specdec-core[chat]'"
        ) from error
    if Version(jinja2.__version__) < Version(JINJA_FLOOR):
        raise UsageError(
            f"jinja2 {jinja2.__version__} is too old to run a checkpoint's chat template safely; install {JINJA_FLOOR} or later: "
            "pip install 'specdec-core[chat]'"
        )

    class Generation(Extension):
        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    Generation.tags = {"generation"}

    # no further arguments: json.dumps would call some of them, outside the sandbox
    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def refuse(message: str) -> None:
        raise _Refusal(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
