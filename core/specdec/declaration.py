"""What a plugin declares: the recipe, and the records it is made of.

Everything here is frozen, keyword-only and validated when it is built, so a recipe that exists is consistent. Declaration
layer: the standard library, attrs and other declaration modules only; importing it loads no torch.

State records live in :mod:`specdec.layout`, tensor records in :mod:`specdec.tensors`; import all of them from here.
"""

import re
from collections.abc import Iterable
from typing import Any

from attrs import evolve, field, fields, frozen

from specdec.errors import DeclarationError
from specdec.layout import StateField, StateKind, StateLayout
from specdec.tensors import DTYPE_BYTES, TensorGroup, TensorInventory, TensorSpec
from specdec.validators import as_tuple, integer, text, tuple_of

__all__ = [
    "DTYPE_BYTES",
    "REQUEST_OPTIONS",
    "DrafterRecipe",
    "Recipe",
    "SamplingDefaults",
    "StateField",
    "StateKind",
    "StateLayout",
    "TensorGroup",
    "TensorInventory",
    "TensorSpec",
    "WidthCatalog",
]

_RECIPE_NAME = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")
_EMBEDDED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[\w.-]+(?:/[\w.-]+)*")
_CALLABLE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")

#: Options of a request by name; a recipe may say that it cannot honour some of them.
REQUEST_OPTIONS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "greedy",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_new_tokens",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "stop",
    "grammar",
)

#: Fields of a recipe whose number must name its source.
SOURCED_FIELDS = (
    "default_draft_tokens",
    "max_draft_tokens",
    "sampling",
    "eos_token_ids",
    "speculative_token_capacity",
)


def _check_function(recipe: str, field_name: str, value: str | None) -> None:
    if value is not None and not _CALLABLE.fullmatch(value):
        raise DeclarationError(f"Recipe {recipe!r}: {field_name} must look like 'module:function', got {value!r}")


def _pairs(sources: Iterable[Iterable[str]]) -> tuple[Any, ...]:
    return tuple(tuple(pair) for pair in sources)


@frozen(kw_only=True)
class WidthCatalog:
    """Verification widths W = K + 1 that a recipe offers: increasing, and width one always among them.

    Raises:
        DeclarationError: if the widths are not increasing integers from 1.
    """

    widths: tuple[int, ...] = field(converter=as_tuple, validator=tuple_of(int, minimum=1))

    @widths.validator
    def _increasing_from_one(self, attribute: object, value: tuple[int, ...]) -> None:
        if value[0] != 1 or any(later <= earlier for earlier, later in zip(value, value[1:], strict=False)):
            raise DeclarationError(f"WidthCatalog.widths must increase and start with 1 (plain decoding), got {value}")

    @property
    def max_draft_tokens(self) -> int:
        """Draft tokens of the widest width."""
        return self.widths[-1] - 1


@frozen(kw_only=True)
class SamplingDefaults:
    """The sampling a checkpoint asks for; a request may override each value. ``top_k=0`` means no top-k.

    Raises:
        DeclarationError: if a value is out of range.
    """

    temperature: float = field()
    top_k: int = field(validator=integer(minimum=0))
    top_p: float = field()
    min_p: float = field(default=0.0)

    @temperature.validator
    def _positive(self, attribute: object, value: float) -> None:
        if not 0.0 < value < float("inf"):
            raise DeclarationError(f"SamplingDefaults.temperature must be positive and finite, got {value}")

    @top_p.validator
    def _nucleus(self, attribute: object, value: float) -> None:
        if not 0.0 < value <= 1.0:
            raise DeclarationError(f"SamplingDefaults.top_p must be in (0, 1], got {value}")

    @min_p.validator
    def _floor(self, attribute: object, value: float) -> None:
        if not 0.0 <= value < 1.0:
            raise DeclarationError(f"SamplingDefaults.min_p must be in [0, 1), got {value}")


