"Streams: each document once, on any number of ranks, over any restarts, whatever the shapes of files and batches."
import json
import random
import time
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fineweb_server import fineweb, parquet, rows, serve, text_of
from hypothesis import given, settings, strategies as st

from nsa_nb.audit import audit
from nsa_nb.config import load_config, save_config
from nsa_nb.errors import RunError, UsageError
from nsa_nb.data.loader import open_run_data
from nsa_nb.data.rows import file_order
from nsa_nb.data.stream import held_out
from nsa_nb.data.tokenizer import ByteTokenizer
from nsa_nb.data.tokens import text_hash

TOK = ByteTokenizer()


def config(**kw):
    "A configuration for a stream; double underscores are dots."
    base = {
        "data.dataset": "fineweb_edu_local", "data.val_fraction": 0.2, "data.loader_timeout": 10, "train.seq_len": 16,
        "train.batch_size": 2, "train.eval_batches": 2, "data.report_docs": 0,
    }
    return load_config(
        None, base | {k.replace("__", "."): str(v) if k.endswith(("path", "out_dir")) else v for k, v in kw.items()}, {}
    )


def write(folder, files):
    "A folder with these files."
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


class Ranks:
    "The loaders of all ranks of one session, each with its record."
    def __init__(self, cfg, out, step, world, rows, n_micro, state=None):
        self.world = world
        self.rows = rows
        self.n_micro = n_micro
        self.data = []
        self.states = {}
        self.said = []
        for rank in range(world):
            d = open_run_data(cfg)
            if state: d.load_state_dict(json.loads(json.dumps(state)))
            d.watch(
                SimpleNamespace(
                    event=lambda *a, **k: self.said.append((a, k)), note=self.said.append, check=lambda: None,
                    cfg=SimpleNamespace(train=SimpleNamespace(steps=10**6)), out_dir=out, step=step, rows=rows,
                    n_micro=n_micro, rank=rank, world=world,
                )
            )
            self.data.append(d)

    def step(self, s) -> torch.Tensor:
        "The global batch [rows, S + 1], and the states after it."
        parts = [
            self.data[r].train_batch(s, self.rows, m, self.n_micro, r, self.world)
            for m in range(self.n_micro)
            for r in range(self.world)
        ]
        for p in parts: assert (p.x[:, 1:] == p.y[:, :-1]).all()
        self.states[s + 1] = [d.state_dict(s + 1) for d in self.data]
        assert all(x == self.states[s + 1][0] for x in self.states[s + 1]), "all ranks have one bookmark"
        return torch.cat([torch.cat([p.x, p.y[:, -1:]], 1) for p in parts])

    def close(self):
        for d in self.data: d.close()


