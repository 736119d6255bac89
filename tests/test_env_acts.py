"""Each environment variable of the kernels does something that can be seen: in the model that is built, in what
serves a call, in the log, in the heartbeat."""

import json
import os
import re
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch

import nsa_nb.attention as attention
import nsa_nb.config as config
import nsa_nb.choices as choices
import nsa_nb.op as op
from nsa_nb.config import load_config
from nsa_nb.envvars import ENV_VARS
from nsa_nb.errors import RunError, UsageError
from nsa_nb.geometry import Geometry
from nsa_nb.monitoring.heartbeat import PROGRESS_KEYS
from nsa_nb.model import build_model
from nsa_nb.choices import Choices, plan_call
from nsa_nb.fallbacks import Fallbacks, fallbacks
from nsa_nb.op import nsa_attention
from nsa_nb.schema import FIELDS

SMALL = {
    "model.dim": 32, "model.n_heads": 4, "model.d_k": 8, "model.d_v": 8, "train.seq_len": 64, "train.batch_size": 2,
    "train.steps": 4, "train.log_every": 2, "train.eval_every": 0, "train.save_every": 0, "train.sample_tokens": 0,
    "train.eval_batches": 1, "monitor.heartbeat_every": 1, "data.dataset": "synthetic", "runtime.device": "cpu",
}
KERNEL = (
    "NSA_USE_FA2", "NSA_USE_FA2_WIN", "NSA_USE_FA2_CMP", "NSA_FA2_MIN_LEN_WIN", "NSA_FA2_MIN_LEN_CMP",
    "NSA_USE_SEL_PACK", "NSA_USE_SEL_VARLEN", "NSA_SDPA_AUDIT", "NSA_DEBUG_TIMING", "NSA_ENV_STATIC",
)
STREAM = ("NSA_FWE_PREFETCH", "NSA_FWE_Q", "NSA_FWE_DOC_BATCH", "NSA_FWE_WARMUP_BATCHES", "NSA_FWE_WARMUP_TIMEOUT")


def layer(**environ):
    "The attention layer that a run with these variables has."
    return build_model(load_config(None, SMALL, environ), 256).attentions()[0]


def counted(f):
    "What a call adds to the counts."
    before = dict(fallbacks.counts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        f()
    return {k: n - before[k] for k, n in fallbacks.counts.items() if n != before[k]}


def unserved(layer, S=64, packed=False):
    "What it is asked for and can't have, and whether it could elsewhere on this machine."
    return {name: "never" if never else "counted" for name, _, never in layer.unserved(S, torch.float32, packed)}


# the last two act in test_world.py
@pytest.mark.parametrize("name", KERNEL + STREAM + ("NSA_DDP_SAFE", "DDP_SAFE"))
def test_nothing_is_only_recorded(name):
    assert ENV_VARS[name].acts == "now" and "recorded" not in FIELDS[ENV_VARS[name].field].description


@pytest.mark.parametrize("block", [9, -2])
def test_strict_asserts_refuse_a_selection_out_of_range(block, monkeypatch):
    "A ValueError where Python calls the layer, a RunError (exit code 1) to a training."
    def selects(*args, **kw):
        o, aux = op.attend(*args, **kw | dict(return_aux=True))
        aux["indices"] = aux["indices"].clone()
        aux["indices"][0, -1, 0, 0] = block
        return (o, aux) if kw.get("return_aux") else o
    monkeypatch.setattr(attention, "attend", selects)
    x = torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(0))
    layer()(x)
    for kind in (ValueError, RunError):
        with pytest.raises(kind, match=f"block {block} of the query at position 19 is out of range"):
            layer(NSA_STRICT_ASSERTS="1")(x)
    with pytest.raises(ValueError, match="block 9 of the query at position 0 is out of range"):
        attention.check_selection(torch.tensor([[[[0, 9, -1]]]]), torch.arange(1), 16)


