"""The execution manifest: every prepared graph as data, written beside a preparation and read back at start.

Declaration layer: the standard library, attrs and other declaration modules only (cattrs only while reading or writing).
"""

from __future__ import annotations

from attrs import field, frozen

from specdec.catalog import RoundShape, batch_capacities
from specdec.declaration import Recipe
from specdec.errors import DeclarationError
from specdec.preparation import PreparationConfig
from specdec.validators import as_tuple, integer, one_of, text, tuple_of

__all__ = [
    "ABI_VERSION",
    "OPERATION_IDS",
    "RESERVED_OPERATION_IDS",
    "ExecutionGraph",
    "ExecutionManifest",
    "build_manifest",
]

#: Version of the execution contract: token-vector completions in two transfer frames.
ABI_VERSION = 6

#: Operation id of each graph kind.
OPERATION_IDS: dict[str, int] = {
    "init": 1,
    "prefill": 2,
    "scored_prefill": 3,
    "decode": 4,
    "resume": 5,
    "restore": 6,
    "snapshot": 7,
    "vision": 8,
    "mixed": 9,
    "speculative": 12,
}

#: Ids of stand-alone proposal and verification graphs. A round is one program, so these can never be executed.
RESERVED_OPERATION_IDS = (10, 11, 13)


@frozen(kw_only=True)
class ExecutionGraph:
    """One prepared graph.

    ``token_capacity`` is W for a speculative graph, rows of a chunk for prefill kinds, and 1 for one-token kinds.
    ``draft_tokens``, ``verify_tokens`` and ``draft_source`` are set on graphs that declare a draft depth and on no other.
    ``speculation_enabled`` is true or false for graphs of one serving mode and absent for shared operations.
    ``packed_token_capacity`` is the physical target rows P, 0 for the rectangular B·W layout. ``confidence_width`` is
    the confidence values returned per lane; ``copy_tokens`` says whether the graph takes copied drafts as inputs.

    Raises:
        DeclarationError: if the operation id is reserved or not that of the kind, or the fields contradict each other.
    """

    kind: str = field(validator=one_of(tuple(OPERATION_IDS)))
    operation_id: int = field()
    batch_capacity: int = field(validator=integer(minimum=1))
    token_capacity: int = field(validator=integer(minimum=1))
    sampling_mode: str = field(default="general", validator=one_of(("general",)))
    draft_tokens: int | None = field(default=None)
    verify_tokens: int | None = field(default=None)
    draft_source: str | None = field(default=None)
    speculation_enabled: bool | None = field(default=None)
    packed_token_capacity: int = field(default=0, validator=integer(minimum=0))
    confidence_width: int = field(default=0, validator=integer(minimum=0))
    copy_tokens: bool = field(default=False)

    @operation_id.validator
    def _supported_operation(self, attribute: object, value: int) -> None:
        if value in RESERVED_OPERATION_IDS:
            raise DeclarationError(
                f"operation id {value} is reserved for stand-alone proposal or verification graphs, which are not supported; "
                "a speculative round is one graph"
            )
        if value != OPERATION_IDS[self.kind]:
            raise DeclarationError(
                f"operation id of kind {self.kind!r} must be {OPERATION_IDS[self.kind]}, got {value!r}"
            )

    @copy_tokens.validator
    def _consistent_depth(self, attribute: object, value: bool) -> None:
        # Sits on the last field, so that everything it compares is already set.
        depth = (self.draft_tokens, self.verify_tokens, self.draft_source)
        if self.kind != "speculative":
            if any(item is not None for item in depth) or self.packed_token_capacity or self.confidence_width or value:
                raise DeclarationError(
                    f"a graph of kind {self.kind!r} declares no drafts, packed rows, confidence or copy tokens"
                )
            return
        if self.draft_tokens is None or self.verify_tokens is None or not self.draft_source:
            raise DeclarationError("a speculative graph declares draft_tokens, verify_tokens and draft_source")
        if self.verify_tokens != self.token_capacity:
            raise DeclarationError(
                f"verify_tokens ({self.verify_tokens}) of a speculative graph must equal token_capacity ({self.token_capacity})"
            )
        if self.speculation_enabled is not True:
            raise DeclarationError(
                f"a speculative graph has speculation_enabled true, got {self.speculation_enabled!r}"
            )
        # Builds the shape for its checks: depth, width and packed rows must fit together.
        RoundShape(
            batch=self.batch_capacity,
            draft_tokens=self.draft_tokens,
            verify_width=self.verify_tokens,
            packed_rows=self.packed_token_capacity,
        )

    @property
    def shape(self) -> RoundShape | None:
        """The round shape of a speculative graph; ``None`` for other kinds."""
        if self.draft_tokens is None or self.verify_tokens is None:
            return None
        return RoundShape(
            batch=self.batch_capacity,
            draft_tokens=self.draft_tokens,
            verify_width=self.verify_tokens,
            packed_rows=self.packed_token_capacity,
        )