def by_hand(tables: list[list[tuple[str, str]]], seed: int, val_fraction: float, n: int) -> np.ndarray:
    """The first n tokens of the stream, from the definition: files in the epoch's order, rows as they stand,
    without held-out and empty ones."""
    out = []
    size = 0
    epoch = 0
    while size < n:
        for f in file_order(len(tables), seed, epoch):
            for x, text in tables[f]:
                if text and not held_out(text_hash(x.encode()), val_fraction):
                    out.append(np.concatenate([[TOK.separator], TOK.encode(text)]))
                    size += len(out[-1])
        epoch += 1
    return np.concatenate(out)[:n]


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_every_document_once_over_ranks_and_restarts(data):
    import tempfile
    from pathlib import Path
    draw = data.draw
    sizes = draw(st.lists(st.integers(0, 8), min_size=1, max_size=5).filter(lambda s: sum(s) >= 3))
    group = draw(st.integers(1, 9))
    S = draw(st.integers(3, 40))
    world_rows = draw(st.sampled_from([2, 4, 6, 12]))
    texts = draw(st.lists(st.text(max_size=60), min_size=sum(sizes), max_size=sum(sizes)))
    val_fraction, seed = draw(st.sampled_from([.01, .3, .5])), draw(st.integers(0, 99))
    tables = []
    i = 0
    for n in sizes:
        tables.append([(f"d{i + k}", texts[i + k].replace("\0", "x")) for k in range(n)])
        i += n
    if not any(t and not held_out(text_hash(x.encode()), val_fraction) for table in tables for x, t in table): return
    jsonl = draw(st.booleans())
    with tempfile.TemporaryDirectory() as tmp:
        folder, out = Path(tmp)/"data", Path(tmp)/"run"
        folder.mkdir()
        out.mkdir()
        for k, table in enumerate(tables):
            if jsonl:
                (folder / f"{k}.jsonl").write_text("".join(json.dumps(dict(id=x, text=t)) + "\n" for x, t in table))
            else:
                pq.write_table(
                    pa.table(
                        dict(
                            text=pa.array([t for _, t in table], pa.string()),
                            id=pa.array([x for x, _ in table], pa.string()),
                        )
                    ),
                    folder / f"{k}.parquet",
                    row_group_size=group,
                )
        cfg = config(
            data__local_path=folder, data__val_fraction=val_fraction, train__seed=seed, train__seq_len=S,
            data__prefetch=False, data__doc_batch=draw(st.integers(1, 9)), train__out_dir=out,
        )
        step = 0
        state = None
        got = []
        for _ in range(draw(st.integers(1, 4))):
            world = draw(st.sampled_from([w for w in (1, 2, 3) if world_rows % w == 0]))
            n_micro = draw(st.sampled_from([m for m in (1, 2, 3) if world_rows // world % m == 0]))
            ranks = Ranks(cfg, out, step, world, world_rows // world // n_micro, n_micro, state)
            n = draw(st.integers(1, 6))
            keep = step
            for s in range(step, step + n): got[s:] = [ranks.step(s)]
            back = draw(st.integers(0, n))                    # the process dies; its last checkpoint is older
            step = keep + n - back
            if back < n: state = ranks.states[step][0]
            got = got[:step]
            ranks.close()
        if not got: return
        flat = by_hand(tables, seed, val_fraction, len(got) * world_rows * S + 1)
        want = np.stack([flat[k * S:(k + 1) * S + 1] for k in range(len(got) * world_rows)])
        assert (torch.cat(got).numpy() == want).all()
        assert audit(out).exit_code == 0, audit(out)


def test_shards_of_3_4_5_6_rows_on_two_ranks(tmp_path):
    """Sharding over ranks gives 8 against 10 rows and a hang; here both ranks go on for ever, in step, and an
    epoch has every row once."""
    files = {
        f"{k}.parquet": parquet(rows(100 * k, n, lambda i: f"document number {i}"), 2)
        for k, n in enumerate((3, 4, 5, 6))
    }
    cfg = config(data__local_path=write(tmp_path/"d", files), data__val_fraction=.01, train__out_dir=tmp_path)
    save_config(cfg, tmp_path/"config.yaml")
    ranks = Ranks(cfg, tmp_path, 0, 2, 2, 1)
    x = torch.cat([ranks.step(s)[:, :-1] for s in range(20)]).flatten().tolist()
    ranks.close()
    docs = TOK.decode(x).split("␀")[1:-1]
    assert (
        len(docs) > 36
        and all(docs[i : i + 18] for i in (0, 18))
        and len(set(docs[:18])) == len(set(docs[18:36])) == 18
        and docs[:18] != docs[18:36]
    )
    report = audit(tmp_path, with_source=True)
    assert report.exit_code == 0 and report.epochs >= 3 and report.compared >= 36, report


def test_parquet_and_json_lines_are_one_stream(tmp_path):
    table = rows(0, 50)
    a = write(tmp_path/"a", {"x.parquet": parquet(table, 7)})
    b = write(tmp_path/"b", {"x.jsonl": b"".join(json.dumps(r).encode() + b"\n" for r in table.to_pylist())})
    da, db = (open_run_data(config(data__local_path=d)) for d in (a, b))
    assert all(torch.equal(da.train_batch(s, 3).x, db.train_batch(s, 3).x) for s in range(60))
    assert torch.equal(da.val_batch(0, 2).x, db.val_batch(0, 2).x)
    da.close()
    db.close()


def test_documents_do_not_mix_and_labels_do_not_cross_rows_wrongly(tmp_path):
    d = open_run_data(config(data__local_path=write(tmp_path/"d", fineweb()), train__seq_len=64))
    for s in range(20):
        b = d.train_batch(s, 4)
        assert b.doc_starts is not None and b.doc_starts[0] == 0 and b.doc_starts[-1] == b.x.numel()
        at = [i for i in b.doc_starts[:-1].tolist() if i % 64]
        assert all(b.x.flatten()[i] == TOK.separator for i in at) and b.n_docs == int((b.x == TOK.separator).sum())
    d.close()
    d = open_run_data(config(data__local_path=tmp_path/"d", data__cross_documents=True))
    assert d.train_batch(3, 4).doc_starts is None
    d.close()


def test_gpt2_streams_too(tmp_path):
    try: d = open_run_data(config(data__local_path=write(tmp_path/"d", fineweb()), data__tokenizer="gpt2"))
    except UsageError as e: pytest.skip(f"gpt2 is not on this machine: {e}")
    texts = d.tokenizer.decode(torch.cat([d.train_batch(s, 4).x for s in range(20)]).flatten().tolist()).split("␀")[
        1:-1
    ]
    assert texts and all(t in {text_of(i) for k in range(3) for i in range(1000 * k, 1000 * k + 50)} for t in texts)
    assert 3 < d.bytes_per_token < 7
    d.close()


def test_a_resume_reads_one_group_of_rows_and_not_the_file(tmp_path):
    "Where datasets' own bookmark counts rows from the start of a shard."
    files = {
        f"{k}.parquet": parquet(rows(10_000 * k, 3000, lambda i: random.Random(i).randbytes(1500).hex()), 100)
        for k in range(2)
    }
    with serve(files) as s:
        cfg = config(
            data__dataset="fineweb_edu", data__data_files=s.urls, train__seq_len=1000, data__prefetch=False,
            data__val_fraction=0.01,
        )
        d = open_run_data(cfg)
        for k in range(600): d.train_batch(k, 8)              # 4.8 MB of the first file's 9
        state = d.state_dict(600)
        want = [d.train_batch(k, 8).x for k in (600, 601)]
        d.close()
        s.log.clear()
        again = open_run_data(cfg)
        again.load_state_dict(state)
        assert all(torch.equal(again.train_batch(k, 8).x, x) for k, x in zip((600, 601), want))
        again.close()
    begins = [int(r.split("=")[1].split("-")[0] or 0) for _, r, _, _ in s.log if not r.startswith("bytes=-")]
    assert len(begins) == 1 and begins[0] > 1e6, s.log        # none from the beginning of a file


def test_a_changed_file_is_not_gone_on_with(tmp_path):
    folder = write(tmp_path/"d", fineweb((60,)))
    with serve(fineweb((60,))) as s:
        cfg = config(data__dataset="fineweb_edu", data__data_files=s.urls)
        d = open_run_data(cfg)
        d.train_batch(0, 2)
        state = d.state_dict(1)
        d.close()
        s.files = fineweb((61,))
        d = open_run_data(cfg)
        d.load_state_dict(state)
        with pytest.raises(RunError, match="has .* bytes and had .* when the run began: the data have changed"):
            d.train_batch(1, 2)
        d.close()
    d = open_run_data(config(data__local_path=folder))
    one = d.fingerprint
    d.close()
    write(folder, fineweb((61,)))
    # the trainer refuses it
    d = open_run_data(config(data__local_path=folder))
    assert d.fingerprint != one
    d.close()


def test_no_document_to_train_on_is_an_error_and_no_loop(tmp_path):
    cfg = config(data__local_path=write(tmp_path/"d", {"a.parquet": parquet(rows(0, 5, lambda i: ""))}))
    d = open_run_data(cfg)
    with pytest.raises(RunError, match="no text: the files are empty, or each row's text is null or empty"):
        d.train_batch(0, 2)
    d.close()


@pytest.mark.parametrize(
    "table,says",
    [
        (pa.table(dict(body=["x"])), 'need a column "text", got body'),
        (pa.table(dict(text=[1, 2])), 'row 0: "text" must be a string, got int 1'),
    ],
)
def test_wrong_columns_are_named(tmp_path, table, says):
    d = open_run_data(config(data__local_path=write(tmp_path/"d", {"a.parquet": parquet(table)})))
    with pytest.raises(RunError, match=says): d.train_batch(0, 2)
    d.close()


# ---------------------------------------------------------------- settings of the loader, each of which can be seen

class Counting(ByteTokenizer):
    def __init__(self): self.calls = []

    def encode_batch(self, texts):
        self.calls.append(len(texts))
        return super().encode_batch(texts)


def test_doc_batch(tmp_path):
    for n in (1, 7, 64):
        d = open_run_data(
            config(data__local_path=write(tmp_path / "d", fineweb()), data__doc_batch=n, data__prefetch=False)
        )
        d.reader.tokenizer = tok = Counting()
        d.train_batch(0, 16, n_micro=1)
        d.close()
        assert max(tok.calls) <= n and (n > 1) == (max(tok.calls) > 1)


def test_prefetch_and_queue(tmp_path):
    import threading
    folder = write(tmp_path/"d", fineweb())
    mine = lambda: [t for t in threading.enumerate() if t.name == "nsa-stream"]
    d = open_run_data(config(data__local_path=folder, data__prefetch=False))
    d.train_batch(0, 2)
    assert not mine()
    d.close()
    d = open_run_data(config(data__local_path=folder, data__queue=3))
    d.train_batch(0, 2)
    end = time.monotonic() + 5
    while d.reader.items.queue.qsize() < 3 and time.monotonic() < end: time.sleep(.01)
    time.sleep(0.1)
    assert d.reader.items.queue.qsize() == 3 and len(mine()) == 2
    d.close()
    assert not mine()


def test_warmup_waits_and_gives_up(tmp_path):
    with serve(fineweb((300,), group=10)) as s:
        for timeout, least, most in ((20, 6, 99), (.3, 1, 5)):
            cfg = config(
                data__dataset="fineweb_edu", data__data_files=s.urls, data__warmup_batches=6, data__queue=1,
                data__warmup_timeout=timeout, train__seq_len=1024, data__val_fraction=0.01,
            )
            s.slow = .0 if timeout > 1 else .2
            from nsa_nb.data.remote import RangeFile

            block, RangeFile.block_bytes, tail, RangeFile.tail_bytes = (
                RangeFile.block_bytes, 4000, RangeFile.tail_bytes, 4000,
            )
            try: ranks = Ranks(cfg, tmp_path, 0, 1, 2, 1)
            finally: RangeFile.block_bytes, RangeFile.tail_bytes = block, tail
            (name,), fields = ranks.said[0]
            assert name == "warmup" and least <= fields["batches"] <= most, ranks.said
            assert any("warmup: " in str(t) for t in ranks.said[1:]) == (timeout < 1), ranks.said
            ranks.close()
