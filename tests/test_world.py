"""Several processes: the same training on any number of them, one end for all, and nobody waits for the dead.

Most runs here are forks of one process that get what torchrun tells its processes by their environment;
`test_torchrun…` goes through torchrun itself."""

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

import pytest
import torch
from test_train import MODEL, SLOW, events, metrics, rows, steps, text, zygote  # noqa: F401
from zygote import search_path

from nsa_nb.monitoring.checkpoint_files import verify_checkpoint
from nsa_nb.training.checkpoint import find_checkpoint
from nsa_nb.generate import generate_text, load_trained
from nsa_nb.weights import read_tensors

TINY = [
    "--config", "train_showcase", *MODEL, "--batch-size", 2, "--accum", 4, "--warmup-steps", 2, "--log-every", 1,
    "--heartbeat-every", 1, "--sample-tokens", 4, "--out-dir", "run",
]
ENDLESS = ["--steps", 100_000, "--save-every", 0, "--eval-every", 0]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Job:
    "The processes of one run; `before`: Python that runs first, or one for each rank."
    def __init__(self, zygote, n: int, argv, cwd: Path, env=None, before=""):
        port = free_port()
        self.runs = [
            zygote.start(
                "train",
                *argv,
                cwd=cwd,
                before=before if isinstance(before, str) else before[r],
                env={
                    "RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port), **(env or {}),
                },
            )
            for r in range(n)
        ]

    def wait(self, timeout=90.0) -> list[int]: return [r.wait(timeout) for r in self.runs]
    def text(self) -> str: return "\n".join(r.text() for r in self.runs)
    def until(self, seen): return self.runs[0].until(seen)


@pytest.fixture
def lab(zygote, text, tmp_path):
    "lab.run(n, …) → exit codes and text of n processes; lab.start(n, …) → a living Job."
    class Lab:
        out = tmp_path/"run"

        def options(self, out, argv):
            return [*TINY, "--dataset", "local", "--local-path", text, *argv, "--out-dir", out]

        def start(self, n, *argv, out="run", **kw): return Job(zygote, n, self.options(out, argv), tmp_path, **kw)

        def run(self, n, *argv, out="run", **kw):
            j = self.start(n, *argv, out=out, **kw)
            return j.wait(), j.text()

        def good(self, n, *argv, out="run", **kw):
            codes, said = self.run(n, *argv, out=out, **kw)
            assert codes == [0] * n, said
            return tmp_path/out
        def alone(self, *argv, out="alone"):
            code, said = zygote.run("train", *self.options(out, argv), cwd=tmp_path)
            assert code == 0, said
            return tmp_path/out
    return Lab()


def losses(out: Path) -> list[float]: return [float(r["loss"]) for r in rows(out/"training.csv")]
def val(out: Path) -> list[float]: return [float(r["loss"]) for r in rows(out/"val.csv")]
def close(a, b, eps=1e-5): return len(a) == len(b) and all(abs(x - y) <= eps * abs(y) for x, y in zip(a, b))
def weights(out: Path, step: int) -> dict: return read_tensors(out/"checkpoints"/f"step_{step:08}", "model.safetensors")


# --- the same training

def test_one_and_two_processes_train_alike(lab):
    "Losses, gradient norms, evaluations, files; DDP, DDP_SAFE, FSDP."
    six = ["--steps", 6, "--eval-every", 3, "--eval-batches", 3, "--save-every", 3]
    one = lab.alone(*six)
    for name, (more, env, way) in dict(
        ddp=([], {}, "replicas"), safe=([], {"NSA_DDP_SAFE": "1"}, "afterwards"),
        fsdp=(["--parallel", "fsdp"], {}, "shards"),
    ).items():
        two = lab.good(2, *six, *more, out=name, env=env)
        assert f"on each of 2 processes ({way})" in (two / "train.log").read_text()
        assert close(losses(two), losses(one)) and close(val(two), val(one)), name
        assert close(
            [float(r["grad_norm"]) for r in rows(two / "training.csv")],
            [float(r["grad_norm"]) for r in rows(one / "training.csv")], 1e-4,
        )
        a, b = (torch.load(o/"model.pt", weights_only=True)["state_dict"] for o in (two, one))
        assert a.keys() == b.keys() and all((a[n] - b[n]).abs().max() < 1e-4 for n in a)
        m, n = metrics(two), metrics(one)
        assert (m["world"], m["status"], m["tokens"], m["step"]) == (2, "done", n["tokens"], 6) and steps(two) == [3, 6]
        assert [
            e["msg"]
            for e in map(json.loads, (two / "heartbeat_rank1.jsonl").read_text().splitlines())
            if e["msg"] != "progress"
        ][-1] == "done"
        for p in (two/"checkpoints").glob("step_*"): verify_checkpoint(p)


