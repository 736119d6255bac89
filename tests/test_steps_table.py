"""Every way of training once, through the trainer: attention × documents × precision × checkpointing × kind of
step, and the operators of PyTorch that are called by name.

A cell is a short run: a few steps, an evaluation, a checkpoint. Its losses are those of eager steps without
checkpointing: within 2e-3 in fp32 and 3e-2 in bf16, nats a token. On a
CPU bf16 itself moves them by up to 8e-3; compiled products are rounded at other places, and where NSA's scores
tie to the last bit another block is read. A wrong path moves them
by more: rows without their borders by 0.1 (`test_the_bound_tells…`). `runtime.precision` knows fp32 and bf16.

Cells marked `cuda` need a card; a CPU runs those that it can, on PyTorch's backend, compiled by `aot_eager`."""

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

import nsa_nb.dense as dense
from nsa_nb.data.batches import open_data
from nsa_nb.model import _KEPT, build_model
from nsa_nb.schema import RunConfig
from nsa_nb.training.stepper import Stepper
from nsa_nb.training.trainer import Trainer
from zygote import search_path

ROOT = Path(__file__).resolve().parents[1]
STEPS = 5
BOUND = dict(fp32=2e-3, bf16=3e-2)
KINDS = ("eager", "compile", "graph")
CHECKPOINTING = ("off", "selective", "full")
CELLS = [
    (a, d, p, c) for a in ("nsa", "dense") for d in ("rows", "packed") for p in ("fp32", "bf16") for c in CHECKPOINTING
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    "Short documents, so that a row holds several."
    path = tmp_path_factory.mktemp("text")/"docs.jsonl"
    words = "a row of text that holds several short documents one after another".split()
    docs = [" ".join(words[(i * j + j) % len(words)] for j in range(2 + i % 7)) for i in range(400)]
    path.write_text("\n".join(json.dumps(dict(text=t)) for t in docs))
    return path


def config(attention, documents, precision, checkpointing, step, out_dir, device, seq_len=64):
    width = 32 if device == "cuda" else 8
    return RunConfig(
        model=dict(dim=4 * width, n_layers=2, n_heads=4, n_kv_groups=2, d_k=width, d_v=width, attention=attention),
        nsa=dict(l=16, d=8, l_sel=16, n_sel=4, w=32),
        data=dict(dataset="local", local_path="docs.jsonl", cross_documents=documents == "rows"),
        runtime=dict(device=device, precision=precision, step=step, gradient_checkpointing=checkpointing),
        train=dict(
            steps=STEPS, seq_len=seq_len, batch_size=2, accumulate_grad_batches=2 if device == "cuda" else 1, lr=2e-3,
            warmup_steps=0, eval_every=0, eval_batches=2, save_every=0, log_every=1, out_dir=str(out_dir),
        ),
    )


class Seen:
    "What a run tells."
    def __init__(self): self.losses, self.notes = [], []
    def on_step(self, tr): self.losses.append(tr.stepper.reports.newest()[0])


def outspoken(model):
    """Weights of a size at which attention matters from the first step on: at the gentle start of a training a
    wrong border would move no loss."""
    narrow = (32 / model.embed.weight.shape[1]) ** 0.5
    with torch.no_grad():
        model.embed.weight.mul_(20)
        model.head.weight.mul_(8 * narrow)
        for n, p in model.blocks.named_parameters():
            if p.ndim == 2 and "gate" not in n: p.mul_(12 * narrow)
    return model


def train(cfg, text, tmp_path):
    "→ losses of the steps and of the evaluation at the end, the trainer."
    torch.manual_seed(0)
    seen = Seen()
    t = cfg.train
    data = open_data(
        "local", "byte", str(text), seq_len=t.seq_len, seed=1, val_fraction=0.1,
        cross_documents=cfg.data.cross_documents, cache_dir=str(tmp_path / "tokens"),
    )
    tr = Trainer(cfg, outspoken(build_model(cfg, 256)), data, torch.device(cfg.runtime.device), [seen])
    tr.note = seen.notes.append
    tr.fit()
    assert tr.step == STEPS and tr.skipped == 0 and tr.saved_step == STEPS
    if not cfg.data.cross_documents: assert tr.docs > 4 * STEPS, "rows hold several documents"
    tr.notes = seen.notes
    return torch.tensor([*seen.losses, tr.last_val["loss"]]), tr


@pytest.fixture(scope="module")
def base():
    "Losses of eager steps without checkpointing, by (attention, documents, precision)."
    return {}


@pytest.fixture(scope="module")
def compiled():
    "The group whose compiled functions are in memory: PyTorch keeps eight versions of one."
    return [None]


def check_cell(cell, how, device, text, tmp_path, base, kinds=KINDS):
    attention, documents, precision, checkpointing = cell
    run = lambda step, keep: train(
        config(attention, documents, precision, keep, step, tmp_path / f"{step}_{keep}", device), text, tmp_path
    )
    key = (device, *cell[:3])
    if key not in base: base[key] = run("eager", "off")[0]
    for step in kinds:
        got, tr = run(step, checkpointing)
        assert tr.stepper.how == how.get(step, step) and not [
            n for n in tr.notes if "failed" in n or "not compiled" in n
        ], (step, tr.stepper.how, tr.notes)
        assert (got - base[key]).abs().max() <= BOUND[precision], (step, (got - base[key]).tolist())
        assert got[STEPS - 1] < got[0] - 0.1, "it learns"


# ---------------------------------------------------------------- on a card

@pytest.mark.cuda
@pytest.mark.parametrize("cell", CELLS, ids=" ".join)
def test_every_way_of_training(cell, text, tmp_path, base, compiled):
    "Eager, compiled and captured, with the kernels that a run has there."
    if compiled[0] != cell[:3]: torch.compiler.reset()
    compiled[0] = cell[:3]
    check_cell(cell, {}, "cuda", text, tmp_path, base)


@pytest.mark.cuda
def test_packed_documents_of_the_dense_twin_take_flash_attention():
    "And what takes other ways is said: fp32, unequal widths, a width that is no multiple of 8."
    for more, dtype, kernel in (
        (dict(d_k=32, d_v=32), torch.bfloat16, "FlashAttention-2 by borders"),
        (dict(d_k=32, d_v=32), torch.float16, "FlashAttention-2 by borders"),
        (dict(d_k=32, d_v=32), torch.float32, "float32"), (dict(d_k=32, d_v=16), torch.bfloat16, "values 16"),
        (dict(d_k=20, d_v=20), torch.bfloat16, "width 20"),
    ):
        a = dense.DenseAttention(64, 4, 2, **more).to("cuda", dtype)
        assert kernel in a.audit(64, dtype, packed=True)["documents"]
        x = torch.randn(1, 64, 64, device="cuda", dtype=dtype)
        cu = torch.tensor([0, 3, 40, 64, 64], dtype=torch.int32, device="cuda")
        y = a(x, cu, max_seqlen=40)
        alone = torch.cat([a(x[:, i:j]) for i, j in ((0, 3), (3, 40), (40, 64))], 1)
        assert (y - alone).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * alone.norm(), more
        y.float().square().sum().backward()


# ---------------------------------------------------------------- on a CPU

def reference(q, k, v, cu):
    h = q.shape[1] // k.shape[1]
    K = k.repeat_interleave(h, 1)
    V = v.repeat_interleave(h, 1)
    t = torch.arange(len(q))
    doc = (t[:, None] >= cu[None, 1:]).sum(1)
    seen = (doc[:, None] == doc) & (t[:, None] >= t)
    scale = q.shape[-1] ** -0.5
    p = (torch.einsum("thd,uhd->htu", q, K) * scale).masked_fill(~seen, -torch.inf).softmax(-1)
    return p, K, V, scale


def forward_on_cpu(calls, q, k, v, cu, *rest):
    calls.append("forward")
    p, _, V, _ = reference(q, k, v, cu)
    return (
        torch.einsum("htu,uhd->thd", p, V).contiguous(), q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32),
        torch.zeros(2, dtype=torch.uint64),
    )


