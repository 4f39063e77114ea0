"""Discovery of plugins: entry points loaded one by one, each failure kept as data.

Nothing a plugin does while it is discovered can break the lists, the help or another plugin. Who needs what failed asks
:mod:`specdec.recipes`, which raises the recorded reason.

Declaration layer: the standard library, pluggy, attrs and other declaration modules only.
"""

import contextlib
import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pluggy
from attrs import evolve, field, frozen

from specdec import PROJECT, hookspecs
from specdec.declaration import DrafterRecipe, Recipe
from specdec.entry_points import SELECTION_VARIABLE, InstalledPlugin, core_mismatch, installed_plugins, selection
from specdec.errors import DeclarationError
from specdec.hook_checks import hook_mistake, unmarked
from specdec.places import at, blamed

__all__ = ["Discovery", "Plugin", "PluginRecord", "discover", "inspect_plugin"]


@frozen(kw_only=True)
class PluginRecord:
    """What became of one entry point.

    ``status`` is ``loaded``, ``failed`` (import, hooks or declaration went wrong), ``skipped`` (not selected), ``conflict``
    (a name is claimed twice) or ``incompatible`` (declared for another core); ``reason`` is one line, empty when all of it works.
    ``recipes`` are the names that the plugin declared, as far as it came.
    """

    name: str
    distribution: str
    version: str
    status: str
    reason: str = ""
    recipes: tuple[str, ...] = ()
    error: BaseException | None = field(default=None, repr=False, eq=False)

    @property
    def label(self) -> str:
        """Plugin name with distribution and version, as messages show it."""
        return f"{self.name} ({self.distribution} {self.version})"


@frozen(kw_only=True, eq=False)
class Plugin:
    """A plugin that passed all checks: its record, its recipes and the pluggy manager that holds it alone.

    One manager per plugin, so that only the owner of a recipe can be called for it. ``waiting``: drafters whose target no loaded
    plugin brings.
    """

    record: PluginRecord
    recipes: tuple[Recipe, ...]
    waiting: tuple[DrafterRecipe, ...] = ()
    manager: pluggy.PluginManager = field(repr=False)


@frozen(kw_only=True, eq=False)
class Discovery:
    """Everything that was found. ``notices`` are lines for the user that belong to no plugin, such as a misspelt selection."""

    plugins: tuple[PluginRecord, ...]
    loaded: tuple[Plugin, ...]
    notices: tuple[str, ...] = ()

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """Recipes of all loaded plugins."""
        return tuple(recipe for plugin in self.loaded for recipe in plugin.recipes)

    @property
    def troubled(self) -> tuple[PluginRecord, ...]:
        """Records of plugins that should have been loaded and were not."""
        return tuple(record for record in self.plugins if record.status not in ("loaded", "skipped"))

    def owner(self, recipe_name: str) -> Plugin | None:
        """The loaded plugin that declares the recipe, or ``None``."""
        for plugin in self.loaded:
            if any(recipe.name == recipe_name for recipe in plugin.recipes):
                return plugin
        return None


def discover(environ: Mapping[str, str] | None = None) -> Discovery:
    """Finds and loads every selected plugin. Never raises for what a plugin does, except ``KeyboardInterrupt``.

    ``environ`` is where ``SPECDEC_PLUGINS`` is read from (the process environment by default). While plugins are imported,
    what they print goes to stderr: stdout carries data only.
    """
    found = sorted(installed_plugins(), key=lambda item: (item.name, item.distribution))
    selected, notices = selection(os.environ if environ is None else environ, [item.name for item in found])
    records: list[PluginRecord] = []
    plugins: list[Plugin] = []
    wanted = [item for item in found if selected is None or item.name in selected]
    for item in found:
        if item not in wanted:
            records.append(_record(item, "skipped", f"not named in {SELECTION_VARIABLE}"))
            continue
        rivals = [other for other in wanted if other.name == item.name]
        if len(rivals) > 1:
            records.append(_record(item, "conflict", _name_clash(item.name, rivals)))
            continue
        before = "torch" in sys.modules
        outcome = _load(item)
        if "torch" in sys.modules and not before:
            notices.append(
                f"plugin {item.name!r} of {item.distribution} imports torch when it is discovered, and every command then waits "
                "for it; import torch inside the hooks that need it"
            )
        if isinstance(outcome, Plugin):
            plugins.append(outcome)
            records.append(outcome.record)
        else:
            records.append(outcome)
    refused = _recipe_clashes(plugins)
    known = [refused.get(record.label, record) for record in records]
    loaded = _completed([plugin for plugin in plugins if plugin.record.label not in refused], refused, known)
    outcomes = refused | {plugin.record.label: plugin.record for plugin in loaded}
    return Discovery(
        plugins=tuple(outcomes.get(record.label, record) for record in records),
        loaded=tuple(loaded),
        notices=tuple(notices),
    )