@frozen(kw_only=True)
class _Drafting:
    """What every recipe says of its drafts; the fields are documented where they are declared by plugins."""

    name: str = field(validator=text())
    summary: str = field(validator=text())
    drafter_method: str = field(validator=text())
    default_draft_tokens: int = field(validator=integer(minimum=0))
    max_draft_tokens: int = field(validator=integer(minimum=1))
    widths: WidthCatalog = field()
    speculative_token_capacity: int = field(default=128, validator=integer(minimum=1))
    draft_source: str = field(default="learned", validator=text())
    confidence_width: int = field(default=0, validator=integer(minimum=0))
    supports_history_drafts: bool
    drafter_layout: StateLayout = field(repr=False)
    profiles: str | None = field(default=None)
    drafter_memory: str | None = field(default=None)
    unsupported_options: tuple[str, ...] = field(default=(), converter=as_tuple, validator=tuple_of(str, empty=True))
    sources: tuple[tuple[str, str], ...] = field(converter=_pairs)

    @name.validator
    def _name_form(self, attribute: object, value: str) -> None:
        if not _RECIPE_NAME.fullmatch(value):
            raise DeclarationError(
                f"Recipe.name {value!r}: use lower-case letters and digits with single '.', '_' or '-' between them"
            )

    @max_draft_tokens.validator
    def _not_below_default(self, attribute: object, value: int) -> None:
        if value < self.default_draft_tokens:
            raise DeclarationError(
                f"Recipe {self.name!r}: max_draft_tokens ({value}) must be >= default_draft_tokens ({self.default_draft_tokens})"
            )

    @widths.validator
    def _widths_agree(self, attribute: object, value: WidthCatalog) -> None:
        if not isinstance(value, WidthCatalog):
            raise DeclarationError(f"Recipe {self.name!r}: widths must be a WidthCatalog, got {value!r}")
        if value.max_draft_tokens != self.max_draft_tokens:
            raise DeclarationError(
                f"Recipe {self.name!r}: the widest width ({value.widths[-1]}) must be max_draft_tokens + 1 "
                f"({self.max_draft_tokens + 1})"
            )
        if self.default_draft_tokens + 1 not in value.widths:
            raise DeclarationError(
                f"Recipe {self.name!r}: default_draft_tokens ({self.default_draft_tokens}) needs width "
                f"{self.default_draft_tokens + 1}, which is not in {value.widths}"
            )

    @speculative_token_capacity.validator
    def _holds_one_lane(self, attribute: object, value: int) -> None:
        if value < self.widths.widths[-1]:
            raise DeclarationError(
                f"Recipe {self.name!r}: speculative_token_capacity ({value}) must hold one lane of the widest width "
                f"({self.widths.widths[-1]})"
            )

    @drafter_layout.validator
    def _drafter_layout_owner(self, attribute: object, value: StateLayout) -> None:
        self._check_layout("drafter", value)

    def _check_layout(self, owner: str, value: StateLayout) -> None:
        if not isinstance(value, StateLayout) or value.owner != owner:
            raise DeclarationError(
                f"Recipe {self.name!r}: {owner}_layout must be a StateLayout whose owner is {owner!r}"
            )
        if value.max_draft_tokens < self.max_draft_tokens:
            raise DeclarationError(
                f"Recipe {self.name!r}: {owner}_layout keeps a horizon of {value.max_draft_tokens} draft tokens, "
                f"but the recipe drafts up to {self.max_draft_tokens}"
            )

    @profiles.validator
    def _profiles_form(self, attribute: object, value: str | None) -> None:
        if value is not None and not _EMBEDDED.fullmatch(value):
            raise DeclarationError(f"Recipe {self.name!r}: profiles must look like 'package:file', got {value!r}")

    @drafter_memory.validator
    def _drafter_memory_form(self, attribute: object, value: str | None) -> None:
        _check_function(self.name, "drafter_memory", value)

    @unsupported_options.validator
    def _known_options(self, attribute: object, value: tuple[str, ...]) -> None:
        unknown = sorted(set(value) - set(REQUEST_OPTIONS))
        if unknown:
            raise DeclarationError(
                f"Recipe {self.name!r}: unsupported_options names {', '.join(unknown)}; known: {', '.join(REQUEST_OPTIONS)}"
            )

    @sources.validator
    def _numbers_have_sources(self, attribute: object, value: tuple[tuple[str, str], ...]) -> None:
        malformed = [pair for pair in value if len(pair) != 2 or not all(isinstance(part, str) for part in pair)]
        if malformed:
            raise DeclarationError(
                f"Recipe {self.name!r}: sources are pairs of field name and text, got {malformed[0]!r}"
            )
        stated = {name for name, source in value if source.strip()}
        missing = [name for name in self._sourced_fields() if name not in stated]
        if missing:
            raise DeclarationError(
                f"Recipe {self.name!r}: no source given for {', '.join(missing)}; add them to sources"
            )
        unknown = sorted(name for name in stated if not hasattr(type(self), name))
        if unknown:
            raise DeclarationError(f"Recipe {self.name!r}: sources name unknown fields: {', '.join(unknown)}")

    @classmethod
    def _sourced_fields(cls) -> tuple[str, ...]:
        """Fields whose number must name its source, of those that this kind of recipe has."""
        return tuple(name for name in SOURCED_FIELDS if hasattr(cls, name))

    def source_of(self, field_name: str) -> str:
        """Where the number of ``field_name`` is known from; empty if no source was stated."""
        return dict(self.sources).get(field_name, "")