def test_the_same_rows_whatever_the_world(lab, tmp_path):
    "2 → 1 → 2 takes the rows of one straight run: recorded from the batches as they are made."
    record = (
        "import json, os\nfrom nsa_nb.training import trainer\nmake = trainer.step_input\n"
        "def seen(data, step, *a, **k):\n    inp = make(data, step, *a, **k)\n"
        "    with open('seen.jsonl', 'a') as f: f.write(json.dumps([os.environ.get('WHO'), step, [x.tolist() for b "
        "in inp.passes for x in b.x]]) + '\\n')\n"
        "    return inp\ntrainer.step_input = seen\n"
    )

    def batches(who):
        got = {}
        for line in (tmp_path/"seen.jsonl").read_text().splitlines():
            w, step, x = json.loads(line)
            if w == who: got.setdefault(step, []).extend(x)
        return {s: sorted(x) for s, x in got.items()}
    more = ["--eval-every", 0, "--save-every", 0]
    straight = lab.good(1, "--steps", 9, *more, out="straight", before=record, env={"WHO": "straight"})
    for world, until, resume in ((2, 3, []), (1, 6, ["--resume", "auto"]), (2, 9, ["--resume", "auto"])):
        out = lab.good(world, "--steps", until, *more, *resume, before=record, env={"WHO": "parts"})
    assert batches("straight") == batches("parts") and sorted(batches("parts")) == list(range(9))
    assert metrics(out)["tokens"] == metrics(straight)["tokens"] and metrics(out)["world"] == 2
    # its session had ended in order
    assert [
        e["reason"]
        for e in map(json.loads, (out / "heartbeat_rank1.jsonl").read_text().splitlines())
        if e["msg"] == "halt"
    ] == []


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_resumed_run_is_the_straight_one(lab, parallel):
    more = ["--steps", 8, "--eval-every", 4, "--eval-batches", 2, "--save-every", 4, "--parallel", parallel]
    stop = (
        "from nsa_nb.training import trainer\n"
        "step = trainer.Trainer.train_step\n"
        "def stop(tr):\n"
        "    step(tr)\n"
        "    if tr.step == 5 and tr.rank == 1: tr.stop = 'asked'\n"
        "trainer.Trainer.train_step = stop\n"
    )
    a = lab.good(2, *more, out="a")
    b = lab.good(2, *more, out="b", before=stop)
    assert metrics(b)["reason"] == "asked" and steps(b) == [4, 5]
    lab.good(2, *more, "--resume", "auto", out="b")
    names = sorted(p.name for p in (a/"checkpoints"/"step_00000008").iterdir())
    assert (
        names == sorted(p.name for p in (b / "checkpoints" / "step_00000008").iterdir())
        and "rng_rank1.safetensors" in names
    )
    assert ("model-00002-of-00002.safetensors" in names) == (parallel == "fsdp")
    for n in set(names) - {"manifest.json"}:
        assert (a / "checkpoints" / "step_00000008" / n).read_bytes() == (
            b / "checkpoints" / "step_00000008" / n
        ).read_bytes(), n
    x, y = (torch.load(o/"model.pt", weights_only=True)["state_dict"] for o in (a, b))
    assert all(torch.equal(x[n], y[n]) for n in x) and val(a) == val(b) and losses(a) == losses(b)
    # on one process, from the shares
    said = [generate_text(p, "def ", 20) for p in (a / "model.pt", a / "checkpoints" / "step_00000008", a)]
    assert said[0] == said[1] == said[2]
    (a/"checkpoints"/"step_00000008"/"state.json").unlink()
    # step 4: the newest that is whole
    old, _ = load_trained(a)
    assert not torch.equal(old.state_dict()["embed.weight"], x["embed.weight"])


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_documents_too_short_for_a_block(lab, tmp_path, parallel):
    "Parameters without a gradient: no compressed block anywhere, and the network that makes them."
    (tmp_path / "short").mkdir()
    r = random.Random(0)
    for i in range(400): (tmp_path/"short"/f"{i}.txt").write_text("".join(r.choices("abcdefgh ", k=9)))
    more = ["--local-path", "short", "--phi", "mlp", "--steps", 4, "--eval-every", 2, "--val-fraction", 0.3]
    one = lab.alone(*more)
    for passes in (1, 4):
        assert close(
            losses(
                lab.good(
                    2, *more, "--parallel", parallel, "--batch-size", 8 // passes, "--accum", passes, out=f"two{passes}"
                )
            ),
            losses(one),
            1e-4,
        )


