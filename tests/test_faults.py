"""Every row of nsa_nb/faults.py, done to runs as processes: the exit code, the words that name the cause, and what
is left.

A function has the name of its row. It does the fault, asserts what the row says is left, and returns exit code
and text."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import test_stream_faults as streams
import yaml
from test_train import EXACT, MODEL, beats, events, metrics, nsa, out, progress, rows, steps, text, zygote  # noqa: F401
from test_world import Job, jsonl
from zygote import search_path

from nsa_nb.monitoring.checkpoint_files import list_checkpoints, verify_checkpoint
from nsa_nb.training.checkpoint import POINTS, find_checkpoint
from nsa_nb.config import load_config
from nsa_nb.faults import FAULTS, KILLED
from nsa_nb.monitoring.health import check_run, exit_code
from nsa_nb.monitoring.heartbeat import Heartbeat

RUN = [
    "--steps", 12, "--warmup-steps", 10, "--save-every", 3, "--eval-every", 4, "--log-every", 1, "--heartbeat-every", 1,
    "--accum", 2, "--lr", "1e-2",
]
QUICK = ["--log-every", 1, "--heartbeat-every", 1, "--sample-tokens", 0]


# --- what all rows share

def prints(out: Path, last: int) -> dict[str, bytes]:
    "What two equal runs have in common, to the last bit."
    m = metrics(out)
    folder = out/"checkpoints"/f"step_{last:08}"
    train = [{k: v for k, v in r.items() if k != "toks_per_s"} for r in rows(out/"training.csv")]
    kept = {k: m[k] for k in ("step", "tokens", "val", "best_val", "loss_last", "skipped_steps", "fingerprint")}
    return (
        {n: (folder / n).read_bytes() for n in EXACT}
        | {n: (out / n).read_bytes() for n in ("val.csv", "model.pt", "samples.txt")}
        | {"training.csv": json.dumps(train).encode(), "metrics.json": json.dumps(kept).encode()}
    )


@pytest.fixture(scope="module")

def base(text):
    return ["--config", "train_showcase", *MODEL, "--dataset", "local", "--local-path", text, "--out-dir", "run"]


@pytest.fixture(scope="module")
def straight(zygote, base, tmp_path_factory) -> Path:
    "A run of 12 steps that nothing happened to."
    d = tmp_path_factory.mktemp("straight")
    code, said = zygote.run("train", *base, *RUN, cwd=d)
    assert code == 0, said
    return d/"run"


@pytest.fixture
def tiny_disk(tmp_path):
    "A folder on a disk of 1 MB."
    d = tmp_path / "tiny"
    d.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(d)], capture_output=True).returncode:
        pytest.skip("can't mount a tmpfs here")
    yield d
    subprocess.run(["umount", "-l", str(d)], check=True)


@pytest.fixture
def lab(nsa, out, text, tmp_path, straight, base, request):
    """Where a fault is done: lab(verb, …) and lab.start(…) run nsa, lab.out is the run's folder, lab.straight that
    of a run nothing happened to."""

    class Lab:
        def __call__(self, *argv, **kw): return nsa(*argv, **kw)
        def train(self, *argv, **kw):
            synthetic = "synthetic" in argv  # random tokens have no text
            own = (
                [w for i, w in enumerate(base) if "--local-path" not in base[max(0, i - 1) : i + 1]]
                if synthetic
                else base
            )
            return nsa("train", *own, *argv, **kw)
        def start(self, *argv, **kw): return nsa.start("train", *base, *argv, **kw)
        def resume(self, *argv, **kw): return nsa("train", *base, *argv, "--resume", "auto", **kw)
        def disk(self): return request.getfixturevalue("tiny_disk")

        def finished(self) -> Path:
            shutil.copytree(straight, out, symlinks=True)
            return out

        def newest(self) -> Path: return out/"checkpoints"/"step_00000012"

        def contents(self):
            return {p: p.read_bytes() for p in out.rglob("*") if p.is_file() and p.name not in ("run.pid", ".lock")}

    lab = Lab()
    lab.zygote = request.getfixturevalue("zygote")
    lab.base = base
    lab.out = out
    lab.dir = tmp_path
    lab.text = text
    lab.straight = straight
    lab.endless = ["--steps", 100_000, "--save-every", 0, "--eval-every", 0, *QUICK]
    return lab


def params():
    for r in FAULTS:
        for v in r.variants or (None,):
            yield pytest.param(r, v, id=r.name if v is None else f"{r.name}-{str(v).replace('/', '_')}")


@pytest.mark.parametrize("row,variant", list(params()))
def test_fault(row, variant, lab):
    code, said = ROWS[row.name](lab, variant)
    assert code == row.exit, said
    assert row.cause is None if row.exit == KILLED else row.cause and row.cause in said, said
    assert "Traceback" not in said, said


def halted(lab, code, said, reason=None):
    "The folder of a run that ended because somebody asked."
    m = metrics(lab.out)
    assert code == 0 and m["status"] == "halted" and (reason is None or m["reason"] == reason), (said, m)
    assert steps(lab.out)[-1] == m["step"] and beats(lab.out)[-1]["msg"] == "halt" and (lab.out/"model.pt").exists()
    for p in list_checkpoints(lab.out): verify_checkpoint(p)
    return code, said


def goes_on(lab, *argv, at=None):
    "The next start goes on from the last good checkpoint, to its end."
    path = find_checkpoint(lab.out, warn=lambda m: None)
    assert at is None or int(path.name[5:13]) == at, path
    code, said = lab.resume("--steps", 40, "--eval-every", 0, *QUICK, *argv)
    assert code == 0 and f"resumed from {path}" in said.replace("resumed from run/", f"resumed from {lab.out}/"), said
    assert metrics(lab.out)["status"] == "done" and not (lab.out/".anomaly_type").exists()


def unchanged(lab, *argv):
    "A start that is refused leaves everything as it was."
    before = lab.contents()
    code, said = lab.train(*argv)
    assert lab.contents() == before
    return code, said


def hooked(body: str) -> str:
    "Code that is run first: `body` gets the trainer as tr when it has been made."
    return ("import os, time, torch\nfrom nsa_nb.training import trainer\nmade = trainer.Trainer.__init__\n"
            "def patch(tr):\n" + "".join(f"    {line}\n" for line in body.strip().splitlines()) +
            "def init(tr, *a, **k): made(tr, *a, **k); patch(tr)\ntrainer.Trainer.__init__ = init\n")


def at_point(body: str) -> str:
    "Code that is run first: `body` is run in the writer's thread, with the snapshot as snap and the point as p."
    return (
        "import os, time\nfrom nsa_nb.training import saver\nwrite = saver.write_snapshot\n"
        "def watched(out, snap, **kw):\n    def point(p):\n"
        + "".join(f"        {line}\n" for line in body.strip().splitlines())
        + "    return write(out, snap, on_point=point, **kw)\nsaver.write_snapshot = watched\n"
    )


# --- killed

def same_as_straight(lab):
    code, said = lab.resume(*RUN)
    assert code == 0, said
    now, then = prints(lab.out, 12), prints(lab.straight, 12)
    assert {k for k in then if now[k] != then[k]} == set()
    assert not list((lab.out/"checkpoints").glob(".tmp-*"))


def kill_at_write_point(lab, at):
    run = lab.start(*RUN, before=at_point(f"if p == {at!r} and snap.step == 6: os.kill(os.getpid(), 9)"))
    code = run.wait()
    named = POINTS.index(at) >= POINTS.index("renamed")
    assert int(find_checkpoint(lab.out).name[5:]) == (6 if named else 3)
    same_as_straight(lab)
    return code, run.text()


def kill_at_random(lab, seed):
    r = random.Random(seed)
    for _ in range(2):
        already = len(events(lab.out, "progress"))
        run = lab.start(*RUN, "--resume", "auto")
        if seed % 2:      # in the middle of the n-th write of a checkpoint
            n = r.randint(1, 2)
            tmp = set()

            def seen():
                tmp.update(p.name for p in (lab.out / "checkpoints").glob(".tmp-step_*"))
                return len(tmp) >= n

            run.until(seen)
            time.sleep(r.random() * 0.006)
        else:             # at any moment after some steps
            n = r.randint(1, 5)
            run.until(lambda: len(events(lab.out, "progress")) >= already + n)
            time.sleep(r.random() * 0.02)
        run.kill()
        code = run.wait()
        if code == 0: return 0, "ended before it was killed"
    same_as_straight(lab)
    return code, run.text()


def kill_before_first_save(lab, _):
    run = lab.start(*RUN)
    run.until(lambda: (lab.out / "training.csv").exists())
    run.kill()
    code = run.wait()
    assert not list_checkpoints(lab.out)
    same_as_straight(lab)
    return code, run.text()


def kill_and_corrupt(lab, _):
    run = lab.start(*RUN, before=at_point("if p == 'weights_written' and snap.step == 9: os.kill(os.getpid(), 9)"))
    code = run.wait()
    damage(lab.out/"checkpoints"/"step_00000006"/"model.safetensors")
    assert find_checkpoint(lab.out, warn=lambda m: None).name == "step_00000003"
    same_as_straight(lab)
    return code, run.text()


# --- asked to end

def term(lab, name):
    run = lab.start(*lab.endless)
    run.until(progress(lab.out))
    run.kill(signal.Signals[f"SIG{name}"])
    return halted(lab, run.wait(), run.text(), f"SIG{name}")


def term_group(lab, _):
    child = "import subprocess, pathlib\npathlib.Path('worker').write_text(str(subprocess.Popen(['sleep', '60']).pid))"
    with streams.serve(streams.BIG()) as s:
        args = streams.options(s, "--save-every", 0, "--queue", 2)
        run = lab.zygote.start(*args, "--steps", 100_000, cwd=lab.dir, before=f"{streams.QUICK}\n{child}")
        run.until(progress(lab.out))
        s.slow, n = 0.3, len(s.log)
        run.until(lambda: len(s.log) > n)  # the reading thread waits for an answer
        os.killpg(run.pid, signal.SIGTERM)
        ended = halted(lab, run.wait(), run.text(), "SIGTERM")
        stat = Path(f"/proc/{(lab.dir/'worker').read_text()}/stat")
        assert not stat.exists() or stat.read_text().split()[2] == "Z"
        s.slow = 0
        code, said = lab.zygote.run(
            *args, "--steps", metrics(lab.out)["step"] + 4, "--resume", "auto", cwd=lab.dir, before=streams.QUICK
        )
        assert code == 0, said
        streams.proved(lab.zygote, lab.out)
    return ended


HOLD = "if p == 'tmp_made': open('writing', 'w'); time.sleep(0.4)"

def term_twice(lab, _):
    run = lab.start(*lab.endless, before=at_point(HOLD))
    run.until(progress(lab.out))
    run.kill(signal.SIGTERM)
    run.until((lab.dir / "writing").exists)
    run.kill(signal.SIGTERM)
    return halted(lab, run.wait(), run.text(), "SIGTERM")


def term_while_saving(lab, _):
    run = lab.start(*lab.endless, "--save-every", 5, before=at_point(HOLD))
    run.until((lab.dir / "writing").exists)
    run.kill(signal.SIGTERM)
    ended = halted(lab, run.wait(), run.text(), "SIGTERM")
    assert steps(lab.out)[0] == 5 and len(steps(lab.out)) >= 2
    return ended


def usr2_waits(lab, _):
    run = lab.start(*lab.endless, before=at_point("if p == 'tmp_made': time.sleep(0.1)"))
    run.until(progress(lab.out))
    run.kill(signal.SIGUSR2)
    run.until(lambda: events(lab.out, "checkpoint"))
    seen = beats(lab.out)
    at = next(i for i, b in enumerate(seen) if b["msg"] == "checkpoint")
    assert (
        all(b["step"] <= seen[at]["step"] for b in seen[:at] if b["msg"] == "progress")
        and verify_checkpoint(lab.out / "checkpoints" / "latest")["step"] == seen[at]["step"]
    )
    run.kill(signal.SIGTERM)
    return halted(lab, run.wait(), run.text(), "SIGTERM")


def halt_file(lab, _):
    run = lab.start(*lab.endless)
    run.until(progress(lab.out))
    (lab.out / ".HALT").write_text("halt: the power goes off\n")
    return halted(lab, run.wait(), run.text(), "halt: the power goes off")


def leftover_halt(lab, _):
    lab.finished()
    (lab.out / ".HALT").write_text("halt: the power goes off\n")
    code, said = unchanged(lab, "--resume", "auto")
    assert "the power goes off" in said
    return code, said


def supervisor_dies(lab, _):
    watcher = subprocess.Popen(["sleep", "60"])
    run = lab.start(*lab.endless, "--supervised", watcher.pid)
    run.until(progress(lab.out))
    watcher.kill()
    watcher.wait()
    return halted(lab, run.wait(), run.text())


def nohup(lab, _):
    run = lab.start(
        "--steps", 60, "--eval-every", 0, *QUICK, before="import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    )
    run.until(progress(lab.out))
    run.kill(signal.SIGHUP)
    code = run.wait()
    assert metrics(lab.out)["step"] == 60
    return code, run.text()


# --- disks and folders

NO_ROOM = """
from nsa_nb.training import checkpoint
save = checkpoint.save_file
def full(tensors, path):
    full.calls = getattr(full, "calls", 0) + 1
    if full.calls > 3: time.sleep(0.2); open(path, "wb").write(b"half"); raise OSError(28, os.strerror(28), str(path))
    save(tensors, path)
