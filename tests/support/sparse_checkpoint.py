"""Checkpoints of any size as headers alone: the payloads are holes in the files."""

import json
import subprocess
import sys

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


# Run in its own process: what is imported and how many bytes are read would otherwise be anybody's.
PROBE = """
import contextlib, importlib, io, json, sys, time
from types import SimpleNamespace
from specdec.cli import inspect as command
RECIPE = importlib.import_module(sys.argv[2]).RECIPE
command.recipe_book = lambda: SimpleNamespace(discovery=SimpleNamespace(recipes=(RECIPE,)))
def bytes_read():
    try:
        return int(open("/proc/self/io").readline().split()[1])
    except OSError:
        return 0
before, start, out = bytes_read(), time.perf_counter(), io.StringIO()
with contextlib.redirect_stdout(out):
    code = command.run(SimpleNamespace(directory=sys.argv[1], recipe=None, json=True))
print(json.dumps({"code": int(code), "seconds": time.perf_counter() - start, "read": bytes_read() - before,
    "heavy": sorted({"torch", "numpy", "safetensors"} & set(sys.modules)), "result": json.loads(out.getvalue())}))
"""


def inspect_alone(directory, recipe_module):
    """What ``specdec inspect`` says of a folder to a user with one recipe: exit code, seconds, bytes read, heavy modules,
    and the result."""
    run = subprocess.run(
        [sys.executable, "-c", PROBE, str(directory), recipe_module],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    return json.loads(run.stdout)