def inspect_plugin(
    plugin: object, *, name: str, distribution: str = "unknown", version: str = "0"
) -> Plugin | PluginRecord:
    """Checks a plugin object (a module, usually) without looking at installed metadata.

    Returns the plugin if all its hooks are known and it declares recipes, else the record that says why not. For tests of
    plugin authors: nothing else is discovered or loaded.
    """
    base = PluginRecord(name=name, distribution=distribution, version=version, status="failed")
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        mistake = hook_mistake(plugin, manager)
        if mistake is not None:
            return evolve(base, reason=mistake)
        manager.register(plugin, name=name)
        manager.check_pending()
        declared = manager.hook.declare_speculation.get_hookimpls()
        if not declared:
            forgotten = unmarked(plugin, "declare_speculation")
            return evolve(base, reason=f"does not implement declare_speculation, so it owns no recipe{forgotten}")
        recipes = _declared(manager.hook.declare_speculation(), f"declare_speculation{at(declared[0].function)}")
    except (Exception, SystemExit) as error:
        return evolve(base, reason=_reason(error), error=error)
    return Plugin(
        record=evolve(base, status="loaded", recipes=tuple(recipe.name for recipe in recipes)),
        recipes=tuple(recipe for recipe in recipes if isinstance(recipe, Recipe)),
        waiting=tuple(recipe for recipe in recipes if isinstance(recipe, DrafterRecipe)),
        manager=manager,
    )


def _record(item: InstalledPlugin, status: str, reason: str = "", error: BaseException | None = None) -> PluginRecord:
    return PluginRecord(
        name=item.name,
        distribution=item.distribution,
        version=item.version,
        status=status,
        reason=reason,
        error=error,
    )


def _load(item: InstalledPlugin) -> Plugin | PluginRecord:
    try:
        mismatch = core_mismatch(item.metadata)
        if mismatch:
            return _record(item, "incompatible", mismatch)
        with contextlib.redirect_stdout(sys.stderr):
            module = item.entry_point.load()
            outcome = inspect_plugin(module, name=item.name, distribution=item.distribution, version=item.version)
    # SystemExit is caught because an importable module may be a script; KeyboardInterrupt is the user's and passes.
    except (Exception, SystemExit) as error:
        return _record(item, "failed", _reason(error), error)
    return outcome


def _completed(
    plugins: list[Plugin], refused: dict[str, PluginRecord], records: Sequence[PluginRecord]
) -> list[Plugin]:
    """Plugins with their drafters' recipes completed; those that cannot be are added to ``refused``, and what they own is no
    target of others. records: of all plugins."""
    targets = {recipe.name: recipe for plugin in plugins for recipe in plugin.recipes}
    outcomes = [(plugin, _with_targets(plugin, targets, records)) for plugin in plugins]
    failed = {plugin.record.label: outcome for plugin, outcome in outcomes if isinstance(outcome, PluginRecord)}
    if failed:
        refused |= failed
        known = [failed.get(record.label, record) for record in records]
        return _completed([plugin for plugin in plugins if plugin.record.label not in failed], refused, known)
    return [outcome for _, outcome in outcomes if isinstance(outcome, Plugin)]


def _with_targets(
    plugin: Plugin, targets: Mapping[str, Recipe], records: Sequence[PluginRecord]
) -> Plugin | PluginRecord:
    """The plugin with each of its drafters completed whose target is among ``targets``; the record of a failure otherwise."""
    recipes, waiting = list(plugin.recipes), list[DrafterRecipe]()
    for drafter in plugin.waiting:
        if drafter.target not in targets:
            waiting.append(drafter)
            continue
        try:
            recipes.append(drafter.completed(targets[drafter.target]))
        except DeclarationError as error:
            return evolve(plugin.record, status="failed", reason=_reason(error), error=error)
    reason = "; ".join(missing_target(drafter, records)[0] for drafter in waiting)
    return evolve(plugin, record=evolve(plugin.record, reason=reason), recipes=tuple(recipes), waiting=tuple(waiting))


