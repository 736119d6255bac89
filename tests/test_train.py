"""What a notebook cannot do to itself: runs that are killed, signalled, doubled, starved and fed with the wrong
things, as processes."""

import csv
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from zygote import ROOT, Zygote, search_path

from nsa_nb.monitoring.heartbeat import PROGRESS_KEYS

MODEL = [
    "--dim", 32, "--n-heads", 4, "--d-k", 8, "--d-v", 8, "--seq-len", 64, "--batch-size", 2, "--sample-tokens", 8,
    "--eval-batches", 2,
]
EXACT = ["model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    "A folder of 30 documents, 3 KB each."
    r = random.Random(0)
    d = tmp_path_factory.mktemp("text")
    for i in range(30):
        (d / f"{i:02}.txt").write_text(
            " ".join("".join(r.choices("etaoinshrdlu", k=r.randint(1, 9))) for _ in range(500))
        )
    return d


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    z = Zygote(tmp_path_factory.mktemp("cache"))
    yield z
    z.close()


@pytest.fixture
def nsa(zygote, text, tmp_path):
    "nsa(verb, …) → exit code and text; nsa.start(…) → a living run; nsa.small: options of a small run."
    class Nsa:
        small = ["--config", "train_showcase", *MODEL, "--dataset", "local", "--local-path", text, "--out-dir", "run"]
        synthetic = ["--config", "train_showcase", *MODEL, "--dataset", "synthetic", "--out-dir", "run"]
        endless = [
            *small, "--steps", 100_000, "--save-every", 0, "--eval-every", 0, "--log-every", 1, "--heartbeat-every", 1,
        ]

        def __call__(self, *argv, **kw): return zygote.run(*argv, **{"cwd": tmp_path, **kw})
        def start(self, *argv, **kw): return zygote.start(*argv, **{"cwd": tmp_path, **kw})
    return Nsa()


@pytest.fixture
def out(tmp_path) -> Path: return tmp_path/"run"


def rows(path: Path) -> list[dict]:
    with open(path) as f: return list(csv.DictReader(f))

def beats(out: Path) -> list[dict]:
    "Complete lines of the heartbeat."
    file = out/"heartbeat_rank0.jsonl"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []

def events(out: Path, name: str) -> list[dict]: return [b for b in beats(out) if b["msg"] == name]
def progress(out: Path): return lambda: events(out, "progress")[2:]
def metrics(out: Path) -> dict: return json.loads((out/"metrics.json").read_text())
def steps(out: Path) -> list[int]: return sorted(int(p.name[5:]) for p in (out/"checkpoints").glob("step_*"))


# --- lines put off

PUT_OFF = """
import nsa_nb.training.trainer as t
def later(self, job, steps=2): self.put_off.append((self.step + steps, job))
t.TrainerState.later = later
write = t.Trainer._write
def _write(self, snap):
    rows = (self.out_dir/'training.csv').read_text().count(chr(10)) - 1
    with open("rows_at_saves", "a") as f: f.write(f"{snap.step} {rows} ")
    return write(self, snap)
t.Trainer._write = _write
"""


def test_lines_written_a_step_later_are_the_same(nsa, out, tmp_path):
    """As on a card, where the next step is on its way before a step's lines are written: same rows and lines, each
    before the checkpoint that follows it."""
    argv = [*nsa.small, "--steps", 7, "--log-every", 1, "--heartbeat-every", 2, "--save-every", 3, "--eval-every", 4]
    assert nsa("train", *argv)[0] == 0
    argv[argv.index("run")] = "off"
    code, said = nsa("train", *argv, before=PUT_OFF)
    assert code == 0, said
    timed = ("toks_per_s", "ts", "iso", "mfu", "pid", "cpu_mem_rss", "cpu_mem_private")
    plain = lambda r: {k: v for k, v in r.items() if k not in timed and "fetch" not in k}
    a, b = ([plain(r) for r in rows(o / "training.csv")] for o in (out, tmp_path / "off"))
    assert a == b and len(a) == 7
    a, b = ([plain(r) for r in events(o, "progress")] for o in (out, tmp_path / "off"))
    assert a == b and [r["step"] for r in a] == [1, 2, 4, 6] and "gate_entropy_mean" in a[1]
    order = [(r["msg"], r["step"]) for r in beats(tmp_path / "off") if r["msg"] in ("progress", "eval")]
    assert order == [("progress", 1), ("progress", 2), ("progress", 4), ("eval", 4), ("progress", 6), ("eval", 7)]
    assert (tmp_path/"rows_at_saves").read_text() == "3 3 6 6 7 7 "
    lines = [
        l.split()[1].split("/")[0]
        for l in (tmp_path / "off" / "train.log").read_text().splitlines()
        if l.startswith("step ")
    ]
    assert lines == [f"{i:05}" for i in range(1, 8)]


def test_lines_put_off_outlive_an_error(nsa, out):
    "The error of step 5 comes before step 4's lines were due."
    fails = PUT_OFF + """
step = t.Trainer.train_step
def train_step(self):
    if self.step == 4: raise OSError(5, "the card is gone")
    step(self)
t.Trainer.train_step = train_step
"""
    code, said = nsa(
        "train", *nsa.small, "--steps", 9, "--log-every", 1, "--heartbeat-every", 1, "--eval-every", 0, before=fails
    )
    assert code == 1 and "the card is gone" in said, said
    assert [r["step"] for r in rows(out / "training.csv")] == ["1", "2", "3", "4"] and [
        r["step"] for r in events(out, "progress")
    ] == [1, 2, 3, 4]


# --- asked to stop, to save, to tell

def test_signals_save_dump_and_stop(nsa, out):
    run = nsa.start("train", *nsa.endless)
    run.until(progress(out))
    os.kill(run.pid, signal.SIGUSR2)
    run.until(lambda: len(events(out, "checkpoint")) == 1)
    os.kill(run.pid, signal.SIGUSR1)
    run.until(lambda: events(out, "stackdump"))
    assert nsa("signal", "--dir", "run", "save")[0] == 0
    run.until(lambda: len(events(out, "checkpoint")) == 2)
    assert nsa("signal", "--dir", "run", "dump")[0] == 0
    run.until(lambda: len(events(out, "stackdump")) == 2)
    at = len(events(out, "progress"))
    run.until(lambda: len(events(out, "progress")) > at)  # it goes on
    dump, = out.glob("stackdump_*.txt")
    assert dump.read_text().count("most recent call first") >= 2 and "train_step" in dump.read_text()
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 0, run.text()
    m = metrics(out)
    last = beats(out)[-1]
    assert m["status"] == "halted" and m["reason"] == "SIGTERM" and last["msg"] == "halt" and last["step"] == m["step"]
    assert steps(out)[-1] == m["step"] and (out/"model.pt").exists() and len(steps(out)) == 3
    assert nsa("signal", "--dir", "run", "stop")[0] == 2                                # nobody is alive


def test_stopped_by_nsa_signal_and_killed_in_the_next_session(nsa, out):
    run = nsa.start("train", *nsa.endless)
    run.until(progress(out))
    assert nsa("signal", "--dir", "run", "stop")[0] == 0
    assert (
        run.wait() == 0
        and metrics(out)["reason"] == "SIGTERM"
        and beats(out)[-1]["msg"] == "halt"
        and steps(out) == [metrics(out)["step"]]
    )
    # what the last session said of its end does not stand when the next is killed
    already = len(events(out, "progress"))
    run = nsa.start("train", *nsa.endless, "--resume", "auto")
    run.until(lambda: len(events(out, "progress")) > already)
    run.kill()
    run.wait()
    assert not (out/"metrics.json").exists() and nsa("report", "--dir", "run")[0] == 1


SLOW = """
import time
from nsa_nb.data import tokens
def slow(texts):
    open("opening", "w").close()
    for t in texts: time.sleep(.1); yield [t]
tokens.doc_batches = slow
"""

def nothing_trained(out, cache):
    assert not any((out / n).exists() for n in ("checkpoints", "model.pt", "training.csv", "metrics.json")) and [
        p.name[:6] for p in (cache / "nsa_nb" / "tokens").iterdir()
    ] == [".lock-"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "halt"])
