"""Mistakes of what a plugin does in a round, as changes of the small plugin, and what must be said of each."""

from __future__ import annotations

from author_mistakes import COMMITTED, GREEDY, MOVED, ONE_ROUND, STATE, Case

# --- 3 feedback off by one ---------------------------------------------------------------------------------------------

ROWS = "feedback = self.target.feedback_rows(lanes.slots, count)\n"
PAIR = "rows = self.row(feedback, tokens[:, :count].clamp(min=0))\n"
FIRST = "row = self.row(self.target.feedback(slots), lanes.pending)\n"
HISTORY = ("drafter history:", "of draft history")
WRITTEN_BY = ("look at RecurrentDrafter.absorb", "{drafter.py|def absorb}")

OFF_BY_ONE = [
    Case(
        "absorbs the feedback one later",
        (("drafter.py", ROWS, ROWS.replace("count)", "count + 1)[:, 1:]")),),
        (*HISTORY, "the feedback one later (h[i+1] instead of h[i])", *WRITTEN_BY, "RecurrentTarget.feedback_rows"),
        STATE,
    ),
    Case(
        "absorbs the feedback one earlier",
        (
            (
                "drafter.py",
                FIRST,
                "self.saved = self.target.feedback(slots)\n        row = self.row(self.saved, lanes.pending)\n",
            ),
            (
                "drafter.py",
                ROWS,
                ROWS + "            feedback = torch.cat([self.saved.unsqueeze(1), feedback[:, :-1]], dim=1)\n",
            ),
        ),
        (*HISTORY, "the feedback one earlier (h[i−1] instead of h[i])", *WRITTEN_BY),
        STATE,
    ),
    Case(
        "pairs the token one later",
        (("drafter.py", PAIR, PAIR.replace(":count", "1 : count + 1")),),
        (*HISTORY, "the token one later (x[i+2] instead of x[i+1])", *WRITTEN_BY),
        STATE,
    ),
    Case(
        "pairs the token one earlier",
        (("drafter.py", PAIR, "tokens = torch.cat([lanes.pending.unsqueeze(1), tokens], dim=1)\n            " + PAIR),),
        (*HISTORY, "the token one earlier (x[i] instead of x[i+1])", *WRITTEN_BY),
        STATE,
    ),
    Case(
        "completes the last row from the last round's first input",
        (("drafter.py", FIRST, "row = self.row(self.target.feedback_rows(slots, 1)[:, 0], lanes.pending)\n"),),
        (
            *HISTORY,
            "the feedback one earlier",
            "row N−1 of a round is written by RecurrentDrafter.propose",
            "{drafter.py|def propose}",
        ),
        STATE,
    ),
    Case(
        "the target's rows are shifted",
        (
            (
                "target.py",
                COMMITTED,
                COMMITTED + "\n    def feedback_rows(self, slots, rows):\n"
                "        return self.store['memory'][0][:, 1 : rows + 1].index_select(0, slots)\n",
            ),
        ),
        (
            "feedback_rows of slot",
            "the input 1 later",
            "RecurrentTarget.feedback_rows",
            "{target.py|def feedback_rows}",
        ),
        ONE_ROUND,
    ),
    Case(
        "the target's saved row is shifted",
        (
            (
                "target.py",
                COMMITTED,
                COMMITTED + "\n    def feedback(self, slots):\n"
                "        column = (self.store.selected.index_select(0, slots) - 1).clamp(min=0)\n"
                "        return self.store.read_column('memory', 0, slots * 4 + column)\n",
            ),
        ),
        ("feedback of slot", "the input 1 earlier", "RecurrentTarget.feedback", "{target.py|def feedback(}"),
        ONE_ROUND,
    ),
    Case(
        "history is counted one too far",
        (("drafter.py", "lanes.consumed + emitted - 1)", "lanes.consumed + emitted)"),),
        ("draft history does not follow", "the drafter's field rows is 8 at 8", "should be 7", "prefill and commit"),
        STATE,
    ),
]


# --- 4 a state field forgotten -----------------------------------------------------------------------------------------

STEPS = '        self.store.write_row("steps", lanes.slots, lanes.consumed + taken)\n'
COMMIT = ("RecurrentTarget.commit", "{target.py|def commit}")

