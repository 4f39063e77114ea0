"""Installed plugins as metadata tells of them: entry points, selection and the declared range of the core. Imports no plugin.

Declaration layer: the standard library, attrs and other declaration modules only; packaging inside a function.
"""

import difflib
import importlib.metadata
from collections.abc import Iterator, Mapping

from attrs import frozen

from specdec import PROJECT, __version__

__all__ = [
    "CORE_DISTRIBUTION",
    "SELECTION_VARIABLE",
    "InstalledPlugin",
    "core_mismatch",
    "installed_plugins",
    "selection",
]

#: Distribution that plugins state their range of the core against.
CORE_DISTRIBUTION = "specdec-core"

#: Environment variable that restricts loading: unset loads all, empty loads none, otherwise a comma list of names.
SELECTION_VARIABLE = "SPECDEC_PLUGINS"


@frozen(kw_only=True, eq=False)
class InstalledPlugin:
    """An entry point and the distribution that provides it."""

    name: str
    distribution: str
    version: str
    entry_point: importlib.metadata.EntryPoint
    metadata: importlib.metadata.Distribution


def installed_plugins() -> Iterator[InstalledPlugin]:
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
            yield InstalledPlugin(
                name=point.name, distribution=name, version=version, entry_point=point, metadata=distribution
            )


def selection(environ: Mapping[str, str], names: list[str]) -> tuple[set[str] | None, list[str]]:
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


def core_mismatch(distribution: importlib.metadata.Distribution) -> str:
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
