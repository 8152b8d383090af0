"""The text: Python's standard library, its sources and documentation, as bytes.

It is real text that every machine with Python already has. (`pydoc_data/topics.py` is the language
reference.) Another Python version has a slightly different library, so a run logs a digest.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ep_moe.errors import InputError

VOCAB_SIZE = 256

# Packages and tests are not the same everywhere; codec tables are numbers, not text.
_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "__pycache__",
}
_HELD_OUT_ONE_IN = 32


@dataclass(frozen=True, eq=False)
class Corpus:
    """Two texts that share no file, each a 1-d uint8 tensor of bytes."""

    train: Tensor
    held_out: Tensor
    num_files: int
    digest: str


def load_corpus(folder: str | Path | None = None) -> Corpus:
    """Read every .py file below folder (the standard library by default) and split by whole files.

    A file is held out by the hash of its path in the library, so the split depends on nothing else.
    Raises FileNotFoundError when either side would be empty.
    """
    folder = Path(folder or sysconfig.get_paths()["stdlib"])
    everything = hashlib.sha256()
    train, held_out = [], []
    names = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if path.is_file()
    )
    for name in names:
        if _SKIPPED_FOLDERS.intersection(name.split("/")):
            continue
        text = (folder / name).read_bytes()
        everything.update(f"{name} {len(text)} ".encode() + text)
        chosen = (
            int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % _HELD_OUT_ONE_IN
            == 0
        )
        (held_out if chosen else train).append(text)
    if not train or not held_out:
        raise FileNotFoundError(
            f"{folder} gives {len(train)} .py files to train on and {len(held_out)} to hold out, "
            "but both are needed: the standard library of an ordinary Python has hundreds"
        )
    return Corpus(
        train=_bytes(train),
        held_out=_bytes(held_out),
        num_files=len(train) + len(held_out),
        digest=everything.hexdigest()[:16],
    )


def random_windows(text: Tensor, count: int, length: int, *, seed: tuple[int, ...]) -> Tensor:
    """(count, length + 1) int64: windows at random places; one seed always draws the same ones."""
    starts = np.random.default_rng(seed).integers(_num_starts(text, length), size=count)
    return _windows(text, torch.from_numpy(starts), length)


def even_windows(text: Tensor, count: int, length: int) -> Tensor:
    """(count, length + 1) int64: windows that are spread evenly over the text."""
    starts = torch.linspace(0, _num_starts(text, length) - 1, count, dtype=torch.float64)
    return _windows(text, starts.long(), length)


def unigram_entropy(tokens: Tensor) -> float:
    """Entropy of the distribution of tokens in nats: the best loss of a model without context."""
    counts = torch.bincount(tokens.flatten(), minlength=VOCAB_SIZE).double()
    p = counts / counts.sum()
    return -torch.xlogy(p, p).sum().item()


def _bytes(texts: list[bytes]) -> Tensor:
    return torch.from_numpy(np.frombuffer(b"\n".join(texts), dtype=np.uint8).copy())


def _num_starts(text: Tensor, length: int) -> int:
    if len(text) <= length:
        raise InputError("text", f"{len(text)} bytes long", f"longer than a sequence of {length}")
    return len(text) - length


def _windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    index = starts[:, None] + torch.arange(length + 1)
    return text[index.to(text.device)].long()
