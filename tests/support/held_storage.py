"""Every tensor that an object holds, found by walking it: what a plan of memory is compared with."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import fields, has

from specdec.state.store import StateStore

#: What an object's account does not include: stores are planned by layout, a drafter's target by itself.
_LEAVES = (str, bytes, int, float, complex, type, types.ModuleType, torch.device, torch.dtype, torch.Generator)


def tensors(root: object, *, without: tuple[object, ...] = ()) -> Iterator[torch.Tensor]:
    """Tensors reachable through attributes, containers, closures, bound methods and partial functions, in no order.

    without: objects that are not entered.
    """
    seen = {id(item) for item in without}
    waiting: list[Any] = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or item is None or isinstance(item, _LEAVES):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += item
        elif isinstance(item, functools.partial):
            waiting += [item.func, item.args, item.keywords]
        elif isinstance(item, types.MethodType):
            waiting.append(item.__self__)
        elif isinstance(item, types.FunctionType):
            waiting += [cell.cell_contents for cell in item.__closure__ or () if _filled(cell)]
        else:
            waiting += [getattr(item, field.name) for field in fields(type(item))] if has(type(item)) else []
            waiting += getattr(item, "__dict__", {}).values()


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def storages(root: object, *, without: tuple[object, ...] = ()) -> dict[int, int]:
    """Bytes by address of every storage behind ``tensors``; one storage counts once."""
    found: dict[int, int] = {}
    for tensor in tensors(root, without=without):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


def held_bytes(root: object, *, without: tuple[object, ...] = ()) -> int:
    """Bytes of all storages behind ``tensors``."""
    return sum(storages(root, without=without).values())


def store_of(owner: Any) -> StateStore:
    """The state store of a target or drafter."""
    assert isinstance(owner.store, StateStore)
    return owner.store
