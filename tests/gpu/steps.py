"""Time a training step of the 125M configuration in many ways; one CSV for nbs/results.

    python tests/gpu/steps.py OUT.csv [NAME ...]     # all of WAYS, or those named; `python tests/gpu/steps.py`
    lists them

Each way is a process of its own. All compile at once; when all are warm they are timed one after the other, so
that nothing runs beside what is timed.
The largest of them need about 25 GB each at the same time: name fewer at once on a smaller card."""

import csv
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
COLUMNS = (
    "card", "date", "torch", "triton", "nsa_nb", "attention", "optimizer", "rows", "seq_len", "documents",
    "checkpointing", "step", "ms", "toks_per_s", "peak_mib", "reserved_mib", "predicted_mib",
)
# ALONE: each row one document
DENSE = {"model.attention": "dense"}
ALONE = {"data.dataset": "synthetic", "data.cross_documents": True}


def shape(rows: int, S: int) -> dict:
    return {"train.seq_len": S, "train.batch_size": rows, "train.accumulate_grad_batches": 1}


WAYS = {
    "nsa": {},
    "nsa-alone": ALONE,
    "dense-alone": ALONE | DENSE,
    "muon": {"train.optimizer": "muon"},
    "eager": {"runtime.step": "eager"},
    "compile": {"runtime.step": "compile"},
    "selective": {"runtime.gradient_checkpointing": "selective"},
    "full": {"runtime.gradient_checkpointing": "full"},
    "nsa-16": shape(16, 2048),
    "nsa-16-alone": shape(16, 2048) | ALONE,
    "dense-16-alone": shape(16, 2048) | ALONE | DENSE,
    **{
        f"{a}-{S // 1024}k": shape(1, S) | ALONE | more
        for S in (8192, 32768, 65536)
        for a, more in (("nsa", {}), ("dense", DENSE))
    },
}
STEPS = {65536: 8, 32768: 12}      # timed, by tokens a row


def wait_for_the_others(folder: Path, n: int) -> object:
    "Say that this process is warm, wait for all, then for a turn; what is returned holds it."
    (folder/f"ready_{os.getpid()}").touch()
    until = time.monotonic() + 300
    while len(list(folder.glob("ready_*"))) < n and time.monotonic() < until: time.sleep(0.2)
    lock = open(folder / "lock", "a")
    fcntl.flock(lock, fcntl.LOCK_EX)
    time.sleep(0.3)
    return lock


def one(name: str, folder: Path, n: int) -> dict:
    import torch
    from nsa_nb.data.batches import open_data
    from nsa_nb.bench.measure import versions
    from nsa_nb.config import load_config
    from nsa_nb.model import build_model
    from nsa_nb.training.memory_plan import planned_peak
    from nsa_nb.training.trainer import Trainer
    cfg = load_config("m7c_125m_1xa100_production", WAYS[name])
    device = torch.device("cuda")
    t = cfg.train
    data = open_data(cfg.data.dataset, "byte", seq_len=t.seq_len, cross_documents=cfg.data.cross_documents)
    torch.manual_seed(t.seed)
    tr = Trainer(cfg, build_model(cfg, data.vocab_size), data, device, [], folder/name)
    tr.events.listen(note=lambda text: print(f"{name}: {text}", flush=True))
    for _ in range(4): tr.train_step()
    torch.cuda.synchronize()
    turn = wait_for_the_others(folder, n)
    steps = STEPS.get(t.seq_len, 30)
    began = time.perf_counter()
    for _ in range(steps): tr.train_step()
    torch.cuda.synchronize()
    s = (time.perf_counter() - began) / steps
    turn.close()
    mib = lambda b: round(b / 2**20)
    v = versions("cuda")
    return dict(
        card=v["card"], date=v["date"], torch=v["torch"], triton=v["triton"], nsa_nb=v["nsa_nb"],
        attention=cfg.model.attention, optimizer=t.optimizer, rows=t.batch_size * t.accumulate_grad_batches,
        seq_len=t.seq_len, documents="one a row" if cfg.data.cross_documents else "text",
        checkpointing=cfg.runtime.gradient_checkpointing, step=tr.stepper.how, ms=round(s * 1e3, 2),
        toks_per_s=round(tr.tokens_per_step / s), peak_mib=mib(torch.cuda.max_memory_allocated()),
        reserved_mib=mib(torch.cuda.max_memory_reserved()),
        predicted_mib=mib(planned_peak(cfg, data.vocab_size, tr.model.num_params(), device).total),
    )


def main() -> int:
    if sys.argv[1:2] == ["--one"]:
        try:
            row = one(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
        # the others need not wait for it
        except BaseException:
            (Path(sys.argv[3]) / f"ready_{os.getpid()}").touch()
            raise
        with open(Path(sys.argv[3]) / f"{sys.argv[2]}.csv", "w", newline="") as f:
            w = csv.DictWriter(f, COLUMNS)
            w.writeheader()
            w.writerow(row)
        return 0
    if len(sys.argv) < 2:
        print(*WAYS, sep="\n")
        return 0
    names = sys.argv[2:] or list(WAYS)
    if unknown := [n for n in names if n not in WAYS]:
        sys.exit(f"no such way: {', '.join(unknown)}; there are {', '.join(WAYS)}")
    from nsa_nb.data.batches import open_data
    open_data("stdlib", "byte", seq_len=2048)      # tokens are made once
    with tempfile.TemporaryDirectory() as d:
        runs = {n: subprocess.Popen([sys.executable, __file__, "--one", n, d, str(len(names))]) for n in names}
        for n, p in runs.items():
            if p.wait(): print(f"{n} failed", flush=True)
        rows = [
            r
            for n in names
            if (Path(d) / f"{n}.csv").exists()
            for r in csv.DictReader(open(Path(d) / f"{n}.csv", newline=""))
        ]
    with open(sys.argv[1], "w", newline="") as f:
        w = csv.DictWriter(f, COLUMNS, lineterminator="\n")
        w.writeheader()
        w.writerows(rows)
    print(f"{len(rows)} of {len(names)} ways in {sys.argv[1]}")
    return int(len(rows) < len(names))


if __name__ == "__main__": sys.exit(main())
