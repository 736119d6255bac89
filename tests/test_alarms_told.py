"""What the health check finds is a line of the log when it begins and when it is over; the last line says what
stands open."""


import pytest
from test_train import events, metrics, nsa, out, rows, text, zygote  # noqa: F401
from test_world import lab  # noqa: F401

from nsa_nb.training.alarms import Alarms, open_text
from nsa_nb.config import load_config
from nsa_nb.monitoring.health import check_health
from nsa_nb.monitoring.heartbeat import Heartbeat, read_new

COLLAPSE = dict(gate_entropy_mean=0.1, gate_max_gate=0.95, gate_collapse_frac=0.9)

def lines_with(*changes) -> str:     # (first step, last step, fields)
    "Python to run first: healthy gates in the heartbeat, and from one step to another what a change says."
    return (
        "from nsa_nb.monitoring import heartbeat\nprogress, nan = heartbeat.Heartbeat.progress, float('nan')\n"
        f"def changed(self, step, **fields):\n    fields |= dict(gate_entropy_mean=1.0, gate_max_gate=0.5, "
        f"gate_collapse_frac=0.0)\n    for first, last, more in {changes!r}:\n"
        "        if first <= step <= last: fields |= more\n    return progress(self, step, "
        "**fields)\nheartbeat.Heartbeat.progress = changed\n"
    )


RUN = [
    "--steps", 14, "--save-every", 0, "--eval-every", 0, "--log-every", 1, "--heartbeat-every", 1, "--leak-probe-every",
    0,
]


def alarms_of(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith(("warning: ", "critical: ", "recovered: ", "rank "))]


@pytest.mark.parametrize("last", [9, 99], ids=["over", "open"])
def test_a_gate_collapse(nsa, out, last):
    """Critical at the third line of it; once in the log and once on the screen, whatever the number of lines; then
    over, or open at the end."""
    code, said = nsa("train", *nsa.small, *RUN, before=lines_with((4, last, COLLAPSE)))
    log = (out/"train.log").read_text()
    # the exit code is that of a run that is done
    assert code == 0 and alarms_of(log) == [line for line in alarms_of(said)], said
    found = [line for line in alarms_of(log) if "gate collapse at" in line]
    assert found[0].startswith(
        "critical: gate collapse at step 6: 3 of the last 3 heartbeats beyond a critical limit: gate_entropy_mean "
        "0.1 (limit 0.2)"
    ), log
    assert [
        line.split(" at step")[0]
        for line in alarms_of(log)
        if line.endswith(("warning below 0.5", "warning above 0.85", "warning above 0.1")) and "recovered" not in line
    ] == ["warning: gate entropy mean", "warning: gate max gate", "warning: gate collapse frac"], log
    order = [line[:20] for line in log.splitlines()]
    # when it happens
    assert order.index("critical: gate colla") > order.index("step 00005/14 | loss") and order.index(
        "critical: gate colla"
    ) < order.index("step 00008/14 | loss")
    end = said.splitlines()[-1]
    assert end.startswith("done at step 14: ") and log.splitlines()[-1] == end
    if last == 9:
        assert (
            [line.split(":")[1] for line in found[1:]] == [" gate collapse at step 10, critical since step 6"]
            and "; open:" not in end
            and metrics(out)["open_alarms"] == []
        )
        assert {
            "recovered: gate max gate at step 12, warning since step 4: gate_max_gate is 0.5, warning above 0.85"
        } <= set(alarms_of(log)), log
    else:
        assert len(found) == 1 and end.endswith(
            "; open: critical gate collapse since step 6, warning gate entropy mean since step 4, warning gate max "
            "gate since step 4, warning gate collapse frac since step 4"
        )
        assert [(a["level"], a["name"], a["step"]) for a in metrics(out)["open_alarms"]][0] == (
            "critical", "gate_collapse", 6,
        )
    # events stay
    assert [e["type"] for e in events(out, "anomaly")] == ["gate_collapse"] and len(events(out, "recovered")) == (
        last == 9
    )
    assert metrics(out)["status"] == "done"


@pytest.mark.parametrize(
    "fields,name", [(dict(dt_fetch_s=3.5), "fetch"), (dict(loss=float("nan")), "nonfinite")], ids=["fetch", "nonfinite"]
)
def test_other_rules(nsa, out, fields, name):
    "Numbers and limit; a NaN is critical, then a warning."
    code, said = nsa("train", *nsa.small, *RUN, before=lines_with((5, 5, fields)))
    lines = [line for line in alarms_of((out/"train.log").read_text()) if f" {name} " in line]
    assert code == 0 and lines[0].startswith(
        {
            "fetch": "warning: fetch at step 5: the last batch took 3.5 s to come, warning above 2 s",
            "nonfinite": "critical: nonfinite at step 5: ",
        }[name]
    ), said
    assert len(lines) == 2 and lines[1].startswith(
        {
            "fetch": "recovered: fetch at step 8, warning since step 5",
            "nonfinite": "recovered: nonfinite at step 6, critical since step 5; a warning from now on: ",
        }[name]
    ), lines
    assert said.splitlines()[-1].endswith({"fetch": "run", "nonfinite": "; open: warning nonfinite since step 6"}[name])


