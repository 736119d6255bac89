"""A signal is answered at once, whatever the main thread is in; and `nsa signal` comes back with what was asked for."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_train import events, metrics, nsa, out, progress, steps, text, zygote  # noqa: F401
from test_world import ENDLESS, lab  # noqa: F401
from zygote import search_path

from nsa_nb.monitoring.checkpoint_files import verify_checkpoint
from nsa_nb.monitoring.heartbeat import PHASES

# Python to run first: step 4 sits in a C call that no signal ends (a mutex that is locked already) until a file
# `release` is there
STUCK = """
import ctypes, os, pathlib, threading, time
from nsa_nb.training import trainer
libc, mutex = ctypes.CDLL(None), (ctypes.c_char * 64)()
step = trainer.Trainer.train_step
def release():
    while not os.path.exists("release"): time.sleep(0.01)
    libc.pthread_mutex_unlock(mutex)
def stuck(tr):
    if tr.step == 3 and WHO in (None, tr.rank):
        libc.pthread_mutex_lock(mutex)
        threading.Thread(target=release, daemon=True).start()
        pathlib.Path("inside").touch()
        libc.pthread_mutex_lock(mutex)
    step(tr)
trainer.Trainer.train_step = stuck
"""

def stuck(rank=None) -> str: return STUCK.replace("WHO", repr(rank))


@pytest.fixture
def run(nsa, tmp_path):
    "A run whose fourth step takes as long as one wants: run.go() ends it."
    r = nsa.start("train", *nsa.endless, before=stuck())
    r.go = (tmp_path/"release").touch
    r.until((tmp_path/"inside").exists)
    return r


def logged(out: Path, words: str):
    "The line of train.log with these words, once it is there."
    return lambda: next((line for line in (out/"train.log").read_text().splitlines() if words in line), None)


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP"])
def test_a_stop_in_a_long_step_is_answered_in_it(run, out, name):
    run.kill(signal.Signals[f"SIG{name}"])
    line = run.until(logged(out, f"{name} received"))
    assert (
        line == f"{name} received at step 3: finishing step 4, then saving and ending"
        and line in run.text().splitlines()
    )
    run.kill(signal.SIGTERM)
    again = run.until(logged(out, "as asked before"))
    assert (
        again.startswith("TERM received at step 3: still finishing step 4")
        and f"kill -KILL {run.pid}, which leaves no checkpoint" in again
    )
    assert run.poll() is None
    run.go()
    assert (
        run.wait() == 0
        and metrics(out)["status"] == "halted"
        and metrics(out)["reason"] == f"SIG{name}"
        and steps(out) == [4]
    ), run.text()
    end = run.text().splitlines()[-1]
    assert end.startswith(f"halted at step 4 (SIG{name}): ") and (out/"train.log").read_text().splitlines()[-1] == end


@pytest.mark.parametrize("name,status", [("TERM", "halted"), ("USR2", "done")])
def test_a_signal_in_an_evaluation_is_obeyed_after_it(nsa, out, name, status):
    "As its answer says: no further step is trained before the run ends, or saves."
    asks = f"""
import os, signal
from nsa_nb.training import trainer
evaluate = trainer.Trainer.evaluate
def asked(tr):
    if tr.step == 2: os.kill(os.getpid(), signal.SIG{name})
    evaluate(tr)