checkpoint.save_file = full
"""

def disk_full_at_save(lab, _):
    try: lab.out = lab.disk()/"run"
    # no tmpfs here: a write that raises ENOSPC
    except pytest.skip.Exception: return full_disk(lab, "--no-async-save")
    code, said = lab.train(
        "--out-dir", lab.out, "--steps", 100, "--save-every", 1, "--eval-every", 0, "--no-async-save", timeout=30
    )
    good = list_checkpoints(lab.out)
    assert good
    for p in good: verify_checkpoint(p)
    return code, said


def full_disk(lab, *argv):
    code, said = lab.train(
        "--steps", 100_000, "--save-every", 5, "--eval-every", 0, *QUICK, *argv, before="import os, time\n" + NO_ROOM
    )
    m = metrics(lab.out)
    assert (
        m["status"] == "failed"
        and "step_00000010" in m["reason"]
        and "ENOSPC" in m["reason"]
        and (lab.out / ".anomaly_type").read_text().strip() == "disk_full"
    )
    assert m["step"] == 10 if argv else 10 < m["step"] < 1000
    assert [e["step"] for e in events(lab.out, "checkpoint")] == [5] and not list(
        (lab.out / "checkpoints").glob(".tmp-step*")
    )
    goes_on(lab, at=5)
    return code, said

def disk_full_behind(lab, _): return full_disk(lab)


def file_limit(lab, _):
    limit = at_point(
        "import resource\nif p == 'tmp_made' and snap.step == 10: resource.setrlimit(resource.RLIMIT_FSIZE, "
        "(60_000, resource.RLIM_INFINITY))"
    )
    code, said = lab.train("--steps", 100_000, "--save-every", 5, "--eval-every", 0, "--sample-tokens", 0, before=limit)
    assert "while writing model.safetensors" in said
    goes_on(lab, at=5)
    return code, said


def disk_full_between(lab, _):
    disk = lab.disk()
    # tensorboardX's own thread died of it, and the run waited for ever
    run = lab.start(*lab.endless, "--out-dir", disk/"run")
    run.until(progress(disk/"run"))
    with open(disk/"filler", "wb", buffering=0) as f:
        try:
            while True: f.write(bytes(4096))
        except OSError: pass
    return run.wait(30), run.text()


def out_dir_unwritable(lab, where):
    lab.out.mkdir()
    (lab.out / "file").write_text("mine")
    code, said = lab.train("--out-dir", where)
    assert (lab.out/"file").read_text() == "mine" and os.listdir(lab.out) == ["file"]
    return code, said


def out_dir_is_a_file(lab, _):
    lab.out.write_text("mine")
    code, said = lab.train()
    assert lab.out.read_text() == "mine"
    return code, said


def earlier_run(lab, _):
    lab.finished()
    return unchanged(lab)


def second_trainer(lab, how):
    first = lab.start(*lab.endless)
    first.until(progress(lab.out))
    code, said = lab.train(*{"plain": [], "resume": ["--resume", "auto"], "fresh": ["--fresh"]}[how])
    assert str(first.pid) in said or "earlier run" in said
    at = len(events(lab.out, "progress"))
    first.until(lambda: len(events(lab.out, "progress")) > at)
    first.kill(signal.SIGTERM)
    halted(lab, first.wait(), first.text())
    assert {b["pid"] for b in beats(lab.out)} == {first.pid}
    assert [int(r["step"]) for r in rows(lab.out/"training.csv")] == list(range(1, metrics(lab.out)["step"] + 1))
    assert sorted(p.name for p in lab.dir.glob("run*")) == ["run"]
    return code, said


def stale_pid(lab, _):
    lab.out.mkdir()
    other = subprocess.Popen(["sleep", "60"])
    try:
        (lab.out/"run.pid").write_text(f"{other.pid}\n")
        found = {lab("signal", "--dir", "run", what) for what in ("dump", "save", "stop")}
        assert other.poll() is None and len(found) == 1
    finally:
        other.kill()
        other.wait()
    return found.pop()


# --- checkpoint files

def damage(file: Path):
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 4
    file.write_bytes(raw)


def falls_back(lab, name):
    said = []
    assert find_checkpoint(lab.out, warn=said.append).name == "step_00000009" and name in said[0]
    code, said = lab.resume(*RUN)
    assert name in said and "step_00000009" in said and "at step 9" in said
    assert prints(lab.out, 12) == prints(lab.straight, 12)
    return code, said

def flipped_byte(lab, name):
    lab.finished()
    damage(lab.newest() / name)
    return falls_back(lab, name)


def truncated_file(lab, name):
    lab.finished()
    f = lab.newest() / name
    f.write_bytes(f.read_bytes()[:-1])
    return falls_back(lab, name)


def swapped_file(lab, name):
    lab.finished()
    shutil.copy(lab.out / "checkpoints" / "step_00000009" / name, lab.newest() / name)
    return falls_back(lab, name)


def missing_file(lab, name):
    lab.finished()
    (lab.newest() / name).unlink()
    return falls_back(lab, name)


def dangling_latest(lab, _):
    lab.finished()
    link = lab.out / "checkpoints" / "latest"
    link.unlink()
    os.symlink("gone", link)
    code, said = lab.resume("--steps", 13, *QUICK)
    assert "at step 12" in said and verify_checkpoint(link)["step"] == 13
    return code, said


def all_broken(lab, _):
    lab.finished()
    shutil.rmtree(lab.out / "checkpoints" / "step_00000003")
    for p in (lab.out/"checkpoints").glob("step_*"): damage(p/"model.safetensors")
    return unchanged(lab, "--resume", "auto")

def named_broken(lab, _):
    lab.finished()
    damage(lab.newest() / "state.json")
    return unchanged(lab, "--resume", lab.newest())


def named_missing(lab, _):
    lab.finished()
    return unchanged(lab, "--resume", "run/checkpoints/step_00000013")


def other_model(lab, what):
    lab.finished()
    code, said = unchanged(
        lab,
        "--resume",
        "auto",
        *{"dim": ["--dim", 64], "n_layers": ["--n-layers", 2], "n_heads": ["--n-heads", 2, "--d-k", 16, "--d-v", 16]}[
            what
        ],
    )
    assert {
        "dim": "model.dim was 32, is 64", "n_layers": "model.n_layers was 1, is 2",
        "n_heads": "model.n_heads was 4, is 2",
    }[what] in said and "--resume none" in said
    return code, said

def other_data(lab, _):
    lab.finished()
    (lab.dir / "other.txt").write_text("quite another text " * 2000)
    return unchanged(lab, "--resume", "auto", "--local-path", "other.txt")

def broken_weights(lab, _):
    (lab.dir/"half.pt").write_bytes((lab.straight/"model.pt").read_bytes()[:5000])
    code, said = lab.train("--resume", "half.pt")
    assert "half.pt" in said and not list_checkpoints(lab.out)
    return code, said


# --- numbers

def bad_gradient(value, when):
    return hooked(f"p = dict(tr.model.named_parameters())['blocks.0.ffn.w2.weight']\n"
                  f"p.register_hook(lambda g: g.index_fill(0, torch.tensor([0]), float('{value}')) if {when} else g)")

def inf_gradient_once(lab, value):
    code, said = lab.train("--steps", 8, *QUICK, before=bad_gradient(value, "tr.step == 3"))
    m = metrics(lab.out)
    skipped = events(lab.out, "skipped")
    assert (
        m["status"] == "done"
        and m["skipped_steps"] == 1
        and [e["step"] for e in skipped] == [4]
        and skipped[0]["parameters"] == ["blocks.0.ffn.w2.weight"]
    )
    assert not (lab.out / ".anomaly_type").exists() and all(
        map(math.isfinite, (float(r["loss"]) for r in rows(lab.out / "training.csv")))
    )
    return code, said


def failed_as(lab, kind, *, at):
    m = metrics(lab.out)
    assert (
        m["status"] == "failed"
        and (lab.out / ".anomaly_type").read_text().strip() == kind
        and not (lab.out / "model.pt").exists()
    )
    assert [e["type"] for e in events(lab.out, "anomaly")][-1] == kind and m["step"] == at, m

def nonfinite_gradients(lab, value):
    code, said = lab.train("--steps", 8, "--save-every", 2, *QUICK, before=bad_gradient(value, "tr.step >= 3"))
    failed_as(lab, "nonfinite", at=6)
    goes_on(lab)
    return code, said

def nonfinite_loss(lab, value):
    broken = hooked(f"tr.model.norm.register_forward_hook(lambda m, a, o: o * float('{value}') if tr.step >= 3 else o)")
    code, said = lab.train("--steps", 8, "--save-every", 2, *QUICK, before=broken)
    failed_as(lab, "nonfinite", at=6)
    goes_on(lab)
    return code, said

def exploding_loss(lab, _):
    code, said = lab.train(
        "--steps", 40, "--lr", "1e30", "--warmup-steps", 0, "--grad-clip", "null", "--save-every", 1, "--eval-every", 1,
        *QUICK,
    )
    failed_as(lab, "nonfinite", at=metrics(lab.out)["step"])
    assert metrics(lab.out)["skipped_steps"] == 3 and lab("report", "--dir", "run")[0] == 1
    return code, said

def recovered(lab, _):
    once = hooked("tr.model.norm.register_forward_hook(lambda m, a, o: o * float('nan') if tr.step == 3 else o)")
    code, said = lab.train("--steps", 8, "--eval-every", 0, *QUICK, before=once)
    assert [(b["msg"], b["type"], b["step"]) for b in beats(lab.out) if b["msg"] in ("anomaly", "recovered")] == [
        ("anomaly", "nonfinite", 4),
        ("recovered", "nonfinite", 5),
    ]
    assert not (lab.out/".anomaly_type").exists() and metrics(lab.out)["status"] == "done"
    # a warning stays: it happened
    assert exit_code(check_run(lab.out, load_config("train_showcase", environ={}).monitor)) == 3
    return code, said

OOM = """
step = type(tr).train_step
def out_of_memory(self):
    if self.step == 5:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
                                     "capacity of 79.10 GiB")
    step(self)
