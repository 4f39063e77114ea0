"""What a checkpoint's configuration says about the quantisation of its modules. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specdec.errors import CheckpointError

if TYPE_CHECKING:
    from specdec.checkpoint.reader import Checkpoint

__all__ = ["quantisation_of", "quantises_activations"]


def quantisation_of(
    checkpoint: Checkpoint, module_name: str, *, aliases: Mapping[str, str] | None = None
) -> Mapping[str, Any] | None:
    """Return what ``config.json`` says about the quantisation of a module, or None.

    The answer is the entry of ``quantization_config.quantized_layers`` for the module or its nearest listed ancestor. The
    entry is information: loading follows the stored tensors.

    ``aliases`` maps other beginnings of module names to the stored ones (``{"draft.layers.9.": "draft.layers.0."}``), for
    models whose layers are listed under the names that engines give them. Both names of such a module are one module here.

    Raises:
        CheckpointError: if two names of one module are listed with different entries.
    """
    config = checkpoint.config
    text = config.get("text_config", config)
    quantisation = config.get("quantization_config") or text.get("quantization_config") or {}
    listed: dict[str, dict[str, Any]] = {}
    for name, entry in (quantisation.get("quantized_layers") or {}).items():
        listed.setdefault(_stored_name(name, aliases or {}), {})[name] = entry
    module = _stored_name(module_name, aliases or {})
    while module:
        entries = list(listed.get(module, {}).values())
        if any(entry != entries[0] for entry in entries):
            raise CheckpointError(
                f"{checkpoint.directory / 'config.json'}: quantization_config.quantized_layers gives one module different "
                f"entries: {listed[module]}"
            )
        if entries:
            return entries[0]
        module = module.rpartition(".")[0]
    return None


def quantises_activations(
    checkpoint: Checkpoint, module_name: str, *, aliases: Mapping[str, str] | None = None
) -> bool:
    """Whether experts under a module quantise what they read, if their weights are NVFP4 and have input scales.

    W4A4 is the meaning of NVFP4; a checkpoint that says ``W4A16_NVFP4`` keeps activations as they are. See ``quantisation_of``
    for names and errors.
    """
    declared = quantisation_of(checkpoint, module_name, aliases=aliases) or {}
    return declared.get("quant_algo") != "W4A16_NVFP4"


def _stored_name(module: str, aliases: Mapping[str, str]) -> str:
    for other, stored in aliases.items():
        if module.startswith(other):
            return stored + module.removeprefix(other)
    return module