FORGOTTEN = [
    Case(
        "a row is never committed",
        (("target.py", STEPS, ""),),
        ("state of the target: steps (0 times) was not committed in the round", "store.write_row('steps',", *COMMIT),
        STATE,
    ),
    Case(
        "history is never committed",
        (("drafter.py", "        self.store.commit(lanes.slots, emitted)\n", ""),),
        (
            "state of the drafter: history (0 times) was not committed in the round",
            "store.commit(",
            "{drafter.py|def commit}",
        ),
        STATE,
    ),
    Case(
        "a field is committed twice",
        (("target.py", COMMITTED, COMMITTED * 2),),
        ("memory (2 times) was committed again", "exactly once a round", *COMMIT),
        STATE,
    ),
    Case(
        "a row is committed as it was",
        (
            (
                "target.py",
                STEPS,
                STEPS.replace("lanes.consumed + taken", 'self.store.read_row("steps", 0, lanes.slots)'),
            ),
        ),
        (
            "target steps: [65] against [68]",
            "3 tokens earlier",
            "was not committed in the last round",
            *COMMIT,
            "write_row('steps'",
        ),
        MOVED,
    ),
    Case(
        "the column before is selected",
        (("target.py", COMMITTED, COMMITTED.replace("taken)", "(taken - 1).clamp(min=0))")),),
        (
            "target memory:",
            "column 0 is selected and the right value is in column 1",
            "1 earlier",
            *COMMIT,
            "taken − 1",
        ),
        ONE_ROUND,
    ),
    Case(
        "what was rejected is selected",
        (("target.py", COMMITTED, COMMITTED.replace("taken)", "torch.where(taken > 0, self.width, taken))")),),
        ("target memory:", "column 3 is selected and the right value is in column 0", "3 later", *COMMIT),
        ONE_ROUND,
    ),
    Case(
        "a prompt leaves it out",
        (
            (
                "target.py",
                '            self.store.write_row("steps", slots, positions[:, -1] + 1)\n',
                "            pass\n",
            ),
        ),
        (
            "target steps: [8] against [0]",
            "a prompt pass leaves it at its initial value",
            ".prefill",
            "does not set steps",
        ),
        STATE,
    ),
    Case(
        "a snapshot leaves it out",
        (
            (
                "drafter.py",
                "        return self.store.state_after(slots, torch.zeros_like(slots))\n",
                "        found = self.store.state_after(slots, torch.zeros_like(slots))\n"
                "        return {'history': found.get('history')}\n",
            ),
        ),
        ("RecurrentDrafter.snapshot", "{drafter.py|def snapshot}", "leaves out rows"),
        MOVED,
    ),
    Case(
        "it is not restored",
        (
            (
                "target.py",
                COMMITTED,
                COMMITTED + "\n    def restore(self, slot, state, consumed):\n"
                "        kept = self.store['steps'][:, :, 0].index_select(1, slot)\n"
                "        super().restore(slot, {**state, 'steps': kept}, consumed)\n",
            ),
        ),
        (
            "target steps: [0] against [68]",
            "nothing was written to steps",
            "RecurrentTarget.restore",
            "{target.py|def restore}",
        ),
        MOVED,
    ),
    Case(
        "it is not declared",
        (
            (
                "target.py",
                "        hidden = self.feedback(slots)\n",
                "        if not hasattr(self, 'hidden'):\n"
                "            self.hidden = torch.zeros(self.store.slots + 1, 12, dtype=self.head.dtype)\n"
                "        hidden = self.hidden[slots]\n",
            ),
            (
                "target.py",
                "        found = torch.stack",
                "        self.hidden[slots] = hidden\n        found = torch.stack",
            ),
        ),
        ("as in plain decoding", "outside the state store: RecurrentTarget.hidden [5, 12]", "declared as a StateField"),
        GREEDY,
    ),
]


# --- 5 the host waits in the round -------------------------------------------------------------------------------------

SEEN = "        seen = self.steps.unsqueeze(0) <= first.unsqueeze(1)\n"
MEAN = "        mean = torch.where(seen.unsqueeze(2), history, 0.0).sum(1) / lanes.consumed.unsqueeze(1)\n"

SYNCHRONISED = [
    Case(
        "item",
        (("drafter.py", SEEN, "        longest = first.max().item()\n" + SEEN),),
        ("Tensor.item", "torch.where", "{drafter.py|.item()}", "in propose"),
    ),
    Case(
        "bool",
        (
            (
                "drafter.py",
                "        if draft_tokens == 0:\n",
                "        if draft_tokens == 0 or (lanes.pending < 0).any():\n",
            ),
        ),
        ("Tensor.__bool__", "torch.where", "{drafter.py|.any()}", "in propose"),
    ),
    Case(
        "tolist",
        (
            (
                "drafter.py",
                "        count = tokens.shape[1] - 1\n",
                "        count = tokens.shape[1] - 1\n        emitted.tolist()\n",
            ),
        ),
        ("Tensor.tolist", "torch.where", "{drafter.py|.tolist()}", "in absorb"),
    ),
    Case(
        "boolean mask",
        (
            (
                "drafter.py",
                MEAN,
                "        mean = torch.stack([one[mask].mean(0) for one, mask in zip(history, seen)])\n",
            ),
        ),
        ("aten.index.Tensor", "boolean mask", "torch.where or masked_fill_", "{drafter.py|one[mask]}"),
    ),
    Case(
        "cpu",
        (("target.py", "            rows.append(hidden)\n", "            rows.append(hidden.cpu())\n"),),
        ("Tensor.cpu", "copies to the host", "{target.py|.cpu()}", "in run_rows"),
    ),
    Case(
        "storage kept",
        (("target.py", "        found = torch.stack", "        found = self.kept = torch.stack"),),
        ("persistent allocation", "{target.py|self.kept}", "in run_rows", "buffers allocated at preparation"),
    ),
]