trainer.Trainer.evaluate = asked
"""
    code, said = nsa("train", *nsa.small, "--steps", 4, "--eval-every", 2, "--save-every", 0, before=asks)
    assert code == 0 and f"{name} received at step 2: " in said and metrics(out)["status"] == status, said
    assert steps(out)[0] == 2, said


def test_a_dump_in_a_long_step_names_its_file_and_step(run, nsa, out):
    code, said = nsa("signal", "--dir", "run", "dump")
    dump, = out.glob("stackdump_*.txt")
    assert code == 0 and said.splitlines()[-1] == f"stacks: {dump.resolve()}" and "stuck" in dump.read_text(), said
    assert (
        run.until(logged(out, "USR1 received"))
        == f"USR1 received at step 3: stacks of every thread are in {dump.resolve()}"
    )
    event, = run.until(lambda: events(out, "stackdump"))
    assert (event["step"], event["path"]) == (3, dump.name) and event["phase"] in PHASES
    run.go()
    run.kill(signal.SIGTERM)
    assert run.wait() == 0


def test_a_save_in_a_long_step(run, nsa, out):
    "Answered at once; `nsa signal save` says that it waited in vain, then gets its checkpoint."
    code, said = nsa("signal", "--dir", "run", "save", "--wait", 0.5)
    assert (
        code == 1
        and f"no answer within 0.5 s; process {run.pid} is alive, its last line is of step 3" in said
        and "--wait 600" in said
        and "Traceback" not in said
    ), said
    assert run.until(logged(out, "USR2 received")) == "USR2 received at step 3: finishing step 4, then saving"
    run.go()
    run.until(lambda: events(out, "checkpoint"))
    assert events(out, "checkpoint")[0]["step"] == 4 and events(out, "checkpoint")[0]["asked"] is True
    run.kill(signal.SIGTERM)
    assert run.wait() == 0


def test_nsa_signal_waits_for_what_it_asked(nsa, out):
    run = nsa.start("train", *nsa.endless, "--save-every", 3)
    run.until(progress(out))
    for more in ([], ["--wait"], ["--wait", 30], ["--wait=30"]):
        code, said = nsa("signal", "--dir", "run", *more, "save")
        assert code == 0 and f"save: sent to process {run.pid}; waiting " in said, said
        path = Path(said.splitlines()[-1].removeprefix("saved: "))
        assert path.is_absolute() and verify_checkpoint(path)["step"] == int(path.name[5:]) in [
            e["step"] for e in events(out, "checkpoint") if e.get("asked")
        ]
    n = len(events(out, "checkpoint"))
    assert nsa("signal", "--dir", "run", "save", "--no-wait") == (0, f"save: sent to process {run.pid}\n")
    run.until(lambda: len(events(out, "checkpoint")) > n)
    for bad in (["--wait", "-1"], ["--wait=soon"], ["--wait=nan"]):
        code, said = nsa("signal", "--dir", "run", "save", *bad)
        assert code == 2 and "Traceback" not in said, said
    code, said = nsa("signal", "--dir", "run", "stop")
    m = metrics(out)  # it is over when the command comes back
    assert code == 0 and said.splitlines()[-1].startswith(f"halted at step {m['step']}; checkpoint: {out.resolve()}"), (
        said
    )
    assert run.wait() == 0 and m["status"] == "halted"
    assert nsa("signal", "--dir", "run", "stop")[0] == 2


def test_a_stop_that_fails_is_told(nsa, out):
    "The run ends while it is asked: with what, and exit code 1."
    before = (
        stuck()
        + "\nfrom nsa_nb.errors import RunError\ndef fails(tr):\n    stuck(tr)\n    if tr.step == 4: raise "
          "RunError('the data are gone')\ntrainer.Trainer.train_step = fails\n"
    )
    run = nsa.start("train", *nsa.endless, before=before)
    run.until((out.parent/"inside").exists)
    asks = [nsa.start("signal", "--dir", "run", what) for what in ("stop", "save")]
    for a in asks: a.until(lambda: "waiting up to 60 s" in a.text())
    (out.parent/"release").touch()
    assert [a.wait() for a in asks] == [1, 1] and run.wait() == 1
    assert (
        "failed: it failed at step 4: the data are gone" in asks[0].text()
        and "has ended and left no answer" in asks[1].text()
    )


# --- before the first step

ENTRIES = {
    "module": ["-m", "nsa_nb.train"],
    "nsa": ["-c", "import sys; sys.argv[0] = 'bin/nsa'; from nsa_nb.cli import main; main()", "train"],
}


def listens(pid: int, number: int) -> bool:
    "Whether a process has a handler for a signal."
    mask = next(
        line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")
    )
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", ["TERM", "INT"])
def test_a_stop_while_python_imports(tmp_path, entry, name):
    "From the moment on in which the package is found: no exit code 143 and no empty log."
    number = signal.Signals[f"SIG{name}"]
    # a shell's background jobs ignore it, and so would this
    def hear_int(): signal.signal(signal.SIGINT, signal.SIG_DFL)

    p = subprocess.Popen(
        [sys.executable, *ENTRIES[entry], "--steps", "3", "--out-dir", str(tmp_path / "run")], cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=hear_int,
        env={**os.environ, "PYTHONPATH": search_path()},
    )
    until = time.monotonic() + 60
    while not listens(p.pid, signal.SIGUSR2):      # Python itself listens to INT
        assert p.poll() is None and time.monotonic() < until
        time.sleep(0.002)
    imports_torch = "libtorch" in Path(f"/proc/{p.pid}/maps").read_text()
    p.send_signal(number)
    said = p.communicate(timeout=60)[0]
    assert (
        p.returncode == 0
        and said == f"{name} received while starting: ending; stopped before the first step: nothing was trained\n"
    ), said
    assert not imports_torch and not (tmp_path/"run").exists()


def test_what_is_heard_while_it_imports_is_kept(tmp_path):
    "USR1 and USR2 do not end the process; the checkpoint comes after the first step."
    p = subprocess.Popen(
        [
            sys.executable, "-m", "nsa_nb.train", "--config", "train_showcase", "--steps", "2", "--dim", "32",
            "--n-layers", "1", "--sample-tokens", "0", "--eval-batches", "1", "--dataset", "synthetic", "--save-every",
            "0", "--out-dir", "run",
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": search_path()},
    )
    until = time.monotonic() + 60
    while not listens(p.pid, signal.SIGUSR2):
        assert p.poll() is None and time.monotonic() < until
        time.sleep(0.002)
    p.send_signal(signal.SIGUSR1)
    p.send_signal(signal.SIGUSR2)
    said, err = p.communicate(timeout=120)
    assert (
        p.returncode == 0
        and "USR2 received while starting: saving after the first step\n" in said
        and "most recent call first" in err
    ), (said, err)
    assert steps(tmp_path/"run") == [1, 2]


def test_an_import_of_the_package_leaves_signals_alone(nsa):
    "The process that the runs here are forks of has imported all of it."
    shown = (
        "import signal, nsa_nb.train, nsa_nb.cli\n"
        "print([signal.getsignal(s) == signal.SIG_DFL for s in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)], "
        "flush=True)"
    )
    assert nsa("config", "list", before=shown)[1].startswith("[True, True, True]\n")


# --- several processes

@pytest.mark.parametrize("rank", [0, 1])
def test_each_process_answers_for_itself(lab, rank):
    job = lab.start(2, *ENDLESS, before=stuck())
    job.until((lab.out.parent/"inside").exists)
    pid = job.runs[rank].pid
    who = "rank 1: " if rank else ""
    os.kill(pid, signal.SIGUSR1)
    os.kill(pid, signal.SIGTERM)
    at = "received at step 3: "
    for words in (
        f"{who}USR1 {at}stacks of every thread are in ",
        f"{who}TERM {at}finishing step 4, then saving and ending",
    ):
        job.until(lambda: any(line.startswith(words) for line in (lab.out/"train.log").read_text().splitlines()))
        assert any(line.startswith(words) for line in job.runs[rank].text().splitlines())
    (lab.out.parent/"release").touch()
    assert job.wait() == [0, 0] and metrics(lab.out)["reason"] == "SIGTERM" and steps(lab.out) == [4], job.text()
    dumps = [
        e
        for e in map(json.loads, (lab.out / f"heartbeat_rank{rank}.jsonl").read_text().splitlines())
        if e["msg"] == "stackdump"
    ]
    assert [e["step"] for e in dumps] == [3]
