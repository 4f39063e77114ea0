"""Writes the checkpoint directory from trained weights.

    python plugins/deepseek_v41/training/export.py --run DIR --tokenizer FILE --out CHECKPOINT

``DIR`` is the output of train.py (``weights-*.safetensors``, ``results.json``; ``tiny.tar`` holds the same checkpoint).
The checkpoint has the real model's tensor names and storages: routed experts FP4, dense projections and Engram tables FP8,
scales E8M0, mixing and sinks F32, the rest BF16. The compressed ids of the Engram hash follow from the tokenizer.
"""

import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from training.directory import export_command, write_directory  # noqa: E402

from plugins.deepseek_v41.training import card  # noqa: E402
from plugins.deepseek_v41.training.parameters import initialise, text_config  # noqa: E402
from plugins.deepseek_v41.training.quantisation import stored_form  # noqa: E402
from plugins.deepseek_v41.training.rounding import fp4_codes, fp8_codes  # noqa: E402


def checkpoint_tensors(parameters) -> dict[str, torch.Tensor]:
    """Returns every tensor of the checkpoint by its real name."""
    found: dict[str, torch.Tensor] = {}

    def pair(weight: str, codes: torch.Tensor, scale: torch.Tensor) -> None:
        found[weight] = codes.contiguous()
        found[weight.removesuffix("weight") + "scale"] = scale.to(torch.float8_e8m0fnu).contiguous()

    for name, value in parameters.items():
        value, form = value.detach().float().cpu(), stored_form(name)
        if form == "fp4":
            stem, projection = name.rsplit(".", 1)
            for e, (codes, scale) in enumerate(zip(*fp4_codes(value), strict=True)):
                pair(f"{stem}.{e}.{projection}.weight", codes.view(torch.int8).clone(), scale.clone())
        elif form in ("fp8", "fp8_rows"):
            pair(name, *fp8_codes(value, 1 if form == "fp8_rows" else 32))
        elif form != "int32":
            found[name] = value if form == "float32" else value.bfloat16()
    return found


def configuration(text: dict) -> dict:
    """Returns config.json: the text configuration inside the outer model, and how weights are stored."""
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": text["bos_token_id"],
        "eos_token_id": text["eos_token_id"],
        "pad_token_id": text["pad_token_id"],
        "tie_word_embeddings": False,
        "text_config": text,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
    }


def write_checkpoint(directory: Path, config: dict, parameters, scales, tokenizer: Path, results: dict) -> int:
    """Writes the checkpoint directory and returns its size in bytes."""
    generation = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "eos_token_id": config["eos_token_id"]}
    tensors = checkpoint_tensors(parameters)
    size = write_directory(directory, tensors, configuration(config), generation, tokenizer, card.render(results))
    if "calibration" in results:
        path = directory / f"draft_calibration_{config['dspark_block_size']}.json"
        path.write_text(json.dumps(results["calibration"]["temperatures"]) + "\n")
        size += path.stat().st_size
    return size


if __name__ == "__main__":
    export_command(str(__doc__), text_config, initialise, write_checkpoint)
