"""NSA and its dense twin at equal tokens: same text, seed, order and optimizer, each at the best rate of a small sweep.

    python tests/gpu/corpus.py unpack CORPUS TEXT          # .jsonl files of prose, and this machine's Python sources
    python tests/gpu/twins.py data TEXT DATA               # DATA/train.jsonl, and held-out prose and code
    python tests/gpu/twins.py run DATA OUT --seconds 900   # the sweep, then as many steps as the time allows; OUT/*.csv

Runs go through `python -m nsa_nb.train` as anybody's do, some at a time: losses do not depend on that, times do, so
times come from tests/gpu/steps.py. At the end the models are scored on held-out text, by kind and length of context."""
import argparse
import csv
import json
import math
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
CODE = "python-packages.jsonl"         # all other files hold prose
ATTENTIONS = ("nsa", "dense")
ROWS = {2048: 4, 8192: 1}              # tokens a row → rows a step: 8,192 tokens a step
RATES = (4e-4, 8e-4, 1.6e-3)
SWEEP_STEPS, WARMUP = 1500, 200
CONTEXTS = (0, 64, 256, 1024, 2048, 4096, 8192)     # borders of the classes of context length, tokens
LABELS = ("run", "attention", "seq_len", "lr", "steps", "seed", "documents")
CURVE_COLUMNS = (*LABELS, "step", "tokens", "val_bits_per_byte")
SCORE_COLUMNS = (*LABELS, "text", "context_from", "context_to", "tokens", "bits_per_byte")


def make_data(text: Path, data: Path, held: int, seed: int = 0) -> None:
    "One shuffled file to train on, and held-out documents of prose and of code."
    data.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    train = []
    for kind in ("prose", "code"):
        files = sorted(p for p in text.glob("*.jsonl") if (p.name == CODE) == (kind == "code"))
        lines = [line for p in files for line in p.read_bytes().splitlines(keepends=True)]
        draw.shuffle(lines)
        n, size = 0, 0
        while n < len(lines) - 1 and size < held:
            size += len(lines[n])
            n += 1
        (data/f"held_{kind}.jsonl").write_bytes(b"".join(lines[:n]))
        train += lines[n:]
        print(f"{kind}: {sum(map(len, lines)) / 1e6:.1f} MB in {len(lines):,} documents, {n:,} held out", flush=True)
    draw.shuffle(train)
    (data/"train.jsonl").write_bytes(b"".join(train))


