"The health rules on real heartbeat files: what a run writes is what a watcher judges."
import json
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from nsa_nb.monitoring.health import Finding, check_health, check_run, exit_code, write_anomaly
from nsa_nb.monitoring.heartbeat import PROGRESS_KEYS, Heartbeat, read_new
from nsa_nb.schema import MonitorConfig

TH = MonitorConfig()


class Clock:
    now = 1000.0
    def __call__(self): return self.now


def run_file(tmp_path, values, every=10.0, rank=0):
    "A heartbeat file as the trainer writes it: boot, loader_ready, one progress line every ten seconds."
    clock = Clock()
    hb = Heartbeat(tmp_path/f"heartbeat_rank{rank}.jsonl", rank, clock=clock)
    hb.event("boot")
    hb.event("loader_ready", floor_nats=math.log(256))
    for i, v in enumerate(values):
        clock.now += every
        hb.progress(
            i + 1,
            **{
                **dict(
                    loss=6.0, toks_per_s=1e4, grad_norm=1.0, dt_fetch_s=0.01, gate_entropy_mean=1.0, gate_max_gate=0.5,
                    gate_collapse_frac=0.0, gate_branch_shares=[0.4, 0.3, 0.3], tokens=1000 * i,
                ),
                **v,
            },
        )
    return hb, clock


def levels(findings): return {f.name: f.level for f in findings if f.level != "ok"}


def judge(tmp_path, values, wait=0.0, **kw):
    hb, clock = run_file(tmp_path, values)
    hb.close()
    return levels(check_run(tmp_path, TH, now=clock.now + wait, **kw))


def test_a_healthy_run(tmp_path): assert judge(tmp_path, [{}] * 100) == {}


@pytest.mark.parametrize("wait,expected", [(180.0, {}), (180.5, {"heartbeat_stall": "critical"})])
def test_stall(tmp_path, wait, expected): assert judge(tmp_path, [{}] * 5, wait) == expected


def test_the_watchdogs_own_lines_do_not_hide_a_stall(tmp_path):
    hb, clock = run_file(tmp_path, [{}] * 5)
    died = clock.now
    for i in range(10):
        clock.now = died + 60.0 * (i + 1)
        hb.event("stackdump", path="stackdump_1.txt")
        hb.event("anomaly", type="heartbeat_stall")
    assert levels(check_run(tmp_path, TH, now=clock.now + 1))["heartbeat_stall"] == "critical"


@pytest.mark.parametrize("last", ["done", "halt"])
def test_an_ended_run_is_not_stalled(tmp_path, last):
    hb, clock = run_file(tmp_path, [{}] * 5)
    hb.event(last)
    assert levels(check_run(tmp_path, TH, now=clock.now + 1e6)) == {}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), torch.tensor(float("nan"))])
def test_not_finite_is_critical_and_then_a_warning(tmp_path, bad):
    assert judge(tmp_path, [{}] * 3 + [{"loss": bad}]) == {"nonfinite": "critical"}
    assert judge(tmp_path, [{}] * 3 + [{"grad_norm": bad}]) == {"nonfinite": "critical"}
    assert judge(tmp_path, [{}] * 3 + [{"grad_norm": bad}, {}]) == {"nonfinite": "warn"}


def test_unshifted_labels_on_random_bytes_are_found(tmp_path):
    "The earlier system's numbers: 1.04 nats on i.i.d. bytes, where ln 256 = 5.545 is the least."
    assert judge(tmp_path, [{"loss": 5.6}] * 3 + [{"loss": 1.04}] * 3) == {"leak": "critical"}
    assert judge(tmp_path, [{"loss": math.log(256) - 0.04}] * 5) == {}


def test_text_without_a_floor_warns(tmp_path):
    hb = Heartbeat(tmp_path/"heartbeat_rank0.jsonl", 0, clock=lambda: 1000.0)
    hb.event("boot")
    for i in range(3): hb.progress(i, loss=0.28)
    assert levels(check_run(tmp_path, TH, now=1000.0)) == {"leak": "warn"}


def test_a_dead_rank_is_found(tmp_path):
    hb0, clock = run_file(tmp_path, [{}] * 100)
    run_file(tmp_path, [{}] * 50, rank=1)
    found = check_run(tmp_path, TH, now=clock.now)
    assert exit_code(found) == 1 and [f.message[:6] for f in found if f.level == "critical"] == ["rank1:"]


