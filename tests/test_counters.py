"A counter that can be 0: what no call could have had is said once, what could have been is counted (issue 16, row 14)."
import json
import re
import warnings
from dataclasses import replace

import pytest
import torch

import nsa_nb.choices as choices
from nsa_nb.kernels import choice
from nsa_nb.config import load_config
from nsa_nb.model import build_model
from nsa_nb.choices import Choices, plan_call
from nsa_nb.fallbacks import fallbacks
from nsa_nb.geometry import Geometry
from nsa_nb.monitoring.heartbeat import PROGRESS_KEYS
from nsa_nb.preflight import preflight
from nsa_nb.monitoring.report import first_steps
from nsa_nb.train import train

SMALL = {"model.dim": 32, "model.n_heads": 4, "model.d_k": 8, "model.d_v": 8, "train.seq_len": 64,
         "train.batch_size": 2, "train.steps": 3, "train.log_every": 1, "train.eval_every": 0,
         "train.save_every": 0, "train.sample_tokens": 0, "train.eval_batches": 1, "monitor.heartbeat_every": 1,
         "data.dataset": "synthetic", "runtime.device": "cpu"}
RUNBOOK = dict(NSA_USE_FA2="1", NSA_SDPA_AUDIT="1")      # as the runbooks export it
COUNTERS = [k for k in PROGRESS_KEYS if k.startswith("fb_")]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "A run as the runbooks ask for it: its folder, its configuration, what it printed, the warnings that Python heard."
    out = tmp_path_factory.mktemp("fa2")/"run"
    lines = []
    cfg = load_config(None, SMALL | {"train.out_dir": str(out)}, RUNBOOK)
    choice._noted.clear()      # another test of this process may have met the same reasons
    fallbacks.counts["selection_triton"] += 5      # what was counted before a run is not the run's
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        patch.setattr("nsa_nb.train.notify", lines.append)
        train(cfg)
    return out, cfg, lines, [str(w.message) for w in heard if "nsa" in str(w.message).lower()]


def test_what_can_never_be_served_is_said_once_in_a_plain_line(run):
    out, cfg, lines, heard = run
    about = [l for l in lines if "FlashAttention-2" in l]
    assert len(about) == 1 and about[0].startswith("note: asked for, and never served on cpu: ")
    assert "compressed_fa2 (" in about[0] and "sliding_fa2 (" in about[0]
    assert heard == []


def test_and_no_counter_counts_it(run):
    out, cfg, lines, heard = run
    beats = [r for r in map(json.loads, (out/"heartbeat_rank0.jsonl").read_text().splitlines())
             if r["msg"] == "progress"]
    assert len(beats) == 3
    for b in beats: assert [b[k] for k in COUNTERS] == [0] * len(COUNTERS)      # the keys stay
    attention = json.loads((out/"env.json").read_text())["attention"]
    assert set(attention["never"]) == {"compressed_fa2", "sliding_fa2"} and attention["fallbacks"] == {}


def test_the_report_is_green_and_its_hint_names_a_row_that_exists(run):
    out, cfg, lines, heard = run
    row = next(r for r in first_steps(out, cfg).rows if r.name == "fallbacks")
    assert (row.value, row.level) == ("none", "green")
    beats = (out/"heartbeat_rank0.jsonl")
    beats.write_text(re.sub(r'("fb_sliding_fa2": ?)0', r"\g<1>7", beats.read_text()))
    row = next(r for r in first_steps(out, cfg).rows if r.name == "fallbacks")
    named = re.search(r"row (\w+) of nsa preflight", row.remedy)
    assert row.level == "yellow" and named[1] in [r.name for r in preflight(cfg, fresh=True).rows]


def rows(monkeypatch=None, **environ):
    table = preflight(load_config(None, SMALL | {"train.out_dir": "/tmp/never/made"}, environ))
    return {r.name: r for r in table.rows}


def test_preflight_says_who_serves_what_and_why():
    found = rows(**RUNBOOK)
    assert found["kernels"].level == "green"
    assert found["kernels"].value == "compressed: torch backend; selected: torch backend; window: torch backend"
    for reason in ("not used for the compressed branch: it can't express", "the torch backend has its own window"):
        assert reason in found["settings"].value
    assert "settings" not in rows()


