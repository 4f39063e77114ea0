"""Writes the trained weights: resumable FP32 state files and the checkpoint directory.

    python plugins/qwen38/training/export.py --run DIR --tokenizer FILE --out CHECKPOINT

``DIR`` is the output of train.py (``weights-*.safetensors``, ``results.json``; ``tiny.tar`` holds the same checkpoint).
The checkpoint has the real model's tensor names: routed experts NVFP4 (target with ``input_scale``, MTP without), n-gram
table FP8 with one BF16 scale, the rest BF16.
"""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from training.directory import export_command, write_directory  # noqa: E402

from plugins.qwen38.training import card  # noqa: E402
from plugins.qwen38.training.parameters import MTP, TEXT, hash_vectors, initialise, text_config  # noqa: E402
from plugins.qwen38.training.quantisation import table_codes  # noqa: E402
from training.quantisation import expert_tensors, is_expert  # noqa: E402


def checkpoint_tensors(config: dict, parameters, scales) -> dict[str, torch.Tensor]:
    """Returns every tensor of the checkpoint by its real name."""
    found: dict[str, torch.Tensor] = {}
    for name, value in parameters.items():
        value = value.detach().float().cpu()
        if is_expert(name):
            stem, ending = name.rsplit(".", 1)
            layer = stem.removesuffix("mlp.experts")
            for e, projection, packed, block, outer in expert_tensors(name, value):
                p = f"{stem}.{e}.{projection}."
                found[p + "weight"], found[p + "weight_scale"], found[p + "weight_scale_2"] = packed, block, outer
                if name.startswith(TEXT):
                    site = 0 if ending == "gate_up_proj" else 1
                    found[p + "input_scale"] = scales[layer][site].float().cpu().clone()
        elif name.endswith("ngram_embedding.weight"):
            codes, scale = table_codes(value)
            stem = name.removesuffix("weight")
            for index, shard in enumerate(codes.chunk(config["split_ngram_parts"])):
                found[f"{stem}shard_{index}.weight"] = shard.clone()
            found[stem + "weight_scale"] = scale
        else:
            found[name] = value.bfloat16()
    for ordinal, layer in enumerate(config["ple_layer_ids"]):
        stem = f"{TEXT}layers.{layer - 1}.ple.ple_embedding."
        multipliers, primes, offsets, _ = hash_vectors(config, ordinal)
        found[stem + "layer_multipliers"] = torch.tensor(multipliers)
        found[stem + "ngram_heads_vocab_sizes"] = torch.tensor(primes)
        found[stem + "ngram_heads_offsets"] = torch.tensor(offsets)
    return found


def configuration(text: dict) -> dict:
    """Returns config.json: the text configuration inside the outer model, and the quantised modules.

    The MTP experts are listed twice: under their stored name and under the name they have when appended to the stack.
    """
    target = {"quant_algo": "NVFP4", "group_size": 16}
    drafter = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    layers = {f"{TEXT}layers.{i}.mlp.experts": target for i in range(text["num_hidden_layers"])}
    layers |= {f"{MTP}layers.{i}.mlp.experts": drafter for i in (0, text["num_hidden_layers"])}
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
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
    generation = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.95,
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": [config["eos_token_id"]],
    }
    tensors = checkpoint_tensors(config, parameters, scales)
    return write_directory(directory, tensors, configuration(config), generation, tokenizer, card.render(results))


if __name__ == "__main__":
    export_command(str(__doc__), text_config, initialise, write_checkpoint)