def backward_on_cpu(calls, do, q, k, v, o, lse, cu, *rest):
    calls.append("backward")
    p, K, V, scale = reference(q, k, v, cu)
    ds = p * (torch.einsum("thd,uhd->htu", do, V) - (do * o).sum(-1).t()[..., None]) * scale
    fold = lambda x: x.unflatten(1, (k.shape[1], -1)).sum(2).contiguous()
    return (
        torch.einsum("htu,uhd->thd", ds, K).contiguous(), fold(torch.einsum("htu,thd->uhd", ds, q)),
        fold(torch.einsum("htu,thd->uhd", p, do)),
    )


@contextmanager
def flash_on_cpu():
    "PyTorch's operator with kernels for a CPU, so that the whole way of a card is gone but the kernel itself."
    dense.varlen_asks_for_groups()
    calls = []
    lib = torch.library.Library("torch_attn", "IMPL")
    lib.impl("_varlen_attn", partial(forward_on_cpu, calls), "CPU")
    lib.impl("_varlen_attn_backward", partial(backward_on_cpu, calls), "CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "varlen_unavailable", lambda q, v: None)
        try:
            yield calls
        finally:
            lib._destroy()
            torch.compiler.reset()


def test_the_operator_is_there_when_it_is_needed_and_not_before():
    """In a process of its own: importing the package imports no part of it; the first call that needs it does,
    also where that call is being compiled."""
    code = """
import sys, torch
import nsa_nb.cli, nsa_nb.train
import nsa_nb.dense as dense
name = "torch.nn.attention.varlen"
assert name not in sys.modules
dense.varlen_unavailable = lambda q, v: None
q, cu = torch.randn(1, 6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
try: torch.compile(dense.dense_attention, fullgraph=True, backend="eager")(q, q, q, cu)
except NotImplementedError as e:      # a CPU has no such kernel: the operator was found
    assert "_flash_attention_forward" in str(e), e
assert name in sys.modules and torch.ops.torch_attn._varlen_attn
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | dict(PYTHONPATH=search_path())
    )
    assert done.returncode == 0, done.stderr[-2000:]


CPU_CELLS = [
    ("nsa", "packed", "fp32", "selective", ("eager",)), ("nsa", "rows", "bf16", "full", ("eager",)),
    ("dense", "rows", "fp32", "full", ("compile",)), ("dense", "packed", "bf16", "off", ("compile",)),
]


@pytest.mark.parametrize("cell", CPU_CELLS, ids=lambda c: " ".join([*c[:4], *c[4]]))
def test_cells_that_a_cpu_can_run(cell, text, tmp_path, base, monkeypatch):
    monkeypatch.setattr("nsa_nb.training.trainer.Stepper", partial(Stepper, compiler="aot_eager"))
    torch.compiler.reset()
    check_cell(cell[:4], {}, "cpu", text, tmp_path, base, cell[4])


@pytest.mark.parametrize("keep,forwards", [("off", 1), ("selective", 1), ("full", 2)])
@pytest.mark.parametrize("step", ["eager", "compile"])
def test_packed_documents_through_the_operator(step, keep, forwards, text, tmp_path, base, monkeypatch):
    """The dense twin with borders, as on a card: one forward and one backward a layer and pass; selective
    checkpointing keeps the output."""
    monkeypatch.setattr("nsa_nb.training.trainer.Stepper", partial(Stepper, compiler="aot_eager"))
    torch.compiler.reset()
    with flash_on_cpu() as calls:
        key = ("cpu", "dense", "packed", "fp32")
        if key not in base:
            with pytest.MonkeyPatch.context() as plain:
                plain.setattr(dense, "varlen_unavailable", lambda q, v: "by a mask")
                base[key] = train(config(*key[1:], "off", "eager", tmp_path/"base", "cpu"), text, tmp_path)[0]
            assert calls == []
        got, tr = train(config("dense", "packed", "fp32", keep, step, tmp_path/"run", "cpu"), text, tmp_path)
        assert tr.stepper.how == step and tr.notes == [] or step == "compile" and all("GPU" in n for n in tr.notes), (
            tr.notes
        )
        assert (got - base[key]).abs().max() <= BOUND["fp32"]
        layers_and_passes = 2 * STEPS
        assert calls.count("backward") == layers_and_passes
        assert calls.count("forward") == forwards * layers_and_passes + 2 * 2      # and two evaluations of two layers


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_the_bound_tells_a_border_that_is_not_seen(attention, text, tmp_path):
    "The same rows with and without borders: losses apart by more than the bounds."
    cells = [config(attention, d, "fp32", "off", "eager", tmp_path/d, "cpu") for d in ("rows", "packed")]
    a, b = (train(cfg, text, tmp_path)[0] for cfg in cells)
    assert (a - b).abs().max() > 2 * BOUND["bf16"]


# ---------------------------------------------------------------- names of operators

def test_operators_called_by_name_exist():
    "Each `torch.ops.…` in the package, with the arguments that it is given; each name that checkpointing keeps."
    dense.varlen_asks_for_groups()
    found = {m for p in (ROOT/"nsa_nb").glob("**/*.py") for m in re.findall(r"torch\.ops\.(\w+)\.(\w+)", p.read_text())}
    assert found == {("aten", "_flash_attention_forward"), ("aten", "_flash_attention_backward")}
    for space, name in found:
        arguments = {a.name for a in getattr(getattr(torch.ops, space), name).default._schema.arguments}
        assert {"scale", "window_size_left", "window_size_right", "is_causal"} <= arguments
    for name in _KEPT:
        space, _, op = name.partition("::")
        assert getattr(getattr(torch.ops, space), op).overloads(), name
