import contextlib
import functools
import gc

import attrs
import numpy as np
import pytest
import torch
from torch.nn import functional

import specdec.catalog
from specdec.testing import CapturableGuard, NotCapturable

X = torch.arange(20.0).view(4, 5) + 1
MASK = X > 3
INDEX = torch.tensor([1, 2])

FAULTS = {
    "item": lambda: X[0, 0].item(),
    "bool": lambda: bool(X[0, 0] > 0),
    "if": lambda: 1 if MASK.any() else 2,
    "and": lambda: MASK.all() and 1,
    "int": lambda: int(INDEX[0]),
    "float": lambda: float(X[0, 0]),
    "complex": lambda: complex(X[0, 0]),
    "python index": lambda: [1, 2, 3][INDEX[0]],
    "range": lambda: range(INDEX[0]),
    "max": lambda: max(INDEX),
    "sorted": lambda: sorted(INDEX),
    "slice bound": lambda: X[: INDEX[0]],
    "tolist": lambda: X.tolist(),
    "repr": lambda: repr(X),
    "format": lambda: f"{X[0, 0]}",
    "contains": lambda: 1.0 in X,
    "numpy": lambda: X.numpy(),
    "asarray": lambda: np.asarray(X),
    "from_dlpack": lambda: np.from_dlpack(X),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "assert": lambda: torch._assert(MASK.any(), "x"),
    "nonzero": lambda: MASK.nonzero(),
    "nonzero tuple": lambda: MASK.nonzero(as_tuple=True),
    "argwhere": lambda: MASK.argwhere(),
    "where of one": lambda: torch.where(MASK),
    "mask index": lambda: X[MASK],
    "mask index of a row": lambda: X[MASK[:, 0]],
    "uint8 mask index": lambda: X[MASK[:, 0].to(torch.uint8)],
    "mask assignment": lambda: X.clone().__setitem__(MASK, 0.0),
    "mask index_put": lambda: X.clone().index_put_((MASK,), X.sum()),
    "masked_select": lambda: X.masked_select(MASK),
    "unique": lambda: INDEX.unique(),
    "unique_consecutive": lambda: INDEX.unique_consecutive(),
    "bincount": lambda: INDEX.bincount(),
    "isin": lambda: torch.isin(INDEX, INDEX),
    "repeat_interleave": lambda: X[:2].repeat_interleave(INDEX, 0),
    "tensor_split": lambda: X.tensor_split(INDEX),
    "rand": lambda: torch.rand(3),
    "randn_like": lambda: torch.randn_like(X),
    "randint": lambda: torch.randint(0, 3, (2,)),
    "randperm": lambda: torch.randperm(3),
    "multinomial": lambda: X.multinomial(1),
    "bernoulli": lambda: X.clone().bernoulli_(0.5),
    "normal_": lambda: X.clone().normal_(),
    "exponential_": lambda: X.clone().exponential_(),
    "dropout": lambda: functional.dropout(X, 0.5),
    "tensor": lambda: torch.tensor([1.0, 2.0]),
    "scalar tensor": lambda: torch.tensor(1.0),
    "new_tensor": lambda: X.new_tensor([1.0]),
    "as_tensor": lambda: torch.as_tensor([1.0]),
    "from_numpy": lambda: torch.from_numpy(np.zeros(3)),
    "list index": lambda: X[[0, 1]],
    "other device": lambda: X.to("meta"),
    "cpu": lambda: X.cpu(),
    "copy to other device": lambda: torch.empty(4, 5, device="meta").copy_(X),
    "resize": lambda: X.resize_(8, 9),
}

