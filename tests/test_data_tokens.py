"The token file and its cache: random documents, two makers at once, kills, full disks."
import errno
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import nsa_nb.data.token_cache as cache
from nsa_nb.errors import RunError, UsageError
from nsa_nb.data.text import clean_text, local_source
from nsa_nb.data.token_cache import open_tokens, token_folder
from nsa_nb.data.tokenizer import ByteTokenizer
from nsa_nb.data.tokens import COUNTS, DOCS, META, TOKENS, cut_end, entropy_nats, read_token_file, split_documents

TOK = ByteTokenizer()
texts = st.lists(st.text(st.characters(exclude_categories=[]), min_size=1, max_size=60), min_size=1, max_size=30)


def jsonl(path: Path, docs) -> Path:
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in docs))
    return path


def documents(tf):
    "The documents of a token file, as text."
    return [TOK.decode(p[1:]) for p in np.split(tf.tokens, tf.docs["start"][1:])]


@settings(deadline=None, max_examples=100)
@given(texts, st.floats(0, 1, exclude_max=True), st.integers(1, 300))
def test_every_document_is_there_once_and_on_one_side(tmp_path_factory, docs, val_fraction, seq_len):
    d = tmp_path_factory.mktemp("tokens")
    docs = [clean_text(t) for t in docs]
    try: tf = open_tokens(local_source(jsonl(d/"a.jsonl", docs)), TOK, d)
    except UsageError as e:
        assert "too little text" in str(e) and len(set(docs)) == 1 and len(set(docs[0])) == 1 and len(docs[0]) < 3
        return
    got = documents(tf)
    new = set(got) - set(docs)                                      # the two halves of a document that was cut
    if new:
        a, b = new
        gone = (set(docs) - set(got)).pop()
        assert gone in (a + b, b + a) and sorted(got) == sorted([t for t in docs if t != gone] + [a, b])
    else: assert sorted(got) == sorted(docs)
    assert (tf.tokens[tf.docs["start"]] == TOK.separator).all() and (tf.tokens == TOK.separator).sum() == len(got)
    assert tf.docs["bytes"].tolist() == [len(t.encode()) for t in got]
    v = split_documents(tf.docs, len(tf.tokens), val_fraction, seq_len + 1)
    assert 1 <= v < len(got) and set(got[:v]).isdisjoint(got[v:])
    # validation takes more than its fraction only to fill one row, and then leaves training the half
    cut = int(tf.docs["start"][v])
    share = tf.docs["hash"][v - 1] / 2**64
    if share >= val_fraction and v > 1 and len(set(got[:v])) > 1: assert len(tf.tokens) - cut >= len(tf.tokens) // 2


def test_order_of_the_source_does_not_matter(tmp_path):
    docs = [f"document {i} " * (i % 5 + 1) for i in range(300)] * 2
    a = open_tokens(local_source(jsonl(tmp_path/"a.jsonl", docs)), TOK, tmp_path)
    b = open_tokens(local_source(jsonl(tmp_path/"b.jsonl", docs[::-1])), TOK, tmp_path)
    assert a.path != b.path and a.fingerprint == b.fingerprint
    c = open_tokens(local_source(jsonl(tmp_path/"c.jsonl", docs + ["one more"])), TOK, tmp_path)
    assert c.fingerprint != a.fingerprint
    # a document stays on its side when others are added
    val = lambda tf: set(documents(tf)[:split_documents(tf.docs, len(tf.tokens), .1, 10)])
    assert val(c) - {"one more"} == val(a)


def test_small_batches_change_nothing(tmp_path, monkeypatch):
    import nsa_nb.data.tokens as T
    docs = [f"document {i} " * (i % 50 + 1) for i in range(300)]
    a = open_tokens(local_source(jsonl(tmp_path/"a.jsonl", docs)), TOK, tmp_path/"1")
    monkeypatch.setattr(T.doc_batches, "__defaults__", (100,))
    b = open_tokens(local_source(tmp_path/"a.jsonl"), TOK, tmp_path/"2")
    assert a.fingerprint == b.fingerprint and (a.docs == b.docs).all()


@given(st.text(min_size=2, max_size=300), st.floats(0, 1))
def test_cut_end(text, share):
    a, b = cut_end(text, share)
    assert a and b and a + b == text


