"""The data: one order of rows for every layout, a synthetic source of known entropy, one tokenization a machine."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from trainer_core import data
from trainer_core.config import ConfigError, DataConfig, ModelConfig, TrainConfig, TrainSection, resolve

TEXTS = [f"def function_{i}(x):\n    return x + {i * i}\n" for i in range(400)]


def config(corpus: str, vocab=300, seq_len=16, batch=8, local=2, seed=0) -> TrainConfig:
    return resolve(TrainConfig(
        model=ModelConfig(vocab_size=vocab), data=DataConfig(corpus, seq_len),
        train=TrainSection(local_batch_size=local, global_batch_size=batch, seed=seed),
    ))  # fmt: skip


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "a corpus, with=odd {name}.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    return path


def rows(corpus: data.Corpus, step: int, dp: int) -> torch.Tensor:
    """The global batch [GBS, T + 1], put together from every dp rank's passes."""
    parts = [torch.cat([t, y[:, -1:]], 1) for r in range(dp) for t, y in corpus.batches(step, r, dp)]
    return torch.cat(parts)


@pytest.mark.parametrize("kind", ["synthetic", "jsonl"])
def test_global_batch_is_the_same_for_every_layout(kind, jsonl, tmp_path):
    name = f"jsonl:{jsonl}" if kind == "jsonl" else kind
    corpus = data.open_corpus(config(name), tmp_path)
    reference = rows(corpus, 3, 1)
    assert reference.shape == (8, 17) and reference.dtype == torch.int64
    for dp in (2, 4):
        assert torch.equal(rows(corpus, 3, dp), reference)
    other_cut = replace(corpus, local_batch_size=4)
    assert len(corpus.batches(3, 0, 2)) == 2 and len(other_cut.batches(3, 0, 2)) == 1
    assert torch.equal(rows(other_cut, 3, 2), reference)
    assert torch.equal(rows(data.open_corpus(config(name), tmp_path), 3, 1), reference)
    assert not torch.equal(rows(corpus, 4, 1), reference)
    assert not torch.equal(rows(data.open_corpus(config(name, seed=1), tmp_path), 3, 1), reference)


def test_labels_are_the_next_tokens(jsonl, tmp_path):
    tokens, labels = data.open_corpus(config(f"jsonl:{jsonl}"), tmp_path).batches(1, 0, 1)[0]
    assert torch.equal(tokens[:, 1:], labels[:, :-1]) and tokens.is_contiguous() and labels.is_contiguous()


def test_an_epoch_visits_every_window_once(jsonl, tmp_path):
    corpus = data.open_corpus(config(f"jsonl:{jsonl}"), tmp_path)
    stream = np.fromfile(next(tmp_path.glob("tokens-*[0-9a-f]/tokens.bin")), dtype="<u2")
    count = (len(stream) - 1) // 16
    windows = sorted(tuple(stream[i * 16 : i * 16 + 17]) for i in range(count))
    for epoch in (0, 1):
        assert sorted(tuple(corpus.row(n)) for n in range(epoch * count, (epoch + 1) * count)) == windows
    assert any(tuple(corpus.row(n)) != tuple(corpus.row(n + count)) for n in range(count))