def test_stopped_while_text_is_made_into_tokens(nsa, out, tmp_path, name):
    "Gigabytes take minutes: the answer comes at the next lot, and the next start is the first one."
    few = [*nsa.small, "--steps", 2, "--cache-dir", "cache"]
    run = nsa.start("train", *few, before=SLOW)
    run.until((tmp_path/"opening").exists)
    if name == "halt": (out/".HALT").write_text("halt: enough\n")
    else: run.kill(signal.Signals[name])
    assert (
        run.wait(2) == 0
        and run.text().count("stopped before the first step: nothing was trained\n") == 1
        and "halted" not in run.text()
    ), run.text()
    nothing_trained(out, tmp_path/"cache")
    (out / ".HALT").unlink(missing_ok=True)
    code, said = nsa("train", *few)
    assert code == 0 and metrics(out)["step"] == 2, said


def test_stopped_between_opening_and_the_first_step(nsa, out):
    before = (
        "import os\n"
        "from nsa_nb import train\n"
        "floor = train.data_floor\n"
        "def f(data): os.kill(os.getpid(), 15); return floor(data)\n"
        "train.data_floor = f\n"
    )
    code, said = nsa("train", *nsa.small, "--steps", 2, before=before)
    assert (
        code == 0
        and "stopped before the first step: nothing was trained" in said
        and not (out / "model.pt").exists()
        and not steps(out)
    ), said
    code, said = nsa("train", *nsa.small, "--steps", 2)
    assert code == 0 and steps(out) == [2], said


