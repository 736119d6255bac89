"""Alarms: silent on healthy runs, line by line as they were written, and loud on sick ones.

Healthy: the heartbeat of a run on a card (nbs/results), of small runs of today, and what happens to healthy
runs (a slow first step, a pause, a long evaluation, a clock that jumps), made from them.
Sick: one fault at a time put into the same lines."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from nsa_nb.monitoring import heartbeat
from nsa_nb.config import load_config
from nsa_nb.monitoring.health import RULES, check_health, check_run
from nsa_nb.monitoring.heartbeat import PROGRESS_KEYS, Heartbeat, as_record, read_new
from nsa_nb.monitoring.report import first_steps, read_run, verdict
from nsa_nb.monitoring.run_files import read_csv
from nsa_nb.schema import MonitorConfig
from nsa_nb.train import train

ROOT = Path(__file__).resolve().parents[1]
PRODUCTION = ROOT/"nbs/results/prod_h200_2026-11-28"
TH = MonitorConfig()
TINY = {
    "model.dim": 32, "model.n_heads": 2, "model.n_kv_groups": 1, "model.d_k": 16, "model.d_v": 16, "nsa.l": 8,
    "nsa.d": 4, "nsa.l_sel": 8, "nsa.n_sel": 4, "nsa.w": 8, "train.seq_len": 32, "train.batch_size": 2,
    "train.eval_batches": 2, "train.sample_tokens": 8, "train.log_every": 1, "monitor.heartbeat_every": 1,
    "train.warmup_steps": 10,
}


def alarms(records, now=None, th=TH) -> dict[str, str]:
    "Name → level of what is not ok."
    last = [r["ts"] for r in records if isinstance(r.get("ts"), (int, float))]
    found = check_health(records, th, now=(last[-1] if last else 0.0) if now is None else now)
    return {f.name: f.level for f in found if f.level != "ok"}


def each_moment(records):
    "Every alarm that would have been heard while these lines came one by one."
    return {(n, *a) for n in range(1, len(records) + 1) for a in alarms(records[:n]).items()}


def progress(records): return [r for r in records if r["msg"] == "progress"]


@pytest.fixture(scope="module")
def production() -> list[dict]: return read_new(PRODUCTION/"heartbeat_rank0.jsonl")[0]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    "A run of today: evaluations, saves, a stop in the middle, a resume, a first step that takes its time."
    out = tmp_path_factory.mktemp("alarms")/"run"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two tiny threads wait for each other on a machine that is shared
    cfg = lambda steps: load_config(
        "train_showcase",
        TINY | {"train.steps": steps, "train.eval_every": 12, "train.save_every": 20, "train.out_dir": str(out)},
        environ={},
    )
    train(cfg(45))
    train(cfg(110), resume="auto")
    torch.set_num_threads(threads)
    return out


# --- healthy

def test_a_production_run_is_healthy_at_every_line(production): assert not each_moment(production)


def test_runs_of_today_are_healthy_at_every_line(small):
    records = read_new(small/"heartbeat_rank0.jsonl")[0]
    assert len(progress(records)) > 100 and sum(r["msg"] == "boot" for r in records) == 2
    assert not each_moment(records)
    assert all(isinstance(r["cpu_mem_private"], int) for r in progress(records))


def later(records, i, by): return [r | dict(ts=r["ts"] + by * (k >= i)) for k, r in enumerate(records)]
def changed(records, what):
    return [as_record(dict(r) | what(k, r)) if r["msg"] == "progress" else r for k, r in enumerate(records)]


def first_at(records, msg): return next(i for i, r in enumerate(records) if r["msg"] == msg)

# its beginning is in another file
# on a slower card, steps repeat
# a slow machine: minutes between lines
# a laptop was closed
# compilation
HEALTHY = {
    "slow_first_step": lambda rs: later(rs, first_at(rs, "progress"), 600),
    "slow_first_batch": lambda rs: changed(
        rs, lambda k, r: dict(dt_fetch_s=45.0, fetch_p95_ms=45e3) if k == first_at(rs, "progress") else {}
    ),
    "pause": lambda rs: changed(later(rs, 60, 5400), lambda k, r: dict(toks_per_s=30.0) if k == 60 else {}),
    "clock_forward": lambda rs: later(rs, 60, 7200),
    "clock_back": lambda rs: later(rs, 60, -7200),
    "rare_lines": lambda rs: [r | dict(ts=rs[0]["ts"] + 40 * (r["ts"] - rs[0]["ts"])) for r in rs],
    "memory_of_evaluation": lambda rs: changed(rs, lambda k, r: dict(gpu_mem_alloc=1459 + 400 * (k >= 50))),
    "memory_of_evaluation_and_save": lambda rs: changed(
        rs, lambda k, r: dict(gpu_mem_alloc=1459 + 400 * (k >= 50) + 300 * (k >= 90))
    ),
    "pages_of_the_text": lambda rs: changed(
        rs, lambda k, r: dict(gpu_mem_alloc=None, gpu_mem_reserved=None, cpu_mem_rss=1000 + 8 * k, cpu_mem_private=800)
    ),
    "allocator_noise": lambda rs: changed(
        rs, lambda k, r: dict(gpu_mem_alloc=None, cpu_mem_rss=400 + random.Random(k).randrange(12))
    ),
    "rising_norms_in_warmup": lambda rs: changed(
        rs, lambda k, r: dict(grad_norm=0.01 * 1.3 ** min(k, 20), lr=1e-5 * min(k, 30))
    ),
    "one_slow_line": lambda rs: changed(rs, lambda k, r: dict(toks_per_s=9.0) if k == 70 else {}),
    "resumed": lambda rs: (
        rs[:80]
        + [
            dict(ts=rs[79]["ts"] + 900, msg="boot", step=2000),
            *[r | dict(ts=r["ts"] + 950, toks_per_s=(r.get("toks_per_s") or 0) / 3) for r in rs[1:]],
        ]
    ),
    "lines_of_others": lambda rs: [
        x for r in rs for x in (r, dict(msg="step_end"), dict(ts=None, msg="note"), dict(msg=3, ts="x"))
    ],
    "rotated": lambda rs: rs[47:],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_happens_to_healthy_runs_is_no_alarm(production, name):
    # of a clock that went back it says so
    heard = {a for a in each_moment(HEALTHY[name](production)) if a[1:] != ("heartbeat_stall", "warn")}
    # nobody says what the text allows
    if name == "rotated": heard = {a for a in heard if a[1] != "leak"}
    assert not heard


def test_silence_that_is_in_order(production):
    start = production[:2]
    assert not alarms(start, now=start[-1]["ts"] + 899) and alarms(start, now=start[-1]["ts"] + 901) == {
        "heartbeat_stall": "critical"
    }
    rare = HEALTHY["rare_lines"](production[:40])
    usual = sorted(b["ts"] - a["ts"] for a, b in zip(progress(rare), progress(rare)[1:]))[18]
    limit = max(180, 3 * usual)
    assert not alarms(rare, now=rare[-1]["ts"] + 0.9 * limit) and alarms(rare, now=rare[-1]["ts"] + 1.2 * limit) == {
        "heartbeat_stall": "critical"
    }


def test_a_long_evaluation_writes_beats(tmp_path, monkeypatch):
    "Every batch of an evaluation, and every second that a save is waited for, may write one; here BEAT_S is 0."
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.0)
    train(
        load_config(
            "train_showcase",
            TINY
            | {
                "train.steps": 3, "train.eval_every": 3, "train.eval_batches": 4, "train.async_save": False,
                "train.out_dir": str(tmp_path / "run"),
            },
            environ={},
        )
    )
    said = [
        (r["msg"], r.get("phase"))
        for r in read_new(tmp_path / "run" / "heartbeat_rank0.jsonl")[0]
        if r["msg"] != "progress"
    ]
    evaluation = said.index(("eval", None))
    assert said[evaluation - 4:evaluation] == [("beat", "eval")] * 4
    assert not {"anomaly", "recovered"} & {m for m, _ in said}


def test_the_tables_of_a_production_run(tmp_path):
    "Nothing to look at but what the recording does not hold: checkpoints and model.pt."
    cfg = load_config(PRODUCTION/"config.yaml", environ={})
    rows = [r for t in (first_steps(PRODUCTION, cfg), verdict(PRODUCTION, cfg)) for r in t.rows]
    assert {r.name for r in rows} >= {
        "errors", "causality", "loss", "throughput", "memory", "end", "training loss", "validation loss", "health",
        "MFU",
    }
    assert {r.name for r in rows if r.level != "green"} == {"checkpoints", "model.pt"}, [
        r for r in rows if r.level != "green"
    ]


def test_the_tables_of_a_run_of_today(small):
    cfg = load_config(small/"config.yaml", environ={})
    rows = [r for t in (first_steps(small, cfg), verdict(small, cfg)) for r in t.rows]
    yellow = {r.name for r in rows if r.level != "green"}
    assert yellow <= {"validation loss", "throughput"}, rows      # it is short, and other processes share this machine


# --- sick

slope = lambda k: 1459 + 2 * max(0, k - 20)
SICK = {
    "memory_slope": (lambda rs: changed(rs, lambda k, r: dict(gpu_mem_alloc=slope(k))), {"memory": "warn"}),
    "memory_slope_late": (
        lambda rs: changed(rs, lambda k, r: dict(gpu_mem_alloc=1459 + 4 * max(0, k - 120))),
        {"memory": "warn"},
    ),
    "memory_at_each_evaluation": (
        lambda rs: changed(rs, lambda k, r: dict(gpu_mem_alloc=1459 + 30 * (k // 10))),
        {"memory": "warn"},
    ),
    "memory_of_a_process": (
        lambda rs: changed(rs, lambda k, r: dict(gpu_mem_alloc=None, cpu_mem_rss=slope(k))),
        {"memory": "warn"},
    ),
    "host_memory": (lambda rs: changed(rs, lambda k, r: dict(cpu_mem_private=slope(k))), {"host_memory": "warn"}),
    "loss": (lambda rs: changed(rs, lambda k, r: dict(loss=math.nan) if k >= 180 else {}), {"nonfinite": "critical"}),
    "gradient": (
        lambda rs: changed(rs, lambda k, r: dict(grad_norm=math.inf) if k >= 180 else {}),
        {"nonfinite": "critical"},
    ),
    "validation": (
        lambda rs: [
            r | dict(val_loss=None, nonfinite=["val_loss"]) if r["msg"] == "eval" and r["step"] == 50_000 else r
            for r in rs
        ],
        {"nonfinite": "critical"},
    ),
    "loss_once": (lambda rs: changed(rs, lambda k, r: dict(loss=math.nan) if k == 100 else {}), {"nonfinite": "warn"}),
    "norm": (lambda rs: changed(rs, lambda k, r: dict(grad_norm=30.0) if k >= 184 else {}), {"grad_spike": "warn"}),
    "fetch": (lambda rs: changed(rs, lambda k, r: dict(dt_fetch_s=2.5)), {"fetch": "warn"}),
    "fetch_now_and_then": (
        lambda rs: changed(rs, lambda k, r: dict(dt_fetch_s=0.01, fetch_p95_ms=3000.0)),
        {"fetch": "warn"},
    ),
    "speed": (
        lambda rs: changed(rs, lambda k, r: dict(toks_per_s=r["toks_per_s"] / 5) if k >= 90 else {}),
        {"throughput": "warn"},
    ),
    "speed_of_rare_lines": (
        lambda rs: changed(
            HEALTHY["rare_lines"](rs), lambda k, r: dict(toks_per_s=r["toks_per_s"] / 9) if k >= 170 else {}
        ),
        {"throughput": "warn"},
    ),
    "gates": (
        lambda rs: changed(rs, lambda k, r: dict(gate_max_gate=0.95) if k >= 170 else {}),
        {"gate_max_gate": "warn", "gate_collapse": "critical"},
    ),
    "gates_not_finite": (
        lambda rs: changed(rs, lambda k, r: dict(gate_max_gate=math.nan) if k >= 180 else {}),
        {"gate_max_gate": "warn"},
    ),
    "leak": (lambda rs: changed(rs, lambda k, r: dict(loss=0.1) if k >= 170 else {}), {"leak": "critical"}),
    "out_of_memory": (
        lambda rs: rs[:-1] + [dict(ts=rs[-1]["ts"], msg="anomaly", type="out_of_memory", step=9)],
        {"out_of_memory": "critical"},
    ),
}


@pytest.mark.parametrize("name", SICK)
def test_faults_are_heard(production, name):
    make, expected = SICK[name]
    assert alarms(make(production)) == expected


def test_a_dead_run_and_a_save_that_never_ends(production):
    cut = production[:100]
    assert alarms(cut, now=cut[-1]["ts"] + 200) == {"heartbeat_stall": "critical"}
    beats = lambda phase: [dict(ts=cut[-1]["ts"] + 30.0 * i, msg="beat", step=1, phase=phase) for i in range(1, 41)]
    assert alarms(cut + beats("save")) == {"heartbeat_stall": "warn"} and not alarms(cut + beats("eval"))


def test_every_rank_is_judged(tmp_path, production):
    sick = {0: production, 1: SICK["memory_slope"][0](production), 2: production[:100]}
    for rank, records in sick.items():
        (tmp_path / f"heartbeat_rank{rank}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    found = [
        (f.message.partition(":")[0], f.name, f.level)
        for f in check_run(tmp_path, TH, now=production[-1]["ts"])
        if f.level != "ok"
    ]
    assert found == [("rank1", "memory", "warn"), ("rank2", "heartbeat_stall", "critical")]


LINES = st.lists(st.integers(41, 200), min_size=0, max_size=2, unique=True)

@settings(max_examples=60, deadline=None)
@given(base=st.integers(200, 80_000), at=LINES, high=st.floats(0.02, 3.0), n=st.integers(45, 200))
def test_no_height_and_no_moment_of_a_step_is_growth(base, at, high, n):
    "Memory that rises once or twice and stays there, at any two lines, on either kind of device."
    mib = [round(base * (1 + high * sum(i >= a for a in at))) for i in range(n)]
    for key in ("gpu_mem_alloc", "cpu_mem_private"):
        assert "memory" not in alarms(
            [dict(ts=10.0 * i, msg="progress", step=i, **{key: m}) for i, m in enumerate(mib)]
        )


@settings(max_examples=60, deadline=None)
@given(
    base=st.integers(2_000, 80_000), share=st.floats(0.02, 1.0), n=st.integers(64, 300), noise=st.floats(0, 0.001),
    seed=st.integers(0, 99),
)
def test_every_slope_is_growth(base, share, n, noise, seed):
    "At least 2 % over the window, 1 % is the limit; noise of a tenth of that."
    g = random.Random(seed)
    mib = [round(base * (1 + 2 * share * i / n + noise * g.uniform(-1, 1))) for i in range(n)]
    assert (
        alarms([dict(ts=10.0 * i, msg="progress", step=i, gpu_mem_alloc=m) for i, m in enumerate(mib)])["memory"]
        == "warn"
    )


# --- one reading

NOT_FINITE = [
    "NaN", "Infinity", "-Infinity", '"nan"', '"NaN"', '"inf"', '"-Infinity"', "1e999", "1" + "0" * 400,
    "-" + "7" * 5000,
]
NOT_KNOWN = ["null", "true", '"high"', "[]", "{}"]

def line(text: str, **more) -> str:
    fields = dict(ts=1000.0, msg="progress", step=7, loss="LOSS", grad_norm=1.0) | more
    return json.dumps(fields).replace('"LOSS"', text)

def of_file(tmp_path, *lines):
    (tmp_path/"heartbeat_rank0.jsonl").write_text("".join(x + "\n" for x in lines))
    return {f.name: f.level for f in check_run(tmp_path, TH, now=1001.0) if f.level != "ok"}

@pytest.mark.parametrize("text", NOT_FINITE)
@pytest.mark.parametrize("more", [{}, {"nonfinite": []}, {"nonfinite": None}, {"nonfinite": "none"}])
def test_what_is_not_finite_is_heard_whoever_wrote_it(tmp_path, text, more):
    assert of_file(tmp_path, line(text, **more)) == {"nonfinite": "critical"}
    assert of_file(tmp_path, line(text, **more), line("3.0")) == {"nonfinite": "warn"}

@pytest.mark.parametrize("text", NOT_KNOWN + ["MISSING"])
def test_what_is_not_known_is_no_fault_and_no_traceback(tmp_path, text):
    one = line("3.0").replace('"loss": 3.0, ', "") if text == "MISSING" else line(text)
    assert of_file(tmp_path, one, one) == {}

@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 10**400, "nan", "-inf"], ids=lambda v: str(v)[:8])
def test_records_in_memory_are_read_like_those_of_a_file(bad):
    assert alarms([dict(ts=1.0, msg="progress", step=1, loss=bad, grad_norm=1.0)]) == {"nonfinite": "critical"}

def test_our_own_writer_and_a_foreign_one_say_the_same(tmp_path):
    hb = Heartbeat(tmp_path / "heartbeat_rank0.jsonl", 0, clock=lambda: 1000.0)
    hb.progress(7, loss=math.nan, grad_norm=1.0)
    hb.close()
    ours = check_run(tmp_path, TH, now=1001.0)
    (tmp_path/"heartbeat_rank0.jsonl").write_text(line("NaN") + "\n")
    foreign = check_run(tmp_path, TH, now=1001.0)
    assert [(f.level, f.name, f.message) for f in ours] == [(f.level, f.name, f.message) for f in foreign]

ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**400), 10**400), st.floats(), st.text(max_size=4),
    st.sampled_from(["nan", "-inf", "3"]), st.lists(st.none(), max_size=2), st.just({}),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from([*PROGRESS_KEYS, "val_loss", "type", "floor_nats", "fresh_tokens"]), ODD, max_size=12
        ),
        max_size=20,
    ),
    st.booleans(),
)
def test_no_line_of_anybody_makes_a_rule_fail(records, as_progress):
    if as_progress: records = [r | dict(msg="progress", ts=float(i)) for i, r in enumerate(records)]
    found = check_health(records, TH, now=30.0)
    assert {f.name for f in found if f.name in RULES} >= {
        "heartbeat_stall", "nonfinite", "fetch", "throughput", "grad_spike", "memory", "leak",
    } - {str(r.get("type")) for r in records}
    assert all(f.level in ("ok", "warn", "critical") and f.message for f in found)


# --- the tables of report

def with_files(folder: Path, small: Path, **files) -> tuple[Path, object]:
    "A copy of the small run's tables with some files replaced."
    for name in ("config.yaml", "training.csv", "val.csv", "metrics.json", "heartbeat_rank0.jsonl"):
        (folder / name).write_text(files.get(name.partition(".")[0], (small / name).read_text()))
    return folder, load_config(folder/"config.yaml", environ={})

def row(table, name): return next(r for r in table.rows if r.name == name)

@pytest.mark.parametrize("text", ["nan", "NaN", "inf", "-Infinity", "1e999"])
@pytest.mark.parametrize("dataset", ["stdlib", "synthetic"])
def test_a_loss_in_a_csv_that_is_not_finite(tmp_path, small, text, dataset):
    head, *rows = (small/"training.csv").read_text().splitlines()
    broken = [r.split(",") for r in rows]
    for b in broken[-3:]: b[1] = text
    metrics = json.dumps(json.loads((small/"metrics.json").read_text()) | dict(dataset=dataset))
    val = (small / "val.csv").read_text().splitlines()
    val[-1] = f"110,{text},{text},{text}"
    out, cfg = with_files(
        tmp_path, small, training="\n".join([head, *map(",".join, broken), ""]), val="\n".join([*val, ""]),
        metrics=metrics,
    )
    t = verdict(out, cfg)
    for name in ("training loss", "validation loss"):
        assert row(t, name).level == "red" and "not finite" in row(t, name).remedy, row(t, name)
    assert row(first_steps(out, cfg), "loss").level == "red"

@pytest.mark.parametrize("rubbish", ["x,y\n", "7,\n", "7,8,9,10,11,12,13\n", "\n", "\0\0\n", "7,1e5"])
def test_rows_that_are_none_are_left_out(tmp_path, small, rubbish):
    text = (small/"training.csv").read_text()
    out, cfg = with_files(tmp_path, small, training=text + rubbish)
    assert read_csv(out/"training.csv") == read_csv(small/"training.csv")
    assert row(verdict(out, cfg), "training loss").level == "green"

def test_a_fault_of_an_earlier_session_is_not_one_of_this(tmp_path, small):
    lines = (small/"heartbeat_rank0.jsonl").read_text().splitlines()
    fault = json.dumps(
        dict(ts=json.loads(lines[0])["ts"] + 1, msg="anomaly", step=20, type="out_of_memory", message="no room")
    )
    out, cfg = with_files(tmp_path, small, heartbeat_rank0="\n".join([lines[0], fault, *lines[1:], ""]))
    assert row(first_steps(out, cfg), "errors").level == "yellow"
    out, cfg = with_files(tmp_path, small, heartbeat_rank0="\n".join([*lines[:-1], fault, ""]))
    assert row(first_steps(out, cfg), "errors").level == "red"

def test_rates_of_zero_and_memory_of_zero(tmp_path, small):
    head, *rows = (small/"training.csv").read_text().splitlines()
    still = [",".join([*r.split(",")[:3], "0.0", *r.split(",")[4:]]) for r in rows]
    beats = [
        json.loads(x) | ({"gpu_mem_alloc": 0} if '"progress"' in x else {})
        for x in (small / "heartbeat_rank0.jsonl").read_text().splitlines()
    ]
    out, cfg = with_files(
        tmp_path, small, training="\n".join([head, *still, ""]),
        heartbeat_rank0="".join(json.dumps(b) + "\n" for b in beats),
    )
    assert row(verdict(out, cfg), "memory").level == "green" and len(read_run(out)["beats"]) > 100


@pytest.mark.cuda
def test_a_run_on_a_card_is_healthy_at_every_line(tmp_path):
    "Compilation or capture at the first step, evaluations, saves, a resume."
    cfg = lambda steps: load_config(
        "train_showcase",
        {
            "runtime.device": "cuda", "train.steps": steps, "train.eval_every": 100, "train.save_every": 150,
            "monitor.heartbeat_every": 4, "train.log_every": 10, "train.out_dir": str(tmp_path / "run"),
        },
        environ={},
    )
    train(cfg(400))
    train(cfg(800), resume="auto")
    records = read_new(tmp_path/"run"/"heartbeat_rank0.jsonl")[0]
    assert len(progress(records)) > 190 and not each_moment(records)
    rows = [r for t in (first_steps(tmp_path/"run", cfg(800)), verdict(tmp_path/"run", cfg(800))) for r in t.rows]
    assert {r.name for r in rows if r.level != "green"} <= {"validation loss", "throughput", "fallbacks"}, rows