@pytest.mark.parametrize("docs", [["x" * 5000], ["same " * 100] * 7, ["big " * 5000, "small", "tiny"], ["ab"]])
def test_few_documents_leave_training_most_of_the_text(tmp_path, docs):
    tf = open_tokens(local_source(jsonl(tmp_path/"a.jsonl", docs)), TOK, tmp_path)
    v = split_documents(tf.docs, len(tf.tokens), .01, 33)
    got = documents(tf)
    assert v >= 1 and set(got[:v]).isdisjoint(got[v:])
    assert not any(
        t in big
        for t in got[:v]
        for big in got[v:]
        if len(t) > 50 and "x" not in t and "same" not in t and "big" not in t
    )
    if len(tf.tokens) > 100: assert tf.docs["start"][v] <= .2 * len(tf.tokens)
    assert "".join(sorted("".join(got))) in ("".join(sorted("".join(docs))), "".join(sorted("".join(set(docs)))))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40).filter(sum))
def test_entropy_is_that_of_the_definition(counts):
    n = sum(counts)
    want = -sum(c / n * np.log(c / n) for c in counts if c)
    assert abs(entropy_nats(np.array(counts)) - want) < 1e-12       # 40 terms of at most 1/e, each rounded in float64
    assert 0 <= entropy_nats(np.array(counts)) <= np.log(len(counts)) + 1e-12


# ------------------------------------------------------------------ processes

MAKE = """if True:
    import os, signal, sys, time
    from nsa_nb.data.text import local_source
    from nsa_nb.data.token_cache import open_tokens
    from nsa_nb.data.tokenizer import ByteTokenizer
    text, where, die_at, log = sys.argv[1:]
    def on_point(p):
        with open(log, "a") as f: f.write(p + "\\n")
        if p == die_at: os.kill(os.getpid(), signal.SIGKILL)
    print(open_tokens(local_source(text), ByteTokenizer(), where, warn=lambda m: None, on_point=on_point).fingerprint)
"""


