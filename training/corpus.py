"""Builds the training corpus of the small checkpoints: text, tokenizer and token files.

    python training/corpus.py --out DIR [--cache DIR]

Text is Python source and prose from the interpreter's standard library and from version-pinned packages under
permissive licences (``PACKAGES``), fetched with ``pip download --no-deps``.  Files are filtered, deduplicated by content
and split by a hash of their content: about one file in a hundred is held out as a whole.  A byte-level BPE tokenizer
with exactly 512 ids (id 500 is ``<|endoftext|>``) is trained on a fixed subset of the training files.

Written to ``--out``: ``tokenizer.json``; ``train.bin.xz`` and ``heldout.bin.xz`` (little-endian uint16 token ids,
every document followed by id 500); ``heldout/*.txt`` (a few held-out files as text); ``manifest.json`` (packages,
versions, licences, counts).  Equal package versions and interpreter give equal files.
"""

import argparse
import email.parser
import hashlib
import json
import lzma
import platform
import re
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from pathlib import Path

VOCABULARY = 512
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 500
# Interpreter whose standard library is part of the recipe.
INTERPRETER = "3.11.7"
# (distribution, version, "sdist" | "wheel").  Source distributions are used where they add documentation.
PACKAGES = (
    ("django", "5.2.19", "sdist"),
    ("sphinx", "9.0.4", "sdist"),
    ("sqlalchemy", "2.1.9", "sdist"),
    ("twisted", "26.10.0", "sdist"),
    ("flask", "3.1.3", "sdist"),
    ("jinja2", "3.1.6", "sdist"),
    ("werkzeug", "3.1.9", "sdist"),
    ("requests", "2.34.2", "sdist"),
    ("attrs", "26.1.0", "sdist"),
    ("click", "8.5.1", "sdist"),
    ("pytest", "9.2.0", "sdist"),
    ("tornado", "6.6.1", "sdist"),
    ("celery", "5.7.0", "sdist"),
    ("scrapy", "2.19.0", "sdist"),
    ("networkx", "3.6.1", "sdist"),
    ("starlette", "1.10.0", "sdist"),
    ("rich", "15.0.0", "sdist"),
    ("djangorestframework", "3.18.3", "sdist"),
    ("fastapi", "0.165.0", "sdist"),
    ("pydantic", "2.14.4", "sdist"),
    ("black", "26.10.1", "sdist"),
    ("setuptools", "84.2.1", "sdist"),
    ("httpx", "0.28.1", "sdist"),
    ("sympy", "1.14.0", "wheel"),
    ("numpy", "2.4.6", "wheel"),
    ("scipy", "1.17.1", "wheel"),
    ("pandas", "3.1.1", "wheel"),
    ("scikit-learn", "1.9.1", "wheel"),
    ("scikit-image", "0.26.0", "wheel"),
    ("matplotlib", "3.11.2", "wheel"),
    ("statsmodels", "0.15.0", "wheel"),
    ("xarray", "2026.9.0", "wheel"),
    ("dask", "2026.8.0", "wheel"),
    ("distributed", "2026.8.0", "wheel"),
    ("bokeh", "3.9.2", "wheel"),
    ("astropy", "8.0.2", "wheel"),
    ("transformers", "5.24.0", "wheel"),
    ("ipython", "9.18.1", "wheel"),
    ("nltk", "3.10.4", "wheel"),
    ("jedi", "0.20.1", "wheel"),
    ("aiohttp", "3.14.5", "wheel"),
    ("torch-geometric", "2.8.1", "wheel"),
    ("pip", "26.3", "wheel"),
    ("wagtail", "8.0.1", "wheel"),
    ("mypy", "2.4.1", "wheel"),
)
# Words that a licence field or classifier of an accepted package must contain (any one of them).
PERMISSIVE = ("bsd", "mit", "apache", "psf", "python software foundation", "matplotlib", "isc", "public domain", "cnri")
REFUSED = ("gpl", "general public", "mozilla", "mpl", "proprietary", "cc-by-nc")
SUFFIXES = (".py", ".pyi", ".rst", ".md", ".txt")
# Names that hold licence texts, vendored data or machine-made tables rather than source and prose.
SKIPPED = re.compile(
    r"(licen[sc]e|copying|authors|locale/|_pb2|/data/|sources\.txt|unicode_?data|/lib2to3/tests/data)", re.I
)
CAP_BYTES = 7_000_000  # per source, so that no package dominates
HELDOUT_SHARE = 100  # one file in this many
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def fetch(name: str, version: str, kind: str, cache: Path) -> Path:
    """Returns the archive of one pinned package, downloading it into ``cache`` when absent."""
    stem = re.sub(r"[-_.]+", "[-_.]", re.escape(name).replace("\\", ""))
    pattern = re.compile(rf"{stem}-{re.escape(version)}([-.].*)?(\.whl|\.tar\.gz|\.zip)$", re.I)

    def present() -> Path | None:
        suffix = ".whl" if kind == "wheel" else ".gz"
        return next((p for p in sorted(cache.iterdir()) if pattern.match(p.name) and p.name.endswith(suffix)), None)

    if (found := present()) is None:
        form = "--only-binary=:all:" if kind == "wheel" else f"--no-binary={name}"
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            form,
            "-d",
            str(cache),
            f"{name}=={version}",
        ]
        subprocess.run(command, check=True)
        found = present()
    if found is None:
        raise SystemExit(f"{name}=={version}: pip download left no {kind} in {cache}")
    return found


