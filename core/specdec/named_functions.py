"""Functions that a recipe names as "module:function": found, called and blamed by the recipe that names them.

Declaration layer: the standard library and other declaration modules only; what is called may import more.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from specdec.errors import PluginError, SpecdecError
from specdec.places import blamed

if TYPE_CHECKING:
    from specdec.declaration import Recipe

__all__ = ["call_named", "named_function"]

_T = TypeVar("_T")


def named_function(reference: str) -> Callable[..., Any]:
    """What "module:function" names. Raises whatever the import does, AttributeError for a name that is not there."""
    module, _, name = reference.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def call_named(recipe: Recipe, field: str, *arguments: Any, returns: type[_T], on: object = None) -> _T:
    """What the function that ``recipe`` names in ``field`` returns for ``arguments``. on: what it works on, for messages.

    Raises PluginError, naming recipe, field and place, if it cannot be found, fails, or returns something else than ``returns``;
    errors of the SpecdecError family pass unchanged.
    """
    reference = getattr(recipe, field)
    try:
        found = named_function(reference)(*arguments)
    except SpecdecError:
        raise
    except (Exception, SystemExit) as error:
        where = blamed(error)
        subject = "" if on is None else f" on {on}"
        place = f" ({where})" if where else ""
        raise PluginError(
            f"recipe {recipe.name!r}: {field} {reference} failed{subject} with {type(error).__name__}: {error}{place}; correct "
            "the function or what the recipe names"
        ) from error
    if not isinstance(found, returns):
        raise PluginError(
            f"recipe {recipe.name!r}: {field} {reference} returned {type(found).__name__}, needs a {returns.__name__}"
        )
    return found