def test_a_failed_run_says_it_too(nsa, out):
    fails = (
        "from nsa_nb.training import trainer\n"
        "from nsa_nb.errors import RunError\n"
        "step = trainer.Trainer.train_step\n"
        "def f(tr):\n"
        "    step(tr)\n"
        "    if tr.step == 9: raise RunError('the data are gone')\n"
        "trainer.Trainer.train_step = f\n"
    )
    code, said = nsa("train", *nsa.small, *RUN, before=lines_with((4, 99, COLLAPSE)) + fails)
    assert code == 1 and said.splitlines()[-1].startswith(
        "failed: the data are gone; open: critical gate collapse since step 6"
    ), said
    assert (out / "train.log").read_text().splitlines()[-1].startswith(
        "failed at step 9: the data are gone; open: critical gate collapse"
    ) and metrics(out)["open_alarms"][0]["name"] == "gate_collapse"


def test_each_process_tells_its_own(lab):
    """Slow batches of rank 1: its number stands in its lines and in the last one; what is of the run is told once,
    by rank 0."""
    dead = (4, 99, COLLAPSE)
    slow = (4, 99, dict(dt_fetch_s=3.5))
    codes, said = lab.run(2, *RUN, before=[lines_with(dead), lines_with(dead, slow)])
    log = (lab.out/"train.log").read_text()
    assert codes == [0, 0] and [line for line in alarms_of(log) if "fetch" in line] == [
        "rank 1: warning: fetch at step 4: the last batch took 3.5 s to come, warning above 2 s"
    ], log
    assert (
        log.count("critical: gate collapse at") == 1
        and said.count("critical: gate collapse at") == 1
        and "rank 1: critical" not in log
    )
    assert (
        log.splitlines()[-1].endswith("warning fetch since step 4 (rank 1)")
        and metrics(lab.out)["open_alarms"][-1]["rank"] == 1
    )


def test_notes_are_in_the_log(nsa, out):
    "What the screen is told while a run goes on stands in train.log."
    nan = (
        "from nsa_nb.training import trainer\nmade = trainer.Trainer.__init__\ndef init(tr, *a, **k):\n    "
        "made(tr, *a, **k)\n    tr.call = (lambda call: lambda hook: (tr.note('something odd') if hook == "
        "'on_step' and tr.step == 2 else None, call(hook)))(tr.call)\n"
        "trainer.Trainer.__init__ = init\n"
    )
    code, said = nsa("train", *nsa.small, *RUN[2:], "--steps", 3, before=nan)
    assert (
        code == 0
        and said.count("note: something odd\n") == 1
        and (out / "train.log").read_text().count("note: something odd\n") == 1
    ), said


def test_a_line_for_each_change_of_level(tmp_path):
    """Random walks through the levels: as many lines as changes, none while nothing changes, and what is open is
    what is bad now or was within three lines."""
    import random
    r = random.Random(1)
    th = load_config(environ={}).monitor
    for n in range(20):
        hb = Heartbeat(tmp_path/f"{n}.jsonl", 0)
        lines = []
        alarms = Alarms(lines.append)
        offset = 0
        records = []
        slow = []
        for step in range(1, 60):
            late = r.random() < (0.9 if step // 10 % 2 else 0.1)
            hb.progress(step, loss=5.0, grad_norm=1.0, dt_fetch_s=9.0 if late else 0.1)
            new, offset = read_new(hb.path, offset)
            records += new
            findings = check_health(records, th)
            # the rule's own word: a first batch may be late
            slow.append(any(f.name == "fetch" and f.level != "ok" for f in findings))
            alarms.update(step, findings)
        hb.close()
        is_open, want = False, 0
        for i, bad in enumerate(slow):
            if bad and not is_open: is_open, want = True, want + 1
            if is_open and not any(slow[max(0, i - 2):i + 1]): is_open, want = False, want + 1
        told = [line for line in lines if " fetch at step" in line]
        assert len(told) == want and bool([a for a in alarms.open() if a["name"] == "fetch"]) == is_open, (told, slow)
        assert ("warning fetch since" in open_text(alarms.open())) == is_open
