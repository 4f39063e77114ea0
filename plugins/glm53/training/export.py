"""Writes the checkpoint directory from trained weights.

    python plugins/glm53/training/export.py --run DIR --tokenizer FILE --out CHECKPOINT

``DIR`` is the output of train.py (``weights-*.safetensors``, ``results.json``; ``tiny.tar`` holds the same checkpoint).
The checkpoint has the real model's tensor names: routed experts NVFP4 (the target's with ``input_scale`` and coded block
scales, the MTP layer's plain), mixing and gate parameters F32, the rest BF16.
"""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from training.directory import export_command, write_directory  # noqa: E402
from training.storage import csf  # noqa: E402

from plugins.glm53.training import card  # noqa: E402
from plugins.glm53.training.parameters import FLOAT32, TEXT, initialise, text_config  # noqa: E402
from plugins.glm53.training.quantisation import of_drafter  # noqa: E402
from training.quantisation import expert_tensors, is_expert  # noqa: E402


def checkpoint_tensors(parameters, scales) -> dict[str, torch.Tensor]:
    """Returns every tensor of the checkpoint by its real name."""
    found: dict[str, torch.Tensor] = {}
    for name, value in parameters.items():
        value = value.detach().float().cpu()
        if not is_expert(name):
            found[name] = value if name.endswith(FLOAT32) else value.bfloat16()
            continue
        stem, ending = name.rsplit(".", 1)
        drafter = of_drafter(name, parameters)
        for e, projection, packed, block, outer in expert_tensors(name, value, joined=not drafter):
            p = f"{stem}.{e}.{projection}."
            found[p + "weight"], found[p + "weight_scale_2"] = packed, outer
            if drafter:
                found[p + "weight_scale"] = block
                continue
            fixed, exceptions = csf.encode(block)
            found[p + "weight_scale.nvfp4_csf_fixed"] = fixed
            found[p + "weight_scale.nvfp4_csf_exceptions"] = exceptions
            layer, site = stem.removesuffix("mlp.experts"), 0 if ending == "gate_up_proj" else 1
            found[p + "input_scale"] = scales[layer][site].float().cpu().clone()
    return found


def configuration(text: dict) -> dict:
    """Returns config.json: the text configuration inside the outer model, and the quantised modules."""
    target = {"quant_algo": "NVFP4", "group_size": 16, "weight_scale_encoding": "csf"}
    drafter = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    kinds = enumerate(text["mlp_layer_types"])
    layers = {f"{TEXT}layers.{i}.mlp.experts": target for i, kind in kinds if kind == "sparse"}
    layers[f"{TEXT}layers.{text['num_hidden_layers']}.mlp.experts"] = drafter
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "dtype": "bfloat16",
        "eos_token_id": text["eos_token_id"],
        "tie_word_embeddings": False,
        "text_config": text,
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": layers,
        },
    }


def write_checkpoint(directory: Path, config: dict, parameters, scales, tokenizer: Path, results: dict) -> int:
    """Writes the checkpoint directory and returns its size in bytes."""
    generation = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "eos_token_id": config["eos_token_id"]}
    tensors = checkpoint_tensors(parameters, scales)
    return write_directory(directory, tensors, configuration(config), generation, tokenizer, card.render(results))


if __name__ == "__main__":
    export_command(str(__doc__), text_config, initialise, write_checkpoint)
