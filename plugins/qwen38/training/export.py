"""Writes the trained weights: resumable FP32 state files and the checkpoint directory.

    python plugins/qwen38/training/export.py --run DIR --tokenizer FILE --out CHECKPOINT

``DIR`` is the output of train.py (``weights-*.safetensors``, ``results.json``; ``tiny.tar`` holds the same checkpoint).
The checkpoint has the real model's tensor names: routed experts NVFP4 (target with ``input_scale``, MTP without), n-gram
table FP8 with one BF16 scale, the rest BF16.
"""

import argparse
import json
import shutil
import tarfile
from pathlib import Path

import card
import torch
from parameters import MTP, TEXT, hash_vectors, initialise, text_config
from quantisation import is_expert, matrices, table_codes
from safetensors.torch import load_file, save_file
from storage import nvfp4

STATE_FILE_BYTES = 14 * 2**20


def save_state(directory: Path, parameters, scales) -> None:
    """Writes FP32 parameters and activation scales to ``weights-N.safetensors`` files of at most 14 MiB."""
    for old in directory.glob("weights-*.safetensors"):
        old.unlink()
    everything = {n: v.detach().float().cpu().contiguous() for n, v in parameters.items()}
    everything |= {f"scales.{n}": v.detach().float().cpu() for n, v in scales.items()}
    part, size, index = {}, 0, 0
    for name, value in everything.items():
        if part and size + value.nbytes > STATE_FILE_BYTES:
            save_file(part, str(directory / f"weights-{index}.safetensors"))
            part, size, index = {}, 0, index + 1
        part[name] = value
        size += value.nbytes
    save_file(part, str(directory / f"weights-{index}.safetensors"))


def load_state(directory: Path, parameters) -> dict[str, torch.Tensor]:
    """Copies saved weights into ``parameters`` (all must be present, equal shapes); returns the activation scales."""
    found = {}
    for path in sorted(directory.glob("weights-*.safetensors")):
        found |= load_file(str(path))
    missing = [n for n in parameters if n not in found]
    if missing:
        raise SystemExit(f"{directory}: {len(missing)} tensors missing, first {missing[0]}")
    device = next(iter(parameters.values())).device
    for name, parameter in parameters.items():
        if found[name].shape != parameter.shape:
            raise SystemExit(f"{directory}: {name} is {tuple(found[name].shape)}, expected {tuple(parameter.shape)}")
        parameter.data.copy_(found[name])
    return {n.removeprefix("scales."): v.to(device) for n, v in found.items() if n.startswith("scales.")}


def checkpoint_tensors(config: dict, parameters, scales) -> dict[str, torch.Tensor]:
    """Returns every tensor of the checkpoint by its real name."""
    found: dict[str, torch.Tensor] = {}
    for name, value in parameters.items():
        value = value.detach().float().cpu()
        if is_expert(name):
            stem, ending = name.rsplit(".", 1)
            names = ("gate_proj", "up_proj") if ending == "gate_up_proj" else ("down_proj",)
            packed, block, outer = nvfp4.quantise(matrices(name, value))
            layer = stem.removesuffix("mlp.experts")
            for e in range(value.shape[0]):
                for j, projection in enumerate(names):
                    p = f"{stem}.{e}.{projection}."
                    found[p + "weight"] = packed[e, j].clone()
                    found[p + "weight_scale"] = block[e, j].clone()
                    found[p + "weight_scale_2"] = outer[e, j].clone()
                    if name.startswith(TEXT):
                        found[p + "input_scale"] = (
                            scales[layer][0 if ending == "gate_up_proj" else 1].float().cpu().clone()
                        )
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
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    tensors = checkpoint_tensors(config, parameters, scales)
    save_file(dict(sorted(tensors.items())), str(directory / "model.safetensors"), metadata={"format": "pt"})
    generation = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.95,
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": [config["eos_token_id"]],
    }
    for name, content in (("config.json", configuration(config)), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    shutil.copyfile(tokenizer, directory / "tokenizer.json")
    (directory / "README.md").write_text(card.render(results), encoding="utf-8")
    for path in directory.iterdir():
        path.chmod(0o644)
    return sum(p.stat().st_size for p in directory.iterdir())


def pack(directory: Path, archive: Path) -> None:
    with tarfile.open(archive, "w") as bundle:
        bundle.add(directory, arcname=directory.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = json.loads((arguments.run / "results.json").read_text())
    config = text_config(**results["text_config_arguments"])
    parameters = initialise(config, 0)
    scales = load_state(arguments.run, parameters)
    size = write_checkpoint(arguments.out, config, parameters, scales, arguments.tokenizer, results)
    print(f"{arguments.out}: {size:,} bytes")


if __name__ == "__main__":
    main()