# --- what a run leaves

def test_everything_of_the_out_dir(nsa, out):
    code, said = nsa(
        "train", *nsa.small, "--steps", 6, "--log-every", 2, "--eval-every", 3, "--save-every", 3, "--heartbeat-every",
        2,
    )
    assert code == 0, said
    assert list(rows(out/"training.csv")[0])[:4] == ["step", "loss", "lr", "toks_per_s"]
    assert [int(r["step"]) for r in rows(out/"training.csv")] == [1, 2, 4, 6]
    assert list(rows(out / "val.csv")[0]) == ["step", "loss", "ppl", "bits_per_byte"] and [
        int(r["step"]) for r in rows(out / "val.csv")
    ] == [3, 6]
    for r in rows(out / "val.csv"):
        assert math.isclose(float(r["ppl"]), math.exp(float(r["loss"]))) and float(r["bits_per_byte"]) < 8.5
    assert all(float(r["grad_norm"]) > 0 for r in rows(out/"training.csv"))
    for b in beats(out): assert {"ts", "iso", "pid", "rank", "step", "msg"} <= b.keys()
    lines = events(out, "progress")
    assert [b["step"] for b in lines] == [1, 2, 4, 6]
    for b in lines:
        assert set(PROGRESS_KEYS) <= b.keys()
        assert all(b[k] is not None for k in PROGRESS_KEYS if not k.startswith(("gpu_mem", "fb_")) and k != "mfu"), b
        assert (
            b["phase"] in ("data", "forward", "backward", "optim", "save", "eval")
            and b["grad_norm"] > 0
            and len(b["gate_branch_shares"]) == 3
        )
    assert [b["msg"] for b in beats(out) if b["msg"] != "progress"] == [
        "boot", "loader_ready", "eval", "checkpoint", "eval", "checkpoint", "done",
    ]
    m = metrics(out)
    env = json.loads((out/"env.json").read_text())
    assert {
        "status", "reason", "step", "steps", "params", "tokens", "toks_per_s", "val", "dataset", "fingerprint",
        "loss_first", "loss_last", "session_s",
    } <= m.keys()
    assert (
        m["status"] == "done"
        and m["tokens"] == 6 * 2 * 64
        and math.isclose(m["toks_per_s"], m["session_tokens"] / m["session_s"])
    )
    assert {"python", "torch", "platform", "cuda_available", "env"} <= env.keys()
    assert set(yaml.safe_load((out / "config.yaml").read_text())) == {
        "model", "nsa", "data", "runtime", "train", "monitor",
    }
    assert os.readlink(out/"checkpoints"/"latest") == "step_00000006" and any((out/"tb").iterdir())
    assert int((out/"run.pid").read_text()) == beats(out)[0]["pid"]
    assert not list(out.glob("stackdump_*")) and not (out/".anomaly_type").exists() and not (out/".HALT").exists()
    assert (out/"samples.txt").read_text().count("--- step") == 2 and "step 00006/6" in (out/"train.log").read_text()

    from nsa_nb.model import TinyLM      # the runbooks' "Post-Run Model Tests"
    saved = torch.load(out/"model.pt", map_location="cpu", weights_only=True)
    c, n = saved["cfg"]["model"], saved["cfg"]["nsa"]
    model = TinyLM(
        vocab=256, dim=int(c["dim"]), n_layers=int(c.get("n_layers", 1)), n_heads=int(c["n_heads"]),
        n_kv_groups=int(c["n_kv_groups"]), d_k=int(c["d_k"]), d_v=int(c["d_v"]), l=int(n["l"]), d=int(n["d"]),
        l_sel=int(n["l_sel"]), n_sel=int(n["n_sel"]), w=int(n["w"]), grad_checkpointing=False,
    ).eval()
    model.load_state_dict(saved["state_dict"], strict=True)
    ids = torch.tensor([list(b"Hello NSA! ")])
    with torch.no_grad():
        for _ in range(4): ids = torch.cat([ids, model(ids)[:, -1, :].argmax(-1, keepdim=True)], 1)
    code, said = nsa("generate", "--model", "run/model.pt", "--prompt", "Hello NSA! ", "--max-new-tokens", 4, "--raw")
    assert code == 0 and bytes(ids[0].tolist()).decode(errors="replace") in said
    code, said = nsa("report", "--dir", "run")
    assert code in (0, 3) and (out/"report.png").stat().st_size > 1000, said