type(tr).train_step = out_of_memory
"""


def out_of_memory(lab, _):
    code, said = lab.train("--steps", 8, "--save-every", 2, *QUICK, before=hooked(OOM))
    failed_as(lab, "out_of_memory", at=5)
    assert all(w in said for w in ("--accum", "--gradient-checkpointing", "--seq-len", "2.00 GiB"))
    goes_on(lab, at=4)
    return code, said

def gpu_too_small(lab, _):
    code, said = lab.train(
        "--steps", 3, "--batch-size", 8, "--seq-len", 512,
        before="from nsa_nb.training import memory_plan\nmemory_plan.gpu_room = lambda device: 20 << 20",
    )
    assert not list_checkpoints(lab.out) and ("--gradient-checkpointing" in said or "--batch-size" in said)
    return code, said

OWN = """
from nsa_nb.data import batches
whole = batches.SyntheticData._batch
def leaky(self, part, n): b = whole(self, part, n); return batches.Batch(b.x, b.x.clone(), None, 0)
batches.SyntheticData._batch = leaky
"""
PEEK = """
peek = lambda x: torch.cat([x[..., :1].roll(-1, -2), x[..., 1:]], -1)
tr.model.blocks[0].ffn.register_forward_pre_hook(lambda m, a: (peek(a[0]),) if {when} else None)
"""

def own_labels(lab, _):
    code, said = lab.train("--dataset", "synthetic", "--steps", 20, *QUICK, before=OWN)
    failed_as(lab, "leak", at=0)
    return code, said

def future_layer(lab, _):
    code, said = lab.train("--steps", 20, *QUICK, before=hooked(PEEK.format(when="True")))
    failed_as(lab, "leak", at=0)
    return code, said

def late_leak(lab, _):
    code, said = lab.train(
        "--steps", 20, "--save-every", 2, "--eval-every", 3, *QUICK, before=hooked(PEEK.format(when="tr.step >= 5"))
    )
    failed_as(lab, "leak", at=6)
    goes_on(lab)
    return code, said

def loss_under_the_floor(lab, by):
    code, said = lab.train(
        "--dataset", "synthetic", "--steps", 80, "--lr", "3e-2", "--warmup-steps", 5, "--eval-every", 40,
        "--leak-probe-every", 0, "--heartbeat-every", 2 if by == "heartbeat" else 1000, before=OWN,
    )
    failed_as(lab, "leak", at=metrics(lab.out)["step"])
    assert metrics(lab.out)["step"] < 80 and "labels" in metrics(lab.out)["reason"] and steps(lab.out)
    return code, said

def random_tokens(lab, _):
    code, said = lab.train(
        "--dataset", "synthetic", "--steps", 60, "--lr", "3e-2", "--warmup-steps", 5, "--log-every", 1, "--eval-every",
        20, "--heartbeat-every", 2, "--sample-tokens", 0,
    )
    # 128 tokens a step: the loss of one step scatters by less than 0.1 nats around its mean
    assert all(float(r["loss"]) > math.log(256) - 0.1 for r in rows(lab.out/"training.csv"))
    assert all(float(r["loss"]) > math.log(256) - 0.05 for r in rows(lab.out/"val.csv"))
    return code, said

def grad_norm_logged(lab, _):
    code, said = lab.train("--steps", 6, "--grad-clip", "1e-3", *QUICK)
    norms = [float(r["grad_norm"]) for r in rows(lab.out/"training.csv")]
    # far above the clip
    assert len(norms) == 6 and min(norms) > 1e-2 and norms == [b["grad_norm"] for b in events(lab.out, "progress")]
    return code, said

def memory_creep(lab, _):
    small = [
        "--attention", "dense", "--cross-documents", "--dim", 16, "--n-heads", 2, "--seq-len", 16, "--batch-size", 1,
        "--eval-every", 0, "--save-every", 500, "--keep-last", 2, "--heartbeat-every", 20, "--sample-tokens", 0,
    ]
    code, said = lab.train("--steps", 2000, *small, timeout=120)
    found = {f.name: f for f in check_run(lab.out, load_config("train_showcase", environ={}).monitor)}
    mib = [b["cpu_mem_rss"] for b in events(lab.out, "progress")]
    assert len(mib) > 90 and found["memory"].value is not None and abs(found["memory"].value) < 0.01, (
        found["memory"],
        mib[::10],
    )
    return code, said


# --- resuming, clocks, watching

def resume_in_warmup(lab, _):
    stop = lambda at: hooked(
        f"from nsa_nb.training.callback import Callback\n"
        f"tr.callbacks.append(type('Stop', (Callback,), dict(on_step=lambda self, tr: setattr(tr, 'stop', 'test') if "
        f"tr.step == {at} else None))())"
    )
    for at in (7, 9): assert lab.resume(*RUN, before=stop(at))[0] == 0 and metrics(lab.out)["step"] == at
    code, said = lab.resume(*RUN)
    key = lambda d: [(r["step"], r["lr"], r["loss"]) for r in rows(d/"training.csv")]
    assert key(lab.out) == key(lab.straight) and len({r["lr"] for r in rows(lab.out/"training.csv")}) >= 10
    return code, said


def resume_world(lab, _):
    stop = hooked(
        "from nsa_nb.training.callback import Callback\n"
        "tr.callbacks.append(type('Stop', (Callback,), dict(on_step=lambda self, tr: setattr(tr, 'stop', 'test') "
        "if tr.step "
        "== 6 else None))())"
    )
    job = two(lab, *RUN, before=stop)
    codes = job.wait()
    assert codes == [0, 0] and (metrics(lab.out)["step"], metrics(lab.out)["world"]) == (6, 2), job.text()
    code, said = lab.resume(*RUN, before=stop.replace("== 6", "== 9"))
    assert (
        code == 0
        and "resumed from" in said
        and (metrics(lab.out)["step"], metrics(lab.out)["world"], metrics(lab.out)["start_step"]) == (9, 1, 6)
    ), said
    job = two(lab, *RUN, "--resume", "auto")
    codes = job.wait()
    assert codes == [0, 0], job.text()
    m = metrics(lab.out)
    loss = lambda d: [float(r["loss"]) for r in rows(d/"training.csv")]
    assert (m["step"], m["world"], m["start_step"], m["tokens"]) == (12, 2, 9, metrics(lab.straight)["tokens"]), m
    assert len(loss(lab.out)) == 12 and all(
        math.isclose(a, b, rel_tol=1e-4) for a, b in zip(loss(lab.out), loss(lab.straight))
    )
    return codes[0], job.runs[0].text()


def resume_rate(lab, _):
    lab.finished()
    began = time.time()
    code, said = lab.resume(*RUN, "--steps", 16)
    wall = time.time() - began
    m = metrics(lab.out)
    assert (
        m["start_step"] == 12
        and m["session_tokens"] == 4 * 2 * 2 * 64
        and m["tokens"] == 16 * 2 * 2 * 64
        and 0 < m["session_s"] < wall
    )
    assert math.isclose(m["toks_per_s"], m["session_tokens"] / m["session_s"])
    return code, said


CLOCK = """
from nsa_nb.monitoring import heartbeat
real, by = time.time, {by}
time.time = jumped = lambda: real() + (by if made_one and made_one[0].step >= 20 else 0)
begin = heartbeat.Heartbeat.__init__
heartbeat.Heartbeat.__init__ = lambda self, *a, **k: begin(self, *a, **k | dict(clock=jumped))
made_one = []
"""

def clock_jump(lab, way):
    before = (
        "import time\n"
        + CLOCK.format(by=3600 if way == "forward" else -3600)
        + hooked("made_one.append(tr)").replace("import os, time, torch", "import os, torch")
    )
    code, said = lab.train("--steps", 40, "--eval-every", 15, *QUICK, before=before)
    ts = [b["ts"] for b in beats(lab.out)]
    assert max(b - a for a, b in zip(ts, ts[1:])) > 3000 or min(b - a for a, b in zip(ts, ts[1:])) < -3000
    assert (
        not events(lab.out, "anomaly")
        and not (lab.out / ".anomaly_type").exists()
        and metrics(lab.out)["session_s"] < 300
    )
    rate = [float(r["toks_per_s"]) for r in rows(lab.out / "training.csv")]
    assert min(rate) > 0 and sorted(rate)[20] < 1000 * min(rate)
    th = load_config("train_showcase", environ={}).monitor
    assert exit_code(check_run(lab.out, th)) == 0 and exit_code(check_run(lab.out, th, now=ts[-1] + 1)) == 0
    # without `done`: killed
    file = lab.out / "heartbeat_rank0.jsonl"
    file.write_text("".join(line + "\n" for line in file.read_text().split("\n")[:-2]))
    assert (
        exit_code(check_run(lab.out, th, now=ts[-1] + 1)) == 0
        and exit_code(check_run(lab.out, th, now=ts[-1] - 3600)) == 3
    )
    return code, said


def blind_watchdog(lab, _):
    lab.finished()
    file = lab.out / "heartbeat_rank0.jsonl"
    th = load_config("train_showcase", environ={}).monitor
    # without `done`
    lines = file.read_text().split("\n")[:-1]
    file.write_text("\n".join(lines[:-1]) + "\n")
    died = json.loads(lines[-2])["ts"]
    assert exit_code(check_run(lab.out, th, now=died + 100)) in (0, 3)
    hb = Heartbeat(file, 0, clock=lambda: died + 190)
    hb.event("stackdump", path="x")
    hb.event("anomaly", type="heartbeat_stall", message="no beat")
    hb.close()
    with open(file, "a") as f: f.write('{"ts": 99999999999, "msg": "progr')
    found = {f.name: f for f in check_run(lab.out, th, now=died + 200)}
    assert found["heartbeat_stall"].level == "critical" and "190" not in found["heartbeat_stall"].message, found
    return 0, "\n".join(f.message for f in check_run(lab.out, th, now=died + 200) if f.level == "critical")


# --- streamed data

def stream_refused(lab, world): return streams.gone(lab.zygote, lab.dir, world, [503] * 10_000, "HTTP 503")
def stream_silent(lab, world):
    return streams.gone(lab.zygote, lab.dir, world, [503] * 3 + ["stall"] * 100, "sent nothing for 0.5 s")


def stream_cut(lab, _): return streams.cut(lab.zygote, lab.dir)
def stream_damaged(lab, what): return streams.bad_local_file(lab.zygote, lab.dir, what)
def stream_synthetic(lab, _): return streams.synthetic(lab.zygote, lab.dir)
def stream_term(lab, how):
    return streams.stop_while_silent(lab.zygote, lab.dir, "SIGTERM", ["--no-prefetch"] if how == "no_prefetch" else [])


# --- wrong use

def nothing_written(lab, code, said):
    assert not (lab.out / "training.csv").exists() and not (lab.out / "checkpoints").exists(), said
    return code, said


def typo(lab, where):
    (lab.dir/"typo.yaml").write_text("train: {save_evry: 5000}\n")
    code, said = {
        "option": lambda: lab.train("--save-evry", 5),
        "config": lambda: lab("train", "--config", "typo.yaml", "--out-dir", "run"),
        "environment": lambda: lab.train(env={"NSA_BACH_SIZE": "2"}), "verb": lambda: lab("tran"),
    }[where]()
    assert {"option": "--save-every", "config": "save_every", "environment": "NSA_BATCH_SIZE", "verb": "train"}[
        where
    ] in said and not lab.out.exists()
    return code, said

def yaml_number(lab, _):
    (lab.dir/"my.yaml").write_text("include: train_showcase\ntrain: {lr: 2e-4}\n")
    code, said = lab.train("--config", "my.yaml", "--steps", 2, *QUICK)
    assert yaml.safe_load((lab.out/"config.yaml").read_text())["train"]["lr"] == 2e-4
    return code, said

def unknown_dataset(lab, _):
    code, said = nothing_written(lab, *lab.train("--dataset", "wiki"))
    assert "stdlib" in said
    return code, said


def missing_text(lab, _): return nothing_written(lab, *lab.train("--local-path", "nowhere.txt"))
def too_little_text(lab, _):
    (lab.dir / "few.txt").write_text("twenty bytes of text")
    return nothing_written(lab, *lab.train("--local-path", "few.txt"))


def missing_device(lab, _): return nothing_written(lab, *lab.train("--device", "cuda:77"))
def bad_values(lab, options): return nothing_written(lab, *lab.train(*options.split()))


# --- several processes

WORLD = ["--save-every", 3, "--eval-every", 0, "--sample-tokens", 0, *QUICK]

def two(lab, *argv, **kw): return Job(lab.zygote, 2, [*lab.base, *argv], lab.dir, **kw)

def rank_killed(lab, victim):
    job = two(lab, "--steps", 100_000, *WORLD)
    job.until(lambda: len(events(lab.out, "checkpoint")) >= 2)
    began = time.monotonic()
    job.runs[victim].kill()
    codes = job.wait()
    assert codes[victim] == -9 and time.monotonic() - began < 30
    said = job.runs[1 - victim].text()
    assert (
        f"rank {victim} (" in said
        and (lab.out / ".anomaly_type").read_text() == "rank_lost\n"
        and metrics(lab.out)["status"] == "failed"
    )
    goes_on(lab)
    return codes[1 - victim], said

def rank_killed_saving(lab, _):
    job = two(
        lab, "--steps", 100_000, "--parallel", "fsdp", *WORLD,
        before=["", at_point("if p == 'weights_written' and snap.step == 6: os.kill(os.getpid(), 9)")],
    )
    codes = job.wait()
    assert codes[1] == -9
    assert steps(lab.out) == [3]
    goes_on(lab, at=3)
    return codes[0], job.runs[0].text()

def rank_disk_full(lab, _):
    full = (
        "import errno\nfrom nsa_nb.training import checkpoint\nsave = checkpoint.save_file\ndef full(tensors, "
        "path, **kw):\n"
        "    if 'model-' in str(path) and '00000006' in str(path): raise OSError(errno.ENOSPC, 'No space left on "
        "device')\n    save(tensors, path, **kw)\ncheckpoint.save_file = full\n"
    )
    job = two(lab, "--steps", 100_000, "--parallel", "fsdp", *WORLD, before=["", full])
    codes = job.wait()
    assert (
        codes == [1, 1]
        and "ENOSPC" in job.runs[0].text()
        and "rank 1: failed: " in job.runs[1].text()
        and "ENOSPC" in job.runs[1].text()
    )
    assert not list((lab.out / "checkpoints").glob(".tmp-*"))
    goes_on(lab, at=3)
    return codes[0], job.runs[0].text()

def rank_loader(lab, _):
    broken = (
        "from nsa_nb.training import trainer\n"
        "from nsa_nb.errors import RunError\n"
        "make = trainer.step_input\n"
        "def f(data, step, *a, **k):\n"
        "    if step == 4: raise RunError('no batch for 60 s')\n"
        "    return make(data, step, *a, **k)\n"
        "trainer.step_input = f\n"
    )
    job = two(lab, "--steps", 100_000, *WORLD, before=["", broken])
    codes = job.wait()
    assert codes == [1, 1] and "rank 1: failed: no batch for 60 s" in job.runs[1].text()
    goes_on(lab, at=3)
    return codes[0], job.runs[0].text()

def rank_term(lab, _):
    job = two(lab, *lab.endless)
    job.until(progress(lab.out))
    job.runs[1].kill(signal.SIGTERM)
    codes = job.wait()
    assert codes == [0, 0]
    halted(lab, codes[0], job.text(), "SIGTERM")
    assert (
        json.loads((lab.out / "heartbeat_rank1.jsonl").read_text().splitlines()[-1])["step"] == metrics(lab.out)["step"]
    )
    return codes[0], job.runs[0].text()

def ddp_alone(lab, _): return unchanged(lab, "--ddp", 1)

def ddp_rows(lab, rows):
    job = two(lab, "--batch-size", rows)
    codes = job.wait()
    assert (
        codes == [2, 2] and f"give --batch-size {rows + 1}, or --accum 2" in job.runs[0].text() and not lab.out.exists()
    )
    return codes[0], job.runs[0].text()

def ddp_few_documents(lab, rows):
    jsonl(lab.dir/"jsonl", (3, 4, 5, 6))
    job = two(
        lab, "--dataset", "fineweb_edu_local", "--local-path", "jsonl", "--val-fraction", 0.2, "--batch-size", rows,
        "--steps", 40, "--save-every", 0, "--eval-every", 0, *QUICK,
    )
    codes = job.wait()
    assert codes == [0, 0] and events(lab.out, "progress")[-1]["epoch"] >= 1, job.text()
    streams.proved(lab.zygote, lab.out)
    return codes[0], job.runs[0].text()


ROWS = {r.name: globals().get(r.name) for r in FAULTS}

def test_every_row_has_its_function():
    assert [name for name, f in ROWS.items() if not callable(f)] == []


@pytest.mark.cuda
def test_a_real_out_of_memory(tmp_path):
    "The card's own: a batch that no card holds. The error names the remedy; what was saved before is good."
    args = [
        "--config", "train_showcase", "--device", "cuda", "--out-dir", str(tmp_path / "run"), "--sample-tokens", "0",
        "--eval-every", "0",
    ]
    env = {**os.environ, "PYTHONPATH": search_path(), "XDG_CACHE_HOME": str(tmp_path/"cache")}
    run = lambda *more: subprocess.run(
        [sys.executable, "-m", "nsa_nb.train", *args, *more], env=env, capture_output=True, text=True, timeout=300
    )
    assert run("--steps", "2").returncode == 0
    ended = run("--steps", "4", "--resume", "auto", "--batch-size", "20000", "--seq-len", "2048", "--no-memory-check")
    assert (
        ended.returncode == 1
        and "out of memory" in ended.stderr
        and "--batch-size" in ended.stderr
        and "Traceback" not in ended.stderr
    ), ended.stderr[-2000:]
    assert (tmp_path / "run" / ".anomaly_type").read_text().strip() == "out_of_memory" and find_checkpoint(
        tmp_path / "run"
    ).name == "step_00000002"


ENDING = """
import torch
from nsa_nb.training.inputs import Prefetcher
torch.set_num_threads(1)
def make(step):
    x = torch.randn(1000, 1000)
    for _ in range(15): x = x @ x * 1e-3
    return x
p = Prefetcher(make, 50)
try: p.get(0); raise RuntimeError('the main thread ends')
finally: p.close(30.0, rest=False)
"""

def test_a_thread_inside_pytorch_does_not_abort_the_end():
    """Python stops such a thread by force, which C++ answers with `terminate called without an active exception`
    and SIGABRT: an error that had been told well became exit code -6."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDING], env=os.environ | {"PYTHONPATH": search_path()}, capture_output=True, text=True,
        timeout=120,
    )
    assert ended.returncode == 1 and "the main thread ends" in ended.stderr and "terminate" not in ended.stderr, (
        ended.returncode,
        ended.stderr,
    )
