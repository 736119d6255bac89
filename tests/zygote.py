"""Processes at a hundredth of their price: one process imports everything, each run is a fork of it with its own
session, folder and environment.

`Zygote().start("train", "--steps", "3")` is what a shell does with `nsa train --steps 3`, without the seconds
of imports."""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def search_path(*first) -> str:
    """PYTHONPATH of a process: these folders or this repository, before what the environment has there, where
    packages may lie."""
    return os.pathsep.join([*map(str, first or (ROOT,)), *filter(None, [os.environ.get("PYTHONPATH")])])


def in_the_interpreter(code: str) -> None:
    "Run Python in a process whose Triton kernels run on the CPU; it must end well."
    here = Path(__file__).parent
    env = os.environ | dict(TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONPATH=search_path(here.parent, here))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]


def _child(argv: list[str], env: dict, cwd: str, log: str, before: str) -> None:
    "Becomes the run; never returns."
    # as in a terminal, also when the tests run under nohup
    os.setsid()
    os.chdir(cwd)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for k in [k for k in os.environ if k.startswith("NSA_")]: del os.environ[k]
    os.environ.update(env)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = 1
    try:
        from nsa_nb.cli import run
        from nsa_nb.options import guarded
        exec(before, {"__name__": "before"})
        code = guarded(run, argv)
    except SystemExit as e: code = e.code or 0
    except BaseException: traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve() -> None:
    "Fork a run for each line of standard input; answer its process number, or how one ended."
    # here, once for all; an optimizer imports _dynamo
    import matplotlib.figure
    import safetensors.torch
    import tensorboardX
    import torch._dynamo
    import nsa_nb.audit
    import nsa_nb.bench.command
    import nsa_nb.bootstrap
    import nsa_nb.cli
    import nsa_nb.config_command
    import nsa_nb.data_smoke
    import nsa_nb.generate
    import nsa_nb.preflight
    import nsa_nb.report_command
    import nsa_nb.signals
    import nsa_nb.train
    sys.stdin.reconfigure(line_buffering=True)
    print("ready", flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        if "wait" in ask:
            pid, status = os.waitpid(ask["wait"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
            continue
        pid = os.fork()
        if not pid: _child(**ask)
        print(pid, flush=True)


class Run:
    "One started run."
    def __init__(self, zygote, pid: int, log: Path): self.zygote, self.pid, self.log, self.code = zygote, pid, log, None

    def poll(self) -> int | None:
        if self.code is None: self.code = self.zygote.ask(wait=self.pid)
        return self.code

    def wait(self, timeout: float = 60.0) -> int:
        "Exit code; −N after signal N."
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"still alive after {timeout} s:\n{self.text()[-3000:]}")
            time.sleep(0.005)
        return self.code

    def kill(self, number: int = signal.SIGKILL):
        if self.poll() is None: os.kill(self.pid, number)

    def text(self) -> str: return self.log.read_text(errors="replace")

    def until(self, seen, timeout: float = 60.0):
        "What `seen()` gives as soon as it gives something."
        end = time.monotonic() + timeout
        while True:
            got = seen()
            if got: return got
            assert self.poll() is None, f"ended with {self.code} before it was seen:\n{self.text()[-3000:]}"
            assert time.monotonic() < end, f"not seen in {timeout} s:\n{self.text()[-3000:]}"
            time.sleep(0.002)


class Zygote:
    "Starts runs."
    def __init__(self, cache: Path):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache), "PYTHONPATH": search_path()}
        self.proc = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        assert self.proc.stdout.readline() == "ready\n"
        self.runs: list[Run] = []

    def ask(self, **what):
        self.proc.stdin.write(json.dumps(what) + "\n")
        self.proc.stdin.flush()
        return json.loads(self.proc.stdout.readline())

    def start(self, *argv, cwd: Path, env: dict | None = None, before: str = "") -> Run:
        "Begin `nsa argv…` in a folder; `before` is Python to execute first, to break something."
        log = Path(cwd)/f"log-{len(self.runs)}.txt"
        log.touch()
        self.runs.append(
            Run(
                self, self.ask(argv=[str(a) for a in argv], env=env or {}, cwd=str(cwd), log=str(log), before=before),
                log,
            )
        )
        return self.runs[-1]

    def run(self, *argv, timeout: float = 60.0, **kw) -> tuple[int, str]:
        "Exit code and everything it printed."
        r = self.start(*argv, **kw)
        return r.wait(timeout), r.text()

    def close(self):
        for r in self.runs: r.kill()
        for r in self.runs: r.wait()
        self.proc.stdin.close()
        self.proc.wait(60)


if __name__ == "__main__": serve()