def test_an_earlier_session_is_not_judged(tmp_path):
    hb, clock = run_file(tmp_path, [{"toks_per_s": 1e6}] * 100 + [{"gate_max_gate": 0.99, "loss": 0.01}] * 5)
    hb.event("anomaly", type="leak")
    hb.event("boot")
    hb.event("resume")
    for i in range(70):
        clock.now += 10
        hb.progress(i, loss=6.0, toks_per_s=1e3)
    assert levels(check_run(tmp_path, TH, now=clock.now)) == {}


def test_half_a_line_at_the_end_changes_nothing(tmp_path):
    hb, clock = run_file(tmp_path, [{}] * 20)
    before = check_run(tmp_path, TH, now=clock.now)
    with open(hb.path, "ab") as f: f.write(b'{"ts": 99999.0, "msg": "progress", "loss": 0.0')
    assert check_run(tmp_path, TH, now=clock.now) == before


def test_lines_of_another_version(tmp_path):
    "Keys missing, keys unknown: judged by what is there."
    (tmp_path/"heartbeat_rank0.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [
        {"ts": 1000.0, "msg": "boot"}, {"ts": 1010.0, "msg": "progress", "step": 20, "loss": 5.7, "sel_rows": 2048},
        {"ts": 1011.0, "msg": "step_end"}]))
    assert levels(check_run(tmp_path, TH, now=1020.0)) == {}


def test_collapse_details_have_the_gate_keys(tmp_path):
    hb, clock = run_file(
        tmp_path,
        [{}] * 3
        + [
            {
                "gate_entropy_mean": 0.1, "gate_max_gate": 0.97, "gate_collapse_frac": 0.8,
                "gate_branch_shares": [0.97, 0.02, 0.01],
            }
        ]
        * 3,
    )
    f = next(f for f in check_health(read_new(hb.path)[0], TH, now=clock.now) if f.level == "critical")
    write_anomaly(tmp_path, f.name, dict(step=6, value=f.value, limit=f.limit, message=f.message))
    assert (tmp_path/".anomaly_type").read_text() == "gate_collapse\n"
    details = json.loads((tmp_path/"gate_collapse_details.json").read_text())
    assert (
        details["gate_branch_shares"] == [0.97, 0.02, 0.01]
        and details["gate_collapse_frac"] == 0.8
        and details["step"] == 6
    )


def test_judging_at_every_heartbeat_is_cheap():
    import time

    line = {
        **dict.fromkeys(PROGRESS_KEYS), "ts": 1.0, "msg": "progress", "step": 1, "loss": 3.0, "toks_per_s": 1.0,
        "grad_norm": 1.0, "nonfinite": [], "gate_entropy_mean": 1.0, "gate_max_gate": 0.5, "gate_collapse_frac": 0.0,
    }
    records = [line] * 200
    start = time.perf_counter()
    for _ in range(20): check_health(records, TH, now=1.0)
    assert (time.perf_counter() - start) / 20 < 0.05


NUMBER = st.none() | st.floats(allow_nan=False, allow_infinity=False, width=32)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "ts": st.floats(0, 1e5),
                "msg": st.sampled_from(["progress", "boot", "done", "anomaly", "eval", "skipped", "stackdump"]),
            },
            optional={
                "loss": NUMBER, "toks_per_s": NUMBER, "grad_norm": NUMBER, "dt_fetch_s": NUMBER,
                "gate_entropy_mean": NUMBER, "gate_max_gate": NUMBER, "gate_collapse_frac": NUMBER,
                "tokens": st.none() | st.integers(0, 10**9), "val_loss": NUMBER,
                "nonfinite": st.none() | st.lists(st.sampled_from(["loss", "mfu"]), max_size=2),
                "type": st.sampled_from(["leak", "nonfinite_gradient"]), "step": st.none() | st.integers(0, 100),
            },
        ),
        max_size=30,
    ),
    st.none() | st.floats(0.1, 10),
    st.none() | st.integers(0, 10**6),
)
def test_any_records_get_a_verdict(records, floor, fresh):
    "No sequence of records makes a rule fail, and each rule speaks exactly once."
    found = check_health(records, TH, now=1e5, floor_nats=floor, fresh_tokens=fresh)
    assert all(isinstance(f, Finding) and f.level in ("ok", "warn", "critical") and f.message for f in found)
    names = [f.name for f in found]
    assert len(names) == len(set(names)) or "leak" in names      # an anomaly line may bear a rule's name
    assert exit_code(found) in (0, 1, 3)