def _canonical(distribution: str) -> str:
    """A distribution's name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def missing_target(drafter: DrafterRecipe, records: Iterable[PluginRecord]) -> tuple[str, BaseException | None]:
    """Why a drafter's recipe cannot be used and what would help, by the record of the plugin that should bring the target; and
    that record's error, if there is one."""
    what = f"recipe {drafter.name!r} drafts for recipe {drafter.target!r}, which no loaded plugin brings"
    wanted = _canonical(drafter.target_distribution)
    for record in records:
        if drafter.target not in record.recipes and _canonical(record.distribution) != wanted:
            continue
        if record.status == "skipped":
            return f"{what}: {record.label} is left out; add {record.name} to {SELECTION_VARIABLE}", None
        if record.status != "loaded":
            return f"{what}: {record.label} is not loaded: {record.reason}", record.error
        close = difflib.get_close_matches(drafter.target, record.recipes, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"its recipes: {', '.join(record.recipes)}"
        return f"{what}: {record.label} has no such recipe with a target of its own; {hint}", None
    return f"{what}; install {drafter.target_distribution}", None


def _declared(results: Iterable[Any], hook: str) -> tuple[Recipe | DrafterRecipe, ...]:
    """Recipes out of the hook's results, checked one by one. hook: its name and place, for messages."""
    recipes: list[Recipe | DrafterRecipe] = []
    for result in results:
        single = isinstance(result, str | bytes | Mapping | Recipe | DrafterRecipe)
        if single or not isinstance(result, Iterable):
            raise TypeError(
                f"{hook} must return an iterable of Recipe, got {type(result).__name__}; return a list of records: [RECIPE]"
            )
        for recipe in result:
            if not isinstance(recipe, Recipe | DrafterRecipe):
                raise TypeError(
                    f"{hook} must yield Recipe records, got {type(recipe).__name__}; return a list of records: [RECIPE]"
                )
            if isinstance(recipe, Recipe) and recipe.target_recipe is not None:
                raise ValueError(
                    f"recipe {recipe.name!r} sets target_recipe; declare a DrafterRecipe to draft for another plugin's target"
                )
            if any(recipe.name == other.name for other in recipes):
                raise ValueError(f"{hook} yields recipe {recipe.name!r} twice; give each a name of its own")
            recipes.append(recipe)
    if not recipes:
        raise ValueError(f"{hook} returned no recipe; return a list of records: [RECIPE]")
    return tuple(recipes)


def _name_clash(name: str, rivals: list[InstalledPlugin]) -> str:
    providers = " and ".join(f"{item.distribution} {item.version}" for item in rivals)
    return f"plugin name {name!r} is provided by {providers}; uninstall one of them"


def _recipe_clashes(plugins: list[Plugin]) -> dict[str, PluginRecord]:
    """Records, by label, of plugins that are refused because another plugin declares one of their recipes."""
    claims: dict[str, list[Plugin]] = {}
    for plugin in plugins:
        for recipe in (*plugin.recipes, *plugin.waiting):
            claims.setdefault(recipe.name, []).append(plugin)
    refused: dict[str, PluginRecord] = {}
    for name, claimants in claims.items():
        if len(claimants) > 1:
            providers = " and ".join(plugin.record.label for plugin in claimants)
            reason = (
                f"recipe {name!r} is declared by {providers}; uninstall one, or leave one out with {SELECTION_VARIABLE}"
            )
            for plugin in claimants:
                refused.setdefault(plugin.record.label, evolve(plugin.record, status="conflict", reason=reason))
    return refused


def _reason(error: BaseException) -> str:
    """One line: kind and message of an error, and the file and line it came from."""
    if isinstance(error, SystemExit):
        text = f"called sys.exit({error.code!r}) while it was loaded"
    else:
        message = " / ".join(line.strip() for line in str(error).splitlines() if line.strip())
        text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    where = blamed(error)
    return f"{text} ({where})" if where else text