def test_the_exit_code_of_a_report_is_that_of_the_worse_table(nsa, out):
    "A loss that rose for the first 500 steps and fell later: a STOP in the first table, none in the verdict."
    code, said = nsa("train", *nsa.small, "--steps", 6, "--log-every", 1, "--eval-every", 0)
    assert code == 0 and nsa("report", "--dir", "run")[0] in (0, 3), said
    head, *lines = (out/"training.csv").read_text().splitlines()
    first = lambda step, loss: ",".join([str(step), str(loss), *lines[0].split(",")[2:]])
    (out / "training.csv").write_text(
        "\n".join([head, *(first(100 * i + 1, 5 + i) for i in range(5)), *(first(1000 + i, 3) for i in range(6)), ""])
    )
    code, said = nsa("report", "--dir", "run")
    beginning, verdict = said.split("Verdict")
    assert code == 1 and "STOP" in beginning and "STOP" not in verdict, said


# --- where a setting comes from

def test_precedence_and_numbers(nsa, out, tmp_path):
    (tmp_path / "my.yaml").write_text(
        "include: train_showcase\ntrain: {lr: 2e-4, batch_size: 5, accumulate_grad_batches: 5, log_every: "
        "7}\nmodel: {dim: 32}\n"
    )
    rest = ["--config", "my.yaml", *nsa.small[2:], "--steps", 2, "--eval-every", 0]
    i = rest.index("--batch-size")
    del rest[i : i + 2]
    code, said = nsa(
        "train", *rest, "--accum", 1, env={"NSA_ACCUM": "3", "NSA_BATCH_SIZE": "2", "NSA_TOKENIZER": "byte"}
    )
    assert code == 0, said
    t = yaml.safe_load((out/"config.yaml").read_text())["train"]
    assert (
        t["accumulate_grad_batches"] == 1
        and t["batch_size"] == 2
        and t["log_every"] == 7
        and t["lr"] == 2e-4
        and t["seed"] == 1337
    )
    assert metrics(out)["tokens"] == 2 * 2 * 64
    code, said = nsa("config", "show", "my.yaml", "--accum", 1, env={"NSA_BATCH_SIZE": "2"})
    for key, source in (
        ("accumulate_grad_batches", "cli"), ("batch_size", "env:NSA_BATCH_SIZE"), ("train.lr ", "file:my.yaml"),
        ("train.seed", "file:train_showcase"), ("min_lr_ratio", "default"),
    ):
        assert re.search(f"{key}.*{source}", said), said