def test_shares_and_wholes_go_on_from_each_other(lab):
    "fsdp ×2 → alone → ddp ×2 → fsdp ×2: the losses of a straight run."
    more = ["--eval-every", 0, "--save-every", 0, "--lr-schedule", "constant"]
    one = lab.alone("--steps", 8, *more)
    for world, until, parallel in ((2, 2, "fsdp"), (1, 4, "ddp"), (2, 6, "ddp"), (2, 8, "fsdp")):
        codes, said = lab.run(world, "--steps", until, *more, "--parallel", parallel, "--resume", "auto")
        assert codes == [0] * world, said
    assert close(losses(lab.out), losses(one))


def test_a_stream_gives_every_document_once(lab, tmp_path, zygote):
    "2 → 1 → 2 processes, stopped in between; `nsa data audit` reads the records of all."
    jsonl(tmp_path/"jsonl", (3, 4, 5, 6))
    more = [
        "--dataset", "fineweb_edu_local", "--local-path", "jsonl", "--val-fraction", 0.2, "--eval-every", 0,
        "--save-every", 0,
    ]
    for world, until in ((2, 6), (1, 9), (2, 14)): lab.good(world, *more, "--steps", until, "--resume", "auto")
    code, said = zygote.run("data", "audit", "--dir", "run", cwd=tmp_path)
    assert code in (0, 3) and "FAULT" not in said, said
    # in one process alone; both say whose
    stuck = (
        "import time\n"
        "from nsa_nb.data import {0}\n"
        "rows = {0}.{1}\n"
        "def stuck(*a, **k):\n"
        "    time.sleep(6)\n"
        "    yield from rows(*a, **k)\n"
        "{0}.{1} = stuck\n"
    )
    for where, says in (
        (("reader", "all_rows"), "no batch for 2 s"),
        (("held_out", "file_rows"), "no validation text for 2 s"),
    ):
        code, said = lab.run(
            2, *more, "--steps", 16, "--resume", "auto", "--loader-timeout", 2, before=["", stuck.format(*where)]
        )
        assert code == [1, 1] and said.count("rank 1: dataset 'fineweb_edu_local'") >= 1 and says in said, said


def jsonl(folder: Path, sizes, chars: int = 400) -> Path:
    "Files of so many documents; their ids tell which."
    folder.mkdir()
    r = random.Random(0)
    for i, n in enumerate(sizes):
        (folder / f"{i}.jsonl").write_text(
            "".join(
                json.dumps(dict(text="".join(r.choices("abcdefgh ", k=chars)), id=f"{i}-{k}")) + "\n" for k in range(n)
            )
        )
    return folder


STUCK = (
    "import time\n"
    "from nsa_nb.data import reader\n"
    "rows = reader.all_rows\n"
    "def stuck(*a, **k):\n"
    "    for i, x in enumerate(rows(*a, **k)):\n"
    "        if i >= {at}: time.sleep(1000)\n"
    "        yield x\n"
    "reader.all_rows = stuck\n"
)