FINE = {
    "arithmetic": lambda: (X + 1) * X / 2,
    "in place": lambda: X.clone().mul_(2),
    "number assignment": lambda: X.clone().__setitem__((slice(None), 3), 5.0),
    "tensor assignment": lambda: X.clone().__setitem__(0, X[1]),
    "where": lambda: torch.where(MASK, X, 0.0),
    "masked_fill": lambda: X.masked_fill(MASK, 0.0),
    "integer index": lambda: X[INDEX, 0],
    "integer index_put": lambda: X.clone().index_put_((INDEX,), X[:2]),
    "gather, scatter": lambda: X.clone().scatter_(1, INDEX[:1].expand(4, 1), X.gather(1, INDEX[:1].expand(4, 1))),
    "repeat_interleave with size": lambda: X[:2].repeat_interleave(INDEX, 0, output_size=3),
    "repeat_interleave by a number": lambda: X.repeat_interleave(2, 0),
    "sort, topk, cumsum": lambda: (X.sort(-1), X.topk(2), X.cumsum(-1)),
    "shapes": lambda: X.shape[0] + X.numel() + len(X) + X.dim(),
    "fills": lambda: (torch.zeros(3), torch.full((2,), 1.5), torch.arange(4), torch.zeros_like(X), torch.eye(3)),
    "dtype": lambda: X.to(torch.float64).half(),
    "same device": lambda: X.to(X.device).to("cpu"),
    "attention": lambda: functional.scaled_dot_product_attention(X[None], X[None], X[None], is_causal=True),
    "layers": lambda: (functional.linear(X, X), functional.embedding(INDEX, X), functional.rms_norm(X, (5,))),
    "einsum": lambda: torch.einsum("ab,cb->ac", X, X) + X @ X.T,
    "convolution": lambda: functional.conv1d(X[None], torch.ones(4, 1, 2), groups=4),
    "dropout off": lambda: functional.dropout(X, 0.5, training=False),
    "out": lambda: torch.add(X, X, out=torch.empty(4, 5)),
    "iteration over rows": lambda: [row + 1 for row in X],
}

MODES = [contextlib.nullcontext, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAULTS)
def test_catches(name, mode):
    # Compound operations take other paths in inference mode; each must be caught in all three.
    with mode(), pytest.raises(NotCapturable) as caught, CapturableGuard():
        FAULTS[name]()
    assert caught.value.op != "persistent allocation"
    assert caught.value.reason in str(caught.value) and caught.value.op in str(caught.value)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FINE)
def test_lets_pass(name, mode):
    with mode(), CapturableGuard():
        FINE[name]()


def test_raises_at_the_call_at_fault():
    reached = []
    with pytest.raises(NotCapturable) as caught, CapturableGuard():  # noqa: PT012
        reached.append("before")
        X.sum().item()
        reached.append("after")
    assert reached == ["before"]
    assert any(entry.name == "test_raises_at_the_call_at_fault" for entry in caught.traceback)


def test_messages_name_operation_and_cure():
    with (
        pytest.raises(NotCapturable, match=r"aten\.index\.Tensor: a boolean mask .* use torch\.where"),
        CapturableGuard(),
    ):
        X[MASK]


@pytest.mark.parametrize("name", FAULTS)
def test_messages_name_the_line_of_the_call_at_fault(name):
    with pytest.raises(NotCapturable) as caught, CapturableGuard():
        FAULTS[name]()
    line = FAULTS[name].__code__.co_firstlineno
    assert caught.value.where == f"{__file__}:{line} in <lambda>"
    assert str(caught.value).endswith(f"({caught.value.where})")


#: Code of the core, as far as its file says.
CORE = """
def core(x):
    return x.sum().item()

def suite(guard, run):
    with guard:
        run(core)
"""


def suite_of_the_core():
    names = {}
    exec(compile(CORE, specdec.catalog.__file__, "exec"), names)
    return names["suite"]


def test_a_call_of_the_core_is_blamed_on_who_called_it():
    def plugin(core):
        core(X)

    with pytest.raises(NotCapturable) as caught:
        suite_of_the_core()(CapturableGuard(), plugin)
    assert caught.value.where.endswith(" in plugin")