def test_text_survives_the_tokenizer(jsonl, tmp_path):
    """Decoding the token stream gives the documents back: byte-level BPE loses nothing."""
    from tokenizers import Tokenizer, decoders

    odd = jsonl.with_name("odd.jsonl")
    texts = ["naïve — 日本語 🎉\t\x00", *TEXTS[:50]]
    odd.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    data.open_corpus(config(f"jsonl:{odd}"), tmp_path)
    folder = next(p.parent for p in tmp_path.glob("tokens-*/meta.json"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.decoder = decoders.ByteLevel()
    text = tokenizer.decode(np.fromfile(folder / "tokens.bin", dtype="<u2").tolist(), skip_special_tokens=False)
    assert text.split(data.END_OF_DOCUMENT)[:-1] == texts


def test_unigram_entropy_and_digest(jsonl, tmp_path):
    """Against -sum p ln p of the stored stream; equal text gives an equal digest in another cache, and from Parquet."""
    corpus = data.open_corpus(config(f"jsonl:{jsonl}"), tmp_path / "a")
    stream = np.fromfile(next((tmp_path / "a").glob("tokens-*/tokens.bin")), dtype="<u2")
    counts = [int((stream == t).sum()) for t in set(stream.tolist())]
    assert corpus.unigram_entropy == pytest.approx(-sum(c / len(stream) * math.log(c / len(stream)) for c in counts))
    table = tmp_path / "text.parquet"
    pq.write_table(pa.table({"id": range(len(TEXTS)), "text": TEXTS}), table)
    for name in (f"jsonl:{jsonl}", f"parquet:{table}"):
        assert data.open_corpus(config(name), tmp_path / "b").digest == corpus.digest
    assert data.open_corpus(config(f"jsonl:{jsonl}", vocab=290), tmp_path / "b").digest != corpus.digest


def test_stdlib_leaves_out_tests_and_keeps_path_order():
    first = next(data.stdlib_documents())
    import __future__ as first_module

    assert first == Path(first_module.__file__).read_text()
    cut = list(data.head(data.stdlib_documents(), 100_000))
    assert sum(len(t.encode()) for t in cut[:-1]) < 100_000 <= sum(len(t.encode()) for t in cut)


def test_synthetic_entropy_is_the_measured_one():
    """The frequencies of pairs and of single tokens in 400,000 drawn tokens give the stated entropies (plug-in
    estimates; their bias is below 1 % at this many samples a cell)."""
    corpus = data.open_corpus(config("synthetic", vocab=40, seq_len=2000, batch=200))
    drawn = np.stack([corpus.row(n) for n in range(200)])
    pairs = np.zeros((40, 40))
    np.add.at(pairs, (drawn[:, :-1].ravel(), drawn[:, 1:].ravel()), 1)
    p = pairs / pairs.sum()
    first = p.sum(1)
    joint = -(p[p > 0] * np.log(p[p > 0])).sum()
    unigram = -(first * np.log(first)).sum()
    assert joint - unigram == pytest.approx(corpus.entropy, rel=0.01)
    assert unigram == pytest.approx(corpus.unigram_entropy, rel=0.01) and corpus.unigram_entropy == math.log(40)


def test_uneven_labels_are_masked_alike_in_every_layout():
    corpus = replace(data.open_corpus(config("synthetic")), uneven=True)
    labels = torch.cat([y for r in range(4) for _, y in corpus.batches(2, r, 4)])
    counted = (labels != data.IGNORE_INDEX).sum(1)
    assert len(counted.unique()) > 2 and counted.min() >= 1
    assert torch.equal(torch.cat([y for _, y in corpus.batches(2, 0, 1)]), labels)


def test_only_one_process_trains_the_tokenizer(jsonl, tmp_path):
    """Three processes at once: one trains, the others wait for it and read what it wrote."""
    code = (
        "import sys; from pathlib import Path; from trainer_core import data\n"
        "from tests.unit.test_data import config\n"
        "build = data._build\n"
        "def counted(*a): print('built', flush=True); build(*a)\n"
        "data._build = counted\n"
        "print(data.open_corpus(config(sys.argv[1]), Path(sys.argv[2])).digest)\n"
    )
    root = Path(__file__).parents[2]
    command, env = [sys.executable, "-c", code, f"jsonl:{jsonl}", str(tmp_path)], {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [subprocess.Popen(command, text=True, cwd=root, stdout=subprocess.PIPE, env=env) for _ in range(3)]
    output = [p.communicate()[0].split() for p in started]
    assert [p.returncode for p in started] == [0, 0, 0]
    words = [w for o in output for w in o]
    assert words.count("built") == 1 and len(set(words) - {"built"}) == 1


def test_a_broken_build_leaves_nothing_behind(jsonl, tmp_path, monkeypatch):
    def broken(texts, vocab, folder):
        (folder / "tokens.bin").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(data, "_build", broken)
        data.open_corpus(config(f"jsonl:{jsonl}"), tmp_path)
    assert [p.suffix for p in tmp_path.iterdir()] == [".lock"]
    assert data.open_corpus(config(f"jsonl:{jsonl}"), tmp_path).unigram_entropy > 0


@pytest.mark.parametrize(
    ("name", "content", "vocab", "seq_len", "said"),
    [
        ("missing.jsonl", None, 300, 16, "there is no such file"),
        ("bad.jsonl", '{"text": "a"}\n{"body": "b"}\n', 300, 16, "line 2"),
        ("empty.jsonl", "", 300, 16, "no document"),
        ("short.jsonl", '{"text": "abc"}\n', 300, 16, "has only 2 tokens"),
        ("a.jsonl", '{"text": "abc"}\n', 100, 2, "at least 257"),
        ("no.parquet", "x", 300, 16, "no Parquet file"),
    ],
)
def test_bad_input_names_the_reason(name, content, vocab, seq_len, said, tmp_path):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=said):
        data.open_corpus(config(f"{name.split('.')[-1]}:{tmp_path / name}", vocab, seq_len), tmp_path / "cache")


def test_an_unwritable_cache_is_named(jsonl, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        data.open_corpus(config(f"jsonl:{jsonl}"), tmp_path / "file" / "cache")


def test_c4_without_a_network_is_unavailable(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(data.DataUnavailable, match="can not be reached"):
        data.open_corpus(config("c4"), tmp_path)


def test_c4_is_streamed_once_into_the_cache(tmp_path, monkeypatch):
    """With a stand-in for the Hub: the head of the stream is kept, and a second opening asks nobody."""
    import http.server
    import threading

    class Quiet(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(404)

        def log_message(self, *args):
            return

    server = http.server.HTTPServer(("127.0.0.1", 0), Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    calls = []

    class Datasets:
        @staticmethod
        def load_dataset(*args, **kwargs):
            calls.append(args)
            return ({"text": t} for t in TEXTS)

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    monkeypatch.setitem(data.TEXT_BYTES, "c4", 5000)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    first = data.open_corpus(config("c4"), tmp_path)
    server.shutdown()
    assert data.open_corpus(config("c4"), tmp_path).digest == first.digest and len(calls) == 1