def test_preflight_is_yellow_for_what_a_run_will_count(monkeypatch):
    found = {"backend": "triton", "compressed": "a", "selected": "b", "window": "c",
             "fallbacks": dict(sliding_fa2="dtype torch.float32"), "never": {}}
    monkeypatch.setattr("nsa_nb.attention.NSAAttention.audit", lambda self, *args, **kw: found | dict(documents="-"))
    row = rows()["kernels"]
    assert row.level == "yellow" and row.remedy == "sliding_fa2: dtype torch.float32"


# asked for (options of a layer), and which name of the counters it goes by
NEVER_ON_A_CPU = [(dict(window="fa2"), "sliding_fa2"), (dict(compressed_fa2_min_s=1), "compressed_fa2"),
                  (dict(documents="native"), "selection_varlen"), (dict(backend="triton"), "selection_triton"),
                  (dict(backend="reference", documents="padded"), "selection_pack")]


@pytest.mark.parametrize("options,name", NEVER_ON_A_CPU)
def test_each_request_that_a_cpu_cannot_serve(options, name, monkeypatch):
    # also where Triton's interpreter is at hand
    monkeypatch.setattr(choices, "triton_unavailable", lambda device: "no GPU")
    monkeypatch.setattr("nsa_nb.fallbacks.triton_unavailable", lambda device: "no GPU")
    monkeypatch.setattr("nsa_nb.attention.triton_unavailable", lambda device: "no GPU")
    monkeypatch.setattr(choices, "unsupported", lambda *args: "no GPU")
    layer = build_model(load_config(None, SMALL, {}), 256).attentions()[0]
    layer.backend = options.get("backend", "auto")
    layer.compressed_fa2_min_s = options.get("compressed_fa2_min_s")
    ways = {k: v for k, v in options.items() if k in ("window", "documents")}
    layer.choices = replace(layer.choices, **ways)
    if name == "selection_triton": monkeypatch.setattr("nsa_nb.attention.by_torch", lambda *args: True)
    assert {n for n, _, never in layer.unserved(64, torch.float32, True) if never} >= {name}
    before = dict(fallbacks.counts)
    choice._noted.clear()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(2): layer(torch.randn(1, 64, 32), torch.tensor([0, 20, 64], dtype=torch.int32))
    assert fallbacks.counts == before
    assert heard and len({str(w.message) for w in heard}) == len(heard)      # each reason once


def test_what_another_call_could_have_had_is_counted(monkeypatch):
    "Kernels are at hand, and this call's tensors do not fit them."
    monkeypatch.setattr(choices, "triton_unavailable", lambda device: None)
    monkeypatch.setattr(choices, "unsupported", lambda *args: "dtype torch.float64")
    x = torch.zeros(1, 64, 2, 16)
    plan = plan_call(x, x, Geometry(), 1., True, Choices("triton", documents="native"))
    assert set(plan.fallbacks) == {"selection_triton", "selection_varlen"} and plan.never == {}
    monkeypatch.setattr(choices, "fa2_impossible", lambda device: None)
    asked = Choices("triton", window="fa2")
    assert "sliding_fa2" in plan_call(x, x, Geometry(), 1., choices=asked).fallbacks


@pytest.mark.cuda
def test_a_card_counts_what_it_could_have_served():
    "fp32 is no dtype of FlashAttention-2, float64 none of the kernels; the compressed branch is never counted."
    cfg = load_config(None, SMALL | {"runtime.device": "cuda"}, dict(NSA_USE_FA2="1"))
    layer = build_model(cfg, 256).attentions()[0].cuda()
    before = dict(fallbacks.counts)
    x = torch.randn(1, 64, 32, device="cuda")
    layer(x)
    after = fallbacks.counts      # an older torch without the package
    none = choices.fa2_impossible(x.device) is not None
    assert after["sliding_fa2"] - before["sliding_fa2"] == (not none)
    assert after["compressed_fa2"] == before["compressed_fa2"]
    found = {name: never for name, _, never in layer.unserved(64, torch.float32)}
    assert found == dict(sliding_fa2=none, compressed_fa2=True)
    found = {name for name, _, never in layer.unserved(64, torch.bfloat16) if never}
    assert found == ({"compressed_fa2", "sliding_fa2"} if none else {"compressed_fa2"})
    layer.double()(x.double())
    assert fallbacks.counts["selection_triton"] > before["selection_triton"]
