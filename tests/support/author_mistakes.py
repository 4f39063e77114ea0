"""Mistakes with hooks and with what they return, as changes of the small plugin, and what must be said of each."""

from __future__ import annotations

from attrs import frozen

#: Standard tests that notice mistakes; the sound plugin passes each of them.
STATE = "test_state_after_every_accepted_count"
ONE_ROUND = "test_feedback_is_the_row_of_the_last_consumed_token"
MOVED = "test_snapshots_continue_elsewhere"
CAPTURABLE = "test_round_is_capturable"
GREEDY = "test_greedy_equals_plain_decoding"


@frozen
class Case:
    """One mistake. changes: (file, text, instead). said: words of the message, in order; "{file|text}" stands for the place of
    the line with that text."""

    name: str
    changes: tuple[tuple[str, str, str], ...]
    said: tuple[str, ...]
    test: str = CAPTURABLE


# --- 1 a hook that is not one, and 2 what discovery gets ---------------------------------------------------------------

LOAD = "def load_drafter(checkpoint, target, capacities):"
DECLARE = "    return [RECIPE]\n"

DISCOVERY = [
    Case(
        "hook typo",
        (("plugin.py", LOAD, "def load_draftr(checkpoint, target, capacities):"),),
        (
            "load_draftr",
            "{plugin.py|def load_dra}",
            "no 'load_draftr'",
            "did you mean 'load_drafter'?",
            "hooks: declare_speculation, build_target_state, load_drafter, capture_round",
        ),
    ),
    Case(
        "argument typo",
        (("plugin.py", LOAD, "def load_drafter(checkpoint, targt, capacities):"),),
        (
            "load_drafter",
            "{plugin.py|def load_dra}",
            "'targt'",
            "did you mean 'target'?",
            "recipe, checkpoint, target, capacities",
        ),
    ),
    Case(
        "argument by keyword only",
        (("plugin.py", LOAD, "def load_drafter(*, checkpoint, target, capacities):"),),
        ("load_drafter", "{plugin.py|def load_dra}", "'checkpoint' by keyword only", "drop the *"),
    ),
    Case(
        "no marker",
        (("plugin.py", "@hookimpl\ndef declare_speculation", "def declare_speculation"),),
        ("does not implement declare_speculation", "{plugin.py|def declare_speculation}", "put @hookimpl"),
    ),
    Case(
        "one recipe",
        (("plugin.py", DECLARE, "    return RECIPE\n"),),
        ("declare_speculation", "{plugin.py|def declare_speculation}", "iterable of Recipe, got Recipe", "[RECIPE]"),
    ),
    Case(
        "a dict of recipes",
        (("plugin.py", DECLARE, "    return {RECIPE.name: RECIPE}\n"),),
        ("declare_speculation", "{plugin.py|def declare_speculation}", "iterable of Recipe, got dict", "[RECIPE]"),
    ),
    Case(
        "names of recipes",
        (("plugin.py", DECLARE, "    return [RECIPE.name]\n"),),
        ("declare_speculation", "{plugin.py|def declare_speculation}", "yield Recipe records, got str", "[RECIPE]"),
    ),
    Case(
        "no return",
        (("plugin.py", DECLARE, "    [RECIPE]\n"),),
        ("declare_speculation", "{plugin.py|def declare_speculation}", "returned no recipe", "[RECIPE]"),
    ),
    Case(
        "an error of its own",
        (("plugin.py", DECLARE, "    return [RECIPE.nam]\n"),),
        ("AttributeError", "no attribute 'nam'", "{plugin.py|RECIPE.nam]}"),
    ),
]


# --- 2 what hooks return, and what methods return in a round -----------------------------------------------------------

MAKE = "    return RecurrentDrafter(checkpoint, target, capacities)\n"
DRAW = "proposer.draw(depth, (row + mean) @ self.target.head.T)"
COMMITTED = "        self.store.commit(lanes.slots, taken)\n"

