"Batches: the properties that training relies on, on random data and random shapes."
import json
import math
import multiprocessing as mp

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from nsa_nb.data.batches import IGNORE, SyntheticData, TextData, open_data, rows_for
from nsa_nb.errors import UsageError
from nsa_nb.data.text import local_source
from nsa_nb.data.token_cache import open_tokens
from nsa_nb.data.tokenizer import ByteTokenizer

TOK = ByteTokenizer()


@pytest.fixture(scope="module")
def tf(tmp_path_factory):
    d = tmp_path_factory.mktemp("tokens")
    rnd = np.random.Generator(np.random.Philox(0))
    docs = ["".join(map(chr, rnd.integers(97, 123, int(rnd.integers(1, 80))))) for _ in range(300)]
    (d/"a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in docs))
    return open_tokens(local_source(d/"a.jsonl"), TOK, d)


@settings(deadline=None)
@given(st.integers(1, 700), st.integers(0, 2**40), st.integers(1, 5), st.integers(0, 10**7), st.booleans())
def test_any_batch(tf, seq_len, seed, rows, step, cross):
    data = TextData(tf, TOK, seq_len, seed, cross_documents=cross)
    b = data.train_batch(step, rows)
    S = seq_len
    assert b.x.shape == b.y.shape == (rows, S) and b.x.dtype == b.y.dtype == torch.int64
    assert b.y[:, :-1].equal(b.x[:, 1:])
    ring = bytes(np.concatenate([data.train_tokens, data.train_tokens]))
    for x, y in zip(b.x.numpy(), b.y.numpy()):            # each row, its last label included, is a piece of the ring
        assert bytes(np.append(x, y[-1]).astype(np.uint8)) in ring
    at = np.flatnonzero(b.x.flatten() == TOK.separator)
    assert b.n_docs == len(at)
    if cross or not (at % S).any():
        assert b.doc_starts is None
    else:
        assert (
            b.doc_starts.tolist() == sorted({*at.tolist(), *range(0, rows * S + 1, S)})
            and b.doc_starts.dtype == torch.int32
        )
    again = TextData(tf, TOK, seq_len, seed, cross_documents=cross).train_batch(step, rows)
    assert again.x.equal(b.x) and again.y.equal(b.y)


@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 2), (4, 4)]))
def test_slices_of_a_step_are_its_rows(step, rows, shape):
    M, W = shape
    got = [n for m in range(M) for r in range(W) for n in rows_for(step, rows, m, M, r, W)]
    assert got == list(range(step * rows * M * W, (step + 1) * rows * M * W))


@settings(deadline=None, max_examples=12)
@given(st.integers(1, 300), st.integers(0, 9), st.integers(0, 3))
def test_an_epoch_uses_each_label_at_most_once(tf, seq_len, seed, epoch):
    data = TextData(tf, TOK, seq_len, seed)
    R, T = data.rows_per_epoch, data.n_train_tokens
    assert R == T // seq_len
    labels = torch.cat([data.train_batch(s, 1).y[0] for s in range(epoch * R, (epoch + 1) * R)])
    left = np.bincount(data.train_tokens, minlength=256) - np.bincount(labels, minlength=256)
    assert left.min() >= 0 and left.sum() == T - R * seq_len < seq_len


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3000), st.integers(1, 9))
def test_validation_predicts_each_token_once(tf, seq_len, rows):
    data = TextData(tf, TOK, seq_len)
    assert data.n_val_tokens > seq_len
    batches = [data.val_batch(i, rows) for i in range(data.n_val_batches(rows))]
    labels, x = torch.cat([b.y.flatten() for b in batches]), torch.cat([b.x.flatten() for b in batches])
    good = labels != IGNORE
    assert labels[good].tolist() == data.val_tokens[1:].tolist()
    assert good[:good.sum()].all()                                  # what is filled up stands at the end
    assert x[good].tolist() == data.val_tokens[:-1].tolist()
    borders = np.flatnonzero(data.val_tokens[:-1] == TOK.separator)
    for b in batches:                                               # filled up tokens are no documents
        if b.doc_starts is not None: assert b.doc_starts[-1] == b.x.numel() and (b.doc_starts.diff() > 0).all()
    assert len(borders) <= sum(b.n_docs for b in batches) <= len(borders) + 1
    for bad in (-1, len(batches)):
        with pytest.raises(IndexError): data.val_batch(bad, rows)


def test_shifted_labels_catch_a_copying_model(tf):
    "The first deadly fault of the earlier system: labels equal to inputs. Then y == x everywhere; here almost nowhere."
    b = TextData(tf, TOK, 128).train_batch(0, 16)
    assert (b.y == b.x).float().mean() < 0.1                        # 26 letters: chance is 1/26


def test_restart_changes_no_token(tf):
    a, b = (TextData(tf, TOK, 100, cross_documents=c).train_batch(5, 4) for c in (False, True))
    assert a.x.equal(b.x) and a.y.equal(b.y) and b.doc_starts is None and a.doc_starts is not None


def test_split_is_part_of_the_fingerprint(tf):
    prints = {TextData(tf, TOK, 10, val_fraction=f).fingerprint for f in (.01, .3, .6)}
    assert len(prints) == 3
    assert TextData(tf, TOK, 10, seed=1).fingerprint == TextData(tf, TOK, 10, seed=2).fingerprint