def test_wrong_names_are_refused_before_anything_is_written(nsa, out, tmp_path):
    (tmp_path/"typo.yaml").write_text("train: {save_evry: 5000}\n")
    for args, env, says in (
        (["--save-evry", 5], {}, "--save-every"), ([], {"NSA_BACH_SIZE": "2"}, "NSA_BATCH_SIZE"),
        (["--config", "typo.yaml"], {}, "save_every"), ([], {"NSA_ACCUM": "two"}, "NSA_ACCUM"),
        (["--resume", "nowhere"], {}, "nowhere"), (["--steps", 0], {}, "train.steps"),
    ):
        code, said = nsa("train", *([] if "typo.yaml" in args else nsa.small), *args, env=env)
        assert code == 2 and says in said, said
    for verb in (
        ["tran"], ["signal", "--dir", "run", "stp"], ["report", "--dir", "nowhere"], ["generate", "--model", "no.pt"],
    ):
        assert nsa(*verb)[0] == 2
    assert not out.exists()


COUNT = """
import atexit, json, os
from nsa_nb import op
seen = {}
def counted(name, f):
    def g(*a, **k): seen[name] = seen.get(name, 0) + 1; return f(*a, **k)
    return g
op.reference_branches = counted("reference", op.reference_branches)
op.torch_branches = counted("torch", op.torch_branches)
end = os._exit
def leave(code): json.dump(seen, open("seen.json", "w")); end(code)
os._exit = leave
"""


def test_switches_of_the_environment_do_what_they_say(nsa, out, tmp_path):
    def run(**env):
        shutil.rmtree(out, ignore_errors=True)
        code, said = nsa(
            "train", *nsa.small, "--steps", 3, "--log-every", 1, "--heartbeat-every", 1, "--sample-tokens", 0, env=env,
            before=COUNT,
        )
        assert code == 0, said
        return (
            json.loads((tmp_path / "seen.json").read_text()), [float(r["loss"]) for r in rows(out / "training.csv")],
            said,
        )

    plain, losses, said = run()
    assert not plain.get("reference") and plain["torch"] and "reference by" not in said
    parity, same, _ = run(NSA_FORCE_PARITY="1")
    assert parity["reference"] and not parity.get("torch") and same == pytest.approx(losses, abs=1e-4)
    both, same, said = run(NSA_DEBUG_COMPARE="1")
    assert both["reference"] and both["torch"] and same == losses
    rel = [float(x) for x in re.findall(r"differs from the reference by (\S+)", said)]
    assert len(rel) == 3 and max(rel) < 1e-5
    _, scaled, _ = run(NSA_ROPE_SCALE="4.0")
    assert scaled != losses and scaled == pytest.approx(losses, abs=0.5)
    # --batch-size 2 is on the command line
    run(NSA_BATCH_SIZE="1", NSA_ACCUM="3")
    assert metrics(out)["batch_global"] == 6


def test_strict_asserts_name_the_layer_that_is_not_finite(nsa, out):
    assert nsa("train", *nsa.small, "--steps", 1)[0] == 0
    saved = torch.load(out/"model.pt", weights_only=True)
    saved["state_dict"]["blocks.0.attn.q_proj.weight"][0, 0] = math.nan
    torch.save(saved, out.parent/"nan.pt")
    args = ["train", *nsa.small[:-1], "run2", "--steps", 5, "--resume", "nan.pt"]
    code, said = nsa(*args)
    assert (
        code == 1
        and "not finite 3 steps in a row" in said
        and (out.parent / "run2" / ".anomaly_type").read_text().strip() == "nonfinite"
    )
    shutil.rmtree(out.parent/"run2")
    code, said = nsa(*args, env={"NSA_STRICT_ASSERTS": "1"})
    assert code == 1 and "strict asserts: q of an attention layer is not finite" in said