@frozen(kw_only=True)
class ExecutionManifest:
    """All graphs of one preparation, with the options that it was made from.

    Raises:
        DeclarationError: if the ABI version is another one, a graph is listed twice, or the options are for another recipe.
    """

    abi_version: int = field(default=ABI_VERSION)
    core_version: str = field(validator=text())
    recipe: str = field(validator=text())
    config: PreparationConfig = field()
    graphs: tuple[ExecutionGraph, ...] = field(converter=as_tuple, validator=tuple_of(ExecutionGraph))

    @abi_version.validator
    def _known_abi(self, attribute: object, value: int) -> None:
        if value != ABI_VERSION:
            raise DeclarationError(
                f"abi_version must be {ABI_VERSION}, got {value!r}; prepare again with this version of specdec"
            )

    @config.validator
    def _same_recipe(self, attribute: object, value: PreparationConfig) -> None:
        if value.recipe != self.recipe:
            raise DeclarationError(f"config is for recipe {value.recipe!r}, the manifest for {self.recipe!r}")

    @graphs.validator
    def _distinct(self, attribute: object, value: tuple[ExecutionGraph, ...]) -> None:
        if len(set(value)) != len(value):
            twice = next(graph for graph in value if value.count(graph) > 1)
            raise DeclarationError(
                f"graph listed twice: {twice.kind}, batch {twice.batch_capacity}, tokens {twice.token_capacity}"
            )

    @property
    def shapes(self) -> tuple[RoundShape, ...]:
        """Round shapes of the speculative graphs, in order."""
        return tuple(graph.shape for graph in self.graphs if graph.shape is not None)

    def to_json(self) -> str:
        """JSON text from which :meth:`from_json` builds an equal manifest."""
        from specdec.converters import unstructure_json

        return unstructure_json(self)

    @classmethod
    def from_json(cls, data: str, source: str) -> ExecutionManifest:
        """Reads a manifest; ``source`` is the file name that errors start with.

        Raises:
            DeclarationError: if the text is not a manifest of this version: unknown or missing keys, other types, or any rule
                above. The message has one part per problem, each with its path.
        """
        from specdec.converters import structure_json

        return structure_json(data, cls, source)


def build_manifest(
    recipe: Recipe, config: PreparationConfig, *, shapes: tuple[RoundShape, ...] | None = None
) -> ExecutionManifest:
    """The graphs that a preparation has.

    Shared operations come first (init, restore, snapshot), then the ordinary ones without draft work (prefill, decode, resume;
    left out by ``mtp_only``), then those of the speculative serving mode: prefill and resume that absorb feedback into draft
    history, and the rounds. ``shapes`` replaces the chain catalog for recipes whose rounds differ.

    Raises:
        DeclarationError: if ``config`` is for another recipe.
    """
    from specdec import __version__

    graphs = [_graph(kind, 1, 1, None) for kind in ("init", "restore", "snapshot")]
    modes = ([False] if not config.mtp_only else []) + ([True] if config.speculative else [])
    for enabled in modes:
        graphs += [
            _graph(kind, 1, tokens, enabled) for kind in ("prefill", "resume") for tokens in config.prefill_tokens
        ]
        if not enabled:
            graphs += [_graph("decode", batch, 1, False) for batch in batch_capacities(config.concurrency)]
    for shape in config.shapes() if shapes is None else shapes:
        graphs.append(
            ExecutionGraph(
                kind="speculative",
                operation_id=OPERATION_IDS["speculative"],
                batch_capacity=shape.batch,
                token_capacity=shape.verify_width,
                draft_tokens=shape.draft_tokens,
                verify_tokens=shape.verify_width,
                draft_source=recipe.draft_source,
                speculation_enabled=True,
                packed_token_capacity=shape.packed_rows,
                confidence_width=min(recipe.confidence_width, shape.draft_tokens),
                copy_tokens=recipe.supports_history_drafts and shape.draft_tokens > 0,
            )
        )
    return ExecutionManifest(core_version=__version__, recipe=recipe.name, config=config, graphs=graphs)


def _graph(kind: str, batch: int, tokens: int, enabled: bool | None) -> ExecutionGraph:
    return ExecutionGraph(
        kind=kind,
        operation_id=OPERATION_IDS[kind],
        batch_capacity=batch,
        token_capacity=tokens,
        speculation_enabled=enabled,
    )