@frozen(kw_only=True)
class Recipe(_Drafting):
    """One model that can be served speculatively: target, drafter, and the numbers both are prepared with.

    ``name``
        what users type, for example ``"example-7b"``: lower-case letters, digits, and single ``. _ -`` between them.
    ``checkpoint``, ``model_types``
        the checkpoint the numbers were taken from, and the ``model_type`` values of a ``config.json`` that it accepts.
    ``drafter_method``
        short name of how drafts are made; shown to users, never branched on by the core.
    ``default_draft_tokens``, ``max_draft_tokens``, ``widths``
        draft tokens K used unless asked otherwise, the largest K, and the verification widths W = K + 1 offered.
    ``speculative_token_capacity``
        most target rows B·W of a round wider than one token.
    ``draft_source``
        what the graphs of the manifest name as origin of proposals.
    ``confidence_width``
        confidence values a round returns per lane; 0 if it returns none.
    ``sampling``, ``eos_token_ids``
        the checkpoint's sampling defaults and the tokens that end a response.
    ``supports_history_drafts``
        whether rounds take copied continuations in place of learned proposals.
    ``tensor_parallel_sizes``
        world sizes the plugin can prepare.
    ``unsupported_options``
        names from ``REQUEST_OPTIONS`` that rounds of this recipe cannot honour; a request that uses one is refused.
    ``target_layout``, ``drafter_layout``, ``target_inventory``, ``drafter_inventory``
        state and stored tensors of the real checkpoint.
    ``embedded_checkpoint``
        ``"package:folder"`` or ``"package:file"`` of the checkpoint that ships with the plugin or with another distribution, or
        ``None``. The package is looked up and not imported; ``sources`` may say how it is installed.
    ``opener``
        importable ``"module:function"`` that is called with the path of a checkpoint and returns the open
        :class:`~specdec.checkpoint.reader.Checkpoint`, where checkpoints are no folders of safetensors; or ``None``. Must not
        import torch or read weights.
    ``profiles``
        importable ``"package:file"`` of the costs and acceptance curves that ``specdec simulate`` takes for this recipe, or
        ``None``; see :mod:`specdec.simulation.profiles`. Read by that command alone.
    ``inventories``
        importable ``"module:function"`` that is called with a checkpoint's ``config.json`` (a dict) and the open ``Checkpoint``
        and returns its (target, drafter) inventories, where releases differ in what they store those of the form found; or
        ``None`` if every checkpoint of the recipe is like the real one. Must not import torch or read weights.
    ``memory``
        importable ``"module:function"`` that is called with a checkpoint's ``config.json`` (a dict, or ``None`` for the recipe's
        own checkpoint), the open ``Checkpoint`` (or ``None``: stored as the recipe's), the ``Capacities``, and whether
        kernels read experts as they are stored, and returns the :class:`~specdec.held.ModelMemory`: what target and drafter hold
        once loaded; or ``None``, and then memory is neither planned nor checked before it is allocated. Must not import torch or
        read weights.
    ``drafter_memory``
        importable ``"module:function"`` that is called with what ``memory`` declared and the ``Capacities`` and returns the
        ``ModelMemory`` with the drafter that is really loaded; for a recipe that :class:`DrafterRecipe` completes, or ``None``.
    ``target_recipe``
        the recipe of another plugin whose target this one drafts for; set by :meth:`DrafterRecipe.completed`, never by hand.
    ``canonical_name``
        importable ``"module:function"`` that maps the name of a stored tensor to the one that the inventories declare, or
        ``None`` if exporters agree on names. Must not import torch.
    ``sources``
        pairs of field name and where its number is known from; required for every field of ``SOURCED_FIELDS``.

    Raises:
        DeclarationError: if a value is out of range, or two declared values contradict each other; the message names both.
    """

    checkpoint: str = field(validator=text())
    model_types: tuple[str, ...] = field(converter=as_tuple, validator=tuple_of(str))
    sampling: SamplingDefaults
    eos_token_ids: tuple[int, ...] = field(converter=as_tuple, validator=tuple_of(int, minimum=0))
    tensor_parallel_sizes: tuple[int, ...] = field(converter=as_tuple, validator=tuple_of(int, minimum=1))
    target_layout: StateLayout = field(repr=False)
    target_inventory: TensorInventory = field(repr=False)
    drafter_inventory: TensorInventory = field(repr=False)
    embedded_checkpoint: str | None = field(default=None)
    opener: str | None = field(default=None)
    inventories: str | None = field(default=None)
    memory: str | None = field(default=None)
    canonical_name: str | None = field(default=None)
    target_recipe: str | None = field(default=None)

    @eos_token_ids.validator
    def _distinct(self, attribute: object, value: tuple[int, ...]) -> None:
        if len(set(value)) != len(value):
            raise DeclarationError(f"Recipe {self.name!r}: eos_token_ids repeat: {value}")

    @target_layout.validator
    def _target_layout_owner(self, attribute: object, value: StateLayout) -> None:
        self._check_layout("target", value)

    @embedded_checkpoint.validator
    def _embedded_form(self, attribute: object, value: str | None) -> None:
        if value is not None and not _EMBEDDED.fullmatch(value):
            raise DeclarationError(
                f"Recipe {self.name!r}: embedded_checkpoint must look like 'package:folder', got {value!r}"
            )

    @opener.validator
    @inventories.validator
    @memory.validator
    @canonical_name.validator
    def _function_form(self, attribute: object, value: str | None) -> None:
        _check_function(self.name, attribute.name, value)  # type: ignore[attr-defined]