@pytest.mark.parametrize("victim,at", [(1, 1), (0, 0)])
def test_synthetic_on_one_is_synthetic_on_all(lab, tmp_path, zygote, victim, at):
    """One process's reader stalls, in the middle or before its first row: both go on with synthetic tokens from
    the same step on, all files say so, and the resumed run takes every document once."""
    jsonl(tmp_path/"jsonl", (40, 40, 40))
    more = [
        "--dataset", "fineweb_edu_local", "--local-path", "jsonl", "--val-fraction", 0.1, "--eval-every", 0,
        "--save-every", 5, "--loader-timeout", 1.5, "--queue", 1, "--accum", 4,
    ]
    audit = lambda *a: zygote.run("data", "audit", "--dir", "run", *a, cwd=tmp_path)
    codes, said = lab.run(
        2, *more, "--steps", 30, "--synthetic-on-fail",
        before=[STUCK.format(at=at) if r == victim else "" for r in (0, 1)],
    )
    assert codes == [0, 0], said
    k = metrics(lab.out)["synthetic_from"]
    assert (0 < k < 30) if at else k == 0, k
    for r in (0, 1):
        beats = [json.loads(l) for l in (lab.out/f"heartbeat_rank{r}.jsonl").read_text().splitlines()]
        assert [b["synthetic"] for b in beats if b["msg"] == "progress"] == [False] * k + [True] * (30 - k)
        (told,) = [b["error"] for b in beats if b["msg"] == "loader_error"]
        assert told.startswith(f"rank {victim}: ") == (r != victim) and "no batch for 1.5 s" in told
    # each step's, the last evaluation's and the last line
    log = (lab.out / "train.log").read_text()
    assert f"SYNTHETIC tokens from step {k} on" in log and log.count("| SYNTHETIC DATA") == 32 - k
    code, said = zygote.run("report", "--dir", "run", cwd=tmp_path)
    assert "SYNTHETIC tokens were trained on" in said, said
    state = json.loads((lab.out/"checkpoints"/"step_00000030"/"state.json").read_text())["state"]["data"]
    assert state["synthetic_from"] == k and state["cursor"]["tokens"] == k * 8 * 64
    code, said = audit()
    if k: assert code == 0 and f"{30 - k} steps were synthetic" in said, said
    lab.good(2, *more, "--steps", 34, "--resume", "auto")
    m = metrics(lab.out)
    assert m["synthetic_from"] == k and m["stream_tokens"] == (k + 4) * 8 * 64
    lab.good(1, *more, "--steps", 36, "--resume", "auto")
    code, said = audit("--source")
    assert code == 0 and f"{30 - k} steps were synthetic" in said and "no document twice, none missing" in said, said


def test_synthetic_validation_of_one_is_that_of_all(lab, tmp_path, zygote):
    jsonl(tmp_path/"jsonl", (40, 40))
    stuck = "import time\nfrom nsa_nb.data import held_out\nheld_out.validation = lambda *a, **k: time.sleep(1000)\n"
    codes, said = lab.run(
        2, "--dataset", "fineweb_edu_local", "--local-path", "jsonl", "--val-fraction", 0.1, "--steps", 4,
        "--eval-every", 2, "--save-every", 0, "--loader-timeout", 1.5, "--synthetic-on-fail", before=["", stuck],
    )
    m = metrics(lab.out)
    assert codes == [0, 0] and m["synthetic_from"] is None and m["synthetic_validation"] is True, said
    assert (
        re.search("rank 1: dataset .*SYNTHETIC tokens for validation", (lab.out / "train.log").read_text())
        and "SYNTHETIC tokens stood in" in zygote.run("report", "--dir", "run", cwd=tmp_path)[1]
    )


def test_compiled_blocks_under_ddp(lab):
    "Compiled as on a GPU, with the compiler that only traces: same losses, no note of a failure."
    traced = (
        "import functools\n"
        "from nsa_nb.training import trainer, stepper\n"
        "trainer.Stepper = functools.partial(stepper.Stepper, compiler='aot_eager')\n"
    )
    more = ["--steps", 4, "--eval-every", 2, "--attention", "dense", "--n-layers", 2]
    one = lab.alone(*more)
    codes, said = lab.run(2, *more, "--step", "compile", before=traced)
    assert codes == [0, 0] and "compile: blocks by torch.compile" in said and "failed" not in said, said
    assert close(losses(lab.out), losses(one)) and close(val(lab.out), val(one))


