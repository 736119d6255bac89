"The kernel benchmark as a person starts it, without a card; and what validation says of an operation that is wrong."
import os
import subprocess
import sys

import pytest
import torch
from zygote import search_path

from nsa_nb import attention, op
from nsa_nb.bench import measure as bench, kernels as bench_kernels, parity, timing, validate
from nsa_nb.monitoring.checks import CheckTable
from nsa_nb.compress import PHIS
from nsa_nb.errors import RunError
from nsa_nb.runbook import stop_on_red

NO_CARD = {**os.environ, "PYTHONPATH": search_path(), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def nsa(*args, cwd) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", "from nsa_nb.cli import main; main()", *args], capture_output=True, text=True,
        env=NO_CARD, cwd=cwd,
    )


def test_a_quick_table_on_a_cpu(tmp_path):
    peer = tmp_path/"peer"/"flash_nsa"
    peer.mkdir(parents=True)
    (peer/"__init__.py").write_text("raise ImportError('this peer needs a card')")
    done = nsa(
        "bench", "kernels", "--device", "cpu", "--quick", "--shapes", "H4G2D16", "--lengths", "64", "--dtype", "fp32",
        "--seconds", "0.01", "--out", "new/k.csv", "--peer", f"flash_nsa={peer.parent}", cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    rows = bench.read_csv(tmp_path/"new"/"k.csv")
    assert {r.impl for r in rows} >= {"dense cuDNN", "dense FA2", "nsa_nb", "flash_nsa"}
    peer_rows = [r for r in rows if r.impl == "flash_nsa"]
    assert len(peer_rows) == 1 and peer_rows[0].ms_median is None and "this peer needs a card" in peer_rows[0].note
    assert all(r.card == "CPU" and r.torch and r.date and r.nsa_nb for r in rows)
    assert f"{len(rows)} rows in new/k.csv" in done.stdout


def test_without_a_card_it_says_so_and_starts_nothing(tmp_path):
    for device in ([], ["--device", "cuda"]):
        done = nsa("bench", "kernels", *device, cwd=tmp_path)
        assert done.returncode == 2 and "--device cpu" in done.stderr and not list(tmp_path.iterdir()), done.stderr


def test_wrong_use_is_told_before_anything_is_measured(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "bad.pt").write_bytes(b"nothing")
    torch.save(dict(state_dict={}, cfg={}), tmp_path/"empty.pt")
    quick = [
        "--device", "cpu", "--quick", "--shapes", "H4G2D16", "--lengths", "64", "--dtype", "fp32", "--seconds", "0.01",
    ]
    for args, words in (
        (["--out", str(tmp_path)], "is a folder"), (["--out", "file/k.csv"], "can't be written"),
        (["--peer", "flash_nsa"], "--peer flash_nsa=PATH"), (["--model", "bad.pt"], "model.pt of a finished run"),
        (["--model", "empty.pt"], "model.pt of a finished run"), (["--seconds", "nan"], "--seconds nan"),
        (["--lengths", ""], "--lengths ''"),
    ):
        done = nsa("bench", "kernels", *quick, *args, cwd=tmp_path)
        assert done.returncode == 2 and words in done.stderr and "nsa_nb" not in done.stdout.replace("nsa_nb 0", ""), (
            args, done.stdout, done.stderr,
        )
    assert {p.name for p in tmp_path.iterdir()} == {"file", "bad.pt", "empty.pt"}


class FakeCuda:
    """What `graphed` asks of torch.cuda; the end of a capture fails after a failure inside, and leaves its stream
    current."""

    def __init__(self, monkeypatch):
        self.now = "default"
        self.log = []
        self.captured = []
        cuda = self
        class Side:
            def wait_stream(self, other): cuda.log.append("wait")
        class Here(Side): pass
        self.side = Side()
        self.here = Here()
        class Stream:
            def __init__(self, s): self.s = s
            def __enter__(self): self.old, cuda.now = cuda.now, self.s
            def __exit__(self, *a): cuda.now = self.old
        class Graph:
            def __init__(self, graph, stream=None): self.s = stream
            def __enter__(self): cuda.now = self.s
            def __exit__(self, kind, *a):
                if kind: raise RuntimeError("operation failed due to a previous error during capture")
                cuda.now = cuda.here
        self.now = self.here
        for name, f in dict(
            Stream=lambda: self.side, current_stream=lambda: self.now, stream=Stream, graph=Graph,
            CUDAGraph=lambda: type("G", (), dict(replay=lambda self: cuda.log.append("replay")))(),
            set_stream=lambda s: setattr(self, "now", s),
            synchronize=lambda *a: (_ for _ in ()).throw(RuntimeError("still broken")),
        ).items():
            monkeypatch.setattr(torch.cuda, name, f)


def test_a_graph_is_warmed_up_on_the_stream_that_captures_it(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    at = []
    replay = bench.graphed(lambda: at.append(cuda.now))
    assert at == [cuda.side] * 4 and cuda.now is cuda.here
    replay()
    assert cuda.log[-1] == "replay" and len(at) == 4


def test_a_capture_that_fails_leaves_the_next_one_alone(monkeypatch):
    """Once the first failure left its stream current, so that later captures ran beside it and only the first row
    of a process was without a time."""
    cuda = FakeCuda(monkeypatch)
    calls = []
    def step():
        calls.append(1)
        if len(calls) == 4: raise RuntimeError("operation would make the legacy stream depend on a capturing stream")
    with pytest.raises(RuntimeError, match="legacy stream"): bench.graphed(step)
    assert cuda.now is cuda.here
    assert bench.graphed(lambda: None) and cuda.now is cuda.here


def test_the_cost_of_a_group_is_timed_on_replays(monkeypatch):
    base = bench.Row(dtype="fp32")
    geo = validate.Geometry(l=8, d=4, l_sel=8, n_sel=4, w=12)
    graphs = []

    def graphed(f):
        graphs.append(f)
        return f

    monkeypatch.setattr(timing, "graphed", graphed)
    monkeypatch.setattr(bench_kernels, "HEADS", (1, 2))
    monkeypatch.setattr(timing, "replayed", lambda step, device, right=timing.replayed: right(step, "cuda"))
    rows = bench_kernels.bench_heads(40, geo, base, "cpu", .01, lambda line: None)
    assert [(r.what, r.passes, r.note) for r in rows] == [
        ("heads", p, n) for p, n in (("f", "replayed"), ("f+b", "replayed"), ("b", "replayed; by difference"))
    ] * 2 and len(graphs) == 4

    def second_fails(f):
        graphs.append(f)
        if len(graphs) % 2 == 0: raise RuntimeError("no capture")
        return f

    graphs.clear()
    monkeypatch.setattr(timing, "graphed", second_fails)
    rows = bench_kernels.bench_heads(40, geo, base, "cpu", .01, lambda line: None)
    assert [(r.passes, r.note) for r in rows] == [
        ("f", "replayed"),
        ("f+b", "called, not replayed: RuntimeError: no capture"),
    ] * 2 and all(r.ms_median for r in rows)


def test_every_option_is_explained(tmp_path):
    done = nsa("bench", "--help", cwd=tmp_path)
    from nsa_nb.verbs import bench_parser
    assert done.returncode == 0
    for action in bench_parser()._actions:
        assert action.help and (not action.option_strings or action.option_strings[-1] in done.stdout)


def test_all_implementations_answer_the_same_question():
    "On shared inputs with every block selected and gates on the selected branch, ours is dense attention."
    shape = bench.parse_shape("H4G2D16")
    geo = validate.Geometry(l=8, d=4, l_sel=8, n_sel=16, w=8)
    case = bench.random_case(shape, 100, geo, torch.float32, "cpu")
    case.gate = lambda w: torch.tensor([0., 1, 0]).expand_as(w)
    dense = bench.DENSE["dense FA2"](case)()
    assert (
        timing.difference(bench.nsa_step(case)(), dense).startswith("output")
        and float(timing.difference(bench.nsa_step(case)(), dense).split()[1]) < 1e-5
    )
    assert float(timing.difference(bench.nsa_step(case)() * 1.1, dense).split()[1]) == pytest.approx(.1, rel=.01)


@pytest.mark.parametrize("branch,name", [(0, "compressed"), (1, "selected"), (2, "window")])
def test_validation_finds_a_branch_that_is_wrong(monkeypatch, branch, name):
    right = op.torch_branches
    def wrong(*args):
        out = list(right(*args))
        out[branch] = out[branch] * 1.02
        return tuple(out)
    monkeypatch.setattr(op, "torch_branches", wrong)
    t = CheckTable("Validation")
    parity.check_parity(t, validate.Site("cpu", 256), "torch")
    assert {r.name for r in t.reds} == {
        f"parity, {b}, {d}" for b in (name, "all branches") for d in ("fp32", "bf16", "fp16")
    }
    with pytest.raises(RunError, match=f"parity, {name}"): stop_on_red(t)


def test_validation_finds_a_wrong_selection(monkeypatch):
    right = op.torch_branches
    def wrong(*args):
        *o, idx = right(*args)
        idx = idx.clone()
        idx[:, -1] = (idx[:, -1] - 1).clamp_min(-1)
        return *o, idx
    monkeypatch.setattr(op, "torch_branches", wrong)
    t = CheckTable("Validation")
    parity.check_parity(t, validate.Site("cpu", 256), "torch")
    assert len(t.reds) == 12 and all("selection" in r.value for r in t.reds)


@pytest.mark.parametrize("phi", PHIS)
def test_validation_finds_a_layer_whose_compression_is_wrong(monkeypatch, phi):
    right = attention.NSAAttention._compress_all
    monkeypatch.setattr(
        attention.NSAAttention,
        "_compress_all",
        lambda self, *a: [
            x * (1 if self.backend == "reference" or self.phi_k.phi != phi else 1.02) for x in right(self, *a)
        ],
    )
    t = CheckTable("Validation")
    parity.check_layers(t, validate.Site("cpu", 256), "torch")
    assert {r.name for r in t.reds} == {f"layer with φ={phi}, {d}" for d in ("fp32", "bf16", "fp16")}, t


KERNEL_ROWS = """
import torch
from nsa_nb.kernels import projection
from nsa_nb.kernels import compress as triton_compress
from nsa_nb.bench import parity
from nsa_nb.monitoring.checks import CheckTable
from nsa_nb.geometry import Geometry
from nsa_nb.kernels.jit import interpreting
from nsa_nb.bench.parity import Site, check_layers, check_split
assert interpreting()
site = Site("cpu", 64, geo=Geometry(l=4, d=2, l_sel=8, n_sel=4, w=8))
def levels(check, *dtypes, **kw):
    t = CheckTable("Validation")
    check(t, site, dtypes=dtypes, **kw)
    print(t)
    return [(r.name, r.level) for r in t.rows]
def layers(*dtypes): return levels(check_layers, *dtypes, backend="triton", S=24)
def split(*dtypes): return levels(check_split, *dtypes, S=5, H=2, G=1, D=8)
assert layers(torch.float32) == [(f"layer with φ={phi}, fp32", "green") for phi in ("avg", "conv", "mlp")]
parity.PHIS = ("conv",)      # each layer takes seconds
assert layers(torch.float16) == [("layer with φ=conv, fp16", "green")]      # bf16 is not right in Triton's interpreter
assert split(torch.float32, torch.float16) == [("RoPE kernel, fp32", "green"), ("RoPE kernel, fp16", "green")]
sums = triton_compress.run_compress_backward
def wrong(*args): dk, dv, *more = sums(*args); return dk, dv * 1.02, *more
tc = triton_compress
tc._compress = tc.direct(tc.run_compress, tc._setup, tc.partial(tc._autograd, wrong))
assert layers(torch.float32) == [("layer with φ=conv, fp32", "red")]
launch = projection._launch
def swaps(y, cos, sin, *more): launch(y, sin, cos, *more)
projection._launch = swaps
assert [x for _, x in split(torch.float32, torch.float16)] == ["red", "red"]
"""


@pytest.mark.slow
def test_validation_of_phi_and_rope_on_kernels():
    "In Triton's interpreter: the rows are green, and red where a kernel's gradient or rotation is wrong."
    done = subprocess.run(
        [sys.executable, "-c", KERNEL_ROWS], capture_output=True, text=True,
        env=os.environ | dict(TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONPATH=search_path()),
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def test_validation_finds_a_needle_that_was_not_read(monkeypatch):
    right = validate.nsa_attention
    # importance from other blocks
    monkeypatch.setattr(validate, "nsa_attention", lambda q, kc, *a, **k: right(q, kc.flip(1), *a, **k))
    t = CheckTable("Validation")
    validate.check_long(t, validate.Site("cpu", 4096))
    assert t.reds and "found 3/3" not in t.reds[0].value


def test_validation_counts_one_causality_row_a_path():
    t = CheckTable("Validation")
    validate.check_causality(t, validate.Site("cpu", 256))
    assert [(r.name, r.value, r.level) for r in t.rows] == [
        (f"causality, {p}", "3/3 φ", "green") for p in ("training", "prefill", "decode", "packed")
    ]
