"""From a recipe's name to its record and to the hooks of the plugin that owns it.

Declaration layer: nothing here imports torch; the hooks that are called may.
"""

from __future__ import annotations

import difflib
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from specdec.declaration import Recipe
from specdec.entry_points import CORE_DISTRIBUTION
from specdec.errors import PluginError, RecipeError, SpecdecError
from specdec.hook_checks import unmarked
from specdec.places import at, blamed
from specdec.plugin_objects import mistake_in, protocol_of
from specdec.plugins import Discovery, Plugin, discover, missing_target

if TYPE_CHECKING:
    import torch

    from specdec.catalog import RoundShape
    from specdec.checkpoint.reader import Checkpoint
    from specdec.interfaces import Capacities, Drafter, Round, Target

__all__ = ["RecipeBook", "RecipeHooks", "recipe_book"]

#: Module with the core's own ``capture_round``, tried after the plugin's. Imported when the first round is built: it needs torch.
DEFAULT_ROUND_MODULE = "specdec.round.default"


@frozen(kw_only=True, eq=False)
class RecipeHooks:
    """The three preparation hooks of the plugin that owns ``recipe``; no other plugin is called, but for the target of a recipe
    that drafts for another plugin's: ``target`` holds that plugin's hooks for its own recipe.

    Each method raises PluginError if the plugin does not implement the hook, the hook fails with an error of its own, or what it
    returns is not what :mod:`specdec.interfaces` says; errors of the SpecdecError family pass unchanged.
    """

    recipe: Recipe
    plugin: Plugin = field(repr=False)
    target: RecipeHooks | None = field(default=None, repr=False)

    def build_target_state(self, *, checkpoint: Checkpoint, capacities: Capacities, device: torch.device) -> Target:
        """Target weights and state; see :func:`specdec.hookspecs.build_target_state`."""
        if self.target is not None:
            return self.target.build_target_state(checkpoint=checkpoint, capacities=capacities, device=device)
        return self._call("build_target_state", checkpoint=checkpoint, capacities=capacities, device=device)

    def load_drafter(self, *, checkpoint: Checkpoint, target: Target, capacities: Capacities) -> Drafter:
        """Drafter weights and state; see :func:`specdec.hookspecs.load_drafter`."""
        return self._call("load_drafter", checkpoint=checkpoint, target=target, capacities=capacities)

    def capture_round(self, *, target: Target, drafter: Drafter | None, shape: RoundShape, arena: Any) -> Round:
        """The round of one shape, the plugin's own or the core's; see :func:`specdec.hookspecs.capture_round`."""
        manager = self.plugin.manager
        if manager.get_plugin(CORE_DISTRIBUTION) is None:
            manager.register(import_module(DEFAULT_ROUND_MODULE), name=CORE_DISTRIBUTION)
        return self._call("capture_round", target=target, drafter=drafter, shape=shape, arena=arena)

    def _call(self, hook: str, **arguments: Any) -> Any:
        plugin = self.plugin
        caller = getattr(plugin.manager.hook, hook)
        written = [one.function for one in caller.get_hookimpls() if one.plugin_name != CORE_DISTRIBUTION]
        label, name = plugin.record.label, self.recipe.name
        named = f"{hook}{at(written[0])}" if written else hook
        try:
            result = caller(recipe=self.recipe, **arguments)
        except SpecdecError:
            raise
        except (Exception, SystemExit) as error:
            where = blamed(error)
            text = f"{type(error).__name__}: {error}" + (f" ({where})" if where else "")
            raise PluginError(f"plugin {label}: {named} for recipe {name!r} failed with {text}") from error
        if result is None:
            forgotten = "" if written else unmarked(plugin.manager.get_plugin(plugin.record.name), hook)
            missing = "; end it with return" if written else f": it does not implement the hook{forgotten}"
            raise PluginError(f"plugin {label} returns nothing from {named} for its recipe {name!r}{missing}")
        mistake = mistake_in(result, protocol_of(hook, self.recipe))
        if mistake is not None:
            raise PluginError(f"plugin {label}: {named} for recipe {name!r} returned {mistake}")
        return result


@frozen(kw_only=True, eq=False)
class RecipeBook:
    """Recipes by name, over what discovery found."""

    discovery: Discovery

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all usable recipes, in order of discovery."""
        return tuple(recipe.name for recipe in self.discovery.recipes)

    def recipe(self, name: str) -> Recipe:
        """The recipe called ``name``.

        Raises:
            PluginError: if the plugin that declares it was refused, or no loaded plugin declares it, nothing resembles it
                and a plugin that may declare it could not be loaded; the message gives the recorded reason.
            RecipeError: if no plugin declares it; the message offers close matches.
        """
        for recipe in self.discovery.recipes:
            if recipe.name == name:
                return recipe
        raise self._refusal(name)

    def hooks_for(self, recipe: Recipe | str) -> RecipeHooks:
        """Hooks of the plugin that owns a recipe, given by name or as a record (which the hooks then receive unchanged).

        Raises:
            PluginError, RecipeError: as :meth:`recipe`.
        """
        record = self.recipe(recipe) if isinstance(recipe, str) else recipe
        owner = self.discovery.owner(record.name)
        if owner is None:
            raise self._refusal(record.name)
        if record.target_recipe is None:
            return RecipeHooks(recipe=record, plugin=owner)
        return RecipeHooks(recipe=record, plugin=owner, target=self.hooks_for(record.target_recipe))

    def _refusal(self, name: str) -> SpecdecError:
        troubled = self.discovery.troubled
        for record in troubled:
            if name in record.recipes:
                error: SpecdecError = PluginError(
                    f"recipe {name!r} is not usable: plugin {record.label}: {record.reason}"
                )
                error.__cause__ = record.error
                return error
        for plugin in self.discovery.loaded:
            for drafter in plugin.waiting:
                if drafter.name == name:
                    reason, cause = missing_target(drafter, self.discovery.plugins)
                    error = PluginError(f"plugin {plugin.record.label}: {reason}")
                    error.__cause__ = cause
                    return error
        close = difflib.get_close_matches(name, self.names, n=3)
        # A plugin that failed before it declared anything may be the one that owns the name.
        suspects = [record for record in troubled if not record.recipes]
        reasons = "; ".join(f"plugin {record.label}: {record.reason}" for record in suspects)
        if suspects and not close:
            error = PluginError(
                f"recipe {name!r} is declared by no loaded plugin, and these could not be loaded: {reasons}"
            )
            error.__cause__ = suspects[0].error
            return error
        hint = f"did you mean {' or '.join(close)}?" if close else f"known recipes: {', '.join(self.names) or 'none'}"
        message = f"unknown recipe {name!r}; {hint}"
        if reasons:
            message += f" (not loaded: {reasons})"
        skipped = [record.name for record in self.discovery.plugins if record.status == "skipped"]
        if skipped:
            message += f" (plugins left out by SPECDEC_PLUGINS: {', '.join(skipped)})"
        return RecipeError(message)


@cache
def recipe_book() -> RecipeBook:
    """The recipes of this process's installed plugins. Discovers once; later calls return the same book."""
    return RecipeBook(discovery=discover())