def test_gradients_sent_while_the_backward_runs(lab):
    """What a captured step does, here eagerly and in many small buckets, of which some must be under way before
    the backward has ended; one pass and two."""
    small = """
from nsa_nb.training import trainer, parallel
class Small(parallel.Overlapped):
    def after(self, params):
        assert len(self.lists) > 5 and len(self.under_way) == len(self.lists)
        super().after(params)
        assert all(p.grad.shape == p.shape for p in params)
trainer.spread_model = lambda model, cfg, world, how, one_pass: Small(model, world.size, limit=16 << 10)
"""
    more = ["--steps", 5, "--eval-every", 5]
    for passes in (1, 2):
        two = lab.good(2, *more, "--batch-size", 8 // passes, "--accum", 2 * passes, out=f"two{passes}", before=small)
        assert "on each of 2 processes (small)" in (two/"train.log").read_text()
        assert close(
            losses(two),
            losses(lab.alone(*more, "--batch-size", 8 // passes, "--accum", 2 * passes, out=f"one{passes}")),
        )


# --- one end for all

def progress(out: Path, n: int = 3): return lambda: len(events(out, "progress")) >= n

def ended_alike(lab, codes, said, reason):
    m = metrics(lab.out)
    ends = [
        json.loads(line)
        for r in (0, 1)
        for line in (lab.out / f"heartbeat_rank{r}.jsonl").read_text().splitlines()[-1:]
    ]
    assert codes == [0, 0] and m["status"] == "halted" and m["reason"] == reason, said
    assert (
        [(e["msg"], e["step"], e["reason"]) for e in ends] == [("halt", m["step"], reason)] * 2
        and steps(lab.out)[-1] == m["step"]
        and (lab.out / "model.pt").exists()
    )
    verify_checkpoint(find_checkpoint(lab.out))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_term_to_one_stops_both(lab, parallel):
    job = lab.start(2, *ENDLESS, "--parallel", parallel)
    job.until(progress(lab.out))
    os.kill(job.runs[1].pid, signal.SIGUSR2)
    job.until(lambda: events(lab.out, "checkpoint"))
    os.kill(job.runs[1].pid, signal.SIGTERM)
    ended_alike(lab, job.wait(), job.text(), "SIGTERM")
    assert len(steps(lab.out)) == 2


def test_halt_and_dump(lab):
    job = lab.start(2, *ENDLESS)
    job.until(progress(lab.out))
    for r in job.runs: os.kill(r.pid, signal.SIGUSR1)
    job.until(lambda: len(list(lab.out.glob("stackdump_*.txt"))) == 2 and events(lab.out, "stackdump"))
    (lab.out/".HALT").write_text("halt: the power goes off\n")
    ended_alike(lab, job.wait(), job.text(), "halt: the power goes off")
    assert sorted("rank1" in p.name for p in lab.out.glob("stackdump_*.txt")) == [False, True]


# --- nobody waits for the dead

@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_all(lab, victim):
    job = lab.start(2, *ENDLESS[:2], "--save-every", 2, "--eval-every", 0)
    job.until(lambda: len(events(lab.out, "checkpoint")) >= 2)
    began = time.monotonic()
    job.runs[victim].kill()
    codes = job.wait(60)
    assert codes[victim] == -9 and codes[1 - victim] == 1 and time.monotonic() - began < 30
    assert re.search(rf"rank {victim} \(.*, process {job.runs[victim].pid}\) has died", job.runs[1 - victim].text()), (
        job.text()
    )
    assert (
        metrics(lab.out)["status"] == "failed"
        and f"rank {victim}" in metrics(lab.out)["reason"]
        and (lab.out / ".anomaly_type").read_text() == "rank_lost\n"
    )
    at = int(find_checkpoint(lab.out).name[5:])
    lab.good(2, "--steps", at + 2, "--eval-every", 0, "--resume", "auto")


def test_a_process_that_hangs_beside_a_dead_one_ends_too(lab):
    "Rank 0 sits where no socket error reaches it, as in a GPU's collective."
    hang = (
        "from nsa_nb.training import trainer\n"
        "import time\n"
        "step = trainer.Trainer.train_step\n"
        "def hung(tr):\n"
        "    step(tr)\n"
        "    if tr.step == 3:\n"
        "        print('HANGS', flush=True)\n"
        "        while True: time.sleep(1)\n"
        "trainer.Trainer.train_step = hung\n"
    )
    job = lab.start(2, *ENDLESS, before=hang)
    job.until(lambda: "HANGS" in job.runs[1].text())
    began = time.monotonic()
    job.runs[1].kill()
    assert job.wait(60) == [1, -9] and time.monotonic() - began < 30
    assert (
        "has died: this process, which waited for it, ends too" in job.runs[0].text()
        and metrics(lab.out)["status"] == "failed"
    )


def test_an_error_of_one_is_named_by_all(lab):
    raises = (
        "from nsa_nb.training import trainer\n"
        "from nsa_nb.errors import RunError\n"
        "make = trainer.step_input\n"
        "def broken(data, step, *a, **k):\n"
        "    if step == 3: raise RunError('no batch for 60 s')\n"
        "    return make(data, step, *a, **k)\n"
        "trainer.step_input = broken\n"
    )
    codes, said = lab.run(2, *ENDLESS, before=["", raises])
    assert (
        codes == [1, 1] and "failed: rank 1: no batch for 60 s" in said and "rank 1: failed: no batch for 60 s" in said
    ), said
    assert metrics(lab.out)["reason"] == "rank 1: no batch for 60 s"
    lost = (
        "from nsa_nb.training import trainer\n"
        "step = trainer.Trainer.train_step\n"
        "def broken(tr):\n"
        "    step(tr)\n"
        "    if tr.step == 3: raise ZeroDivisionError('a bug')\n"
        "trainer.Trainer.train_step = broken\n"
    )
    codes, said = lab.run(2, *ENDLESS, out="bug", before=["", lost])
    assert codes == [1, 1] and re.search(r"^failed: rank 1 \(.*\) failed: ZeroDivisionError: a bug", said, re.M), said


def test_a_gradient_of_one_is_skipped_by_all(lab):
    poison = (
        "import torch\nfrom nsa_nb.training import trainer\nmade = trainer.Trainer.__init__\ndef init(tr, *a, "
        "**k):\n    made(tr, *a, **k)\n"
        "    nll = tr.stepper.nll\n    def bad(b, *a, **k):\n        loss = nll(b, *a, **k)\n        return loss * "
        "float('inf') if tr.step == 2 and torch.is_grad_enabled() else loss\n    tr.stepper.nll = "
        "bad\ntrainer.Trainer.__init__ = init\n"
    )
    for parallel in ("ddp", "fsdp"):
        out = lab.good(2, "--steps", 4, "--eval-every", 0, "--parallel", parallel, out=parallel, before=["", poison])
        skipped = [
            [
                (e["step"], e["reason"])
                for e in map(json.loads, (out / f"heartbeat_rank{r}.jsonl").read_text().splitlines())
                if e["msg"] == "skipped"
            ]
            for r in (0, 1)
        ]
        assert skipped == [[(3, "gradient not finite")]] * 2 and metrics(out)["skipped_steps"] == 1


# --- asked to end

@pytest.mark.parametrize("who", [(0, 1), (0,), (1,)], ids=str)
def test_stopped_while_text_is_made_into_tokens(lab, tmp_path, who):
    "One makes the tokens, the other waits for them; whoever is asked, both end, and nothing was trained."
    job = lab.start(2, "--steps", 2, "--cache-dir", "cache", before=SLOW)
    job.until((tmp_path/"opening").exists)
    for r in who: job.runs[r].kill(signal.SIGTERM)
    assert job.wait(20) == [0, 0] and job.text().count("stopped before the first step: nothing was trained") == 1, (
        job.text()
    )
    assert not any((lab.out / n).exists() for n in ("checkpoints", "model.pt", "training.csv")) and not list(
        (tmp_path / "cache" / "nsa_nb" / "tokens").glob(".tmp-*")
    )
    assert metrics(lab.good(2, "--steps", 2, "--cache-dir", "cache"))["step"] == 2


# --- wrong use

def test_who_waits_for_others_says_so(zygote, tmp_path):
    run = zygote.start(
        "train",
        *TINY,
        "--dataset",
        "synthetic",
        cwd=tmp_path,
        before="import nsa_nb.training.world as w; w.SAY_S = .3",
        env={
            "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        },
    )
    run.until(lambda: "rank 0: waits for the other processes of 2 at 127.0.0.1:" in run.text())
    run.kill()
    run.wait()


def test_wrong_use_is_exit_2_on_all(lab, zygote, tmp_path):
    for argv, says in (
        (["--batch-size", 3, "--accum", 1], "give --batch-size 4, or --accum 2"),
        (["--parallel", "fsdp", "--optimizer", "muon"], "--parallel ddp"), (["--ddp", 0], "--ddp 0 in one of 2"),
    ):
        codes, said = lab.run(2, "--steps", 2, *argv)
        assert codes == [2, 2] and says in said and not (lab.out/"training.csv").exists(), said
    code, said = zygote.run("train", *lab.options("run", ["--ddp", 1]), cwd=tmp_path)
    assert code == 2 and "python -m torch.distributed.run --standalone" in said
    lab.good(2, "--steps", 2, "--eval-every", 0)
    codes, said = lab.run(2, "--steps", 2)
    assert codes == [2, 2] and "holds an earlier run" in said
    code, said = zygote.run(
        "train", *lab.options("one", ["--steps", 2, "--ddp", 1, "--eval-every", 0]), cwd=tmp_path,
        env=dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())),
    )
    assert code == 0, said


def test_compressed_gradients(lab):
    a = lab.alone("--steps", 6, "--eval-every", 0)
    b = lab.good(2, "--steps", 6, "--eval-every", 0, "--grad-compression", "bf16")
    assert losses(a) != losses(b) and close(losses(a), losses(b), 1e-3)


# --- through torchrun

def torchrun(tmp_path, *argv, n=2):
    env = {k: v for k, v in os.environ.items() if not k.startswith("NSA_")} | {
        "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path(), "XDG_CACHE_HOME": str(tmp_path),
    }
    return subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}", "-m",
            "nsa_nb.train", *map(str, argv),
        ],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_torchrun_trains_and_a_killed_process_ends_it(lab, tmp_path):
    run = torchrun(tmp_path, *lab.options("t", ["--steps", 4, "--eval-every", 0]))
    said = run.communicate(timeout=120)[0]
    assert run.returncode == 0 and metrics(tmp_path/"t")["world"] == 2, said
    run = torchrun(tmp_path, *lab.options("k", [*ENDLESS[:2], "--save-every", 2, "--eval-every", 0]))
    out = tmp_path/"k"
    until = time.monotonic() + 60
    while len(events(out, "checkpoint")) < 2:
        assert run.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    pid, = {json.loads(line)["pid"] for line in (out/"heartbeat_rank1.jsonl").read_text().splitlines()}
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    said = run.communicate(timeout=60)[0]
    assert (
        run.returncode == 1
        and time.monotonic() - began < 40
        and re.search(rf"rank 1 \(.*process {pid}\) has died", said)
    ), said
    verify_checkpoint(find_checkpoint(out))
    run = torchrun(tmp_path, *lab.options("h", ENDLESS))      # a scheduler asks the launcher
    out = tmp_path/"h"
    until = time.monotonic() + 60
    while len(events(out, "progress")) < 3:
        assert run.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    said = run.communicate(timeout=60)[0]
    assert (
        metrics(out)["status"] == "halted" and steps(out) == [metrics(out)["step"]] and (out / "model.pt").exists()
    ), said


