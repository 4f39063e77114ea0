"""Discovery of plugins: entry points loaded one by one, each failure kept as data.

Nothing a plugin does while it is discovered can break the lists, the help or another plugin. Who needs what failed asks
:mod:`specdec.recipes`, which raises the recorded reason.

Declaration layer: the standard library, pluggy, attrs and other declaration modules only.
"""

import contextlib
import difflib
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pluggy
from attrs import evolve, field, frozen

import specdec
from specdec import PROJECT, __version__, hookspecs
from specdec.declaration import Recipe

__all__ = [
    "CORE_DISTRIBUTION",
    "SELECTION_VARIABLE",
    "Discovery",
    "Plugin",
    "PluginRecord",
    "discover",
    "inspect_plugin",
]

#: Distribution that plugins state their range of the core against.
CORE_DISTRIBUTION = "specdec-core"

#: Environment variable that restricts loading: unset loads all, empty loads none, otherwise a comma list of names.
SELECTION_VARIABLE = "SPECDEC_PLUGINS"


_PASSING_ON = ("<", *(str(Path(str(module.__file__)).parent) for module in (specdec, pluggy, importlib)))


@frozen(kw_only=True)
class PluginRecord:
    """What became of one entry point.

    ``status`` is ``loaded``, ``failed`` (import, hooks or declaration went wrong), ``skipped`` (not selected), ``conflict``
    (a name is claimed twice) or ``incompatible`` (declared for another core); ``reason`` is one line, empty when loaded.
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

    One manager per plugin, so that only the owner of a recipe can be called for it.
    """

    record: PluginRecord
    recipes: tuple[Recipe, ...]
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


@frozen(kw_only=True, eq=False)
class _Found:
    """An entry point and the distribution that provides it."""

    name: str
    distribution: str
    version: str
    entry_point: importlib.metadata.EntryPoint
    metadata: importlib.metadata.Distribution

    def record(self, status: str, reason: str = "", error: BaseException | None = None) -> PluginRecord:
        return PluginRecord(
            name=self.name,
            distribution=self.distribution,
            version=self.version,
            status=status,
            reason=reason,
            error=error,
        )