def members(archive: Path):
    """Yields (path, bytes) of every regular file of a wheel or source archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as bundle:
            for info in sorted(bundle.infolist(), key=lambda i: i.filename):
                if not info.is_dir():
                    yield info.filename, bundle.read(info)
    else:
        with tarfile.open(archive) as bundle:
            for info in bundle:
                if info.isfile():
                    yield info.name, bundle.extractfile(info).read()


def licence(name: str, files: dict[str, bytes]) -> str:
    """Returns the licence line of a package's metadata; exits when it is not clearly permissive."""
    paths = sorted((p for p in files if p.endswith(("/METADATA", "/PKG-INFO"))), key=lambda p: (p.count("/"), p))
    if not paths:
        raise SystemExit(f"{name}: no metadata file, cannot check its licence")
    message = email.parser.Parser().parsestr(files[paths[0]].decode("utf-8", "replace"))
    short = message.get("License", "") or ""
    classifiers = [c for c in message.get_all("Classifier", []) if c.startswith("License ::")]
    fields = [
        message.get("License-Expression", "") or "",
        short.strip().splitlines()[0] if short.strip() else "",
        *classifiers,
    ]
    text = "; ".join(f.strip() for f in fields if f.strip())[:300]
    lowered = text.lower()
    # Expressions such as "BSD-3-Clause AND GPL-3.0-with-GCC-exception" describe bundled binaries that are not read.
    named = lowered.split(" and ")[0]
    if not any(word in lowered for word in PERMISSIVE) or any(word in named for word in REFUSED):
        raise SystemExit(f"{name}: licence {text!r} is not on the permissive list")
    return text


def acceptable(path: str, data: bytes) -> str | None:
    """Returns the text of a source or prose file, or None for data, generated tables and other languages."""
    if not path.endswith(SUFFIXES) or SKIPPED.search(path) or not 300 <= len(data) <= 250_000:
        return None
    try:
        text = data.decode("utf-8").replace("\r\n", "\n").replace("\t", "    ")
    except UnicodeDecodeError:
        return None
    lines = text.splitlines()
    if len(text) / max(len(lines), 1) > 90 or max(map(len, lines)) > 1000:
        return None
    letters = sum(c.isalpha() or c.isspace() for c in text)
    if letters < 0.65 * len(text) or len(data) > 1.02 * len(text):
        return None
    return re.sub(r"[ \t]+\n", "\n", text).strip("\n") + "\n"


def library_files() -> dict[str, bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    found = {}
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root).as_posix()
        if path.is_file() and path.suffix in SUFFIXES and "site-packages" not in relative:
            found[relative] = path.read_bytes()
    return found


def collect(cache: Path) -> tuple[list[tuple[str, str, str]], list[dict]]:
    """Returns (documents [(digest, source path, text)], one record per source with its licence and counts)."""
    documents, records, seen = [], [], set()
    for name, version, kind in (("python-stdlib", INTERPRETER, "interpreter"), *PACKAGES):
        if kind == "interpreter":
            files, terms = library_files(), "PSF-2.0"
        else:
            files = dict(members(fetch(name, version, kind, cache)))
            terms = licence(name, files)
        kept = []
        for path, data in files.items():
            if (text := acceptable(path, data)) is not None:
                digest = hashlib.sha256(text.encode()).hexdigest()
                if digest not in seen:
                    seen.add(digest)
                    kept.append((digest, f"{name}/{path}", text))
        kept.sort()  # digest order: a fixed pseudo-random choice under the cap
        total, chosen = 0, []
        for item in kept:
            if total < CAP_BYTES:
                chosen.append(item)
                total += len(item[2])
        documents += chosen
        records.append(
            {
                "name": name,
                "version": version,
                "form": kind,
                "licence": terms,
                "files": len(chosen),
                "characters": total,
            }
        )
        print(f"{name} {version}: {len(chosen)} files, {total / 1e6:.2f} M characters, {terms[:60]}", flush=True)
    documents.sort()
    return documents, records


