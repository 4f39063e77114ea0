"""A guard that fails the moment a round does what a CUDA graph could not capture. It works on the CPU.

    with CapturableGuard() as guard:
        outcome = round.run()
        guard.allow(outcome)

Three classes of fault are found:

* the host waits for, or reads, a tensor: `.item()`, `if tensor:`, `.tolist()`, `nonzero`, boolean-mask indexing and every
  other operation whose result's shape depends on data;
* data crosses between host and device other than by an asynchronous pinned copy, constants built from Python numbers
  (`torch.tensor([...])`) included: on the CPU they look harmless, on a GPU each is a copy from pageable memory;
* draws from torch's generators, whose state a replay cannot own;

and at the end: storage made inside that is still alive, unless allowed. A round must leave nothing behind. Every message names
the line at fault: the plugin's own, where the core or torch were called from it.

Not seen: numpy code that got at memory before the guard, `torch.cuda.synchronize` and streams, work in other threads.
"""

import gc
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import attrs
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specdec import places
from specdec.testing.uncapturable import refusal, refusal_of_function


class NotCapturable(AssertionError):
    """A round did something that a captured graph cannot contain.

    Attributes:
        op: name of the operation, for example "aten.nonzero.default" or "Tensor.item", or "persistent allocation".
        reason: why it cannot be captured, and what to use instead.
        where: "file:line in function" that did it, empty if unknown.
    """

    def __init__(self, op: str, reason: str, where: str = "") -> None:
        super().__init__(f"{op}: {reason}{f' ({where})' if where else ''}")
        self.op = op
        self.reason = reason
        self.where = where


class CapturableGuard:
    """Context manager; see the module. One object serves one `with` block.

    Attributes:
        operations: operations dispatched inside so far, views included.

    Raises:
        NotCapturable: inside the block, from the call at fault; at its end, if storage made inside is still alive (not
            when the block already raised).
    """

    def __init__(self) -> None:
        self.operations = 0
        self._made: dict[int, tuple[StorageWeakRef, str]] = {}
        self._allowed: set[int] = set()
        self._since = 0
        self._dispatch = _DispatchGuard(self)
        self._function = _FunctionGuard(self)

    def allow(self, *values: Any) -> None:
        """Let storage outlive the block: tensors, or tuples, lists, dicts and attrs records that hold them."""
        for value in values:
            for tensor in _tensors(value):
                self._allowed.add(StorageWeakRef(tensor.untyped_storage()).cdata)

    def __enter__(self) -> "CapturableGuard":
        # of the frame with the block
        self._since = places.depth() - 1
        self._function.__enter__()
        self._dispatch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._dispatch.__exit__(kind, error, trace)
        self._function.__exit__(kind, error, trace)
        if kind is not None:
            return
        alive = self._alive()
        if alive:
            # Only reference cycles may be holding it; those are not the round's state.
            gc.collect()
            alive = self._alive()
        if alive:
            shown = "; ".join(alive[:3]) + ("; ..." if len(alive) > 3 else "")
            raise NotCapturable(
                "persistent allocation",
                f"{len(alive)} storage(s) made inside the round are still alive: {shown}. Write into buffers allocated "
                "at preparation, or name intended results with guard.allow(...)",
            )

    def _line(self) -> str:
        return places.running(self._since, __file__)

    def _alive(self) -> list[str]:
        return [what for key, (ref, what) in self._made.items() if key not in self._allowed and not ref.expired()]

    def _record(self, name: str, before: set[int], result: Any) -> None:
        """Remember storages in `result` that were not among an operation's inputs."""
        for tensor in _tensors(result):
            ref = StorageWeakRef(tensor.untyped_storage())
            # The weak reference keeps the address from being used again, so it can serve as a key.
            if ref.cdata not in before and ref.cdata not in self._made:
                where = self._line()
                self._made[ref.cdata] = (ref, f"{name} {tuple(tensor.shape)} {tensor.dtype} ({where})")

    def _foreign(self, tensor: Tensor) -> bool:
        return StorageWeakRef(tensor.untyped_storage()).cdata not in self._made


class _DispatchGuard(TorchDispatchMode):
    def __init__(self, guard: CapturableGuard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reason = refusal(func, args, kwargs, self._guard._foreign)
        if reason is not None:
            raise NotCapturable(str(func), reason, self._guard._line())
        # In inference mode compound operations arrive whole; their parts must be seen.
        if func._can_decompose():
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        self._guard.operations += 1
        before = {StorageWeakRef(t.untyped_storage()).cdata for t in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        self._guard._record(str(func), before, result)
        return result


class _FunctionGuard(TorchFunctionMode):
    """Calls that read or build tensors below the dispatcher: only this layer sees them on the CPU."""

    def __init__(self, guard: CapturableGuard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reason = refusal_of_function(func, args, kwargs)
        if reason is not None:
            raise NotCapturable(_written(func), reason, self._guard._line())
        return func(*args, **kwargs)


def _written(func: Callable[..., Any]) -> str:
    """How a call is written: "Tensor.item", not "_TensorBase.item"."""
    name = getattr(func, "__qualname__", str(func))
    return f"Tensor.{name.rpartition('.')[2]}" if name.startswith(("Tensor", "_TensorBase", "TensorBase")) else name


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif attrs.has(type(value)):
        for attribute in attrs.fields(type(value)):
            yield from _tensors(getattr(value, attribute.name))
