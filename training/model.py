"""What the trainer and the evaluation expect of a model, and the parts that do not depend on the architecture."""

from types import ModuleType

import torch
from torch import nn

from training import selector


class WholeSequenceModel:
    """Target and drafter over one parameter dictionary (keys are checkpoint names).

    ``dtype``: compute dtype of matrix products.  ``scales``: activation scales by layer prefix (float32 ``[2]``), used when
    ``quantised`` contains ``activations``.  ``stored``: values that stand in for parameters (quantised or frozen).  A
    subclass names the functions of ``functions`` that :meth:`compile` compiles and adds

    * ``target(tokens [B, T], select=, keep=)`` → (logits ``[B, T, V]`` float32, feedback rows ``h``, statistics); ``keep``
      stores what the selector's loss needs under ``attention`` (tensors whose last two are q and k);
    * ``chain(h, tokens, depths, keep=)`` → draft logits of every depth; ``group_scores(prefix, *kept[:-2])``.
    """

    functions: ModuleType
    compiled_names: tuple[str, ...] = ()
    # Width and number of tokens of the selection.
    ratio: int
    budget: int

    def __init__(self, config: dict, parameters: dict[str, nn.Parameter], dtype: torch.dtype = torch.float32):
        self.config, self.parameters, self.dtype = config, parameters, dtype
        self.device = next(iter(parameters.values())).device
        self.quantised: frozenset[str] = frozenset()
        self.scales: dict[str, torch.Tensor] = {}
        self.measure = False
        self.stored: dict[str, torch.Tensor] = {}
        self.blocks = {name: getattr(self.functions, name) for name in self.compiled_names}
        # Depth counts as tensors: a Python number would compile one variant a depth.
        self._counts = torch.arange(16, device=self.device)

    def compile(self) -> None:
        """Compiles each block once (equal shapes share code)."""
        for name in self.compiled_names:
            self.blocks[name] = self.guarded(name, torch.compile(getattr(self.functions, name), dynamic=False))

    def guarded(self, name: str, compiled):
        """The compiled block, replaced by the plain one for good when its forward cannot be compiled."""

        def call(*arguments):
            try:
                return compiled(*arguments)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:  # any compiler failure has the same cure
                print(f"block {name} runs uncompiled: {type(error).__name__}: {str(error)[:500]}", flush=True)
                self.blocks[name] = getattr(self.functions, name)
                return self.blocks[name](*arguments)

        return call

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: value.detach() for name, value in self.parameters.items()}

    def get(self, name: str) -> torch.Tensor:
        """The parameter, or its stored (quantised) value when quantisation-aware evaluation is on."""
        return self.stored.get(name, self.parameters[name])

    def selection(self, prefix: str, *inputs: torch.Tensor) -> torch.Tensor:
        """Boolean mask ``[B, 1, T, T]`` of the tokens each query attends under the selector's budget."""
        return selector.selection_mask(self.group_scores(prefix, *inputs), self.ratio, self.budget)

    def selector_loss(self, prefix: str, *kept: torch.Tensor) -> torch.Tensor:
        """The selector's loss of one attention layer; only the selector's parameters get gradients (detached inputs)."""
        *inputs, q, k = kept
        return selector.selector_loss(self.group_scores(prefix, *inputs), q, k, self.ratio)

    def rebalance(self, statistics: dict[str, dict], rate: float) -> None:
        """Called after a step with the statistics of ``target`` and ``mtp``; routers may adjust their bias here."""

    def target(self, tokens: torch.Tensor, *, select: bool = False, keep: bool = False):
        raise NotImplementedError

    def chain(self, h: torch.Tensor, tokens: torch.Tensor, depths: int, *, keep=None, statistics=None):
        raise NotImplementedError

    def group_scores(self, prefix: str, *inputs: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError
