"""The steps of a run with a block drafter: blocks at random anchors of every sequence instead of recursive drafts."""

import torch

from plugins.deepseek_v41.training import objectives
from training.trainer import Trainer

# Tokens for each anchor, and sets of anchors for each pass of the frozen target.
_SPACING, _SETS = 8, 2


class BlockTrainer(Trainer):
    """Phases 1 and 2 for a DSpark drafter; block length from the configuration."""

    def build(self, compiled: bool) -> None:
        super().build(compiled)
        terms = objectives.slot_terms
        self.slot_terms = torch.compile(terms, dynamic=False) if compiled else terms

    def calibrate(self, batches: int = 8) -> None:
        """Nothing: input scales are computed from the values themselves."""

    def block_terms(self, logits: torch.Tensor, features: torch.Tensor, text: torch.Tensor, drafted: dict):
        """Terms of blocks at freshly drawn anchors; ``logits, features [B, T, …]`` of ``text [B, T + 1]``."""
        length = self.config["dspark_block_size"]
        context = logits.shape[1]
        anchors = objectives.random_anchors(
            text.shape[0], max(1, context // _SPACING), context - length, self.generator, self.device
        )
        h, base = self.model.draft(features, text, anchors, length, drafted)
        bias, confidence = self.model.correct(h, objectives.at_slots(text, anchors, length))
        target = objectives.at_slots(logits.detach(), anchors, length)
        following = objectives.at_slots(text, anchors + 1, length)
        return self.slot_terms(target, base, bias, confidence, following)

    @staticmethod
    def acceptances(terms) -> dict[str, torch.Tensor]:
        mean = terms.acceptance.detach().mean((0, 1))
        tokens = 1 + terms.acceptance.detach().cumprod(-1).mean((0, 1)).sum()
        return {f"a{k}": mean[k - 1] for k in (1, 2, 4, mean.numel()) if k <= mean.numel()} | {"tokens": tokens}

    def joint_step(self, quantised: bool, rate: float = 0.0) -> dict:
        """Phase 1: next-token loss, and distillation of the drafter whose gradient reaches the trunk."""
        text, own, model = self.draw(), self.architecture, self.model
        model.quantised = frozenset({"caches", "inputs"} if quantised else ())
        model.stored = own.unquantised(self.parameters)
        if quantised:
            model.stored = {
                p: v for part in ("target", "mtp") for p, v in own.straight_through(self.parameters, part).items()
            }
        logits, features, statistics = model.target(text[:, :-1])
        loss = self.losses.language_loss(logits, text[:, 1:])
        balance = torch.stack(statistics["balance"]).mean()
        drafted: dict = {}
        terms = self.block_terms(logits, features, text, drafted)
        total = loss + own.balance_weight * balance + self.a.joint_weight * objectives.block_loss(terms, 0.0)
        total.backward()
        model.stored = {}
        model.rebalance({"target": statistics, "mtp": drafted}, rate * own.balance_rate)
        logged = {"loss": loss, "balance": balance, **self.acceptances(terms)}
        return {k: v.detach() for k, v in logged.items()}

    def drafter_step(self, sharp: float, rate: float = 0.0) -> dict:
        """Phase 2: the drafter on the frozen target, and the indexers on the attention mass of compressed rows."""
        text, own, model = self.draw(), self.architecture, self.model
        model.quantised = frozenset({"caches", "inputs"})
        model.stored = self.frozen
        # The graph of the target is dropped unused: running it in gradient mode spares a second set of compiled blocks.
        logits, features, statistics = model.target(text[:, :-1], keep=True)
        logits, features = logits.detach(), features.detach().requires_grad_()
        few = max(1, self.batch // 8)
        index = 0.0
        model.stored = {**self.frozen, **own.straight_through(self.parameters, "indexer")}
        for layer, (source, *kept) in statistics["attention"].items():
            index = index + model.index_loss(layer, source, *(t[:few] for t in kept))
        total = 0.0
        for _ in range(_SETS):
            drafted: dict = {}
            model.stored = {**self.frozen, **own.straight_through(self.parameters, "mtp")}
            terms = self.block_terms(logits, features, text, drafted)
            loss = objectives.block_loss(terms, sharp) / _SETS
            loss.backward()
            total = total + loss.detach()
            model.rebalance({"mtp": drafted}, rate * own.balance_rate / _SETS)
        (0.1 * index).backward()
        model.stored = {}
        logged = {"draft": total, "index": index, "confidence": terms.confidence.mean(), **self.acceptances(terms)}
        return {k: v.detach() for k, v in logged.items()}