@pytest.mark.parametrize("environ,window,cmp", [
    ({}, ("auto", 0), None),
    (dict(NSA_USE_FA2="1"), ("fa2", 16), 16),
    (dict(NSA_USE_FA2="0"), ("own", 0), None),
    (dict(NSA_USE_FA2="1", NSA_USE_FA2_WIN="0"), ("own", 0), 16),
    (dict(NSA_USE_FA2="0", NSA_USE_FA2_WIN="1"), ("fa2", 16), None),
    (dict(NSA_USE_FA2="1", NSA_USE_FA2_CMP="0"), ("fa2", 16), None),
    (dict(NSA_USE_FA2="0", NSA_USE_FA2_CMP="1"), ("own", 0), 16),
    (dict(NSA_USE_FA2="1", NSA_FA2_MIN_LEN_WIN="2048"), ("fa2", 2048), 16),
    (dict(NSA_USE_FA2="1", NSA_FA2_MIN_LEN_WIN="-1", NSA_FA2_MIN_LEN_CMP="-1"), ("own", 0), None),
    (dict(NSA_FA2_MIN_LEN_WIN="-1"), ("own", 0), None),
    (dict(NSA_USE_FA2="1", NSA_FA2_MIN_LEN_CMP="512"), ("fa2", 16), 512)])
def test_flash_attention_switches_reach_the_layer(environ, window, cmp):
    a = layer(**environ)
    assert (a.choices.window, a.choices.window_fa2_min_s) == window and a.compressed_fa2_min_s == cmp


def test_flash_attention_that_cannot_be_is_told_and_not_counted():
    x = torch.randn(1, 64, 32)
    # a CPU has none
    for environ, told in (
        (dict(NSA_USE_FA2="1"), dict(compressed_fa2="never", sliding_fa2="never")),
        (dict(NSA_USE_FA2="1", NSA_FA2_MIN_LEN_WIN="65", NSA_FA2_MIN_LEN_CMP="65"), {}),
        (dict(NSA_USE_FA2="0", NSA_USE_FA2_CMP="1"), dict(compressed_fa2="never")), ({}, {}),
    ):
        a = layer(**environ)
        assert unserved(a) == told and counted(lambda: a(x)) == {}


def test_a_fallback_warns_once():
    f = Fallbacks()
    with pytest.warns(UserWarning, match="said once, of this test"): f.add("sliding_fa2", "said once, of this test")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f.add("sliding_fa2", "said once, of this test")
    assert f.fields()["fb_sliding_fa2"] == f.fields()["fb_total"] == 2
    assert set(f.fields()) == {k for k in PROGRESS_KEYS if k.startswith("fb_")}


@pytest.mark.parametrize(
    "environ,documents,served",
    [
        ({}, "auto", "padded"), (dict(NSA_USE_SEL_PACK="1"), "auto", "padded"),
        (dict(NSA_USE_SEL_PACK="0"), "single", "single"), (dict(NSA_USE_SEL_VARLEN="1"), "native", "padded"),
        (dict(NSA_USE_SEL_VARLEN="0"), "padded", "padded"),
        (dict(NSA_USE_SEL_VARLEN="0", NSA_USE_SEL_PACK="0"), "single", "single"),
        (dict(NSA_USE_SEL_VARLEN="1", NSA_USE_SEL_PACK="0"), "native", "padded"),
    ],
)
def test_packed_documents(environ, documents, served):
    a = layer(**environ)
    assert a.choices.documents == documents and a.audit(64, torch.float32, packed=True)["documents"] == served
    x = torch.randn(1, 64, 32)
    cu = torch.tensor([0, 1, 40, 64], dtype=torch.int32)
    # on a CPU no kernel takes them as they are
    assert (
        unserved(a, packed=True) == (dict(selection_varlen="never") if documents == "native" else {})
        and counted(lambda: a(x, cu)) == {}
    )
    b = layer()
    b.load_state_dict(a.state_dict())
    assert torch.allclose(a(x, cu), b(x, cu), atol=1e-5)


