"""What `nsa report` says in every state a run's folder can be in: (alive, done, halted, failed, killed) × (no
checkpoint, whole ones, only broken ones) × (model.pt there or not).

One small run is made once; each cell is a copy of its folder, changed as the state leaves it. Alive is what
holds the lock of run.pid. Processes, kills and the command line stand at the end."""

import json
import os
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nsa_nb.config import load_config
from nsa_nb.monitoring.report import report, run_state
from nsa_nb.monitoring.run_folder import RunLock
from nsa_nb.train import train
from zygote import Zygote

TINY = [
    "--dim", 32, "--n-heads", 2, "--n-kv-groups", 1, "--d-k", 16, "--d-v", 16, "--l", 8, "--d", 4, "--l-sel", 8,
    "--n-sel", 4, "--w", 8, "--seq-len", 32, "--batch-size", 2, "--eval-batches", 2, "--sample-tokens", 8,
    "--log-every", 1, "--heartbeat-every", 1, "--warmup-steps", 5, "--lr", "3e-3",
]
STEPS, LAST = 60, 45      # of the run; where what is not done has come to
REASON = "step 45: gradient not finite"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    "A run that is done, with checkpoints of steps 15, 30, 45 and 60."
    out = tmp_path_factory.mktemp("states")/"run"
    threads = torch.get_num_threads()
    fields = {k[2:].replace("-", "_"): v for k, v in zip(TINY[::2], TINY[1::2])}
    from nsa_nb.schema import FIELDS
    full = {f.partition(".")[2]: f for f in FIELDS}
    torch.set_num_threads(1)
    train(
        load_config(
            "train_showcase",
            {full[k]: v for k, v in fields.items()}
            | {"train.steps": STEPS, "train.eval_every": 30, "train.save_every": 15, "train.out_dir": str(out)},
            environ={},
        )
    )
    torch.set_num_threads(threads)
    return out


def cut(out: Path, step: int, msg: str | None) -> None:
    "The files as a run has them at a step, right now; the heartbeat's last line is `msg`."
    for name in ("training.csv", "val.csv"):
        head, *rows = (out/name).read_text().splitlines()
        (out/name).write_text("\n".join([head, *(r for r in rows if int(r.split(",")[0]) <= step), ""]))
    lines = [json.loads(x) for x in (out/"heartbeat_rank0.jsonl").read_text().splitlines()]
    lines = [r for r in lines if r["msg"] != "done" and r["step"] <= step]
    if msg: lines.append(dict(lines[-1], msg=msg, step=step, type="nonfinite", message=REASON))
    shift = time.time() - lines[-1]["ts"]
    (out/"heartbeat_rank0.jsonl").write_text("".join(json.dumps(r | dict(ts=r["ts"] + shift)) + "\n" for r in lines))


@pytest.fixture
def folder(finished, tmp_path):
    "Make a folder of a state; what the state holds (a lock) is let go at the end of the test."
    with ExitStack() as held:
        def make(state: str, checkpoints: str, model: bool) -> Path:
            out = tmp_path/"run"
            shutil.copytree(finished, out, symlinks=True)
            if state != "done":
                cut(out, LAST, dict(halted="halt", failed="anomaly").get(state))
                shutil.rmtree(out/"checkpoints"/"step_00000060")
            metrics = json.loads((out/"metrics.json").read_text())
            if state in ("alive", "killed"): (out/"metrics.json").unlink()
            if state == "halted": metrics |= dict(status="halted", reason="SIGTERM", step=LAST)
            if state == "failed": metrics |= dict(status="failed", reason=REASON, step=LAST)
            if state in ("halted", "failed"): (out/"metrics.json").write_text(json.dumps(metrics))
            if checkpoints == "none": shutil.rmtree(out/"checkpoints")
            if checkpoints == "broken":
                for p in (out/"checkpoints").glob("step_*"): (p/"model.safetensors").write_bytes(b"half")
            if not model: (out/"model.pt").unlink()
            if state == "alive": held.enter_context(RunLock(out))
            return out
        yield make


def rows(found) -> dict: return {r.name: r for r in found.verdict.rows}