def test_the_gpt2_tokenizer_by_its_variable(nsa, out):
    code, said = nsa("train", *nsa.small, "--steps", 1, "--eval-every", 0, env={"NSA_TOKENIZER": "gpt2"})
    if code == 0:
        assert (
            yaml.safe_load((out / "config.yaml").read_text())["data"]["tokenizer"] == "gpt2"
            and metrics(out)["params"] > 2 * 50257 * 32
        )
    else:
        assert (
            code == 2
            and "gpt2" in said
            and ("pip install" in said or "tokenizer_path" in said or "tokenizer-path" in said)
        ), said


# --- resuming

def test_ways_to_resume(nsa, out, tmp_path, text):
    base = [*nsa.small, "--steps", 8, "--save-every", 2, "--log-every", 1]
    assert nsa("train", *base)[0] == 0
    kept = tmp_path / "kept"
    shutil.copytree(out, kept, symlinks=True)

    def again():
        shutil.rmtree(out)
        shutil.copytree(kept, out, symlinks=True)

    newest = out/"checkpoints"/"step_00000008"

    code, said = nsa("train", *base, "--resume", "run/checkpoints/latest", "--steps", 9)
    assert code == 0 and "at step 8" in said and metrics(out)["step"] == 9, said
    # back, and forward again: the same
    again()
    code, said = nsa("train", *base, "--resume-from", "run/checkpoints/step_00000004")
    assert (
        code == 0
        and (newest / "model.safetensors").read_bytes()
        == (kept / "checkpoints" / "step_00000008" / "model.safetensors").read_bytes()
    )
    assert [int(r["step"]) for r in rows(out/"training.csv")] == list(range(1, 9))

    again()
    raw = bytearray((newest / "optimizer.safetensors").read_bytes())
    raw[-1] ^= 1
    (newest / "optimizer.safetensors").write_bytes(raw)
    # a flipped byte: falls back and says so
    code, said = nsa("train", *base, "--resume", "auto")
    assert code == 0 and "step_00000008/optimizer.safetensors" in said and "at step 6" in said, said
    assert (newest / "model.safetensors").read_bytes() == (
        kept / "checkpoints" / "step_00000008" / "model.safetensors"
    ).read_bytes()

    again()
    raw[0] ^= 1
    (newest / "optimizer.safetensors").write_bytes(raw)
    # named by hand: no falling back
    code, said = nsa("train", *base, "--resume", newest)
    assert code == 1 and "optimizer.safetensors" in said
    again()
    (tmp_path / "bad.pt").write_bytes((out / "model.pt").read_bytes()[:5000])
    code, said = nsa("train", *base[:-1], 1, "--out-dir", "other", "--resume", "bad.pt")
    assert code == 1 and "bad.pt" in said, said
    # weights only, into a folder of its own
    code, said = nsa("train", *base, "--out-dir", "other", "--resume", "run/model.pt", "--fresh")
    assert code == 0 and "weights only" in said and metrics(tmp_path/"other")["start_step"] == 0, said
    assert float(rows(tmp_path/"other"/"training.csv")[0]["loss"]) < float(rows(out/"training.csv")[0]["loss"])

    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file() and p.name != "run.pid" and p.name != ".lock"}
    code, said = nsa(
        "train", *[str(text / "00.txt") if a == text else a for a in base], "--resume", "auto", "--seq-len", 32
    )
    assert code == 2 and "the data have changed" in said, said                                         # other data
    # would overwrite what the run has left
    code, said = nsa("train", *base, "--resume", "run/model.pt")
    assert code == 2 and "earlier run" in said, said
    code, said = nsa("train", *base, "--resume", "auto", "--fresh")
    assert code == 2 and "--fresh" in said, said
    code, said = nsa("train", *base, "--resume", "auto", "--dim", 64)
    assert code == 2 and "model.dim was 32, is 64" in said and "--resume none" in said, said
    # a file of weights says nothing of its fields
    code, said = nsa("train", *base, "--out-dir", "third", "--resume", "run/model.pt", "--dim", 64)
    assert code == 2 and "has shape [256, 32], the model needs [256, 64]" in said, said
    assert before == {p: p.read_bytes() for p in before}
    # nothing left to do
    code, said = nsa("train", *base, "--resume", "auto", "--steps", 3)
    assert code == 0 and metrics(out)["step"] == 8 and "nothing to do" in said, said


