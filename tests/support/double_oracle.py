"""Running transformers' classes in float64 throughout.

They widen half precision by casting to float32 in many places, which in a float64 model narrows instead and leaves single
precision noise in every comparison. Under this mode the casts keep float64, so an implementation can be compared to 1e-12
and a wrong epsilon or a misplaced rounding shows.
"""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode


class KeepDouble(TorchFunctionMode):
    """Inside this context every request for float32, by cast or by ``dtype=``, gives float64.

    narrow: further dtypes treated so; with bfloat16 among them a reference's rounding points disappear.
    """

    def __init__(self, *narrow: torch.dtype) -> None:
        super().__init__()
        self.narrow = (torch.float32, *narrow)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            return args[0].double()
        if func in (torch.Tensor.to, torch.Tensor.type):
            args = tuple(torch.float64 if argument in self.narrow else argument for argument in args)
        if kwargs.get("dtype") in self.narrow:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def double_model(model):
    """Converts a causal model in place and returns it: float64 weights, rope frequencies computed in float64, plain experts.

    The grouped expert product has no float64 form.
    """
    model = model.double()
    model.config._experts_implementation = "eager"
    rope = model.model.rotary_emb
    with KeepDouble():
        rope.inv_freq = rope.compute_default_rope_parameters(model.config)[0]
    assert rope.inv_freq.dtype is torch.float64
    return model