def test_packing_on_the_reference_is_told():
    a = layer(NSA_FORCE_PARITY="1", NSA_USE_SEL_VARLEN="0")
    assert unserved(a, packed=True) == dict(selection_pack="never")
    assert counted(lambda: a(torch.randn(1, 64, 32), torch.tensor([0, 20, 64], dtype=torch.int32))) == {}


@pytest.mark.parametrize("here", [True, False])
def test_kernels_that_cannot_take_a_case_are_counted(here, monkeypatch):
    """float64 is no kernel's dtype: counted where there are kernels. Without a GPU (or Triton's interpreter) no
    call could have had them."""
    monkeypatch.setattr(choices, "triton_unavailable", lambda device: None if here else "no GPU")
    r = lambda *s: torch.randn(*s, dtype=torch.float64)
    geo = Geometry(l=8, d=4, l_sel=8, n_sel=4, w=5)
    xs = r(1, 20, 2, 16), r(1, 4, 1, 16), r(1, 4, 1, 16), *(r(1, 20, 1, 16) for _ in range(4)), r(1, 20, 2, 3)
    assert counted(lambda: nsa_attention(*xs, **vars(geo), backend="triton")) == (
        dict(selection_triton=1) if here else {}
    )
    assert plan_call(xs[0], xs[4], geo, 1., choices=Choices("triton")).backend == "torch"


def test_compiled_code_says_that_it_falls_back():
    "It counts nothing: the trainer asks `audit` instead."
    xs = [torch.randn(1, n, m, 16) for n, m in ((20, 2), (4, 1), (4, 1), *((20, 1),) * 4)] + [torch.randn(1, 20, 2, 3)]
    sizes = dict(l=8, d=4, l_sel=8, n_sel=4, w=5)
    def f(*xs): return nsa_attention(*xs, **sizes, window="fa2")  # the torch backend has its own window

    with pytest.warns(UserWarning, match=r"compiled code falls back \(sliding_fa2\)"):
        out = torch.compile(f, fullgraph=True, backend="eager")(*xs)
    assert torch.equal(out, f(*xs))


def test_arguments_that_are_no_tensors_of_four_axes():
    x = torch.randn(1, 20, 2, 8)
    g = torch.randn(1, 20, 2, 3)
    c = x[:, :4]
    sizes = dict(l=8, d=4, l_sel=8, n_sel=4, w=5)
    with pytest.raises(UsageError, match="q must have 4 axes"): nsa_attention(x[0, 0, 0], c, c, x, x, x, x, g, **sizes)
    with pytest.raises(UsageError, match="cu_seqlens is a list: give an int32 tensor"):
        nsa_attention(x, c, c, x, x, x, x, g, cu_seqlens=[0, 20], **sizes)
    with pytest.raises(UsageError, match="backend"): nsa_attention(x, c, c, x, x, x, x, g, backend=None, **sizes)


SCRIPT = """
import sys, json
from nsa_nb.config import load_config
from nsa_nb.train import train
train(load_config(None, json.loads(sys.argv[1])))
"""