def test_killed_after_going_back_to_an_older_checkpoint(nsa, out):
    "`auto` goes on where training went, not where the way that was left had come to."
    few = [*nsa.small, "--steps", 9, "--save-every", 3, "--eval-every", 0, "--log-every", 1]
    code, said = nsa("train", *few)
    assert code == 0 and steps(out) == [3, 6, 9], said
    kill = (
        "import os\n"
        "from nsa_nb.training import trainer\n"
        "step = trainer.Trainer.train_step\n"
        "def f(tr):\n"
        "    if tr.step == 4: os.kill(os.getpid(), 9)\n"
        "    step(tr)\n"
        "trainer.Trainer.train_step = f\n"
    )
    code, said = nsa("train", *few, "--resume", "run/checkpoints/step_00000003", "--lr", "2e-3", before=kill)
    assert code == -9 and "step_00000003 now counts as the last checkpoint" in said and steps(out) == [3, 6, 9], said
    code, said = nsa("train", *few, "--resume", "auto", "--lr", "2e-3")
    assert (
        code == 0
        and "step_00000003 at step 3" in said
        and [int(r["step"]) for r in rows(out / "training.csv")] == list(range(1, 10))
    ), said
    kept = sorted(p.name for p in (out / "checkpoints").glob("step_*"))
    assert kept == ["step_00000003", "step_00000006", "step_00000006.old-1", "step_00000009", "step_00000009.old-1"]


def test_what_another_configuration_changes_is_told_on_resume(nsa, out):
    few = [*nsa.small, "--eval-every", 0, "--save-every", 0]
    code, said = nsa("train", *few, "--steps", 3, "--lr", "1e-3")
    assert code == 0 and "going on with" not in said, said
    code, said = nsa("train", *few, "--steps", 3, "--lr", "1e-3", "--resume", "auto")
    assert code == 0 and "going on with" not in said, said
    code, said = nsa(
        "train", *few, "--steps", 5, "--lr", "2e-3", "--lr-schedule", "wsd", "--warmup-steps", 0, "--precision", "bf16",
        "--optimizer", "muon", "--batch-size", 4, "--weight-decay", 0.5, "--resume", "auto",
    )
    assert code == 0, said
    for told in (
        "train.lr was 0.001, is 0.002: going on with 0.002", "train.steps was 3, is 5: going on with 5",
        "train.lr_schedule was cosine, is wsd: going on with wsd", "train.warmup_steps was 20, is 0",
        "runtime.precision was fp32, is bf16",
        "train.optimizer was adamw, is muon: going on with muon; the momenta of the blocks' matrices begin at zero",
        "rows_per_step was 2, is 4", "weight_decay was 0.01",
    ):
        assert said.count(f"note: {told}") == 1, (told, said)
    assert "muon was None" not in said
    code, said = nsa("train", *few, "--steps", 2, "--optimizer", "muon", "--out-dir", "back")
    assert code == 0, said
    code, said = nsa("train", *few, "--steps", 6, "--optimizer", "adamw", "--out-dir", "back", "--resume", "auto")
    assert code == 0 and "train.optimizer was muon, is adamw: going on with adamw; the momenta" in said, said


# --- odd configurations

@pytest.mark.parametrize(
    "options",
    [
        "--steps 1",
        "--steps 3 --warmup-steps 50 --grad-clip null --eval-every 100 --accum 3 --batch-size 1",
        "--steps 2 --seq-len 1",
        "--steps 2 --seq-len 7",
        "--steps 3 --lr-schedule wsd --phi mlp --gate softmax --shared-kv --gradient-checkpointing --keep-last 1 "
        "--save-every 1",
    ],
)
def test_odd_configurations_run_to_their_end(nsa, out, options):
    code, said = nsa("train", *nsa.small, *options.split())
    assert code == 0, said
    assert metrics(out)["status"] == "done" and math.isfinite(metrics(out)["val"]["loss"])
    assert nsa("report", "--dir", "run")[0] in (0, 3)