# --- on GPUs

ON_CARD = [
    "--config", "train_showcase", "--device", "cuda", "--precision", "fp32", "--dataset", "synthetic", "--steps", 6,
    "--accum", 4, "--batch-size", 2, "--warmup-steps", 2, "--log-every", 1, "--eval-every", 3, "--save-every", 3,
    "--sample-tokens", 4, "--out-dir",
]
WAYS = {
    "ddp": [], "safe": ["--ddp-safe"], "fsdp": ["--parallel", "fsdp"], "graph": ["--step", "graph"],
    "bf16": ["--grad-compression", "bf16"], "graph_bf16": ["--step", "graph", "--grad-compression", "bf16"],
}


def like_alone(tmp_path, n, way):
    alone = subprocess.run(
        [sys.executable, "-m", "nsa_nb.train", *map(str, ON_CARD), "one"], cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": search_path()}, capture_output=True, text=True,
    )
    assert alone.returncode == 0, alone.stderr
    run = torchrun(tmp_path, *ON_CARD, "several", "--ddp", 1, *WAYS[way], n=n)
    said = run.communicate(timeout=300)[0]
    one, out = tmp_path/"one", tmp_path/"several"
    assert run.returncode == 0 and " failed (" not in said, said
    if "graph" in way: assert "the whole step one CUDA graph" in said, said
    assert close(losses(out), losses(one), 1e-3 if "bf16" in way else 1e-4) and close(
        val(out), val(one), 1e-3 if "bf16" in way else 1e-4
    ), (losses(out), losses(one))
    for p in (out/"checkpoints").glob("step_*"): verify_checkpoint(p)
    assert (out/"model.pt").exists() and metrics(out)["world"] == n