def expected(state: str, checkpoints: str, model: bool) -> SimpleNamespace:
    "The table, written out: what the row `end` says and advises, levels of the rows on files, the exit code at least."
    newest = STEPS if state == "done" else LAST
    says = dict(
        alive=f"running, step {LAST} of {STEPS} (in use by process {os.getpid()})",
        done=f"done at step {STEPS} of {STEPS}", halted=f"halted at step {LAST} of {STEPS}: SIGTERM",
        failed=f"failed at step {LAST} of {STEPS}: {REASON}", killed=f"killed at step {LAST} of {STEPS}",
    )[state]
    end = dict(alive="green", done="green", halted="yellow", failed="red", killed="red")[state]
    on = (
        f"go on with --resume auto, from step {newest}"
        if checkpoints == "whole"
        else "start anew with --fresh: there is no whole checkpoint to go on from"
    )
    advice = "" if state in ("alive", "done") else f"mend that, then {on}" if state == "failed" else on
    if state == "alive": saved = dict(none="green", whole="green", broken="yellow")[checkpoints]
    else: saved = dict(none="yellow" if state == "done" and model else "red", whole="green", broken="red")[checkpoints]
    exported = "green" if model or state == "alive" else "red" if state == "done" else "yellow"
    return SimpleNamespace(
        says=says, end=end, advice=advice, saved=saved, exported=exported, red="red" in (end, saved, exported)
    )


@pytest.mark.parametrize("model", [True, False], ids=["model", "no_model"])
@pytest.mark.parametrize("checkpoints", ["none", "whole", "broken"])
@pytest.mark.parametrize("state", ["alive", "done", "halted", "failed", "killed"])
def test_every_state(folder, state, checkpoints, model):
    out = folder(state, checkpoints, model)
    found = report(out)
    want = expected(state, checkpoints, model)
    got = rows(found)
    assert got["end"].value.startswith(want.says) and (got["end"].level, got["end"].remedy) == (
        want.end,
        want.advice,
    ), got["end"]
    assert (got["checkpoints"].level, got["model.pt"].level) == (want.saved, want.exported), (
        got["checkpoints"],
        got["model.pt"],
    )
    whole = 0 if checkpoints != "whole" else 4 if state == "done" else 3
    if state == "alive" and checkpoints == "none":
        assert got["checkpoints"].value == f"none yet: the first is due at step {STEPS}"
    else:
        assert got["checkpoints"].value.startswith(f"{whole} whole") and (
            ", the newest of step" in got["checkpoints"].value
        ) == bool(whole)
    assert (
        ("broken" in got["checkpoints"].value)
        == (checkpoints == "broken")
        == ("model.safetensors" in got["checkpoints"].remedy)
    )
    text = f"{found.begun}\n{found.verdict}"
    assert "Error" not in text and "Traceback" not in text      # no exception's name in place of a sentence
    if not whole: assert "resume" not in text
    if state == "alive": assert "STOP" not in text and found.exit_code in (0, 3)
    assert found.exit_code == 1 if want.red or state in ("failed", "killed") else found.exit_code in (0, 3), text
    if not model:
        assert got["model.pt"].value.startswith(
            dict(alive="not yet", done="missing").get(state, "none: a run writes it when it ends")
        )
    # judged in every state
    assert got["training loss"].level == "green" and "skipped steps" in got and "speed" in got


def test_a_model_of_an_earlier_session_says_so(folder):
    out = folder("alive", "whole", True)
    assert rows(report(out))["model.pt"].value == f"loads: of step {STEPS}, where an earlier session ended"


def test_a_model_that_cannot_be_loaded_is_a_sentence(folder):
    out = folder("done", "whole", True)
    (out/"model.pt").write_bytes(b"half")
    row = rows(report(out))["model.pt"]
    assert row.level == "red" and row.value.startswith("can't be loaded: ") and "UsageError" not in row.value, row