@dataclass
class Run:
    "One training run; it is its own process."
    attention: str
    seq_len: int
    lr: float
    steps: int
    out: Path
    options: list[str] = field(default_factory=list)
    config: str = "m7c_125m_1xa100_production"
    seed: int = 1337
    process: subprocess.Popen | None = None
    seconds: float = 0.0

    @property
    def name(self) -> str: return f"{self.attention}-{self.seq_len}-lr{self.lr:g}-{self.steps}-s{self.seed}"

    @property
    def rows(self) -> int: return ROWS.get(self.seq_len, 1)      # of a step

    @property
    def folder(self) -> Path: return self.out/"runs"/self.name

    def start(self, data: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        eval_every = max(1, self.steps // 10)
        options = {
            "attention": self.attention, "seq-len": self.seq_len, "batch-size": 1, "accum": self.rows,
            "lr": self.lr, "steps": self.steps, "warmup-steps": min(WARMUP, self.steps // 4), "seed": self.seed,
            "dataset": "local", "local-path": data/"train.jsonl", "cache-dir": data/"tokens", "val-fraction": 0.002,
            "eval-every": eval_every, "eval-batches": 10_000, "sample-tokens": 0,
            "save-every": 0, "heartbeat-every": 50, "log-every": 50, "out-dir": self.folder/"run",
        }
        words = [w for k, v in options.items() for w in (f"--{k}", str(v))]
        command = [sys.executable, "-m", "nsa_nb.train", "--config", self.config, *words, *self.options]
        log = open(self.folder/"log", "w")
        self.began = time.monotonic()
        search = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": search, "TORCHINDUCTOR_COMPILE_THREADS": "4"}
        self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def curve(self) -> list[dict]:
        "A row for each evaluation."
        with open(self.folder/"run"/"val.csv", newline="") as f: rows = list(csv.DictReader(f))
        a_step = self.rows * self.seq_len
        return [
            self.labels() | dict(step=r["step"], tokens=int(r["step"]) * a_step, val_bits_per_byte=r["bits_per_byte"])
            for r in rows
        ]

    def labels(self) -> dict:
        documents = "across" if "--cross-documents" in self.options else "separate"
        return dict(run=self.name, attention=self.attention, seq_len=self.seq_len, lr=self.lr, steps=self.steps,
                    seed=self.seed, documents=documents)

    def loss(self) -> float: return float(self.curve()[-1]["val_bits_per_byte"])


def go(runs: list[Run], data: Path, at_once: int) -> list[Run]:
    "Run them, some at a time; those that ended well."
    waiting = list(runs)
    busy = []
    good = []
    while waiting or busy:
        while waiting and len(busy) < at_once:
            busy.append(waiting.pop(0))
            busy[-1].start(data)
        time.sleep(0.5)
        for run in [r for r in busy if r.process.poll() is not None]:
            busy.remove(run)
            run.seconds = time.monotonic() - run.began
            if run.process.returncode == 0:
                good.append(run)
                print(f"{run.name}: {run.loss():.4f} bits per byte after {run.seconds:.0f} s", flush=True)
            else: print(f"{run.name} failed:", (run.folder/"log").read_text()[-800:], flush=True)
    return good


def write(path: Path, columns: tuple, rows: list[dict]) -> None:
    with open(path, "w", newline="") as f:
        w = csv.DictWriter(f, columns, lineterminator="\n", extrasaction="ignore")
        w.writeheader()
        w.writerows(rows)


def token_losses(model, b, seq_len: int, device: str):
    "Of each token of a batch [T]: its loss in nats, whether it counts, how many tokens of its document stand before."
    import torch
    from nsa_nb.data.batches import IGNORE
    longest = None if b.doc_starts is None else seq_len
    with torch.no_grad(), torch.autocast(torch.device(device).type, torch.bfloat16, enabled=device != "cpu"):
        logits = model(b.x, cu_seqlens=b.doc_starts, max_seqlen=longest).float()
    y, at = b.y.flatten(), torch.arange(b.y.numel(), device=device)
    starts = torch.arange(0, len(y) + 1, seq_len, device=device) if b.doc_starts is None else b.doc_starts.long()
    loss = torch.nn.functional.cross_entropy(logits.view(len(y), -1), y, ignore_index=IGNORE, reduction="none")
    return loss, y != IGNORE, at - starts[torch.searchsorted(starts, at, right=True) - 1]


def score(run: Run, data: Path, device: str) -> list[dict]:
    "Bits per byte of the trained model on held-out text, in all and by how many tokens of the document stand before."
    import torch
    from nsa_nb.data.batches import open_data
    from nsa_nb.model import load_model
    model, cfg = load_model(run.folder/"run"/"model.pt", device)
    borders = torch.tensor(CONTEXTS, device=device)
    rows = []
    for kind in ("prose", "code"):
        text = open_data("local", "byte", data/f"held_{kind}.jsonl", seq_len=run.seq_len, val_fraction=0.5,
                         cache_dir=data/"tokens", cross_documents=cfg.data.cross_documents)
        nats, count = torch.zeros(2, len(CONTEXTS), dtype=torch.float64, device=device)
        for i in range(text.n_val_batches(run.rows)):
            loss, counts, context = token_losses(model, text.val_batch(i, run.rows).to(device), run.seq_len, device)
            group = torch.searchsorted(borders, context, right=True) - 1
            nats.index_add_(0, group, loss.double())
            count.index_add_(0, group, counts.double())
        sums = [(0, run.seq_len, nats.sum(), count.sum()), *zip(CONTEXTS, CONTEXTS[1:], nats, count)]
        for start, end, a, n in sums:
            if not n: continue
            bits = (a / n).item() / math.log(2) / text.bytes_per_token
            rows.append(run.labels() | {"text": kind, "context_from": start, "context_to": end, "tokens": int(n),
                                        "bits_per_byte": round(bits, 5)})
    return rows


def run_all(a) -> None:
    began = time.monotonic()
    a.out.mkdir(parents=True, exist_ok=True)
    more = dict(out=a.out, config=a.config, options=a.option)
    kinds = [(x, S) for S in a.seq_lens for x in ATTENTIONS]
    tried = go([Run(x, S, a.rates[0], a.try_steps, **more) for x, S in kinds], a.data, a.at_once)
    if len(tried) < len(kinds):
        print("documents are not separated, since a short run failed", flush=True)
        more["options"] = [*a.option, "--cross-documents"]
        go([Run(x, S, a.rates[0], a.try_steps + 1, **more) for x, S in kinds], a.data, a.at_once)
    print(f"warm after {time.monotonic() - began:.0f} s", flush=True)
    sweep_began = time.monotonic()
    sweep = go([Run(x, S, lr, a.sweep_steps, **more) for lr in a.rates for x, S in kinds], a.data, a.at_once)
    sweep_seconds = time.monotonic() - sweep_began
    curves = [row for r in sweep for row in r.curve()]
    write(a.out/"curves.csv", CURVE_COLUMNS, curves)
    if not a.most_steps: return
    best = {k: min((r for r in sweep if (r.attention, r.seq_len) == k), key=Run.loss) for k in kinds}
    step_seconds = sweep_seconds / len(a.rates) / a.sweep_steps      # of one step of every kind
    left = a.seconds - (time.monotonic() - began) - 60
    steps = max(a.sweep_steps + 1, int(min(a.most_steps, left / step_seconds)) // 500 * 500)
    print(f"sweep {sweep_seconds:.0f} s; {steps} steps follow with rates {[r.lr for r in best.values()]}", flush=True)
    final = go([Run(x, S, best[x, S].lr, steps, **more) for x, S in kinds], a.data, a.at_once)
    write(a.out/"curves.csv", CURVE_COLUMNS, curves + [row for r in final for row in r.curve()])
    scores = []
    for r in final:
        scores += score(r, a.data, a.device)
        write(a.out/"scores.csv", SCORE_COLUMNS, scores)
    for row in scores: print(*row.values(), flush=True)
    (a.out/"done").write_text(json.dumps(dict(seconds=time.monotonic() - began)))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = p.add_subparsers(dest="verb", required=True)
    v = verbs.add_parser("data")
    v.add_argument("text", type=Path)
    v.add_argument("data", type=Path)
    v.add_argument("--held", type=int, default=4_000_000, help="bytes held out of each kind of text; half are scored")
    v = verbs.add_parser("run")
    v.add_argument("data", type=Path)
    v.add_argument("out", type=Path)
    v.add_argument("--seconds", type=float, default=900, help="for everything; the last runs are as long as it allows")
    v.add_argument("--seq-lens", type=int, nargs="+", default=list(ROWS))
    v.add_argument("--try-steps", type=int, default=30, help="of the first, short runs")
    v.add_argument("--sweep-steps", type=int, default=SWEEP_STEPS)
    v.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="learning rates of the sweep")
    v.add_argument("--most-steps", type=int, default=12_000, help="of the last runs; 0: the sweep alone")
    v.add_argument("--at-once", type=int, default=4, help="processes beside each other")
    v.add_argument("--config", default="m7c_125m_1xa100_production")
    v.add_argument("--device", default="cuda")
    v.add_argument("--option", action="append", default=[], help="given to every run, e.g. --option=--device=cpu")
    a = p.parse_args()
    if a.verb == "data": make_data(a.text, a.data, a.held)
    else: run_all(a)


if __name__ == "__main__": main()
