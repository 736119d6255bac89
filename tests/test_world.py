"""Several processes: the same training on any number of them, one end for all, and nobody waits for the dead.

Most runs here are forks of one process that get what torchrun tells its processes by their environment; `test_torchrun…` goes through torchrun itself."""
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_train import MODEL, events, metrics, rows, steps, text, zygote  # noqa: F401
from zygote import ROOT

from nsa_nb.checkpoint import find_checkpoint, verify_checkpoint
from nsa_nb.shards import read_tensors

TINY = ["--config", "train_showcase", *MODEL, "--batch-size", 2, "--accum", 4, "--warmup-steps", 2, "--log-every", 1, "--heartbeat-every", 1, "--sample-tokens", 4, "--out-dir", "run"]
ENDLESS = ["--steps", 100_000, "--save-every", 0, "--eval-every", 0]


def free_port() -> int:
    with socket.socket() as s: s.bind(("127.0.0.1", 0)); return s.getsockname()[1]


class Job:
    "The processes of one run."
    def __init__(self, zygote, n: int, argv, cwd: Path, env=None, before=""):     # noqa: F811; before: Python first, or one for each rank
        port = free_port()
        self.runs = [zygote.start("train", *argv, cwd=cwd, before=before if isinstance(before, str) else before[r], env={
            "RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **(env or {})}) for r in range(n)]

    def wait(self, timeout=90.0) -> list[int]: return [r.wait(timeout) for r in self.runs]
    def text(self) -> str: return "\n".join(r.text() for r in self.runs)
    def until(self, seen): return self.runs[0].until(seen)


@pytest.fixture
def lab(zygote, text, tmp_path):    # noqa: F811
    "lab.run(n, …) → exit codes and text of n processes; lab.start(n, …) → a living Job."
    class Lab:
        out = tmp_path/"run"
        def options(self, out, argv): return [*TINY, "--dataset", "local", "--local-path", text, *argv, "--out-dir", out]
        def start(self, n, *argv, out="run", **kw): return Job(zygote, n, self.options(out, argv), tmp_path, **kw)
        def run(self, n, *argv, out="run", **kw): j = self.start(n, *argv, out=out, **kw); return j.wait(), j.text()
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


# --- the same training ---------------------------------------------------------------------------------------------------------------------------------

def test_one_and_two_processes_train_alike(lab):
    "Losses, gradient norms, evaluations, files; DDP, DDP_SAFE, FSDP."
    six = ["--steps", 6, "--eval-every", 3, "--eval-batches", 3, "--save-every", 3]
    one = lab.alone(*six)
    for name, more in dict(ddp=[], safe=["--ddp-safe"], fsdp=["--parallel", "fsdp"]).items():
        two = lab.good(2, *six, *more, out=name)
        assert close(losses(two), losses(one)) and close(val(two), val(one)), name
        assert close([float(r["grad_norm"]) for r in rows(two/"training.csv")], [float(r["grad_norm"]) for r in rows(one/"training.csv")], 1e-4)
        a, b = (torch.load(o/"model.pt", weights_only=True)["state_dict"] for o in (two, one))
        assert a.keys() == b.keys() and all((a[n] - b[n]).abs().max() < 1e-4 for n in a)
        m, n = metrics(two), metrics(one)
        assert (m["world"], m["status"], m["tokens"], m["step"]) == (2, "done", n["tokens"], 6) and steps(two) == [3, 6]
        assert [e["msg"] for e in map(json.loads, (two/"heartbeat_rank1.jsonl").read_text().splitlines()) if e["msg"] != "progress"][-1] == "done"
        for p in (two/"checkpoints").glob("step_*"): verify_checkpoint(p)