def test_text_shorter_than_a_row(tf):
    n = TextData(tf, TOK, 10).n_train_tokens
    with pytest.raises(UsageError, match=rf"{n} tokens for training.* 100000 needs 100001.*at most {n - 1}"):
        TextData(tf, TOK, 100_000)
    TextData(tf, TOK, n - 1).train_batch(0, 1)
    for bad in (0, -1):
        with pytest.raises(UsageError, match="train.seq_len"): TextData(tf, TOK, bad)


def _rank(path, where, step, rank, world, out):
    data = open_data("local", local_path=path, seq_len=64, cache_dir=where, warn=lambda m: None)
    out.put((rank, data.fingerprint, data.train_batch(step, 12 // world, rank=rank, world=world).x.tolist()))


def test_ranks_that_start_together(tmp_path):
    "The token file does not exist yet: both processes want it at once, and together they see the step's rows."
    p = tmp_path/"a.txt"
    p.write_text("\n".join(f"line {i * i}" for i in range(20_000)))
    ctx = mp.get_context("spawn")
    out = ctx.Queue()
    ranks = [ctx.Process(target=_rank, args=(str(p), str(tmp_path), 77, r, 2, out)) for r in range(2)]
    for r in ranks: r.start()
    got = sorted(out.get(timeout=120) for _ in ranks)
    for r in ranks: r.join(60)
    one = open_data("local", local_path=p, seq_len=64, cache_dir=tmp_path)
    assert {g[1] for g in got} == {one.fingerprint}
    assert [row for g in got for row in g[2]] == one.train_batch(77, 12).x.tolist()


class Vocab:
    name = "any"
    def __init__(self, v): self.vocab_size = v


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 60_000), st.integers(1, 300), st.integers(0, 10**6), st.integers(0, 9))
def test_synthetic(v, seq_len, step, seed):
    data = SyntheticData(Vocab(v), seq_len, seed)
    b = data.train_batch(step, 4)
    assert b.y[:, :-1].equal(b.x[:, 1:]) and 0 <= b.x.min() and b.x.max() < v and b.doc_starts is None
    halves = [data.train_batch(step, 2, rank=r, world=2).x for r in range(2)]
    assert torch.cat(halves).equal(b.x)
    assert sum(data.val_batch(i, 5).x.shape[0] for i in range(data.n_val_batches(5))) == data.val_rows
    if v ** seq_len > 2**40: assert not data.train_batch(step + 1, 4).x.equal(b.x)


def test_synthetic_has_nothing_to_learn():
    "No pair of neighbours is commoner than chance, and no row comes twice: the loss cannot go under ln V."
    data = SyntheticData(Vocab(16), 4096, seed=1)
    pairs = np.zeros((16, 16))
    rows = set()
    for s in range(32):
        b = data.train_batch(s, 4)
        np.add.at(pairs, (b.x.flatten().numpy(), b.y.flatten().numpy()), 1)
        rows |= {bytes(r.numpy()) for r in b.x}
    n = pairs.sum()
    assert len(rows) == 128 and abs(pairs / n * 256 - 1).max() < 5 / math.sqrt(n / 256)     # five standard deviations
    assert data.unigram_entropy_nats == math.log(16)


def test_both_kinds_have_the_same_interface(tf):
    public = lambda o: {n for n in dir(o) if not n.startswith("_")}
    syn = SyntheticData(TOK, 8)
    text = TextData(tf, TOK, 8)
    need = {
        "fingerprint", "vocab_size", "bytes_per_token", "unigram_entropy_nats", "n_train_tokens", "n_val_tokens",
        "n_docs", "describe", "train_batch", "val_batch", "n_val_batches", "bits_per_byte", "tokenizer", "seq_len",
        "seed", "rows_per_epoch", "cross_documents",
    }
    assert need <= public(syn) and need <= public(text)
    for data in (syn, text): json.dumps(data.describe(), allow_nan=False)


def test_gpt2_end_to_end(tmp_path):
    p = tmp_path/"a.txt"
    p.write_text("\n\n".join(f"Paragraph {i}: the quick brown fox jumps over {i} lazy dogs." for i in range(3000)))
    try: data = open_data("local", "gpt2", p, seq_len=128, cache_dir=tmp_path)
    except UsageError as e: pytest.skip(f"gpt2 is not on this machine: {e}")
    b = data.train_batch(0, 4)
    assert data.train_tokens.dtype == np.uint16 and data.vocab_size == 50257 and 2 < data.bytes_per_token < 6
    assert "quick brown fox" in data.tokenizer.decode(b.x[0])
    assert abs(data.bits_per_byte(1.) - 1 / data.bytes_per_token / math.log(2)) < 1e-12


def test_wrong_use_is_refused_at_once(tmp_path):
    for bad, says in (
        (dict(dataset="stdlb"), "stdlib"), (dict(dataset="fineweb_edu"), "--dataset local --local-path FILE"),
        (dict(tokenizer="bite"), "byte"), (dict(dataset="local", local_path=tmp_path / "no.txt"), "no.txt"),
    ):
        with pytest.raises(UsageError, match=says): open_data(**bad, seq_len=8, cache_dir=tmp_path)


def test_batch_moves(tf):
    b = TextData(tf, TOK, 100).train_batch(0, 4)
    c = b.to("cpu")
    assert c.x.equal(b.x) and c.doc_starts.equal(b.doc_starts) and c.n_docs == b.n_docs