def train_tokenizer(texts: list[str]) -> dict:
    """Returns the tokenizer.json content: byte-level BPE of 512 ids, id 500 the special end-of-text token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 1, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    content = json.loads(tokenizer.to_str())
    vocabulary = {token: i + (i >= END_OF_TEXT_ID) for token, i in content["model"]["vocab"].items()}
    vocabulary[END_OF_TEXT] = END_OF_TEXT_ID
    if sorted(vocabulary.values()) != list(range(VOCABULARY)):
        raise SystemExit(f"tokenizer has {len(vocabulary)} ids, expected exactly {VOCABULARY}")
    content["model"]["vocab"] = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
    content["added_tokens"] = [
        {
            "id": END_OF_TEXT_ID,
            "content": END_OF_TEXT,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ]
    return content


def encode(tokenizer, texts: list[str]) -> bytes:
    """Returns the little-endian uint16 token ids of all texts, each followed by end-of-text."""
    import numpy

    parts = []
    for start in range(0, len(texts), 512):
        for encoding in tokenizer.encode_batch(texts[start : start + 512], add_special_tokens=False):
            parts.append(numpy.asarray([*encoding.ids, END_OF_TEXT_ID], dtype="<u2"))
        if start % 4096 == 0:
            print(f"encoded {start} of {len(texts)} documents", flush=True)
    return numpy.concatenate(parts).tobytes()


def compress(data: bytes) -> bytes:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 26, "lc": 3, "lp": 1, "pb": 1}]
    return lzma.compress(data, format=lzma.FORMAT_XZ, filters=filters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=None, help="where archives are kept (default OUT/archives)")
    parser.add_argument(
        "--any-interpreter", action="store_true", help="accept another standard library than the recipe's"
    )
    arguments = parser.parse_args()
    if platform.python_version() != INTERPRETER and not arguments.any_interpreter:
        raise SystemExit(
            f"recipe uses Python {INTERPRETER}, this is {platform.python_version()} (--any-interpreter accepts it)"
        )
    from tokenizers import Tokenizer

    begin = time.time()
    out, cache = arguments.out, arguments.cache or arguments.out / "archives"
    (out / "heldout").mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    documents, records = collect(cache)
    heldout = [d for d in documents if int(d[0][-8:], 16) % HELDOUT_SHARE == 0]
    training = [d for d in documents if int(d[0][-8:], 16) % HELDOUT_SHARE != 0]
    content = train_tokenizer([d[2] for d in training if int(d[0][-8:], 16) % 10 == 1])
    (out / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    if tokenizer.get_vocab_size() != VOCABULARY or tokenizer.token_to_id(END_OF_TEXT) != END_OF_TEXT_ID:
        raise SystemExit("tokenizer.json does not load with 512 ids and end-of-text at 500")
    counts = {}
    for split, chosen in (("heldout", heldout), ("train", training)):
        data = encode(tokenizer, [d[2] for d in chosen])
        packed = compress(data)
        (out / f"{split}.bin.xz").write_bytes(packed)
        counts[split] = {
            "files": len(chosen),
            "characters": sum(len(d[2]) for d in chosen),
            "tokens": len(data) // 2,
            "sha256": hashlib.sha256(data).hexdigest(),
            "compressed_bytes": len(packed),
        }
        print(split, counts[split], f"{time.time() - begin:.0f} s", flush=True)
    sample = [d for d in heldout if 2_000 <= len(d[2]) <= 12_000]
    prose = [d for d in sample if d[1].endswith((".rst", ".md", ".txt"))][:10]
    source = [d for d in sample if d[1].endswith(".py")][:20]
    names = {}
    for index, (_, path, text) in enumerate([*source, *prose]):
        (out / "heldout" / f"{index:02d}.txt").write_text(text, encoding="utf-8")
        names[f"{index:02d}.txt"] = path
    manifest = {"interpreter": INTERPRETER, "sources": records, "counts": counts, "heldout_files": names}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    print(f"corpus written to {out} in {time.time() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
