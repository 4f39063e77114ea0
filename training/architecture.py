"""What a plugin hands to the training command."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from training.evaluation import report
from training.model import WholeSequenceModel


@dataclass(frozen=True)
class Architecture:
    """One small checkpoint's own part.

    ``command``: path of the plugin's entry script.  ``options``: extra options of the command, name → (keyword of
    ``text_config``, default, help).  ``parameter_list(config)``: name → (shape, optimiser group, init).
    ``straight_through(parameters, part)``: stored values with identity gradients of ``target`` or ``mtp``;
    ``unquantised(parameters)``: the same entries unchanged.  ``in_drafter(name, parameters)``: parameters of the MTP layer;
    ``in_selector(name, parameters)``: parameters of the selectors, which the drafter's phase trains too.
    ``write_checkpoint(directory, config, parameters, scales, tokenizer, results)`` returns bytes.
    ``read_tokenizer(config, parameters, tokenizer)``: sets what follows from the tokenizer, before a resume.  ``budget``:
    default of ``--budget``.  ``trainer``: a subclass of :class:`training.trainer.Trainer` in its place; ``report``: the
    held-out measures, as :func:`training.evaluation.report`.
    """

    command: str
    text_config: Callable[..., dict]
    parameter_list: Callable[[dict], dict]
    initialise: Callable[..., dict]
    model: type[WholeSequenceModel]
    straight_through: Callable[..., dict]
    unquantised: Callable[[Any], dict]
    checkpoint_values: Callable[..., dict]
    write_checkpoint: Callable[..., int]
    in_drafter: Callable[[str, Any], bool]
    in_selector: Callable[[str, Any], bool]
    top_k: int | None
    top_p: float
    layers: int
    stored_form: str
    balance_weight: float = 0.01
    balance_rate: float = 0.0
    options: dict[str, tuple[str, int, str]] = field(default_factory=dict)
    read_tokenizer: Callable[..., None] | None = None
    budget: int = 512
    trainer: type | None = None
    report: Callable[..., dict] = report