@pytest.mark.cuda
@pytest.mark.parametrize("way", WAYS)
def test_one_process_and_nccl(tmp_path, way): like_alone(tmp_path, 1, way)


@pytest.mark.multigpu
@pytest.mark.parametrize("way", WAYS)
def test_two_gpus(tmp_path, way): like_alone(tmp_path, 2, way)


@pytest.mark.parametrize(
    "device,step",
    [("cpu", "eager"), *(pytest.param("cuda", s, marks=pytest.mark.multigpu) for s in ("compile", "graph"))],
)
def test_a_deterministic_run_resumes_to_the_bit(request, tmp_path, text, device, step):
    """Stopped after 5 steps of 8 and gone on with: the weights of the run that was not. On a CPU the same with
    gloo, a smaller model and without torchrun's seconds."""

    def run(out, until, *more):
        argv = [
            *ON_CARD, out, "--device", device, "--precision", "bf16", "--dataset", "local", "--local-path", text,
            "--deterministic", "--step", step, "--lr-schedule", "constant", "--steps", until, "--ddp", 1, *more,
        ]
        if device == "cpu":
            job = Job(request.getfixturevalue("zygote"), 2, [*argv, *MODEL], tmp_path)
            codes = job.wait()
            said = job.text()
        else:
            job = torchrun(tmp_path, *argv)
            said = job.communicate(timeout=300)[0]
            codes = [job.returncode]
        assert (
            not any(codes) and f"{step}: " in said and "on each of 2 processes" in said and " failed (" not in said
        ), said
        if step == "graph": assert "the whole step one CUDA graph" in said, said
        return tmp_path/out

    a, b = run("a", 8), run("b", 5)
    assert steps(b) == [3, 5]
    run("b", 8, "--resume", "auto")
    assert (metrics(b)["start_step"], metrics(b)["world"], metrics(b)["dtype"]) == (5, 2, "bf16")
    for n in ("model.safetensors", "optimizer.safetensors", "rng.safetensors", "rng_rank1.safetensors"):
        x, y, before = ((o / "checkpoints" / f"step_{k:08}" / n).read_bytes() for o, k in ((a, 8), (b, 8), (b, 5)))
        assert x == y and (x != before or "rng" in n), n
    x, y = (torch.load(o/"model.pt", weights_only=True)["state_dict"] for o in (a, b))
    assert all(torch.equal(x[n], y[n]) for n in x) and losses(a) == losses(b) and val(a)[-1] == val(b)[-1]


@pytest.mark.multigpu
def test_a_process_that_dies_beside_a_gpu_collective(tmp_path):
    "NCCL does not hear that the other end is gone; the lookout does."
    argv = [*ON_CARD, "run"]
    argv[argv.index("--steps") + 1] = 100_000
    argv[argv.index("--eval-every") + 1] = 0
    run = torchrun(tmp_path, *argv)
    out = tmp_path/"run"
    until = time.monotonic() + 120
    while len(events(out, "checkpoint")) < 2:
        assert run.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    pid, = {json.loads(line)["pid"] for line in (out/"heartbeat_rank1.jsonl").read_text().splitlines()}
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    said = run.communicate(timeout=60)[0]
    assert (
        run.returncode == 1
        and time.monotonic() - began < 40
        and re.search(rf"rank 1 \(.*process {pid}\) has died", said)
    ), said
    verify_checkpoint(find_checkpoint(out))
