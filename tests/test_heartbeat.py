"""The heartbeat under processes: kills in the middle, several writers, a reader that follows, and files as they
are found on disks."""

import json
import multiprocessing as mp
import os
import random
import signal
import threading
import time

import pytest
from hypothesis import given, settings, strategies as st

from nsa_nb.monitoring.heartbeat import (
    EVENTS, HEAD, PROGRESS_KEYS, Heartbeat, age_s, is_over, last_life, last_progress, newest_first, read_new,
)

FORK = mp.get_context("forkserver")
FORK.set_forkserver_preload(["torch._dynamo", "nsa_nb.monitoring.heartbeat"])


def write_forever(path, rank):
    hb = Heartbeat(path, rank)
    i = 0
    while True:
        hb.progress(i, loss=1.0 / (i + 1), gate_branch_shares=[0.3, 0.3, 0.4])
        i += 1


def write_n(path, rank, n):
    hb = Heartbeat(path, rank)
    for i in range(n): hb.progress(i, loss=float(i))


def complete(path):
    "Every line but the last is whole; returns the records."
    lines = path.read_bytes().split(b"\n")
    return [json.loads(x) for x in lines[:-1]], lines[-1]


def test_kill_leaves_at_most_a_half_last_line(tmp_path):
    rng = random.Random(1)
    path = tmp_path/"heartbeat_rank0.jsonl"
    for round in range(6):
        before = path.stat().st_size if path.exists() else 0
        p = FORK.Process(target=write_forever, args=(path, 0))
        p.start()
        until = time.monotonic() + 60
        while (path.stat().st_size if path.exists() else 0) == before and time.monotonic() < until: time.sleep(0.002)
        time.sleep(rng.random() * 0.05)
        os.kill(p.pid, signal.SIGKILL)
        p.join(60)
        records, rest = complete(path)
        progress = [r for r in records if r["msg"] == "progress"]
        assert progress and all(tuple(r) == PROGRESS_KEYS for r in progress)
        assert rest == b"" or not rest.endswith(b"}")
        # and a harder cut than a kill makes
        path.write_bytes(path.read_bytes()[:-random.Random(round).randrange(1, 40)])
        Heartbeat(path, 0).event("boot")
        lines = path.read_bytes().split(b"\n")
        assert json.loads(lines[-2])["msg"] == "boot"
        # without the cut line, for the next round
        path.write_bytes(b"\n".join(lines[:-3] + lines[-2:]))


def test_two_processes_do_not_mix_lines(tmp_path):
    path = tmp_path/"heartbeat_rank0.jsonl"
    ps = [FORK.Process(target=write_n, args=(path, rank, 300)) for rank in (0, 1)]
    for p in ps: p.start()
    for p in ps:
        p.join(60)
        assert p.exitcode == 0
    records, rest = complete(path)
    assert rest == b"" and len(records) == 600
    for rank in (0, 1): assert [r["step"] for r in records if r["rank"] == rank] == list(range(300))


def test_a_follower_sees_every_record_once(tmp_path):
    path = tmp_path/"heartbeat_rank0.jsonl"
    p = FORK.Process(target=write_n, args=(path, 0, 500))
    p.start()
    seen = []
    offset = 0
    until = time.monotonic() + 60
    while len(seen) < 500 and time.monotonic() < until:
        new, offset = read_new(path, offset)
        seen += new
    p.join(60)
    assert [r["step"] for r in seen] == list(range(500)) and offset == path.stat().st_size


def test_a_signal_handler_may_write_in_the_middle(tmp_path):
    "USR1 writes an event while the trainer writes its line."
    hb = Heartbeat(tmp_path/"h.jsonl", 0)
    old = signal.signal(signal.SIGUSR1, lambda *a: hb.event("stackdump"))
    stop = threading.Event()
    poke = threading.Thread(
        target=lambda: [(os.kill(os.getpid(), signal.SIGUSR1), time.sleep(0.001)) for _ in range(100)] and stop.set()
    )
    try:
        poke.start()
        n = 0
        while not stop.is_set():
            hb.progress(n, loss=1.0)
            n += 1
        poke.join()
    finally: signal.signal(signal.SIGUSR1, old)
    records, rest = complete(tmp_path/"h.jsonl")
    assert rest == b"" and [r["step"] for r in records if r["msg"] == "progress"] == list(range(n))
    assert any(r["msg"] == "stackdump" for r in records)


# the file that blinded the earlier watchdog: an event last, and the keys and events of that system
EARLIER = [
    {"ts": 1000.0, "iso": "2026-01-01T00:00:00Z", "pid": 7, "rank": 0, "step": 0, "msg": "boot", "phase": "boot"},
    {
        "ts": 1010.0, "iso": "2026-01-01T00:00:10Z", "pid": 7, "rank": 0, "step": 20, "msg": "progress", "loss": 5.69,
        "toks_per_s": 16979.7, "gate_entropy_mean": 1.0986, "fb_total": 0,
    },
    {"ts": 1011.0, "pid": 7, "rank": 0, "step": 20, "msg": "step_end", "phase": "step"},
    {"ts": 1300.0, "pid": 7, "rank": 0, "step": 20, "msg": "watchdog_dump", "path": "watchdog_stackdump_1300.txt"},
]


@pytest.mark.parametrize("tail", ["", '{"ts": 1301.0, "msg": "progr', '{"ts"', "\n", "\x00\x00\x00\n"])
def test_a_found_file_is_read_right(tmp_path, tail):
    path = tmp_path/"heartbeat_rank0.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in EARLIER) + tail)
    assert last_progress(path)["step"] == 20
    assert last_life(path)["msg"] == "step_end" and age_s(path, now=1311.0) == 300.0
    assert not is_over(path)


def test_reading_the_end_of_a_long_file_reads_little(tmp_path, monkeypatch):
    path = tmp_path/"heartbeat_rank0.jsonl"
    line = json.dumps({**dict.fromkeys(PROGRESS_KEYS), "ts": 1.0, "msg": "progress", "step": 5}) + "\n"
    path.write_text(line * 20_000)
    import builtins
    read = []
    real = builtins.open

    def counting(file, *a, **k):
        f = real(file, *a, **k)
        if str(file) == str(path):
            inner = f.read
            class F:
                def __enter__(s): return s
                def __exit__(s, *x): f.close()
                def seek(s, *x): return f.seek(*x)

                def read(s, n=-1):
                    data = inner(n)
                    read.append(len(data))
                    return data

            return F()
        return f
    monkeypatch.setattr(builtins, "open", counting)
    assert last_progress(path)["step"] == 5
    assert 0 < sum(read) <= 1 << 17 < path.stat().st_size


JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=4), x, max_size=3), max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(EVENTS),
            st.dictionaries(st.sampled_from(["path", "a", "type", "message"]), JSONISH, max_size=3),
        ),
        max_size=6,
    ),
    st.integers(0, 400),
    st.integers(1, 50),
)
def test_any_fields_any_cut(tmp_path_factory, events, cut, block):
    "Whatever is written can be read; a cut anywhere loses the cut line only, forwards and backwards."
    path = tmp_path_factory.mktemp("hb")/"h.jsonl"
    hb = Heartbeat(path, 0)
    written = [hb.event(name, step=i, **fields) for i, (name, fields) in enumerate(events)]
    hb.close()
    assert read_new(path)[0] == written
    assert list(newest_first(path, block)) == written[::-1]
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - min(cut, len(data))])
    whole = path.read_bytes().count(b"\n")
    assert read_new(path)[0] == written[:whole] and list(newest_first(path, block)) == written[:whole][::-1]
    for r in written: assert list(r)[:6] == list(HEAD)