def run(out, **environ):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("NSA_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(SMALL | {"train.out_dir": str(out)})], env=clean | environ,
        capture_output=True, text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    beats = [json.loads(l) for l in (out/"heartbeat_rank0.jsonl").read_text().splitlines()]
    return (
        (out / "train.log").read_text().splitlines(), json.loads((out / "env.json").read_text()),
        [b for b in beats if b["msg"] == "progress"],
    )


def test_a_run_that_asks_for_everything(tmp_path):
    log, env, beats = run(tmp_path/"a", NSA_SDPA_AUDIT="1", NSA_DEBUG_TIMING="1", NSA_USE_FA2="1")
    found = [json.loads(l.removeprefix("attention: ")) for l in log if l.startswith("attention: ")]
    assert (
        found == [env["attention"]]
        and found[0]["backend"] == "torch"
        and (set(found[0]["never"]), found[0]["fallbacks"]) == ({"compressed_fa2", "sliding_fa2"}, {})
    )
    assert {"compressed", "selected", "window", "dtype", "documents", "asked", "counts"} <= set(found[0])
    steps = [l for l in log if l.startswith("step ")]
    assert steps and all(
        re.search(r"\| data [\d.]+ms \| forward [\d.]+ms \| backward [\d.]+ms \| optim [\d.]+ms$", l) for l in steps
    )
    assert {v for b in beats for k, v in b.items() if k.startswith("fb_")} == {0} and "fb_compressed_fa2" in beats[-1]


def test_a_run_that_asks_for_nothing(tmp_path):
    log, env, beats = run(tmp_path/"b")
    assert not [l for l in log if l.startswith("attention")] and "attention" not in env
    assert not [l for l in log if "backward" in l] and {b["fb_total"] for b in beats} == {0}


def test_a_frozen_environment(monkeypatch):
    monkeypatch.setattr(config, "_kept", None)
    monkeypatch.setenv("NSA_ACCUM", "2")
    assert load_config().train.accumulate_grad_batches == 2
    monkeypatch.setenv("NSA_ACCUM", "3")
    assert load_config().train.accumulate_grad_batches == 3      # read anew each time
    monkeypatch.setenv("NSA_ENV_STATIC", "1")
    assert load_config().train.accumulate_grad_batches == 3
    monkeypatch.setenv("NSA_ACCUM", "4")
    monkeypatch.setenv("NSA_ENV_STATIC", "0")
    with pytest.warns(UserWarning, match="ignored: NSA_ACCUM, NSA_ENV_STATIC"):
        assert load_config().train.accumulate_grad_batches == 3
    assert load_config(environ={"NSA_ACCUM": "4"}).train.accumulate_grad_batches == 4


def streamed(folder, **environ):
    "The loader of a run with these variables, begun and warmed up; and what it did to get there."
    from nsa_nb.data.loader import open_run_data

    d = open_run_data(
        load_config(
            None,
            {
                "data.dataset": "fineweb_edu_local", "data.local_path": str(folder), "data.val_fraction": 0.1,
                "train.seq_len": 64,
            },
            environ,
        )
    )
    calls = []
    encode = d.tokenizer.encode_batch
    d.tokenizer.encode_batch = lambda texts: (calls.append(len(texts)), encode(texts))[1]
    d.begin(0, 2)
    return d, calls


def test_the_variables_of_the_stream(tmp_path):
    """Threads or none, the depth of the queue, documents tokenised together, batches before the first step and how
    long they are waited for."""
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps(dict(id=str(i), text=f"document {i} " * 30)) + "\n" for i in range(400))
    )
    threads = lambda: sum(t.name == "nsa-stream" for t in threading.enumerate())
    def settled(d, n):
        end = time.monotonic() + 10
        while d.reader.items.queue.qsize() < n and time.monotonic() < end: time.sleep(.005)
        time.sleep(.05)
        return d.reader.items.queue.qsize()

    d, calls = streamed(tmp_path)
    assert threads() == 2 and settled(d, 4) == 4 and max(calls) > 32
    d.close()
    d, calls = streamed(tmp_path, NSA_FWE_PREFETCH="0")
    d.train_batch(0, 2)
    assert threads() == 0
    d.close()
    d, calls = streamed(tmp_path, NSA_FWE_Q="2")
    assert settled(d, 2) == 2
    d.close()
    d, calls = streamed(tmp_path, NSA_FWE_DOC_BATCH="3")
    settled(d, 4)
    assert max(calls) <= 3
    d.close()
    d, calls = streamed(tmp_path, NSA_FWE_WARMUP_BATCHES="9")
    assert d.warmup()[0] >= 9
    d.close()
    d, calls = streamed(tmp_path, NSA_FWE_WARMUP_BATCHES="100000", NSA_FWE_WARMUP_TIMEOUT="0.3", NSA_FWE_DOC_BATCH="1")
    n, s = d.warmup()
    assert 1 <= n < 100_000 and 0.3 <= s < 5
    d.close()
