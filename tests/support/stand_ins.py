"""Objects that satisfy the core's protocols and do nothing: what hooks may return in tests that never run a round."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from specdec.declaration import StateField, StateLayout
from specdec.interfaces import Drafter, Round, Target

ROWS = StateField(name="rows", kind="row", shape=(), dtype="int64", source="test")


def _stand_in(protocol: type, name: str, **values: Any) -> Any:
    methods = {key: value for key, value in vars(protocol).items() if not key.startswith("_") and callable(value)}
    return type(name, (), {**methods, **values})()


def store(owner: str, *fields: StateField) -> Any:
    """Something with a layout."""
    return SimpleNamespace(layout=StateLayout(owner=owner, fields=fields, max_draft_tokens=4))


def stand_in_target(**values: Any) -> Any:
    """values: other attributes or methods of the class."""
    return _stand_in(Target, "StandInTarget", **{"store": store("target"), "vocab_size": 8, **values})


def stand_in_drafter(**values: Any) -> Any:
    """values: as for ``stand_in_target``."""
    return _stand_in(Drafter, "StandInDrafter", **{"store": store("drafter", ROWS), "lag": 1, **values})


def stand_in_round(**values: Any) -> Any:
    """values: as for ``stand_in_target``."""
    return _stand_in(Round, "StandInRound", **{"program": None, "boundary_state": {}, **values})