@frozen(kw_only=True)
class DrafterRecipe(_Drafting):
    """A drafter for a target that another plugin brings: what ``declare_speculation`` yields in place of a :class:`Recipe`.

    Discovery completes it from the recipe ``target`` of an installed plugin. That plugin then builds the target, this one loads
    the drafter and may capture the rounds. Everything that is not declared here is the target recipe's: checkpoint, sampling
    defaults, end-of-text tokens, target state, inventories.

    ``target``
        name of a recipe that declares its own target.
    ``target_distribution``
        what a user installs to have it, for the message where it is missing.
    ``drafter_memory``
        importable ``"module:function"`` that is called with the target recipe's ``ModelMemory``, in which this drafter holds
        nothing but the state of ``drafter_layout``, and the ``Capacities``, and returns it with what the drafter holds beside; or
        ``None`` if that is nothing. Must not import torch.

    Other fields: as in :class:`Recipe`; sources are required for those of ``SOURCED_FIELDS`` that it has.

    Raises:
        DeclarationError: as :class:`Recipe`.
    """

    target: str = field(validator=text())
    target_distribution: str = field(validator=text())

    def completed(self, target: Recipe) -> Recipe:
        """The recipe that this drafter and the target of ``target`` make together.

        Raises:
            DeclarationError: if ``target`` is another recipe than the declared one or has no target of its own, or its state
                keeps a shorter horizon than this drafter needs.
        """
        if target.name != self.target or target.target_recipe is not None:
            raise DeclarationError(
                f"Recipe {self.name!r}: target must be a recipe with a target of its own, got {target.name!r}"
            )
        own = {one.name: getattr(self, one.name) for one in fields(_Drafting)}
        # what the target's recipe says of its own drafts and drafter is not true of these
        others = {*own, "drafter_inventory"}
        own["sources"] = (*self.sources, *((name, source) for name, source in target.sources if name not in others))
        own["unsupported_options"] = tuple(dict.fromkeys((*self.unsupported_options, *target.unsupported_options)))
        return evolve(target, target_recipe=target.name, **own)