RETURNED = [
    Case(
        "no target",
        (("plugin.py", "    return RecurrentTarget(", "    RecurrentTarget("),),
        (
            "plugin toy (specdec-toy 1.0)",
            "returns nothing from build_target_state",
            "{plugin.py|def build_target_state}",
            "return",
        ),
    ),
    Case(
        "no marker",
        (("plugin.py", "@hookimpl\ndef load_drafter", "def load_drafter"),),
        ("returns nothing from load_drafter", "does not implement", "{plugin.py|def load_drafter}", "put @hookimpl"),
    ),
    Case(
        "a class",
        (("plugin.py", MAKE, "    return RecurrentDrafter\n"),),
        (
            "load_drafter",
            "{plugin.py|def load_dra}",
            "the class RecurrentDrafter",
            "{drafter.py|class RecurrentDrafter}",
            "itself",
            "return an object of it",
            "specdec.interfaces.Drafter",
        ),
    ),
    Case(
        "a tuple",
        (("plugin.py", MAKE, MAKE.replace(")\n", "), None\n")),),
        (
            "load_drafter",
            "{plugin.py|def load_dra}",
            "returned a tuple",
            "one object with the methods of specdec.interfaces.Drafter",
        ),
    ),
    Case(
        "missing methods",
        (
            ("drafter.py", "    def snapshot(", "    def snapshots("),
            ("drafter.py", "    def faults(", "    def fault("),
        ),
        (
            "load_drafter",
            "RecurrentDrafter",
            "{drafter.py|class RecurrentDrafter}",
            "without snapshot, faults;",
            "specdec.interfaces.Drafter has store, lag, prefill",
        ),
    ),
    Case(
        "missing parameter",
        (("drafter.py", "def absorb(self, lanes, tokens, emitted):", "def absorb(self, tokens, emitted):"),),
        ("absorb(tokens, emitted)", "{drafter.py|def absorb}", "cannot be called", "absorb(lanes, tokens, emitted)"),
    ),
    Case(
        "parameters in another order",
        (("drafter.py", "def absorb(self, lanes, tokens, emitted):", "def absorb(self, lanes, emitted, tokens):"),),
        (
            "absorb(lanes, emitted, tokens)",
            "{drafter.py|def absorb}",
            "another order",
            "absorb(lanes, tokens, emitted)",
        ),
    ),
    Case(
        "rows not counted",
        (("state.py", 'name="rows"', 'name="count"'),),
        ("RecurrentDrafter", "does not count its rows", "declare a field 'rows'"),
    ),
    Case(
        "an error of its own",
        (("drafter.py", "        self.target = target\n", "        self.target = target.model\n"),),
        ("load_drafter", "AttributeError", "no attribute 'model'", "{drafter.py|target.model}"),
    ),
    Case(
        "not a round",
        (
            (
                "plugin.py",
                "@hookimpl\ndef load_drafter",
                "@hookimpl\ndef capture_round(shape):\n    return shape\n\n\n@hookimpl\ndef load_drafter",
            ),
        ),
        (
            "capture_round",
            "{plugin.py|def capture_round}",
            "RoundShape",
            "without program, boundary_state, submit, run",
        ),
    ),
    Case(
        "logits with a dimension too many",
        (("drafter.py", DRAW, DRAW.replace("(row", "((row").replace(".T)", ".T).unsqueeze(1))")),),
        ("RecurrentDrafter.propose", "{drafter.py|def propose}", "depth 0", "logits [4, 1, 24]", "[B, V] = [4, 24]"),
    ),
    Case(
        "hidden states for logits",
        (("drafter.py", DRAW, "proposer.draw(depth, row + mean)"),),
        ("RecurrentDrafter.propose", "{drafter.py|def propose}", "logits [4, 12] float64", "[B, V] = [4, 24]"),
    ),
    Case(
        "token ids of another dtype",
        (("drafter.py", DRAW, "proposer.place(depth, lanes.pending.float())"),),
        ("RecurrentDrafter.propose", "{drafter.py|def propose}", "tokens [4] float32", "[B] = [4] int64"),
    ),
    Case(
        "a depth that there is not",
        (("drafter.py", DRAW, DRAW.replace("depth", "depth + 1")),),
        (
            "RecurrentDrafter.propose",
            "{drafter.py|def propose}",
            "depth 1 where draft_tokens is 1",
            "range(draft_tokens)",
        ),
    ),
    Case(
        "tokens without the proposer",
        (("drafter.py", DRAW, "((row + mean) @ self.target.head.T).argmax(-1)"),),
        ("RecurrentDrafter.propose", "{drafter.py|def propose}", "proposed nothing", "proposer.draw(depth, logits)"),
    ),
    Case(
        "tokens returned",
        (
            (
                "drafter.py",
                "            row = self.row(row, token)\n        return None",
                "            row = self.row(row, token)\n        return token",
            ),
        ),
        ("RecurrentDrafter.propose", "{drafter.py|def propose}", "returns [4] int64", "None, or forecasts", "proposer"),
    ),
    Case(
        "logits of the last row only",
        (
            (
                "target.py",
                COMMITTED,
                COMMITTED
                + "\n    def verify(self, tokens, lanes):\n        return super().verify(tokens, lanes)[:, -1]\n",
            ),
        ),
        ("RecurrentTarget.verify", "{target.py|def verify}", "returns [4, 24]", "[B, W, V] = [4, 1, 24]"),
    ),
    Case(
        "feedback of the last row only",
        (
            (
                "target.py",
                COMMITTED,
                COMMITTED
                + "\n    def prefill(self, tokens, slot, start):\n        return super().prefill(tokens, slot, start)[-1]\n",
            ),
        ),
        ("RecurrentTarget.prefill", "{target.py|def prefill}", "returns [12]", "[T, D] = "),
    ),
]
