"""Named sets of costs and acceptance curves, each with its source: those of the core, of installed plugins, or of a file.

A file has three objects: ``curves`` (categories of text), ``costs`` (cost models) and ``profiles``, which name curves and costs
and say what is prepared and asked for. Every curve and cost model says where its numbers come from and of which kind they are,
so that nobody takes a shape that was chosen for a measurement.

``profiles.json`` beside this module stands for no recipe. A plugin ships a file for its own and names it in the recipe; it, like
a file of one's own, may name curves and costs of the core's file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from importlib import resources
from pathlib import Path

from attrs import field, frozen

from specdec.converters import structure_json
from specdec.declaration import Recipe
from specdec.errors import UsageError
from specdec.simulation.acceptance import Category
from specdec.simulation.costs import CostModel
from specdec.simulation.workload import Lengths

#: The core's file, as a recipe names that of its plugin.
CORE_PROFILES = "specdec.simulation:profiles.json"


class Kind(StrEnum):
    """Where numbers come from. published: reported, or ratios of what was; derived: computed from reported numbers under a stated
    assumption; measured: from a result file of this project; qualitative: ours, after a description without numbers."""

    PUBLISHED = "published"
    DERIVED = "derived"
    MEASURED = "measured"
    QUALITATIVE = "qualitative"


def _kind(value: str) -> Kind:
    try:
        return Kind(value)
    except ValueError:
        raise UsageError(f"kind is {value!r}; allowed: {', '.join(Kind)}") from None


@frozen(kw_only=True)
class SourcedCurve:
    """A category of text. source: address or file; note: what was measured there and what was assumed."""

    kind: str = field(converter=_kind)
    source: str
    note: str
    category: Category


@frozen(kw_only=True)
class SourcedCosts:
    """A cost model, with its source as a curve has."""

    kind: str = field(converter=_kind)
    source: str
    note: str
    model: CostModel


@frozen(kw_only=True)
class Profile:
    """One machine, model and stream of requests. mix: weight by curve. rate: requests per second for each replica, unless another
    is asked for. prompt, output: token counts of Poisson arrivals. recipe: the one it stands for, None for none."""

    summary: str
    costs: str
    mix: dict[str, float]
    widths: tuple[int, ...]
    concurrency: int
    rate: float
    prompt: Lengths
    output: Lengths
    recipe: str | None = None
    token_capacity: int = 128
    context: int = 8192
    prefill_tokens: int = 512


@frozen(kw_only=True)
class ProfileFile:
    """What one file holds."""

    curves: dict[str, SourcedCurve]
    costs: dict[str, SourcedCosts]
    profiles: dict[str, Profile]


@frozen(kw_only=True)
class ProfileBook:
    """Profiles with all curves and costs that they may name. unread: why a plugin's file is left out, by its ``package:file``.

    Raises UsageError if a profile names a curve or costs that are not there.
    """

    curves: Mapping[str, SourcedCurve]
    costs: Mapping[str, SourcedCosts]
    profiles: Mapping[str, Profile]
    unread: Mapping[str, str] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for name, profile in self.profiles.items():
            if profile.costs not in self.costs:
                raise UsageError(f"profile {name!r} names costs {profile.costs!r}; known: {', '.join(self.costs)}")
            unknown = [curve for curve in profile.mix if curve not in self.curves]
            if unknown or not profile.mix:
                wrong = f"curve {unknown[0]!r}" if unknown else "no curve"
                raise UsageError(f"profile {name!r} names {wrong}; known: {', '.join(self.curves)}")

    def categories(self, profile: Profile) -> dict[str, Category]:
        """Categories of a profile's mix, by name, in its order."""
        return {name: self.curves[name].category for name in profile.mix}

    @property
    def by_recipe(self) -> dict[str, str]:
        """The profile of each recipe that has some: the first that stands for it."""
        found: dict[str, str] = {}
        for name, profile in self.profiles.items():
            if profile.recipe is not None:
                found.setdefault(profile.recipe, name)
        return found


def profiles_of_file(path: Path) -> ProfileBook:
    """Profiles of a file; its curves and costs come before those of the core with the same name.

    Raises UsageError, naming file and place, if it cannot be read or is not valid.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}; give a readable file of profiles") from error
    except UnicodeError as error:
        raise UsageError(f"{path}: not UTF-8 text; profiles are a JSON file") from error
    held, core = structure_json(text, ProfileFile, str(path), error=UsageError), _packaged(CORE_PROFILES)
    try:
        return ProfileBook(
            curves={**core.curves, **held.curves}, costs={**core.costs, **held.costs}, profiles=held.profiles
        )
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def shipped_profiles(recipes: Iterable[Recipe]) -> ProfileBook:
    """Profiles of the plugins of ``recipes``, in that order, then those of the core.

    A file that cannot be used is left out, and ``unread`` says why: it is its plugin's fault and must not hinder another's.
    """
    owners: dict[str, set[str]] = {}
    for recipe in recipes:
        if recipe.profiles is not None:
            owners.setdefault(recipe.profiles, set()).add(recipe.name)
    core = _packaged(CORE_PROFILES)
    book = ProfileBook(curves=core.curves, costs=core.costs, profiles=core.profiles)
    own: dict[str, Profile] = {}
    unread: dict[str, str] = {}
    for place, names in owners.items():
        try:
            held = _packaged(place)
            book = _joined(book, held, names)
            own.update(held.profiles)
        # Reading it imports the plugin's package, which may do anything.
        except (Exception, SystemExit) as error:
            reason = str(error)
            unread[place] = reason if reason.startswith(place) else f"{place}: {reason or type(error).__name__}"
    ordered = {**own, **core.profiles}
    return ProfileBook(curves=book.curves, costs=book.costs, profiles=ordered, unread=unread)


def _packaged(place: str) -> ProfileFile:
    """The file that ``package:file`` names."""
    package, _, name = place.partition(":")
    text = resources.files(package).joinpath(name).read_text(encoding="utf-8")
    return structure_json(text, ProfileFile, place, error=UsageError)


def _joined(book: ProfileBook, held: ProfileFile, recipes: set[str]) -> ProfileBook:
    """The book with a plugin's file. Raises UsageError for a name that is taken or a recipe that does not declare the file."""
    for kind, names, taken in (
        ("curve", held.curves, book.curves),
        ("costs", held.costs, book.costs),
        ("profile", held.profiles, book.profiles),
    ):
        twice = next((name for name in names if name in taken), None)
        if twice is not None:
            raise UsageError(f"{kind} {twice!r} is in another file too; rename it")
    for name, profile in held.profiles.items():
        if profile.recipe is not None and profile.recipe not in recipes:
            raise UsageError(
                f"profile {name!r} stands for recipe {profile.recipe!r}, which does not declare this file; "
                f"those that do: {', '.join(sorted(recipes))}"
            )
    return ProfileBook(
        curves={**book.curves, **held.curves},
        costs={**book.costs, **held.costs},
        profiles={**book.profiles, **held.profiles},
    )