# --- a failing run in a runbook

@pytest.mark.runbook
def test_a_run_that_fails_under_papermill_fails_the_notebook_with_its_reason(text, tmp_path):
    (tmp_path / "bad.yaml").write_text(
        f"include: train_showcase\nmodel: {{dim: 32, n_heads: 4, d_k: 8, d_v: 8}}\ndata: "
        f"{{dataset: local, local_path: '{text}'}}\n"
        "train: {seq_len: 64, batch_size: 2, warmup_steps: 0, lr: 1e30, grad_clip: null, sample_tokens: 0}\n"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path/"cache"), "PYTHONPATH": search_path()}
    cmd = [
        sys.executable, "-m", "papermill", "--no-progress-bar", "nbs/runbooks/prod_50k.ipynb",
        str(tmp_path / "out.ipynb"), "-p", "config", str(tmp_path / "bad.yaml"), "-p", "out_dir", str(tmp_path / "run"),
        "-p", "steps", "40",
    ]
    done = subprocess.run(cmd, cwd=ROOT, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode != 0
    cells = json.loads((tmp_path/"out.ipynb").read_text())["cells"]
    said = "\n".join(
        o["ename"] + o["evalue"] for c in cells for o in c.get("outputs", []) if o["output_type"] == "error"
    )
    assert "RunError" in said and "not finite" in said and "lower train.lr" in said, said


ODD = {
    "missing": ("nowhere", "there is no such file or folder"), "a text": ("run/config.yaml", "it is no .pt"),
    "rows": ("run/training.csv", "it is no .pt"), "empty": ("empty.pt", "it is empty"),
    "a zip": ("notes.zip", "it is a .zip of something else"), "an empty folder": ("bare", "is not a checkpoint folder"),
    "the run": ("run", "did you mean 'run/checkpoints/latest'?"),
    "its checkpoints": ("run/checkpoints", "did you mean 'run/checkpoints/latest'?"),
    "a manifest": ("run/checkpoints/latest/manifest.json", "it is no .pt"),
    "a device": ("/dev/null", "neither a file nor a folder"), "no tensors": ("list.pt", "holds no weights"),
    "another's": ("run/checkpoints/latest/rng.safetensors", "the weights are of another model"),
}


def test_odd_values_of_resume_are_wrong_use(nsa, out, tmp_path):
    """Exit code 2, the value, what to give; neither a run there nor one that --fresh would move is touched.
    model.pt is a value like any other."""
    code, said = nsa("train", *nsa.small, "--steps", 2)
    assert code == 0, said
    (tmp_path / "empty.pt").touch()
    (tmp_path / "bare").mkdir()
    torch.save([1, 2], tmp_path / "list.pt")
    with zipfile.ZipFile(tmp_path/"notes.zip", "w") as z: z.writestr("a.txt", "text")
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    for name, (value, says) in ODD.items():
        code, said = nsa("train", *nsa.small, "--steps", 2, "--resume", value, "--out-dir", "other")
        assert (
            code == 2
            and says in said
            and value in said
            and ("give " in said or "did you mean" in said)
            and "Traceback" not in said
        ), (name, code, said)
        code, said = nsa("preflight", *nsa.small, "--steps", 2, "--resume", value, "--out-dir", "third")
        late = name in ("no tensors", "another's")
        # a red row; what a file of tensors holds is read when the run begins
        assert late or code == 1 and says in said, (name, code, said)
        if not late:
            code, said = nsa("train", *nsa.small, "--steps", 2, "--resume", value, "--fresh")
            assert code == 2 and not (tmp_path / "run.old-1").exists(), (name, code, said)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before
    code, said = nsa("train", *nsa.small, "--steps", 2, "--resume", "run/model.pt", "--out-dir", "other")
    assert code == 0 and "weights only" in said, said