def test_the_core_is_blamed_where_nobody_else_ran():
    calls = functools.partial(eval(compile("lambda x, core: core(x)", specdec.catalog.__file__, "eval")), X)
    with pytest.raises(NotCapturable) as caught:
        suite_of_the_core()(CapturableGuard(), calls)
    assert caught.value.where == f"{specdec.catalog.__file__}:3 in core"


def test_names_are_those_that_are_written():
    for name, written in (("item", "Tensor.item"), ("if", "Tensor.__bool__"), ("int", "Tensor.__int__")):
        with pytest.raises(NotCapturable) as caught, CapturableGuard():
            FAULTS[name]()
        assert caught.value.op == written


def test_a_result_that_stays_is_an_allocation():
    kept = []
    said = r"persistent allocation: 1 storage.*aten\.add\.Tensor \(4, 5\) torch.float32 \(.*test_guard\.py:\d+ in test_a_result"
    with pytest.raises(NotCapturable, match=said):  # noqa: SIM117
        with CapturableGuard():
            kept.append(X + 1)


def test_views_of_results_that_stay_are_allocations():
    kept = {}
    with pytest.raises(NotCapturable, match="persistent"), CapturableGuard():
        kept["view"] = (X * 2)[0, :2]


def test_a_cache_filled_inside_is_an_allocation():
    @functools.cache
    def table(n):
        return torch.arange(n)

    with pytest.raises(NotCapturable, match=r"aten\.arange"), CapturableGuard():
        X[:, 0] + table(4)
    # Prepared beforehand it is none.
    with CapturableGuard():
        X[:, 0] + table(4)


def test_a_buffer_replaced_instead_of_written_is_an_allocation():
    class State:
        value = torch.zeros(3)

    state = State()
    with pytest.raises(NotCapturable, match="persistent"), CapturableGuard():
        state.value = state.value + 1
    with CapturableGuard():
        state.value.add_(1)
        state.value.copy_(state.value * 2)


def test_allowed_results_may_stay():
    @attrs.frozen(eq=False)
    class Outcome:
        tokens: torch.Tensor
        note: str = "x"

    with CapturableGuard() as guard:
        single, record, nested = X + 1, Outcome(X + 2), {"a": [(X + 3)[0]], "b": (None, 4)}
        guard.allow(single, record, nested)
    assert single[0, 0] == 2 and record.tokens[0, 0] == 3 and nested["a"][0][0] == 4


def test_allowing_one_result_does_not_allow_another():
    with pytest.raises(NotCapturable, match="1 storage"), CapturableGuard() as guard:  # noqa: PT012
        first, second = X + 1, X + 2
        guard.allow(first)
    assert second is not first


def test_views_of_older_tensors_may_stay():
    with CapturableGuard():
        row, same = X[0], X.view(20)
    assert row[0] == same[0] == 1


def test_storage_held_by_a_cycle_only_is_not_an_allocation():
    class Node:
        pass

    gc.disable()
    try:
        with CapturableGuard():
            node = Node()
            node.self, node.data = node, X + 1
            del node
    finally:
        gc.enable()


def test_an_error_inside_is_not_covered_by_the_allocation_report():
    kept = []
    with pytest.raises(KeyError), CapturableGuard():  # noqa: PT012
        kept.append(X + 1)
        raise KeyError("own")


def test_resizing_a_tensor_of_the_round_itself_is_fine():
    with CapturableGuard():
        torch.empty(0).resize_(4)


def test_nothing_stays_active_afterwards():
    with pytest.raises(NotCapturable), CapturableGuard():
        X.sum().item()
    assert X.sum().item() == 210
    assert X[MASK].tolist() == list(range(4, 21))
    with CapturableGuard(), pytest.raises(NotCapturable):
        X.tolist()
    assert torch.tensor([1]).tolist() == [1]


def test_guards_nest():
    with CapturableGuard() as outer, CapturableGuard() as inner:
        X + 1
    assert inner.operations == 1
    assert outer.operations == 1


def test_counts_operations():
    with CapturableGuard() as guard:
        (X + 1).mul_(2)
    assert guard.operations == 2
