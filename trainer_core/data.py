"""What is trained on: a corpus as tokens, and the batch of every step as a pure function of the step number.

Text becomes tokens once a machine: a byte-level BPE is trained on the head of the text, all of it is encoded, and
both are kept in a user cache under the digest of the text and the vocabulary size. A lock makes one process do this
while the other ranks and runs wait. Documents are packed densely, each ended by one end-of-document token.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer_core.config import TrainConfig, invalid
from trainer_core.rules import MIN_TEXT_VOCAB

IGNORE_INDEX = -100
"""The label of a position that carries no loss (torch's cross_entropy default)."""
END_OF_DOCUMENT = "<|end_of_document|>"
BPE_BYTES = 8_000_000
"""The tokenizer is trained on the first so many bytes of a corpus."""
TEXT_BYTES = {"stdlib": 8_000_000, "c4": 64_000_000}
"""How much text is used of the corpora that have no natural end: stdlib is ready in about 6 s on one core."""
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SYNTHETIC_CHOICES = 16
"""How many tokens may follow a token in the synthetic corpus."""


class DataUnavailable(RuntimeError):
    """The corpus can not be had here (offline, a missing package); another corpus runs."""


@dataclass(frozen=True)
class Corpus:
    """Rows of T + 1 tokens, numbered without end.

    ``digest`` identifies the token stream, ``entropy`` is the source's entropy rate in nats a token where it is known
    (the loss no model gets below), ``unigram_entropy`` that of the token frequencies (the loss of a model that knows
    nothing but them). ``row(n)`` gives row n, int64 [T + 1]. ``uneven`` masks a varying tail of each row's labels, so
    that microbatches and ranks carry different numbers of counted tokens.
    """

    digest: str
    unigram_entropy: float
    entropy: float | None
    row: Callable[[int], np.ndarray]
    seq_len: int
    local_batch_size: int
    global_batch_size: int
    uneven: bool = False

    def batches(self, step: int, dp_rank: int, dp: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(tokens, labels), each int64 [LBS, T], of every accumulation pass of ``step`` (from 1) on ``dp_rank``.

        The global batch of step k is rows [(k-1) GBS, k GBS); dp rank r takes the contiguous part
        [r GBS/dp, (r+1) GBS/dp) of it. So it depends on (seed, step, GBS, T) alone, and a resumed run needs no state.
        """
        share = self.global_batch_size // dp
        first = (step - 1) * self.global_batch_size + dp_rank * share
        rows = torch.from_numpy(np.stack([self.row(n) for n in range(first, first + share)]))
        tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        if self.uneven:
            kept = torch.tensor([1 + n * 7919 % self.seq_len for n in range(first, first + share)])
            labels = labels.masked_fill(torch.arange(self.seq_len) >= kept[:, None], IGNORE_INDEX)
        size = self.local_batch_size
        return list(zip(torch.split(tokens, size), torch.split(labels, size), strict=True))


def open_corpus(config: TrainConfig, cache: Path | None = None) -> Corpus:
    """The corpus of a resolved ``config``; text corpora are tokenized into ``cache`` on first use.

    Raises DataUnavailable where the corpus can not be had here, ConfigError where the file, the vocabulary size or the
    sequence length does not fit.
    """
    kind, _, path = config.data.corpus.partition(":")
    sizes = config.data.seq_len, config.train.local_batch_size, config.train.global_batch_size
    if kind == "synthetic":
        row, digest, entropy, unigram = synthetic(config.model.vocab_size, config.data.seq_len, config.train.seed)
        return Corpus(digest, unigram, entropy, row, *sizes)
    vocab = config.model.vocab_size
    if vocab < MIN_TEXT_VOCAB:
        message = f"model.vocab_size={vocab}: a byte-level vocabulary has at least {MIN_TEXT_VOCAB} tokens"
        raise invalid("model.vocab_size", vocab, message, "data.corpus", MIN_TEXT_VOCAB)
    folder = tokenized(lambda: documents(kind, Path(path), cache or cache_folder()), vocab, cache or cache_folder())
    meta = json.loads((folder / "meta.json").read_text())
    tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r")
    return Corpus(meta["digest"], meta["unigram_entropy"], None, windows(tokens, config), *sizes)


def windows(tokens: np.ndarray, config: TrainConfig) -> Callable[[int], np.ndarray]:
    """row(n) over a token stream: each epoch visits every window of T + 1 tokens once, in an order of its own."""
    length, count = config.data.seq_len, (len(tokens) - 1) // config.data.seq_len
    if count < 1:
        message = f"data.seq_len={length}, but data.corpus={config.data.corpus} has only {len(tokens)} tokens"
        raise invalid("data.seq_len", length, message, "data.corpus", len(tokens) - 1)

    @lru_cache(maxsize=2)
    def order(epoch: int) -> np.ndarray:
        return np.random.default_rng([config.train.seed, epoch]).permutation(count)

    def row(n: int) -> np.ndarray:
        start = int(order(n // count)[n % count]) * length
        return tokens[start : start + length + 1].astype(np.int64)

    return row


def synthetic(vocab: int, length: int, seed: int) -> tuple[Callable[[int], np.ndarray], str, float, float]:
    """(row, digest, entropy rate, unigram entropy) of a Markov chain over ``vocab`` tokens.

    A state advances round a ring by e steps, e = 1..K with probability proportional to 1/e, and a fixed permutation
    names the states. Given a token, the next one is a one-to-one function of e, so the entropy rate is H(e) exactly;
    by symmetry every token is equally frequent, so the unigram entropy is ln V.
    """
    choices = min(SYNTHETIC_CHOICES, vocab)
    p = 1 / np.arange(1, choices + 1)
    p /= p.sum()
    names = np.random.default_rng(vocab).permutation(vocab)

    def row(n: int) -> np.ndarray:
        rng = np.random.default_rng([seed, n])
        states = rng.integers(vocab) + np.cumsum(rng.choice(choices, size=length + 1, p=p) + 1)
        return np.asarray(names[states % vocab], dtype=np.int64)

    digest = _digest(f"synthetic {vocab} {choices} {seed}".encode())
    return row, digest, float(-(p * np.log(p)).sum()), float(np.log(vocab))


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/meshmark, or ~/.cache/meshmark."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshmark"


def documents(kind: str, path: Path, cache: Path) -> Iterator[str]:
    """The documents of a text corpus in a fixed order, cut at TEXT_BYTES where that names the corpus."""
    if kind == "stdlib":
        return head(stdlib_documents(), TEXT_BYTES[kind])
    if kind == "c4":
        return jsonl_documents(download_c4(cache))
    if not path.is_file():
        message = f"data.corpus={kind}:{path}: there is no such file (looked in {Path.cwd()})"
        raise invalid("data.corpus", f"{kind}:{path}", message, nearest="stdlib")
    return jsonl_documents(path) if kind == "jsonl" else parquet_documents(path)


def head(texts: Iterable[str], limit: int) -> Iterator[str]:
    """Whole documents until ``limit`` bytes are reached."""
    used = 0
    for text in texts:
        yield text
        used += len(text.encode())
        if used >= limit:
            return


def stdlib_documents() -> Iterator[str]:
    """The running interpreter's standard-library sources in path order, without its tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted((p.relative_to(root).as_posix(), p) for p in root.rglob("*.py"))
    files = [(name, p) for name, p in files if not SKIPPED_FOLDERS.intersection(name.split("/"))]
    if not files:
        raise DataUnavailable(f"data.corpus=stdlib: {root} holds no .py sources; use jsonl:PATH or synthetic")
    for _, path in files:
        yield path.read_text(errors="replace")


def jsonl_documents(path: Path) -> Iterator[str]:
    """The field ``text`` of each line."""
    with open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                text = json.loads(line)["text"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                text = error
            if not isinstance(text, str):
                message = f"{path}, line {number}: not a JSON object with a string field 'text'"
                raise invalid("data.corpus", f"jsonl:{path}", message)
            yield text


def parquet_documents(path: Path) -> Iterator[str]:
    """The column ``text``; nulls are left out."""
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise invalid("data.corpus", f"parquet:{path}", f"{path} is no Parquet file: {error}") from None
    if "text" not in file.schema_arrow.names:
        message = f"{path} has no column 'text', only {', '.join(file.schema_arrow.names)}"
        raise invalid("data.corpus", f"parquet:{path}", message)
    for batch in file.iter_batches(columns=["text"]):
        yield from (str(text) for text in batch.column(0).to_pylist() if text is not None)


def download_c4(cache: Path) -> Path:
    """The head of C4's English training split, streamed once into the cache as JSON lines."""
    target = cache / f"c4-en-{TEXT_BYTES['c4']}.jsonl"
    with lock(target):
        if target.exists():
            return target
        _reach(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
        try:
            import datasets
        except ModuleNotFoundError:
            raise DataUnavailable("data.corpus=c4 needs the package datasets: pip install 'meshmark[c4]'") from None
        temporary = target.with_suffix(f".{os.getpid()}")
        try:
            stream = datasets.load_dataset("allenai/c4", "en", split="train", streaming=True)
            with open(temporary, "w") as file:
                for text in head((record["text"] for record in stream), TEXT_BYTES["c4"]):
                    file.write(json.dumps({"text": text}) + "\n")
            os.replace(temporary, target)
        except OSError as error:
            raise DataUnavailable(f"data.corpus=c4: the download broke off: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)
        return target


def _reach(endpoint: str) -> None:
    """One request, since the Hub's client retries for half a minute before it gives up. An HTTP error is an answer."""
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=10).close()
    except urllib.error.HTTPError:
        return
    except OSError as error:
        raise DataUnavailable(f"data.corpus=c4 is streamed from {endpoint}, which can not be reached ({error}); "
                              "use stdlib or jsonl:PATH offline") from None  # fmt: skip


def tokenized(texts: Callable[[], Iterator[str]], vocab: int, cache: Path) -> Path:
    """The cache folder with tokens.bin, tokenizer.json and meta.json of a corpus; made by whoever comes first.

    ``texts()`` starts the documents from the beginning; they are read once for the digest, and on a miss once for
    the tokenizer and once for the tokens, so that no more than a batch of them is in memory.
    """
    text_digest = hashlib.sha256()
    for text in texts():
        text_digest.update(text.encode(errors="replace") + b"\0")
    key = f"format 1, tokenizers {metadata.version('tokenizers')}, vocabulary {vocab}, {text_digest.hexdigest()}"
    folder = cache / f"tokens-{_digest(key.encode())}"
    with lock(folder):
        if not folder.exists():
            temporary = folder.with_name(f"{folder.name}.{os.getpid()}")
            try:
                temporary.mkdir()
                _build(texts, vocab, temporary)
                os.rename(temporary, folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _build(texts: Callable[[], Iterator[str]], vocab: int, folder: Path) -> None:
    """Train the tokenizer, encode every document, and write both with their figures into ``folder``."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[END_OF_DOCUMENT], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    tokenizer.train_from_iterator(head(texts(), BPE_BYTES), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    dtype = np.dtype("<u2" if vocab <= 2**16 else "<u4")
    end, counts, digest = tokenizer.token_to_id(END_OF_DOCUMENT), np.zeros(vocab, dtype=np.int64), hashlib.sha256()
    documents = texts()
    with open(folder / "tokens.bin", "wb") as file:
        while batch := list(islice(documents, 256)):
            for encoding in tokenizer.encode_batch_fast(batch):
                ids = np.array([*encoding.ids, end], dtype=dtype)
                counts += np.bincount(ids, minlength=vocab)
                digest.update(ids.tobytes())
                file.write(ids.tobytes())
    if not counts.any():
        raise invalid("data.corpus", str(folder), "the corpus holds no document")
    p = counts[counts > 0] / counts.sum()
    meta: dict[str, Any] = {"digest": digest.hexdigest()[:16], "dtype": dtype.str, "tokens": int(counts.sum()),
                            "unigram_entropy": float(-(p * np.log(p)).sum())}  # fmt: skip
    (folder / "meta.json").write_text(json.dumps(meta))


@contextlib.contextmanager
def lock(target: Path) -> Iterator[None]:
    """Only one process of the machine (or of a shared file system) is inside for ``target``; the kernel frees a dead
    holder's lock."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(target.with_name(f"{target.name}.lock"), os.O_RDWR | os.O_CREAT)
    except OSError as error:
        message = f"the cache folder {target.parent} can not be written ({error.strerror}): set XDG_CACHE_HOME"
        raise invalid("data.corpus", str(target.parent), message) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
