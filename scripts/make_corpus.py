"""Make a small text corpus and a tokenizer from the standard library of the Python that runs this.

    python scripts/make_corpus.py --out data/corpus

Neither TorchTitan's wheel nor this package ships data, and the examples and tests must train on real text without a
download. Every machine has the standard library: modules give their source, and their docstrings as prose. Written:

    DIR/train/data.json        JSON lines in the form of C4: text, timestamp, url. A document is a piece of a module's
    DIR/validation/data.json   source or of its docstrings; no module is in both files.
    DIR/tokenizer/             tokenizer.json and tokenizer_config.json: byte-level BPE trained on the train file.
    DIR/corpus.json            what was asked for and the digests of the files.

TorchTitan reads them as training.dataset = "c4_test" with training.dataset_path = "DIR/train" (validation likewise),
and model.hf_assets_path = "DIR/tokenizer".

The same versions of Python and tokenizers give the same bytes. DIR appears, or is replaced, only when it is complete;
if it already holds what is asked for, nothing is done.
"""

import argparse
import ast
import hashlib
import json
import platform
import shutil
import sys
import sysconfig
import tempfile
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# Counted up when the same arguments shall give other bytes than before: existing corpora are then made anew.
FORMAT = 1
# Tests and demos are repetitive; the other two are not part of the library.
SKIPPED_FOLDERS = {"__pycache__", "ensurepip", "idlelib", "site-packages", "test", "tests", "turtledemo"}
# One module in this many goes to the validation file.
VALIDATION_EVERY = 10
# About the mean of C4.
DOCUMENT_CHARS = 2000
TIMESTAMP = "2000-01-01T00:00:00Z"
BOS_TOKEN, EOS_TOKEN = "<|begin_of_text|>", "<|end_of_text|>"
NUM_BYTES = 256


def mixed(names: Iterable[str]) -> list[str]:
    """The names in an order that has nothing to do with them, and is always the same.

    TorchTitan does not shuffle and gives each rank one contiguous part: text in the order of the library would give
    ranks and steps different kinds of text, and a loss that jumps where a module ends.
    """
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())


def list_modules(stdlib: Path) -> list[str]:
    """Paths of the modules, relative to the library, mixed."""
    modules = [path.relative_to(stdlib) for path in stdlib.rglob("*.py")]
    return mixed(module.as_posix() for module in modules if SKIPPED_FOLDERS.isdisjoint(module.parts))


def module_texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (kind, text) of a module: its docstrings and its source. Nothing if it can't be read."""
    try:
        with tokenize.open(path) as file:
            source = file.read()
        tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError):
        return
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
    yield "docstrings", "\n\n".join(docstring for docstring in docstrings if docstring)
    yield "source", source


def split_text(text: str) -> Iterator[str]:
    """Pieces of at least DOCUMENT_CHARS (but the last), cut at empty lines."""
    piece = ""
    for paragraph in text.split("\n\n"):
        piece += paragraph + "\n\n"
        if len(piece) >= DOCUMENT_CHARS:
            yield piece
            piece = ""
    if piece.strip():
        yield piece


def write_documents(folder: Path, max_bytes: float) -> None:
    """Write the two files of documents: whole modules, until their text is max_bytes of UTF-8 or just above."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    documents: dict[str, dict[str, str]] = {"train": {}, "validation": {}}
    num_bytes = 0
    for index, module in enumerate(list_modules(stdlib)):
        if num_bytes >= max_bytes:
            break
        split = "validation" if index % VALIDATION_EVERY == 0 else "train"
        for kind, text in module_texts(stdlib / module):
            for number, piece in enumerate(split_text(text)):
                documents[split][f"stdlib://{module}#{kind}-{number}"] = piece
                num_bytes += len(piece.encode())
    for split, texts in documents.items():
        (folder / split).mkdir()
        with open(folder / split / "data.json", "w", encoding="utf-8", newline="\n") as file:
            for url in mixed(texts):
                document = {"text": texts[url], "timestamp": TIMESTAMP, "url": url}
                file.write(json.dumps(document, ensure_ascii=False) + "\n")


def write_tokenizer(folder: Path, train_file: Path, vocab_size: int) -> None:
    """Train a byte-level BPE tokenizer with exactly vocab_size entries and write what TorchTitan loads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS_TOKEN, EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with open(train_file, encoding="utf-8") as lines:
        tokenizer.train_from_iterator((json.loads(line)["text"] for line in lines), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"--vocab-size {vocab_size} is more than the text gives ({tokenizer.get_vocab_size()} entries): "
            "raise --max-mib or lower --vocab-size"
        )
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": BOS_TOKEN, "eos_token": EOS_TOKEN, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def digest_files(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below the folder but the manifest, by relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / "corpus.json")
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def is_complete(folder: Path, request: dict) -> bool:
    """Whether the folder holds, undamaged, what is asked for."""
    try:
        manifest = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return manifest == {"request": request, "files": digest_files(folder)}


def make_corpus(out: Path, vocab_size: int, max_mib: float) -> bool:
    """Make the corpus in the folder `out`, unless it is there.

    Returns:
        Whether it had to be made.

    Raises:
        ValueError: for an argument that cannot be met, or if `out` is something else than a corpus.
    """
    smallest = NUM_BYTES + len((BOS_TOKEN, EOS_TOKEN))
    if vocab_size < smallest:
        raise ValueError(f"--vocab-size must be at least {smallest} (256 bytes, 2 special tokens), got {vocab_size}")
    if max_mib <= 0:
        raise ValueError(f"--max-mib must be more than 0, got {max_mib}")
    request = {
        "format": FORMAT,
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
        "vocab_size": vocab_size,
        "max_mib": max_mib,
    }
    if is_complete(out, request):
        return False
    if out.exists() and not (out / "corpus.json").is_file() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out} exists and is not a corpus: remove it or name another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    # Next to the goal, as a rename is atomic within one file system only.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        made = Path(temporary) / "corpus"
        made.mkdir()
        write_documents(made, max_mib * 2**20)
        write_tokenizer(made / "tokenizer", made / "train" / "data.json", vocab_size)
        manifest = {"request": request, "files": digest_files(made)}
        (made / "corpus.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        if out.exists():
            shutil.move(out, Path(temporary) / "old")
        made.rename(out)
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make a text corpus and a tokenizer from the standard library.")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--vocab-size", type=int, default=2048, help="entries of the tokenizer (default: %(default)s)")
    parser.add_argument("--max-mib", type=float, default=4.0, help="MiB of text, about (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        made = make_corpus(args.out, args.vocab_size, args.max_mib)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"corpus in {args.out}: {'made' if made else 'already there'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
