import math

import pytest
import torch
from corpus import even_windows, load_corpus, random_windows, unigram_entropy

from ep_moe import InputError


@pytest.fixture
def library(tmp_path):
    for i in range(200):
        (tmp_path / f"module{i}.py").write_text(f"[{i}]")
    for skipped in ("test", "site-packages"):
        (tmp_path / "inner" / skipped).mkdir(parents=True)
        (tmp_path / "inner" / skipped / "one.py").write_text("never read")
    return tmp_path


def files_in(text):
    return set(bytes(text.tolist()).decode().split("\n"))


def test_splits_by_whole_files_and_skips_what_is_not_the_library(library):
    corpus = load_corpus(library)
    train, held_out = files_in(corpus.train), files_in(corpus.held_out)
    assert corpus.num_files == 200
    assert train | held_out == {f"[{i}]" for i in range(200)}
    assert not train & held_out
    assert 0 < len(held_out) < 20


def test_depends_on_the_text_alone(library):
    first, again = load_corpus(library), load_corpus(library)
    assert first.digest == again.digest
    assert torch.equal(first.held_out, again.held_out)

    moved = load_corpus(library.rename(library.with_name("elsewhere")))
    assert moved.digest == first.digest
    (library.with_name("elsewhere") / "module7.py").write_text("[seven]")
    assert load_corpus(library.with_name("elsewhere")).digest != first.digest


def test_one_new_file_moves_no_other(library):
    before = load_corpus(library)
    (library / "new.py").write_text("[new]")
    after = load_corpus(library)
    assert files_in(after.train) - {"[new]"} == files_in(before.train)
    assert files_in(after.held_out) - {"[new]"} == files_in(before.held_out)


def test_the_standard_library_is_enough():
    corpus = load_corpus()
    assert len(corpus.train) > 10 * len(corpus.held_out) > 100_000
    assert 2.5 < unigram_entropy(corpus.held_out.long()) < 4


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"0 \.py files to train on and 0 to hold out"):
        load_corpus(tmp_path)


def test_random_windows_repeat_by_seed():
    text = torch.arange(200, dtype=torch.uint8)
    windows = random_windows(text, 5, 8, seed=(0, 1, 2))
    assert windows.shape == (5, 9)
    assert torch.equal(windows.diff(dim=1), torch.ones(5, 8, dtype=torch.int64))
    assert torch.equal(windows, random_windows(text, 5, 8, seed=(0, 1, 2)))
    assert not torch.equal(windows, random_windows(text, 5, 8, seed=(0, 1, 3)))


def test_even_windows_reach_both_ends():
    text = torch.arange(101, dtype=torch.uint8)
    windows = even_windows(text, 3, 20)
    assert windows[:, 0].tolist() == [0, 40, 80]
    assert windows[-1, -1] == 100


def test_a_text_shorter_than_a_window_is_refused():
    with pytest.raises(InputError, match="text is 8 bytes long"):
        even_windows(torch.zeros(8, dtype=torch.uint8), 1, 8)


def test_unigram_entropy():
    assert unigram_entropy(torch.tensor([[1, 2], [3, 4]])) == pytest.approx(math.log(4))
    assert unigram_entropy(torch.tensor([7, 7, 7])) == 0
