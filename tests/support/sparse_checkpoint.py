"""Checkpoints of any size as headers alone: the payloads are holes in the files."""

import json

CODES = {
    "bfloat16": "BF16",
    "float32": "F32",
    "uint8": "U8",
    "int8": "I8",
    "int32": "I32",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "uint32": "U32",
}


def write_sparse(directory, shards, config, payloads=None):
    """Write headers and index for ``shards`` of (name, shape, dtype, bytes); payloads are holes of the full size.

    payloads: bytes of single tensors, for those that must not be zero.
    """
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    weight_map, header_bytes = {}, 0
    for number, tensors in enumerate(shards):
        file, header, position = f"part-{number}.safetensors", {}, 0
        for name, shape, dtype, size in tensors:
            header[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [position, position + size]}
            position += size
            weight_map[name] = file
        raw = json.dumps(header).encode()
        with (directory / file).open("wb") as out:
            out.write(len(raw).to_bytes(8, "little") + raw)
            out.truncate(8 + len(raw) + position)
            for name in (payloads or {}).keys() & header.keys():
                out.seek(8 + len(raw) + header[name]["data_offsets"][0])
                out.write(payloads[name])
        header_bytes += 8 + len(raw)
    index = json.dumps({"weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index)
    return header_bytes + len(index)


def entries(inventory):
    return [(spec.name, spec.shape, spec.dtype, spec.bytes) for spec in inventory.expand()]
