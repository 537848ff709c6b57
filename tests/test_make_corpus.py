"""scripts/make_corpus.py: the same bytes each time, nothing half made, and files that TorchTitan reads offline."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import datasets
import make_corpus
import pytest
from datasets import load_dataset
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

VOCAB_SIZE = 512
MAX_MIB = 0.2


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("corpus") / "small"
    assert make_corpus.make_corpus(out, VOCAB_SIZE, MAX_MIB)
    return out


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No connection can be made; the cache of datasets is empty."""

    def refuse(*args):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets_cache")


def read_documents(corpus: Path, split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (corpus / split / "data.json").read_text(encoding="utf-8").splitlines()]


def test_two_processes_write_the_same_bytes(corpus, tmp_path):
    """Another hash seed must not change the order of anything."""
    command = [sys.executable, make_corpus.__file__, "--out", str(tmp_path / "again")]
    command += ["--vocab-size", str(VOCAB_SIZE), "--max-mib", str(MAX_MIB)]
    subprocess.run(command, check=True, timeout=60, env=os.environ | {"PYTHONHASHSEED": "1"})
    files = sorted(path.relative_to(corpus) for path in corpus.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(tmp_path / "again") for path in tmp_path.rglob("*") if path.is_file())
    assert len(files) == 5
    for file in files:
        assert (corpus / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file


def test_documents_have_the_form_of_c4(corpus):
    train, validation = read_documents(corpus, "train"), read_documents(corpus, "validation")
    for document in train + validation:
        assert set(document) == {"text", "timestamp", "url"}
        assert document["text"].strip()
    num_bytes = sum(len(document["text"].encode()) for document in train + validation)
    assert num_bytes >= MAX_MIB * 2**20
    modules = [{document["url"].partition("#")[0] for document in split} for split in (train, validation)]
    assert modules[0] and modules[1] and modules[0].isdisjoint(modules[1])
    kinds = {document["url"].partition("#")[2].partition("-")[0] for document in train}
    assert kinds == {"docstrings", "source"}


def test_pieces_make_up_the_text():
    text = Path(make_corpus.__file__).read_text()
    pieces = list(make_corpus.split_text(text))
    assert "".join(pieces) == text + "\n\n"
    assert len(pieces) > 3
    assert all(len(piece) >= make_corpus.DOCUMENT_CHARS for piece in pieces[:-1])


def test_torchtitan_reads_tokenizer(corpus):
    tokenizer = HuggingFaceTokenizer(str(corpus / "tokenizer"))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert sorted(tokenizer.get_vocab().values()) == list(range(VOCAB_SIZE))
    text = "def f(x):\n    return x ** 2  # naïve, ≤ 2⁶⁴\n"
    tokens = tokenizer.encode(text, add_bos=True, add_eos=True)
    assert tokens[0] == tokenizer.bos_id is not None
    assert tokens[-1] == tokenizer.eos_id is not None
    assert tokenizer.decode(tokens[1:-1]) == text
    assert len(tokens) < len(text.encode())


@pytest.mark.parametrize("split", ["train", "validation"])
def test_torchtitan_reads_text_offline(corpus, offline, split):
    tokenizer = HuggingFaceTokenizer(str(corpus / "tokenizer"))
    dataset = HuggingFaceTextDataset("c4_test", str(corpus / split), tokenizer, seq_len=64)
    inputs, labels = next(iter(dataset))
    expected = tokenizer.encode(read_documents(corpus, split)[0]["text"], add_bos=True, add_eos=True)[:65]
    assert inputs["input"].tolist() == expected[:-1]
    assert labels.tolist() == expected[1:]


def test_datasets_cache_notices_new_content(corpus, offline, tmp_path):
    folder = tmp_path / "train"
    folder.mkdir()
    for text in ("one", "two"):
        document = {"text": text, "timestamp": make_corpus.TIMESTAMP, "url": "stdlib://none"}
        (folder / "data.json").write_text(json.dumps(document) + "\n")
        assert load_dataset(str(folder), split="train")["text"][:] == [text]


def test_complete_corpus_is_left_alone(corpus):
    before = {path: path.stat().st_mtime_ns for path in corpus.rglob("*")}
    assert not make_corpus.make_corpus(corpus, VOCAB_SIZE, MAX_MIB)
    assert {path: path.stat().st_mtime_ns for path in corpus.rglob("*")} == before


@pytest.mark.parametrize("damage", ["manifest lost", "file lost", "file cut", "other size asked for"])
def test_incomplete_corpus_is_made_anew(tmp_path, damage):
    out = tmp_path / "out"
    make_corpus.make_corpus(out, 300, 0.05)
    whole = make_corpus.digest_files(out)
    if damage == "manifest lost":
        (out / "corpus.json").write_text("")
    elif damage == "file lost":
        (out / "tokenizer" / "tokenizer.json").unlink()
    elif damage == "file cut":
        (out / "train" / "data.json").write_text("{}\n")
    vocab_size = 310 if damage == "other size asked for" else 300
    assert make_corpus.make_corpus(out, vocab_size, 0.05)
    assert (make_corpus.digest_files(out) == whole) == (vocab_size == 300)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_failure_leaves_the_old_corpus(tmp_path, monkeypatch):
    out = tmp_path / "out"
    make_corpus.make_corpus(out, 300, 0.05)
    whole = make_corpus.digest_files(out)

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(make_corpus, "write_tokenizer", fail)
    with pytest.raises(OSError, match="disk full"):
        make_corpus.make_corpus(out, 310, 0.05)
    assert make_corpus.digest_files(out) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vocab-size", "257"], "--vocab-size must be at least 258"),
        (["--max-mib", "0"], "--max-mib must be more than 0"),
        (["--max-mib", "0.001", "--vocab-size", "100000"], "more than the text gives"),
    ],
)
def test_bad_arguments(tmp_path, capsys, arguments, message):
    assert make_corpus.main(["--out", str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_other_folder_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert make_corpus.main(["--out", str(tmp_path)]) == 2
    assert "is not a corpus" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