def discover(environ: Mapping[str, str] | None = None) -> Discovery:
    """Finds and loads every selected plugin. Never raises for what a plugin does, except ``KeyboardInterrupt``.

    ``environ`` is where ``SPECDEC_PLUGINS`` is read from (the process environment by default). While plugins are imported,
    what they print goes to stderr: stdout carries data only.
    """
    found = sorted(_entry_points(), key=lambda item: (item.name, item.distribution))
    selected, notices = _selection(os.environ if environ is None else environ, [item.name for item in found])
    records: list[PluginRecord] = []
    plugins: list[Plugin] = []
    wanted = [item for item in found if selected is None or item.name in selected]
    for item in found:
        if item not in wanted:
            records.append(item.record("skipped", f"not named in {SELECTION_VARIABLE}"))
            continue
        rivals = [other for other in wanted if other.name == item.name]
        if len(rivals) > 1:
            records.append(item.record("conflict", _name_clash(item.name, rivals)))
            continue
        outcome = _load(item)
        if isinstance(outcome, Plugin):
            plugins.append(outcome)
            records.append(outcome.record)
        else:
            records.append(outcome)
    refused = _recipe_clashes(plugins)
    return Discovery(
        plugins=tuple(refused.get(record.label, record) for record in records),
        loaded=tuple(plugin for plugin in plugins if plugin.record.label not in refused),
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
        manager.register(plugin, name=name)
        # Reports implementations of hooks that do not exist; unknown arguments are reported by register.
        manager.check_pending()
        if not manager.hook.declare_speculation.get_hookimpls():
            return evolve(base, reason="does not implement declare_speculation, so it owns no recipe")
        recipes = _declared(manager.hook.declare_speculation())
    except (Exception, SystemExit) as error:
        return evolve(base, reason=_reason(error), error=error)
    names = tuple(recipe.name for recipe in recipes)
    return Plugin(record=evolve(base, status="loaded", recipes=names), recipes=recipes, manager=manager)


def _entry_points() -> Iterator[_Found]:
    """Entry points of the group with their distributions; a distribution shadowed by an earlier one is left out.

    ``importlib.metadata.entry_points`` is not used: one distribution with broken metadata would end it.
    """
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        try:
            declared = distribution.read_text("entry_points.txt")
            if not declared or PROJECT not in declared:
                continue
            points = [point for point in distribution.entry_points if point.group == PROJECT]
            if not points:
                continue
            name, version = distribution.metadata["Name"], distribution.version
            key = name.lower().replace("_", "-").replace(".", "-")
            # Python imports the first distribution of a name on the path; a later one is not what would run.
            first = importlib.metadata.distribution(name)
            if key in seen or (first.version, first.read_text("entry_points.txt")) != (version, declared):
                continue
            seen.add(key)
        except Exception:  # Metadata that cannot be read names no plugin that could be reported.
            continue
        for point in points:
            yield _Found(name=point.name, distribution=name, version=version, entry_point=point, metadata=distribution)


def _selection(environ: Mapping[str, str], names: list[str]) -> tuple[set[str] | None, list[str]]:
    """Selected plugin names (``None`` for all), and a line for each selected name that is not installed."""
    value = environ.get(SELECTION_VARIABLE)
    if value is None:
        return None, []
    selected = {part.strip() for part in value.split(",") if part.strip()}
    notices = []
    for unknown in sorted(selected - set(names)):
        close = difflib.get_close_matches(unknown, names, n=3)
        hint = (
            f"did you mean {' or '.join(close)}?" if close else f"installed: {', '.join(sorted(set(names))) or 'none'}"
        )
        notices.append(f"{SELECTION_VARIABLE} names {unknown!r}, which is not installed; {hint}")
    return selected, notices


def _load(item: _Found) -> Plugin | PluginRecord:
    try:
        mismatch = _core_mismatch(item.metadata)
        if mismatch:
            return item.record("incompatible", mismatch)
        with contextlib.redirect_stdout(sys.stderr):
            module = item.entry_point.load()
            outcome = inspect_plugin(module, name=item.name, distribution=item.distribution, version=item.version)
    # SystemExit is caught because an importable module may be a script; KeyboardInterrupt is the user's and passes.
    except (Exception, SystemExit) as error:
        return item.record("failed", _reason(error), error)
    return outcome


def _core_mismatch(distribution: importlib.metadata.Distribution) -> str:
    """Why the plugin's declared range excludes the running core; empty if it does not. Reads metadata only."""
    declared = [
        line for line in distribution.requires or () if line.lower().replace("_", "-").startswith(CORE_DISTRIBUTION)
    ]
    if not declared:
        return ""
    # Imported here: only plugins that state a range need it.
    from packaging.requirements import Requirement

    for line in declared:
        requirement = Requirement(line)
        if requirement.name.lower().replace("_", "-") != CORE_DISTRIBUTION:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if not requirement.specifier.contains(__version__, prereleases=True):
            return (
                f"requires {CORE_DISTRIBUTION}{requirement.specifier}, found {__version__}; "
                f"install a matching {CORE_DISTRIBUTION} or another version of {distribution.metadata['Name']}"
            )
    return ""


def _declared(results: Iterable[Any]) -> tuple[Recipe, ...]:
    """Recipes out of the hook's results, checked one by one."""
    recipes: list[Recipe] = []
    for result in results:
        if isinstance(result, str | bytes | Recipe) or not isinstance(result, Iterable):
            raise TypeError(f"declare_speculation must return an iterable of Recipe, got {type(result).__name__}")
        for recipe in result:
            if not isinstance(recipe, Recipe):
                raise TypeError(f"declare_speculation must yield Recipe records, got {type(recipe).__name__}")
            if any(recipe.name == other.name for other in recipes):
                raise ValueError(f"declare_speculation yields recipe {recipe.name!r} twice")
            recipes.append(recipe)
    if not recipes:
        raise ValueError("declare_speculation returned no recipe")
    return tuple(recipes)


def _name_clash(name: str, rivals: list[_Found]) -> str:
    providers = " and ".join(f"{item.distribution} {item.version}" for item in rivals)
    return f"plugin name {name!r} is provided by {providers}; uninstall one of them"


def _recipe_clashes(plugins: list[Plugin]) -> dict[str, PluginRecord]:
    """Records, by label, of plugins that are refused because another plugin declares one of their recipes."""
    claims: dict[str, list[Plugin]] = {}
    for plugin in plugins:
        for recipe in plugin.recipes:
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
    # Frames of this package, pluggy, importlib and generated code only pass errors on; the innermost line outside them is
    # the one to look at.
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_PASSING_ON):
            text += f" ({frame.filename}:{frame.lineno})"
            break
    return text
