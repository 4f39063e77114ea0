"""Refusals in the words of the command line: ``--top-p is 2.0`` where the library says ``top_p is 2.0``.

The library names its fields, for its callers are programs. An option of a command is stored under the field's name, so a
message is spelled anew where the command ends, whatever raised it and however deep.
"""

import argparse
import re
from collections.abc import Callable, Collection
from functools import wraps

from specdec.errors import CapacityError, RecipeError, UsageError

__all__ = ["names_options", "option", "spelled", "translated"]

#: Arguments that are no options, or whose name a message gives to something that several options may hold.
_NO_OPTIONS = frozenset({"command", "benchmark", "recipe", "prompt"})
_QUOTED = r"(?<!\w)'[^']*'|(?<!\w)\"[^\"]*\""
#: A Python value with its option beside it.
_BOTH = re.compile(r"\b\w+=True \((--[a-z-]+)\)")
#: Words of the library that stand for an option of another name.
_OTHERS = {
    "max_draft_tokens": "--mtp-draft-tokens",
    "speculative=False": "--no-mtp",
    "adaptive_verification=False": "--no-mtp-adaptive-verification",
    "raise context": "raise --context",
}
_OTHER = re.compile(rf"{_QUOTED}|(?<![\w.-])({'|'.join(map(re.escape, _OTHERS))})(?![\w=])")
#: What argparse says, and the same as every other refusal says it. The choices of argparse are quoted in some versions only.
_PARSERS = [
    (re.compile(rf"argument (?P<name>\S+): {said}"), instead)
    for said, instead in (
        (r"invalid int value: (?P<value>.*)", "{name} is {value}; give a whole number"),
        (r"invalid float value: (?P<value>.*)", "{name} is {value}; give a number"),
        (r"invalid choice: (?P<value>.*) \(choose from (?P<choices>.*)\)", "{name} is {value}; allowed: {choices}"),
        (r"expected one argument", "{name} has no value; give one, as {name}=VALUE if it begins with a dash"),
        (r"ignored explicit argument (?P<value>.*)", "{name} takes no value, but has {value}; drop the value"),
        (r"not allowed with argument (?P<other>\S+)", "{name} and {other} contradict each other; give one of the two"),
    )
]
_MISSING = re.compile(r"the following arguments are required: (?P<names>.*)")


def translated(message: str) -> str:
    """A message of argparse as what is wrong and, behind a semicolon, what is allowed; others are left as they are."""
    for pattern, instead in _PARSERS:
        if found := pattern.fullmatch(message):
            said = found.groupdict("")
            # an option comes with all its spellings, of which the long one is enough
            said.update((key, max(said[key].split("/"), key=len)) for key in ("name", "other") if key in said)
            said["choices"] = re.sub(r"'([^']*)'", r"\1", said.get("choices", ""))
            return instead.format_map(said)
    if found := _MISSING.fullmatch(message):
        return f"{found['names']} {'are' if ', ' in found['names'] else 'is'} missing"
    return message


def option(field: str) -> str:
    """The option that is stored as ``field``."""
    return "--" + field.replace("_", "-")


def spelled(message: str, first: Collection[str], anywhere: Collection[str]) -> str:
    """The message with options for fields: those of ``first`` at its beginning, those of ``anywhere`` outside quotes."""
    message = _OTHER.sub(lambda found: _OTHERS[found[1]] if found[1] else found[0], _BOTH.sub(r"\1", message))
    if anywhere:
        names = "|".join(map(re.escape, anywhere))
        words = re.compile(rf"{_QUOTED}|(?<![\w.-])({names})(?![\w=])")
        message = words.sub(lambda found: option(found[1]) if found[1] else found[0], message)
    begin = re.match(r"\w+(?=[ ,:])", message)
    return option(begin[0]) + message[begin.end() :] if begin and begin[0] in first else message


def names_options(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Decorates a command: its UsageError and CapacityError name options instead of fields.

    A field whose name is also a plain word is recognised at the beginning of a message only, where refused values stand.
    """

    @wraps(run)
    def refusing(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except RecipeError:
            raise  # its fields are those of a plugin's record
        except (UsageError, CapacityError) as error:
            fields = vars(args).keys() - _NO_OPTIONS
            raise type(error)(spelled(str(error), fields, [field for field in fields if "_" in field])) from error

    return refusing