def test_halted_by_a_file_is_told_how_to_go_on(folder):
    out = folder("halted", "whole", True)
    (out/".HALT").write_text("halt: enough")
    assert rows(report(out))["end"].remedy == f"rm {out/'.HALT'}, then go on with --resume auto, from step {LAST}"


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"status": 3}', '{"status": "don'])
def test_metrics_that_say_nothing_count_as_none(folder, text):
    out = folder("killed", "whole", False)
    (out/"metrics.json").write_text(text)
    assert rows(report(out))["end"].value.startswith("killed at step")


def test_metrics_of_another_version(folder):
    "Only what is there is said."
    out = folder("halted", "whole", True)
    (out/"metrics.json").write_text('{"status": "halted", "step": 45}')
    got = rows(report(out))
    assert got["end"].value == f"halted at step {LAST} of {STEPS}" and got["validation loss"].level in (
        "green",
        "yellow",
    )


@pytest.mark.parametrize("more", [(), ("env.json", "run.pid")])
def test_a_folder_in_which_nothing_has_begun(finished, tmp_path, more):
    for name in ("config.yaml", *more): shutil.copy(finished/name, tmp_path/name)
    found = report(tmp_path)
    assert (
        rows(found)["end"].value == "nothing has been trained here"
        and found.exit_code == 1
        and "resume" not in str(found.verdict)
    )


# --- who is alive

def of_host(out: Path, host: str, age: float) -> None:
    "The heartbeat as a run on this machine or another left it some seconds ago."
    lines = [json.loads(x) for x in (out/"heartbeat_rank0.jsonl").read_text().splitlines()]
    shift = time.time() - age - lines[-1]["ts"]
    (out / "heartbeat_rank0.jsonl").write_text(
        "".join(
            json.dumps(r | dict(ts=r["ts"] + shift) | (dict(host=host) if r["msg"] == "boot" else {})) + "\n"
            for r in lines
        )
    )


def test_a_run_on_another_machine_lives_by_its_heartbeat(folder):
    "Where locks are not seen between machines."
    out = folder("killed", "whole", False)
    cfg = load_config(out/"config.yaml", environ={})
    of_host(out, "another", 20)
    state = run_state(out, cfg)
    assert state.kind == "running" and state.who.startswith("in use by process ") and state.who.endswith(" on another")
    of_host(out, "another", 400)
    assert run_state(out, cfg).kind == "killed"
    of_host(out, os.uname().nodename, 20)
    assert run_state(out, cfg).kind == "killed"  # here the lock says it


def test_alive_and_silent_is_a_stop(folder):
    "The process holds its folder and nothing has come for longer than a stall: it hangs."
    out = folder("alive", "whole", False)
    of_host(out, os.uname().nodename, 400)
    found = report(out)
    assert rows(found)["end"].level == "green" and rows(found)["health"].level == "red" and found.exit_code == 1


def test_between_two_sessions(folder):
    "The lock is held, and metrics.json is still that of the session before: data are being read."
    out = folder("halted", "whole", True)
    with RunLock(out):
        row = rows(report(out))["end"]
    assert (
        row.value
        == f"starting (in use by process {os.getpid()}): halted at step {LAST} before; it reads its data, or is "
           f"about to end"
        and row.level == "green"
        and not row.remedy
    )


def test_a_checkpoint_that_goes_while_it_is_read_is_no_broken_one(folder, monkeypatch):
    "A run that is alive removes old ones."
    from nsa_nb.monitoring import run_state as module
    out = folder("alive", "whole", False)
    verify = module.verify_checkpoint
    def removed(p):
        if p.name == "step_00000015": shutil.rmtree(p)
        return verify(p)
    monkeypatch.setattr(module, "verify_checkpoint", removed)
    assert rows(report(out))["checkpoints"].value == "2 whole, the newest of step 45"


# --- processes

@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    z = Zygote(tmp_path_factory.mktemp("cache"))
    yield z
    z.close()


def test_before_during_and_after_a_life(zygote, tmp_path):
    "One run from nothing to kill −9: what each command says while it is so."
    nsa = lambda *argv: zygote.run(*argv, cwd=tmp_path)
    out = tmp_path/"run"
    out.mkdir()
    code, said = nsa("report", "--dir", "run")
    assert code == 2 and "holds no run (no config.yaml)" in said
    code, said = nsa("report", "--dir", "none")
    assert code == 2 and "no run at" in said
    slow = (
        "import time\n"
        "from nsa_nb import train\n"
        "opened = train.open_run_data\n"
        "def f(*a, **k):\n"
        "    open('opening', 'w').close()\n"
        "    while not __import__('os').path.exists('go'): time.sleep(.01)\n"
        "    return opened(*a, **k)\n"
        "train.open_run_data = f\n"
    )
    run = zygote.start(
        "train", "--config", "train_showcase", *TINY, "--steps", 100_000, "--save-every", 0, "--eval-every", 0,
        "--out-dir", "run", cwd=tmp_path, before=slow,
    )
    run.until((tmp_path/"opening").exists)
    code, said = nsa("report", "--dir", "run")
    assert code == 0 and f"starting (in use by process {run.pid})" in said, said
    (tmp_path/"go").touch()
    run.until(lambda: (out/"training.csv").exists() and len((out/"training.csv").read_text().splitlines()) > 30)
    code, said = nsa("report", "--dir", "run")
    assert (
        code in (0, 3)
        and "STOP" not in said
        and " of 100,000 (in use by process " in said
        and "none yet: the first is due at step 100,000" in said
        and "not yet: a run writes it" in said
    ), said
    assert "resume" not in said and f"in use by process {run.pid}" in said
    code, preflight = nsa("preflight", "--config", "train_showcase", *TINY, "--out-dir", "run")
    assert f"in use by process {run.pid}" in preflight, preflight
    assert run.poll() is None
    run.kill()
    run.wait()
    code, said = nsa("report", "--dir", "run")
    assert (
        code == 1
        and "killed at step" in said
        and "start anew with --fresh: there is no whole checkpoint" in said
        and "--resume" not in said
    ), said
    (out / "config.yaml").unlink()
    assert nsa("report", "--dir", "run")[0] == 2
