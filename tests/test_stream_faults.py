"""Streams from a server that refuses, stalls, cuts and lies: the same batches, or an error that names the cause,
in time; as processes too.

What a row of nsa_nb/faults.py does (`gone`, `cut`, `bad_local_file`, `stop_while_silent`) is run by
tests/test_faults.py."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from fineweb_server import SHA, fineweb, parquet, serve
from safetensors.torch import load_file
from test_stream import config, write
from test_world import Job
from zygote import ROOT, Zygote

from nsa_nb.errors import RunError, UsageError
from nsa_nb.data.loader import open_run_data
from nsa_nb.data.remote import Patience, RangeFile

MODEL = [
    "--dim", 32, "--n-heads", 4, "--d-k", 8, "--d-v", 8, "--seq-len", 64, "--batch-size", 2, "--sample-tokens", 0,
    "--eval-batches", 2, "--val-fraction", 0.1, "--device", "cpu", "--precision", "fp32",
]


@pytest.fixture
def quick(monkeypatch):
    "Short pauses and small blocks, so that a small file takes many requests."
    monkeypatch.setattr(Patience, "first", 0.01)
    monkeypatch.setattr(RangeFile, "block_bytes", 1500)
    monkeypatch.setattr(RangeFile, "tail_bytes", 9000)


QUICK = (
    "import nsa_nb.data.remote as r; r.Patience.first, r.RangeFile.block_bytes, r.RangeFile.tail_bytes = .01, "
    "1500, 9000"
)
# a group of rows is a document, a document some four steps of a small run
BIG = lambda: fineweb((80, 80), group=1, text=lambda i: f"{i} " + random.Random(i).randbytes(250).hex())


def stream(s, **kw): return config(data__dataset="fineweb_edu", data__data_files=s.urls, train__seq_len=256, **kw)


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    z = Zygote(tmp_path_factory.mktemp("cache"))
    yield z
    z.close()


def heartbeat(out: Path) -> list[dict]:
    return [json.loads(l) for l in (out / "heartbeat_rank0.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------- the loader

@pytest.mark.parametrize(
    "faults",
    [[503] * 3, ["stall"], ["drop"] * 4, ["early"] * 4, ["garbage"], [429, "drop", 500, "early", "stall", 502]],
    ids=str,
)
@pytest.mark.parametrize("prefetch", [True, False])
def test_faults_that_pass_change_nothing(quick, faults, prefetch):
    with serve(BIG()) as s:
        s.stall = .7
        d = open_run_data(stream(s, data__prefetch=prefetch, data__loader_timeout=2 if "stall" in faults else 10))
        want = [d.train_batch(k, 4).x for k in range(60)]
        d.close()
        d = open_run_data(stream(s, data__prefetch=prefetch, data__loader_timeout=2 if "stall" in faults else 10))
        got = []
        for k in range(60):
            if k == 2: s.faults[:] = faults
            got.append(d.train_batch(k, 4).x)
        assert (
            all(map(torch.equal, want, got))
            and not s.faults
            and d.retries >= (0 if "garbage" in faults else len(faults))
        )
        d.close()


def test_a_rate_limit_is_waited_for(quick):
    "The Hub says in its RateLimit header when it gives again: a reader comes back then, not before; a run can wait."
    with serve(BIG()) as s:
        s.faults[:] = ["limit"]
        d = open_run_data(stream(s, data__prefetch=False))
        began = time.monotonic()
        d.train_batch(0, 2)
        assert time.monotonic() - began >= 1 and d.retries == 1 and not s.faults
        assert "HTTP 429" in d.reader.patience.last_error and "is over in 1 s" in d.reader.patience.last_error
        d.close()


@pytest.mark.parametrize(
    "always,says",
    [
        (503, "HTTP 503"), ("stall", "sent nothing for 0.3"), ("drop", "ended the answer early|no batch for"),
        (404, "HTTP 404"), (403, "hf auth login"), ("garbage", "cannot be read|no Parquet file"),
    ],
)
@pytest.mark.parametrize("prefetch", [True, False])
def test_faults_that_stay_are_named_in_time(quick, monkeypatch, always, says, prefetch):
    monkeypatch.setattr(RangeFile, "block_bytes", 40_000)
    with serve(BIG()) as s:
        s.stall = 5
        d = open_run_data(stream(s, data__prefetch=prefetch, data__loader_timeout=1.2))
        for k in range(2): d.train_batch(k, 4)
        s.always = always
        began = time.monotonic()
        if always == "drop":
            s.files = {k: b"" for k in s.files}
            s.always = 503
            says = "HTTP 503"
        with pytest.raises(RunError, match=says) as e:
            for k in range(2, 400): d.train_batch(k, 4)
        assert (
            time.monotonic() - began < 8
            and re.search("00[01]_00000.parquet", str(e.value))
            and "fineweb_edu" in str(e.value)
        )
        assert d.failure() == str(e.value)
        with pytest.raises(RunError, match=says): d.train_batch(k, 4)            # whoever asks again hears it at once
        d.close()


def test_a_failure_is_none_until_it_is_met(quick, monkeypatch):
    "What processes tell each other: None while batches come, the cause from the step on that has none."
    with serve(fineweb((40,))) as s:
        d = open_run_data(stream(s, data__queue=2))
        d.train_batch(0, 4)
        assert d.failure() is None
        s.always = 404
        with pytest.raises(RunError, match="HTTP 404"):
            for k in range(1, 400):
                d.train_batch(k, 4)
                assert d.failure() is None
        assert "HTTP 404" in d.failure()
        d.close()


def test_a_server_without_ranges_is_refused(tmp_path):
    import functools, http.server, threading
    write(tmp_path, fineweb((5,)))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    handler.log_message = lambda *a: None
    http.server.SimpleHTTPRequestHandler.log_message = lambda *a: None
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    d = open_run_data(
        config(
            data__dataset="fineweb_edu",
            data__data_files=f"http://127.0.0.1:{server.server_port}/sample/10BT/000_00000.parquet",
        )
    )
    with pytest.raises(RunError, match="does not send parts of files"): d.train_batch(0, 2)
    d.close()
    server.shutdown()


# ---------------------------------------------------------------- before a run

def closed_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.parametrize(
    "env,args",
    [
        ({"HF_ENDPOINT": "http://127.0.0.1:{port}"}, []), ({"HF_ENDPOINT": "http://no-such-host.invalid"}, []),
        ({"HF_HUB_OFFLINE": "1"}, []), ({}, ["--data-files", "http://127.0.0.1:{port}/a.parquet"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("verb", ["preflight", "train"])
def test_a_source_out_of_reach_is_told_in_seconds(zygote, tmp_path, env, args, verb):
    port = closed_port()
    env = {k: v.format(port=port) for k, v in env.items()}
    args = [a.format(port=port) for a in args]
    began = time.monotonic()
    code, said = zygote.run(
        verb, "--config", "train_showcase", *MODEL, "--dataset", "fineweb_edu", "--out-dir", "run", *args, cwd=tmp_path,
        env=env,
    )
    assert code == 2 and time.monotonic() - began < 15, said
    assert "--dataset local --local-path FILE" in said and "-p dataset local -p local_path FILE" in said, said


def test_the_hub_hangs_after_the_knock(zygote, tmp_path):
    "Something listens and never answers."
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen(50)
        began = time.monotonic()
        code, said = zygote.run(
            "preflight", "--config", "train_showcase", *MODEL, "--dataset", "fineweb_edu", "--out-dir", "run",
            cwd=tmp_path, env={"HF_ENDPOINT": f"http://127.0.0.1:{s.getsockname()[1]}"},
        )
        assert code == 2 and time.monotonic() - began < 20 and "--local-path FILE" in said, said


def test_a_hub_that_refuses_is_named(zygote, tmp_path):
    "datasets says that it found no file."
    import http.server, threading
    class Hub(http.server.BaseHTTPRequestHandler):
        def log_message(self, *a): pass

        def do_GET(self):
            self.send_response(403 if self.path.startswith("/api") else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code, said = zygote.run(
        "preflight", "--config", "train_showcase", *MODEL, "--dataset", "fineweb_edu", "--out-dir", "run", cwd=tmp_path,
        env=dict(HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}", HF_HOME=str(tmp_path / "hf")),
    )
    server.shutdown()
    server.server_close()
    assert code == 2 and "403" in said and "--local-path FILE" in said, said


def test_preflight_reads_the_first_batch(zygote, tmp_path):
    with serve() as s:
        args = [
            "preflight", "--config", "train_showcase", *MODEL, "--dataset", "fineweb_edu", "--data-files", s.urls,
            "--out-dir", "run", "--loader-timeout", 1,
        ]
        code, said = zygote.run(*args, cwd=tmp_path)
        assert code in (0, 3) and "the first batch came after" in said and "3 files" in said, said
        s.always = 503
        code, said = zygote.run(*args, cwd=tmp_path)
        assert code == 2 and "HTTP 503" in said and "--local-path FILE" in said, said


# ---------------------------------------------------------------- runs

def options(s, *more):
    return [
        "train", "--config", "train_showcase", *MODEL, "--dataset", "fineweb_edu", "--data-files", s.urls, "--out-dir",
        "run", "--log-every", 1, "--heartbeat-every", 1, "--eval-every", 0, *more,
    ]


def test_a_run_whose_server_dies_ends_with_its_name_and_goes_on_exactly(zygote, tmp_path):
    with serve(BIG()) as s:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        code, said = zygote.run(*options(s, "--steps", 100, "--save-every", 20), cwd=tmp_path/"a", before=QUICK)
        assert code == 0, said
        run = zygote.start(
            *options(s, "--steps", 100, "--save-every", 20, "--loader-timeout", 1.5, "--queue", 1), cwd=tmp_path / "b",
            before=QUICK,
        )
        out = tmp_path/"b"/"run"
        run.until(lambda: (out/"train.log").exists() and "step 00020" in (out/"train.log").read_text())
        s.always = 503
        began = time.monotonic()
        assert run.wait(20) == 1 and time.monotonic() - began < 10
        said = run.text()
        assert "data.loader_timeout" in said and "HTTP 503" in said and "_00000.parquet" in said, said
        events = heartbeat(out)
        assert any(e["msg"] == "loader_error" and "HTTP 503" in e["error"] for e in events)
        m = json.loads((out/"metrics.json").read_text())
        assert (
            m["status"] == "failed"
            and "HTTP 503" in m["reason"]
            and (out / ".anomaly_type").read_text().strip() == "run_error"
        )
        s.always = None
        code, said = zygote.run(
            *options(s, "--steps", 100, "--save-every", 20, "--resume", "auto"), cwd=tmp_path / "b", before=QUICK
        )
        assert code == 0 and "resumed from" in said, said
        same(tmp_path/"a"/"run", out, 100)
        code, said = zygote.run("data", "audit", "--dir", out, "--source", cwd=tmp_path)
        assert code == 0 and "no document twice, none missing" in said and "2 sessions" in said, said


def same(a: Path, b: Path, step: int):
    "Weights, optimizer and state of the last checkpoints are bit-equal."
    for name in ("model.safetensors", "optimizer.safetensors"):
        x, y = (load_file(d/"checkpoints"/f"step_{step:08d}"/name) for d in (a, b))
        assert x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x), name
    x, y = (json.loads((d/"checkpoints"/f"step_{step:08d}"/"state.json").read_text()) for d in (a, b))
    x, y = (z.get("state", z) for z in (x, y))
    assert x["data"] == y["data"] and x["data"]["cursor"]["tokens"] == step * 128


def test_killed_and_resumed_through_the_hub(zygote, tmp_path):
    """`datasets` resolves the repository from a Hub on this machine; kill −9; the same weights as a run that
    nobody touched."""
    with serve(BIG() | fineweb((3,), folder="data/CC-MAIN-2013-20")) as s:
        env = dict(HF_ENDPOINT=s.endpoint, HF_HOME=str(tmp_path/"hf"), HF_TOKEN="hf_secret")
        opts = [o for o in options(s, "--steps", 40, "--save-every", 10) if o not in ("--data-files", s.urls)]
        # HF_ENDPOINT is read when huggingface_hub is imported, which the zygote has not done
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        code, said = zygote.run(*opts, cwd=tmp_path/"a", env=env, before=QUICK)
        assert code == 0, said
        out = tmp_path/"b"/"run"
        for step in (17,):
            run = zygote.start(*opts, "--resume", "auto", cwd=tmp_path/"b", env=env, before=QUICK)
            run.until(lambda: (out/"train.log").exists() and f"step {step:05d}/" in (out/"train.log").read_text())
            run.kill(signal.SIGKILL)
            assert run.wait() == -9
        code, said = zygote.run(*opts, "--resume", "auto", cwd=tmp_path/"b", env=env, before=QUICK)
        assert code == 0, said
        same(tmp_path/"a"/"run", out, 40)
        m = json.loads((out / "metrics.json").read_text())
        assert m["revision"] == SHA and m["dataset"] == "fineweb_edu"
        assert all(who is None for _, _, _, who in s.log), "the token went to another host"
        code, said = zygote.run("data", "audit", "--dir", out, "--source", cwd=tmp_path, env=env)
        assert code == 0 and "2 sessions" in said, said
        assert {
            k
            for b in heartbeat(out)
            if b["msg"] == "progress"
            for k in ("fetch_p50_ms", "fetch_p95_ms")
            if isinstance(b[k], float)
        } == {"fetch_p50_ms", "fetch_p95_ms"}
        assert re.search(r"fetch_p50 [\d.]+ms \| fetch_p95 [\d.]+ms", (out/"train.log").read_text())


def test_another_revision_is_refused_and_named(monkeypatch, tmp_path):
    d = open_run_data(config(data__local_path=write(tmp_path/"d", fineweb())))
    d.train_batch(0, 2)
    state = d.state_dict(1) | dict(revision="a" * 40)
    d.close()
    with pytest.raises(UsageError, match="--hf-revision " + "a" * 40): d.load_state_dict(state)


def synthetic(zygote, tmp_path):
    "Random tokens when asked, and visible everywhere."
    with serve(BIG()) as s:
        run = zygote.start(
            *options(s, "--steps", 80, "--save-every", 0, "--loader-timeout", 4, "--queue", 1, "--synthetic-on-fail"),
            cwd=tmp_path, before=QUICK,
        )
        out = tmp_path/"run"
        run.until(lambda: (out/"train.log").exists() and "step 00010" in (out/"train.log").read_text())
        s.always = 503
        ended = run.wait(60)
    m = json.loads((out / "metrics.json").read_text())
    k = m["synthetic_from"]
    assert m["status"] == "done" and 10 <= k < 80, run.text()
    events = heartbeat(out)
    assert any(e["msg"] == "loader_error" and e["synthetic"] and "HTTP 503" in e["error"] for e in events)
    assert [e["synthetic"] for e in events if e["msg"] == "progress"] == [False] * k + [True] * (80 - k)
    assert [e["synthetic"] for e in events if e["msg"] in ("eval", "done") and e["step"] == 80] == [True, True]
    log = (out/"train.log").read_text()
    assert f"SYNTHETIC tokens from step {k} on" in log and f"SYNTHETIC tokens from step {k} on" in run.text()
    assert ["SYNTHETIC DATA" in l for l in log.splitlines() if l.startswith("step ")] == [False] * k + [True] * (80 - k)
    assert [
        l.endswith(" | SYNTHETIC DATA")
        for l in run.text().splitlines()
        if l.startswith(("eval step 00080", "done at step"))
    ] == [True, True], run.text()
    code, said = zygote.run("report", "--dir", out, cwd=tmp_path)
    assert code in (1, 3) and "SYNTHETIC" in said
    code, said = zygote.run("data", "audit", "--dir", out, cwd=tmp_path)
    assert code == 0 and f"{80 - k} steps were synthetic" in said, said
    return ended, run.text()


def test_synthetic_from_the_first_step(zygote, tmp_path):
    code, said = zygote.run(
        "train", "--config", "train_showcase", *MODEL, "--dataset", "fineweb_edu", "--data-files",
        f"http://127.0.0.1:{closed_port()}/a.parquet", "--out-dir", "run", "--steps", 4, "--eval-every", 2,
        "--save-every", 0, "--synthetic-on-fail", cwd=tmp_path,
    )
    assert code == 0 and "SYNTHETIC tokens from step 0 on" in said and "SYNTHETIC tokens for validation" in said, said
    assert all(
        l.endswith(" | SYNTHETIC DATA") for l in said.splitlines() if l.startswith(("step ", "eval step", "done at"))
    ), said
    assert json.loads((tmp_path/"run"/"metrics.json").read_text())["synthetic_from"] == 0


def test_the_end_of_the_data_begins_an_epoch_and_report_docs(zygote, tmp_path):
    write(tmp_path/"d", fineweb((20, 20)))
    code, said = zygote.run(
        "train", "--config", "train_showcase", *MODEL, "--dataset", "fineweb_edu_local", "--local-path", "d",
        "--out-dir", "run", "--steps", 60, "--eval-every", 0, "--save-every", 0, "--log-every", 20, "--heartbeat-every",
        1, "--fwe-report-docs", 25, cwd=tmp_path,
    )
    assert code == 0, said
    epochs = [b["epoch"] for b in heartbeat(tmp_path/"run") if b["msg"] == "progress"]
    assert epochs == sorted(epochs) and set(epochs) == {0, 1, *epochs} and epochs[-1] >= 1
    log = (tmp_path/"run"/"train.log").read_text()
    assert "the stream has ended and begins again: epoch 1" in log
    told = [int(n) for n in re.findall(r"stream: (\d+) documents", log)]
    assert len(told) == told[-1] // 25 and all(a // 25 < b // 25 for a, b in zip(told, told[1:])), told
    fresh = [b["fresh_tokens"] for b in heartbeat(tmp_path/"run") if b["msg"] == "loader_ready"]
    assert fresh[0] is None and fresh[1] > 0            # text repeats from here on, which the leak check has to know


BAD = {
    "no column": (lambda: parquet(pa.table({"body": ["x"] * 30})), 'need a column "text", got body'),
    "broken Parquet": (lambda: b"PAR1" + b"?" * 100, "is no Parquet file"),
    "no validation": (lambda: parquet(pa.table({"text": ["x"] * 3})), "data.val_fraction=1e-09: raise it"),
    "broken JSON": (lambda: b'{"text": "whole"}\n{"text": "ha', "not a JSON object"),
}


def bad_local_file(zygote, tmp_path, bad):
    "As with `local`: exit code 2, a remedy, and nothing left that the next start would take for a run."
    make, says = BAD[bad]
    name = "a.jsonl" if "JSON" in bad else "a.parquet"
    args = [
        "train", "--config", "train_showcase", *MODEL, "--dataset", "fineweb_edu_local", "--local-path", "d",
        "--out-dir", "run", "--steps", 2, "--save-every", 0,
    ]
    write(tmp_path/"d", {name: make()})
    code, said = zygote.run(*args, *(["--val-fraction", "1e-9"] if "validation" in bad else []), cwd=tmp_path)
    assert (
        code == 2
        and says in said
        and "Traceback" not in said
        and ("raise it" in said or "give another --local-path" in said)
    ), said
    assert {p.name for p in (tmp_path/"run").iterdir()} <= {"run.pid"}
    (tmp_path / "d" / name).unlink()
    write(tmp_path / "d", fineweb())
    good, more = zygote.run(*args, cwd=tmp_path)
    assert good == 0, more
    return code, said


@pytest.mark.parametrize("bad", ["no column", "no validation"])
def test_bad_local_files_are_wrong_use(zygote, tmp_path, bad): bad_local_file(zygote, tmp_path, bad)


def ended(out: Path, step: int, reason: str) -> None:
    "As after any stop."
    m = json.loads((out/"metrics.json").read_text())
    assert (m["status"], m["reason"], m["step"]) == ("halted", reason, step) and not (out/".anomaly_type").exists()
    saved = sorted(p.name for p in (out/"checkpoints").glob("step_*")) if (out/"checkpoints").exists() else []
    assert saved[-1:] == ([f"step_{step:08d}"] if step else []) and (out/"model.pt").exists() == (step > 0)


def stop(run, out: Path, name: str) -> None:
    "Ask for the end, and have it within seconds."
    began = time.monotonic()
    if name == "halt": (out/".HALT").write_text("halt: enough\n")
    else: run.kill(signal.Signals[name])
    assert run.wait(20) == 0, run.text()
    assert time.monotonic() - began < 4, time.monotonic() - began       # 2 s to hear it, and some to save; 60 before


def silent(s):
    "From now on the server takes requests and says nothing; wait until one has been taken."
    n = len(s.log)
    s.stall, s.always = 30, "stall"
    while len(s.log) == n: time.sleep(.01)
    time.sleep(.5)


def stop_while_silent(zygote, tmp_path, name, more=()):
    """It does not wait for the timeout of a silent server: the steps that are done are saved, and the run goes on
    from there."""
    with serve(BIG()) as s:
        # without the thread there is no queue
        args = options(s, "--save-every", 0, *([] if "--no-prefetch" in more else ["--queue", 1]), *more)
        run = zygote.start(*args, "--steps", 10_000, cwd=tmp_path, before=QUICK)
        out = tmp_path/"run"
        run.until(lambda: (out/"train.log").exists() and "step 00010" in (out/"train.log").read_text())
        silent(s)
        stop(run, out, name)
        step = json.loads((out/"metrics.json").read_text())["step"]
        assert step >= 10
        ended(out, step, "halt: enough" if name == "halt" else name)
        s.always = None
        (out / ".HALT").unlink(missing_ok=True)
        code, said = zygote.run(*args, "--steps", step + 2, "--resume", "auto", cwd=tmp_path, before=QUICK)
        assert code == 0 and f"at step {step}" in said, said
        return run.poll(), run.text()


@pytest.mark.parametrize("name", ["SIGINT", "halt"])
@pytest.mark.parametrize("more", [[], ["--no-prefetch"]], ids=str)
def test_a_stop_while_the_loader_waits(zygote, tmp_path, name, more): stop_while_silent(zygote, tmp_path, name, more)


@pytest.mark.parametrize(
    "more", [[], ["--no-prefetch"], ["--warmup-batches", 500, "--queue", 500, "--warmup-timeout", 0]], ids=str
)
def test_a_stop_before_the_first_batch(zygote, tmp_path, more):
    """In a silent server's first answer, and while batches are laid up; a resumed run that is stopped there keeps
    what it has."""
    with serve(BIG()) as s:
        out = tmp_path/"run"
        args = options(s, "--save-every", 0, *more)
        if "--queue" not in more: s.stall, s.always = 30, "stall"
        else: s.slow = .3
        run = zygote.start(*args, "--steps", 10, cwd=tmp_path, before=QUICK)
        run.until(lambda: len(s.log) > 1 and (out / "consumed_rank0.jsonl").exists())
        time.sleep(0.3)
        stop(run, out, "SIGTERM")
        assert run.text().count("stopped before the first step: nothing was trained\n") == 1
        ended(out, 0, "SIGTERM")
        assert not any(e["msg"] == "loader_ready" for e in heartbeat(out))
        s.always, s.slow = None, 0
        code, said = zygote.run(*options(s, "--save-every", 0, "--steps", 3), cwd=tmp_path, before=QUICK)
        assert code == 0, said
        if "--queue" in more: return
        s.always = "stall"
        (out / "model.pt").unlink()
        n = len(s.log)
        run = zygote.start(*args, "--steps", 10, "--resume", "auto", cwd=tmp_path, before=QUICK)
        run.until(lambda: len(s.log) > n)
        time.sleep(0.3)
        stop(run, out, "SIGTERM")
        ended(out, 3, "SIGTERM")


@pytest.mark.parametrize(
    "args,step", [(["--leak-probe-every", 1], 0), (["--leak-probe-every", 0, "--eval-every", 3], 3)], ids=str
)
def test_a_stop_while_validation_is_waited_for(zygote, tmp_path, args, step):
    with serve(BIG()) as s:
        never = (
            QUICK
            + "\nimport time\nfrom nsa_nb.data import held_out\nheld_out.validation = lambda *a, **k: time.sleep(60)"
        )
        run = zygote.start(*options(s, "--steps", 10, "--save-every", 0, *args), cwd=tmp_path, before=never)
        out = tmp_path/"run"
        run.until(
            lambda: (out / "train.log").exists() and (not step or f"step {step:05d}" in (out / "train.log").read_text())
        )
        time.sleep(1)
        stop(run, out, "SIGTERM")
        ended(out, step, "SIGTERM")


@pytest.mark.parametrize("knock", [False, True])
def test_a_stop_while_the_hub_is_silent(zygote, tmp_path, knock):
    "Before it answers at all, and after the knock, when `datasets` asks for the files."
    import http.server, threading
    asked = []
    class Hub(http.server.BaseHTTPRequestHandler):
        def log_message(self, *a): pass
        def do_HEAD(self):
            asked.append("HEAD")
            if not knock: time.sleep(30)
            self.send_response(200)
            self.end_headers()

        def do_GET(self):
            asked.append("GET")
            time.sleep(30)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = dict(HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}", HF_HOME=str(tmp_path/"hf"))
    args = ["train", "--config", "train_showcase", *MODEL, "--dataset", "fineweb_edu", "--out-dir", "run", "--steps", 3]
    run = zygote.start(*args, cwd=tmp_path, env=env)
    run.until(lambda: ("GET" if knock else "HEAD") in asked)
    time.sleep(0.3)
    stop(run, tmp_path/"run", "SIGTERM")
    assert run.text().count("stopped before the first step: nothing was trained\n") == 1 and {
        p.name for p in (tmp_path / "run").iterdir()
    } == {"run.pid", "train.log"}
    began = time.monotonic()                                     # and data.loader_timeout is a limit for this too
    code, said = zygote.run(*args, "--loader-timeout", 1.5, cwd=tmp_path, env=env)
    assert (
        code == 2
        and time.monotonic() - began < 10
        and ("within 1.5 s" if knock else "sent nothing for 0.75 s") in said
        and "--local-path FILE" in said
    ), said
    server.shutdown()
    server.server_close()


def test_a_stop_of_two_processes_while_both_wait(zygote, tmp_path):
    "One step for both, one checkpoint."
    with serve(BIG()) as s:
        job = Job(zygote, 2, options(s, "--steps", 10_000, "--save-every", 0, "--queue", 1)[1:], tmp_path, before=QUICK)
        out = tmp_path/"run"
        job.until(lambda: (out/"train.log").exists() and "step 00010" in (out/"train.log").read_text())
        silent(s)
        time.sleep(1)
        began = time.monotonic()
        for r in job.runs: r.kill(signal.SIGTERM)
        assert job.wait(20) == [0, 0] and time.monotonic() - began < 6, job.text()
        ended(out, json.loads((out/"metrics.json").read_text())["step"], "SIGTERM")


def gone(zygote, tmp_path, world, faults, says):
    """Each process says the data set and the server, soon after the loader's own patience; none waits in a
    collective. The run goes on exactly."""
    with serve(BIG()) as s:
        args = options(s, "--save-every", 5, "--loader-timeout", 2, "--queue", 1)
        out = tmp_path/"run"

        def start(*more):
            return (
                Job(zygote, world, [*args, *more][1:], tmp_path, before=QUICK)
                if world > 1
                else Alone([zygote.start(*args, *more, cwd=tmp_path, before=QUICK)])
            )

        job = start("--steps", 10_000)
        job.until(lambda: (out/"train.log").exists() and "step 00010" in (out/"train.log").read_text())
        s.stall, s.faults[:], began = 30, faults, time.monotonic()
        codes = job.wait(20)
        assert codes == [1] * world and time.monotonic() - began < 8, job.text()
        for r, run in enumerate(job.runs):
            end = [l for l in run.text().splitlines() if l.startswith(f"rank {r}: failed: " if r else "failed: ")]
            assert (
                len(end) == 1
                and "dataset 'fineweb_edu'" in end[0]
                and f"http://127.0.0.1:{s.endpoint.rpartition(':')[2]}/" in end[0]
                and "data.loader_timeout" in end[0]
                and says in end[0]
            ), job.text()
            last = json.loads((out / f"heartbeat_rank{r}.jsonl").read_text().splitlines()[-1])
            assert last["msg"] == "anomaly" and last["message"] in end[0]
        m = json.loads((out / "metrics.json").read_text())
        assert (
            m["status"] == "failed"
            and says in m["reason"]
            and (out / ".anomaly_type").read_text().strip() == "run_error"
        )
        said, at, s.faults[:] = job.text(), int(sorted(p.name for p in (out/"checkpoints").glob("step_*"))[-1][5:]), []
        job = start("--steps", at + 4, "--resume", "auto")
        assert job.wait() == [0] * world and f"at step {at}" in job.text(), job.text()
        proved(zygote, out)
        return codes[0], said


class Alone(Job):
    "A Job of one process without a group."
    def __init__(self, runs): self.runs = runs


def proved(zygote, out: Path) -> None:
    "No document twice, none missing: by the record, and by the source."
    code, said = zygote.run("data", "audit", "--dir", out, "--source", cwd=out.parent)
    assert code == 0 and "no document twice, none missing" in said, said


def cut(zygote, tmp_path):
    "Connections end early, in the middle of a run."
    with serve(BIG()) as s:
        # some 20 answers are of the start: preflight and the validation's text
        s.faults[:] = ["ok"] * 28 + ["drop", "early"] * 4
        code, said = zygote.run(*options(s, "--steps", 60, "--save-every", 0), cwd=tmp_path, before=QUICK)
        assert not s.faults and json.loads((tmp_path/"run"/"metrics.json").read_text())["retries"] == 8
        proved(zygote, tmp_path/"run")
        return code, said


def test_a_finished_run_that_lost_its_model_writes_it_without_reading(zygote, tmp_path):
    write(tmp_path/"d", fineweb())
    args = [
        "train", "--config", "train_showcase", *MODEL, "--dataset", "fineweb_edu_local", "--local-path", "d",
        "--out-dir", "run", "--steps", 3, "--eval-every", 0, "--save-every", 0,
    ]
    code, said = zygote.run(*args, cwd=tmp_path)
    assert code == 0, said
    (tmp_path / "run" / "model.pt").unlink()
    n = len((tmp_path / "run" / "consumed_rank0.jsonl").read_text())
    code, said = zygote.run(*args, "--resume", "auto", cwd=tmp_path)
    assert (
        code == 0
        and (tmp_path / "run" / "model.pt").exists()
        and len((tmp_path / "run" / "consumed_rank0.jsonl").read_text()) == n
    ), said
    code, said = zygote.run(*args[:-6], "--steps", 5, "--resume", "auto", "--val-fraction", .2, cwd=tmp_path)
    assert code == 2 and "the data have changed" in said, said


@pytest.mark.runbook
def test_the_production_runbook_streams_unless_told_otherwise(tmp_path):
    "As it stands it wants FineWeb-Edu; out of reach, preflight stops it in seconds and names the parameter."
    env = {k: v for k, v in os.environ.items() if not k.startswith(("NSA_", "HF_"))} | dict(
        HF_ENDPOINT=f"http://127.0.0.1:{closed_port()}"
    )
    done = subprocess.run(
        [
            sys.executable, "-m", "papermill", "--no-progress-bar", "nbs/runbooks/prod_50k.ipynb",
            str(tmp_path / "out.ipynb"), "-p", "out_dir", str(tmp_path / "run"), "-p", "device", "cpu",
        ],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=180,
    )
    said = "\n".join(
        o["evalue"]
        for c in json.loads((tmp_path / "out.ipynb").read_text())["cells"]
        for o in c.get("outputs", [])
        if o["output_type"] == "error"
    )
    assert (
        done.returncode != 0
        and "HuggingFaceFW/fineweb-edu, sample-10BT" in said
        and "-p dataset local -p local_path FILE" in said
        and not (tmp_path / "run").exists()
    ), said + done.stderr[-2000:]
