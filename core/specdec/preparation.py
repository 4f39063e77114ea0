"""What is prepared for a recipe, as options that are checked against it, and the subset that one start uses.

Declaration layer: the standard library, attrs and other declaration modules only.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import evolve, field, frozen

from specdec.catalog import RoundShape, checked_widths, listed, require_integer, speculative_shapes
from specdec.declaration import Recipe
from specdec.errors import UsageError
from specdec.validators import as_tuple

__all__ = ["ACTIVATION_DTYPES", "SAMPLERS", "PreparationConfig"]

#: Who may sample in a preparation's rounds.
SAMPLERS = ("auto", "reference", "flashinfer")
#: What activations may be. Not float16: a residual stream leaves its range, and no recipe is tested in it.
ACTIVATION_DTYPES = ("float32", "float64", "bfloat16")


@frozen(kw_only=True)
class PreparationConfig:
    """What is prepared for one recipe. Build it with :meth:`for_recipe`, which knows the recipe's defaults and limits.

    ``concurrency``
        most requests in a batch; padded to a power of two for the catalog.
    ``speculative``
        whether the drafter is prepared at all.
    ``speculative_widths``
        captured verification widths; increasing from 1, the widest is the draft-token maximum + 1.
    ``speculative_token_capacity``
        most target rows B·W of a round wider than one token.
    ``context``
        most tokens of one request, prompt and output together.
    ``pages``
        pages of each paged pool that requests share; ``None`` has enough for every one at full context. With fewer, requests wait
        for pages or give theirs up for a while.
    ``prefill_tokens``
        token capacities of prompt chunks.
    ``fixed_width``
        the verification width of the fixed policy, or ``None`` for adaptive verification. A policy only: every width is captured.
    ``extended_sampling``
        whether requests may use penalties, logit bias, minimum lengths and log-probabilities, which need tables over the
        vocabulary and a second variant of every round; it runs only while a request with such an option does.
    ``grammar``
        whether requests may be constrained by a grammar, which needs masks over the vocabulary for every verified row and a
        second variant of every round; it runs only while such a request does.
    ``packed``
        whether rounds with drafts allocate target rows among their lanes, as recipes with forecasts do; then
        ``speculative_token_capacity`` bounds the rows, not the batch.
    ``cuda_graphs``
        whether rounds are captured as CUDA graphs, on devices that have them; without, each operator is launched by itself.
    ``sampler``
        who samples: ``auto`` (FlashInfer on CUDA devices where it works, else plain torch), ``reference`` or ``flashinfer``.
    ``mtp_only``
        leaves out ordinary operations without draft work.
    ``memory_bytes``, ``headroom_bytes``, ``snapshot_bytes``
        budgets in bytes: all that may be used (``None``: what the device has), what stays free of it, and what prefix
        checkpoints may hold.

    Raises:
        UsageError: if a value is out of range or two contradict each other; the message names option, value, range and reason.
    """

    recipe: str
    concurrency: int = 4
    speculative: bool = True
    speculative_widths: tuple[int, ...] = field(converter=as_tuple)
    speculative_token_capacity: int = 128
    context: int = 4096
    pages: int | None = None
    prefill_tokens: tuple[int, ...] = field(default=(512,), converter=as_tuple)
    fixed_width: int | None = None
    extended_sampling: bool = False
    grammar: bool = False
    packed: bool = False
    cuda_graphs: bool = True
    sampler: str = "auto"
    mtp_only: bool = False
    memory_bytes: int | None = None
    headroom_bytes: int = 0
    snapshot_bytes: int = 0

    def __attrs_post_init__(self) -> None:
        require_integer("concurrency", self.concurrency, 1, None, "at least one request is served")
        checked_widths(self.speculative_widths)
        require_integer(
            "speculative_token_capacity",
            self.speculative_token_capacity,
            self.speculative_widths[-1],
            None,
            f"one lane of the widest round has {self.speculative_widths[-1]} rows; draft less or raise the capacity",
        )
        require_integer("context", self.context, 2, None, "a request has a prompt and an output")
        if self.pages is not None:
            require_integer("pages", self.pages, 1, None, "state needs pages")
        if not self.prefill_tokens:
            raise UsageError("prefill_tokens must name at least one chunk capacity")
        for tokens in self.prefill_tokens:
            require_integer("prefill_tokens", tokens, 1, None, "a prompt chunk has at least one token")
        if any(later <= earlier for earlier, later in zip(self.prefill_tokens, self.prefill_tokens[1:])):
            raise UsageError(f"prefill_tokens must increase, got {self.prefill_tokens}")
        if self.fixed_width is not None and self.fixed_width not in self.speculative_widths:
            raise UsageError(
                f"fixed_width {self.fixed_width!r} must be one of the prepared widths {listed(self.speculative_widths)}"
            )
        if not self.speculative and self.speculative_widths != (1,):
            raise UsageError(
                f"speculative_widths {listed(self.speculative_widths)} need the drafter; prepare width 1 alone without it"
            )
        if self.sampler not in SAMPLERS:
            raise UsageError(f"sampler is {self.sampler!r}; allowed: {', '.join(SAMPLERS)}")
        if self.mtp_only and not self.speculative:
            raise UsageError("mtp_only leaves nothing to prepare when speculation is off; drop one of the two options")
        if self.memory_bytes is not None:
            require_integer("memory_bytes", self.memory_bytes, 1, None, "weights and state need memory")
        for option in ("headroom_bytes", "snapshot_bytes"):
            require_integer(option, getattr(self, option), 0, None, "a budget is not negative")

    @classmethod
    def for_recipe(
        cls,
        recipe: Recipe,
        *,
        concurrency: int = 4,
        speculative: bool = True,
        max_draft_tokens: int | None = None,
        speculative_widths: Iterable[int] | None = None,
        speculative_token_capacity: int | None = None,
        context: int = 4096,
        pages: int | None = None,
        prefill_tokens: Iterable[int] = (512,),
        adaptive_verification: bool = True,
        fixed_width: int | None = None,
        extended_sampling: bool = False,
        grammar: bool = False,
        cuda_graphs: bool = True,
        sampler: str = "auto",
        mtp_only: bool = False,
        memory_bytes: int | None = None,
        headroom_bytes: int = 0,
        snapshot_bytes: int = 0,
    ) -> PreparationConfig:
        """Options as a user gives them, completed by the recipe's defaults and checked against its limits.

        Without explicit widths, the recipe's widths up to ``max_draft_tokens`` + 1 are taken, that one always among them. The
        draft-token maximum defaults to the recipe's default; 0 prepares width-one rounds that still maintain draft state.
        ``adaptive_verification=False`` fixes the widest width unless ``fixed_width`` names another.

        Raises:
            UsageError: if an option is out of range for this recipe or contradicts another one.
        """
        limit = f"recipe {recipe.name!r} drafts at most {recipe.max_draft_tokens} tokens"
        source = recipe.source_of("max_draft_tokens")
        reason = f"{limit} (source: {source})" if source else limit
        if max_draft_tokens is not None:
            require_integer("max_draft_tokens", max_draft_tokens, 0, recipe.max_draft_tokens, reason)
        if speculative_widths is not None:
            widths = checked_widths(_numbers("speculative_widths", speculative_widths))
            if widths[-1] > recipe.max_draft_tokens + 1:
                raise UsageError(
                    f"speculative_widths {listed(widths)}: the widest must be at most {recipe.max_draft_tokens + 1}; {reason}"
                )
            if max_draft_tokens is not None and max_draft_tokens + 1 != widths[-1]:
                raise UsageError(
                    f"max_draft_tokens {max_draft_tokens} needs a widest width of {max_draft_tokens + 1}, "
                    f"but speculative_widths are {listed(widths)}; give one of the two"
                )
        else:
            drafts = recipe.default_draft_tokens if max_draft_tokens is None else max_draft_tokens
            widths = tuple(sorted({1, drafts + 1, *(width for width in recipe.widths.widths if width <= drafts + 1)}))
        if not speculative:
            if max_draft_tokens:
                raise UsageError(
                    f"max_draft_tokens {max_draft_tokens} contradicts speculative=False; give one of the two"
                )
            widths = (1,)
        if adaptive_verification and fixed_width is not None:
            raise UsageError(
                f"fixed_width {fixed_width} needs adaptive_verification=False, or adaptive verification would ignore it"
            )
        if not adaptive_verification and fixed_width is None:
            fixed_width = widths[-1]
        return cls(
            recipe=recipe.name,
            concurrency=concurrency,
            speculative=speculative,
            speculative_widths=widths,
            speculative_token_capacity=(
                recipe.speculative_token_capacity if speculative_token_capacity is None else speculative_token_capacity
            ),
            context=context,
            pages=pages,
            prefill_tokens=_numbers("prefill_tokens", prefill_tokens),
            fixed_width=fixed_width,
            extended_sampling=extended_sampling,
            grammar=grammar,
            cuda_graphs=cuda_graphs,
            sampler=sampler,
            packed=speculative and recipe.confidence_width > 0,
            mtp_only=mtp_only,
            memory_bytes=memory_bytes,
            headroom_bytes=headroom_bytes,
            snapshot_bytes=snapshot_bytes,
        )

    @property
    def max_draft_tokens(self) -> int:
        """The draft-token maximum K_max of what is prepared."""
        return self.speculative_widths[-1] - 1

    @property
    def adaptive_verification(self) -> bool:
        """Whether widths are chosen round by round."""
        return self.fixed_width is None

    def shapes(self) -> tuple[RoundShape, ...]:
        """All captured round shapes, whatever the verification policy; none without speculation."""
        if not self.speculative:
            return ()
        return speculative_shapes(
            self.concurrency, self.speculative_widths, self.speculative_token_capacity, packed=self.packed
        )

    def serving_shapes(self) -> tuple[RoundShape, ...]:
        """The shapes the verification policy chooses among: all, or one per batch capacity for a fixed width."""
        if not self.speculative:
            return ()
        return speculative_shapes(
            self.concurrency,
            self.speculative_widths,
            self.speculative_token_capacity,
            self.fixed_width,
            packed=self.packed,
        )

    def reduce(
        self,
        *,
        concurrency: int | None = None,
        max_draft_tokens: int | None = None,
        adaptive_verification: bool | None = None,
        fixed_width: int | None = None,
    ) -> PreparationConfig:
        """The subset of a preparation that one start uses. What was not prepared is refused, never added.

        ``max_draft_tokens=0`` switches speculation off and uses the ordinary operations. A positive depth must be a captured
        one: a graph is never relabelled with a depth it does not have. The verification policy is free to change.

        Raises:
            UsageError: if more is asked than was prepared; the message names what was.
        """
        lanes = self.concurrency if concurrency is None else concurrency
        require_integer(
            "concurrency", lanes, 1, self.concurrency, f"{self.concurrency} were prepared; prepare more for more"
        )
        widths, speculative = self.speculative_widths, self.speculative
        if max_draft_tokens == 0:
            if self.mtp_only:
                raise UsageError(
                    "max_draft_tokens 0 runs ordinary operations, which a preparation with mtp_only does not have; "
                    "prepare without mtp_only"
                )
            widths, speculative = (1,), False
        elif max_draft_tokens is not None:
            depths = tuple(width - 1 for width in widths if width > 1) if speculative else ()
            if max_draft_tokens not in depths:
                raise UsageError(
                    f"max_draft_tokens {max_draft_tokens!r} was not prepared; "
                    f"prepared: {listed((0, *depths))}; prepare it to use it"
                )
            widths = tuple(width for width in widths if width <= max_draft_tokens + 1)
        policy = self.fixed_width
        if adaptive_verification is True and fixed_width is not None:
            raise UsageError(f"fixed_width {fixed_width} contradicts adaptive verification; give one of the two")
        if adaptive_verification is True or not speculative:
            policy = None
        elif fixed_width is not None:
            policy = fixed_width
        elif adaptive_verification is False or (policy is not None and policy not in widths):
            policy = widths[-1]
        return evolve(self, concurrency=lanes, speculative=speculative, speculative_widths=widths, fixed_width=policy)


def _numbers(option: str, given: object) -> tuple[int, ...]:
    """Several numbers as a caller gives them; their values are checked elsewhere."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UsageError(f"{option} is {given!r}; give a sequence of integers")
    return tuple(given)