def maker(text, where, die_at="", log="/dev/null"):
    return subprocess.Popen(
        [sys.executable, "-c", MAKE, str(text), str(where), die_at, str(log)], stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def source(tmp_path):
    return local_source(jsonl(tmp_path/"a.jsonl", [f"document {i} " * (i % 100 + 1) for i in range(5000)]))


def left_over(where):
    return [p.name for p in (Path(where)/"nsa_nb"/"tokens").iterdir() if p.name.startswith(".tmp")]


def test_two_processes_at_once_make_one_cache(tmp_path, source):
    makers = [maker(source.identity, tmp_path, log=tmp_path/"log") for _ in range(4)]
    out = {m.communicate(timeout=120)[0].strip() for m in makers}
    assert [m.returncode for m in makers] == [0] * 4 and len(out) == 1 and len(out.pop()) == 64
    assert (tmp_path/"log").read_text().split() == ["tokens", "sorted", "meta", "renamed"]     # one did the work
    assert left_over(tmp_path) == []


def test_without_locks_the_first_rename_wins(tmp_path, source, monkeypatch):
    monkeypatch.setattr(cache.FileLock, "take", lambda self: True)      # nothing keeps others out
    def other(point):        # another process finishes first, at the worst moment
        if point == "meta": open_tokens(source, TOK, tmp_path)
    tf = open_tokens(source, TOK, tmp_path, on_point=other)
    assert tf.fingerprint == read_token_file(tf.path).fingerprint and left_over(tmp_path) == []


@pytest.mark.parametrize("point", ["tokens", "sorted", "meta", "renamed"])
def test_kill_leaves_no_broken_cache(tmp_path, source, point):
    m = maker(source.identity, tmp_path, point)
    m.communicate(timeout=120)
    assert m.returncode == -signal.SIGKILL
    folder = token_folder(source, TOK, tmp_path)
    assert folder.exists() == (point == "renamed")
    said = []
    tf = open_tokens(source, TOK, tmp_path, warn=said.append)
    assert said == [] and left_over(tmp_path) == []
    assert tf.fingerprint == open_tokens(source, TOK, tmp_path/"fresh").fingerprint


def test_kill_at_any_time(tmp_path, source):
    "Killed after 0, 20, 40 … ms of work, until one call gets through."
    want = open_tokens(source, TOK, tmp_path/"fresh").fingerprint
    for ms in range(0, 400, 40):
        pid = os.fork()
        if pid == 0:
            try: open_tokens(source, TOK, tmp_path)
            finally: os._exit(0)
        time.sleep(ms / 1000)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found = cache.try_read(token_folder(source, TOK, tmp_path))
        if token_folder(source, TOK, tmp_path).exists(): assert found.fingerprint == want
        if found: break
    assert open_tokens(source, TOK, tmp_path).fingerprint == want and left_over(tmp_path) == []


def test_waiting_process_says_so(tmp_path, source):
    folder = token_folder(source, TOK, tmp_path)
    folder.parent.mkdir(parents=True)
    with cache.locked(folder.parent/f".lock-{folder.name}", print) as held:
        assert held
        m = subprocess.Popen([sys.executable, "-c", MAKE.replace("lambda m: None", "lambda m: print(m, flush=True)"),
                              source.identity, str(tmp_path), "", "/dev/null"], stdout=subprocess.PIPE, text=True)
        assert "waiting" in m.stdout.readline()
    assert len(m.communicate(timeout=120)[0].strip()) == 64 and m.returncode == 0


# ------------------------------------------------------------------ damage and disks

@pytest.mark.parametrize("name", [TOKENS, DOCS, COUNTS, META])
@pytest.mark.parametrize("how", ["gone", "empty", "cut", "flipped", "folder"])
def test_damage_is_noticed_and_mended(tmp_path, source, name, how):
    good = open_tokens(source, TOK, tmp_path)
    p = good.path/name
    said = []
    raw = p.read_bytes()
    p.unlink()
    if how == "empty": p.write_bytes(b"")
    if how == "cut": p.write_bytes(raw[:len(raw) // 2])
    if how == "flipped":
        p.write_bytes(raw[: len(raw) // 2] + bytes([raw[len(raw) // 2] ^ 0x80]) + raw[len(raw) // 2 + 1 :])
    if how == "folder": p.mkdir()
    again = open_tokens(source, TOK, tmp_path, warn=said.append)
    assert (
        again.fingerprint == good.fingerprint and len(said) == 1 and "damaged" in said[0] and str(good.path) in said[0]
    )
    assert open_tokens(source, TOK, tmp_path, warn=said.append).fingerprint == good.fingerprint and len(said) == 1


def test_full_disk_is_named_and_leaves_nothing(tmp_path, source, monkeypatch):
    def full(*args, **kw): raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(np, "save", full)
    with pytest.raises(RunError, match="No space left on device; set data.cache_dir"):
        open_tokens(source, TOK, tmp_path)
    assert left_over(tmp_path) == []
    monkeypatch.undo()
    assert open_tokens(source, TOK, tmp_path).fingerprint


def test_error_in_the_text_leaves_nothing(tmp_path):
    p = jsonl(tmp_path/"a.jsonl", ["x" * 100] * 50)
    with open(p, "a") as f: f.write("{broken\n")
    with pytest.raises(UsageError, match="a.jsonl:51"): open_tokens(local_source(p), TOK, tmp_path)
    assert left_over(tmp_path) == []


def test_a_finished_cache_needs_no_right_to_write(tmp_path, source):
    tf = open_tokens(source, TOK, tmp_path)
    assert stat.S_IMODE(tf.path.stat().st_mode) & 0o055 == 0o055          # others may read it
    (tf.path.parent/f".lock-{tf.path.name}").unlink()
    (tf.path.parent/f".lock-{tf.path.name}").mkdir()                      # a lock could not be taken now
    assert open_tokens(source, TOK, tmp_path).fingerprint == tf.fingerprint


def test_default_place_is_the_users_cache(tmp_path, source, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path/"xdg"))
    assert token_folder(source, TOK).parent == tmp_path/"xdg"/"nsa_nb"/"tokens"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path/"home"))
    assert token_folder(source, TOK).parent == tmp_path/"home"/".cache"/"nsa_nb"/"tokens"


def test_progress(tmp_path, source):
    seen = []
    open_tokens(source, TOK, tmp_path, progress=lambda n, total: seen.append((n, total)))
    assert seen[-1] == (source.n_bytes, source.n_bytes) and seen == sorted(seen)
    open_tokens(source, TOK, tmp_path, progress=lambda *a: pytest.fail("found in the cache: no work to show"))


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_big_text_is_not_held_in_memory(tmp_path):
    "64 MB of text in a process that may allocate 40 MB: a few MB of text at a time, and 24 bytes a document."
    with open(tmp_path/"a.jsonl", "w") as f:
        for i in range(16_000): f.write(json.dumps({"text": f"{i} " + "some words of text " * 210}) + "\n")
    code = """if True:
        import re, resource, sys
        from nsa_nb.data.text import local_source
        from nsa_nb.data.token_cache import open_tokens
        from nsa_nb.data.tokenizer import ByteTokenizer
        data = int(re.search(r"VmData:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (data + (40 << 20),) * 2)
        print(len(open_tokens(local_source(sys.argv[1]), ByteTokenizer(), sys.argv[2]).tokens))
    """
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.jsonl"), str(tmp_path)], capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr
    assert int(out.stdout) > 60_000_000
