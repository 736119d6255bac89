"""A disk that fills up during a save: the error names the cause and the file, nothing half stays, the checkpoint
before is used."""

import errno
import multiprocessing as mp
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from nsa_nb.artifacts import CHECKPOINTS, LATEST
from nsa_nb.monitoring.checkpoint_files import verify_checkpoint
from nsa_nb.training.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from nsa_nb.errors import RunError
from nsa_nb.training.optim import build_optimizer
from nsa_nb.weights import export_model, read_weights

FORK = mp.get_context("forkserver")
FORK.set_forkserver_preload(["torch._dynamo", "nsa_nb.training.checkpoint", "nsa_nb.training.optim"])


def make():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(128, 128)
    return model, build_optimizer(model, lr=0.01)


def train(model, opt, steps):
    for _ in range(steps):
        opt.zero_grad()
        model(torch.ones(2, 128)).square().sum().backward()
        opt.step()


def refused(out: Path, model, opt, step, code) -> str:
    "Save, expect a RunError with that cause; check that nothing changed; returns the message."
    before = {p.name for p in (out/CHECKPOINTS).iterdir()}
    try: save_checkpoint(out, step, model=model, optimizer=opt, state={})
    except RunError as e: message = str(e)
    else: return ""
    assert errno.errorcode[code] in message and f"step_{step:08d}" in message, message
    assert {p.name for p in (out/CHECKPOINTS).iterdir()} == before, "no temporary folder stays"
    assert os.readlink(out/CHECKPOINTS/LATEST) == "step_00000002"
    assert find_checkpoint(out).name == "step_00000002"
    return message


def on_a_small_disk(disk: str) -> None:
    "Runs in a process of its own, on a file system of 1 MB."
    disk = Path(disk)
    out = disk / "run"
    model, opt = make()
    train(model, opt, 2)
    save_checkpoint(out, 2, model=model, optimizer=opt, state={"tokens": 2})
    train(model, opt, 1)
    ballast = disk/"ballast"
    where = []
    for free_kb in range(0, 300, 4):
        stat = os.statvfs(disk)
        room = stat.f_bavail * stat.f_frsize + (ballast.stat().st_size if ballast.exists() else 0)
        with open(ballast, "wb") as f: f.write(bytes(max(0, room - free_kb * 1024)))
        message = refused(out, model, opt, 3, errno.ENOSPC)
        if not message: break                          # enough room: saved
        where.append(message.split("while writing ")[1].split(";")[0])
    else: raise AssertionError("never had enough room")
    print(sorted(set(where)), "needed", free_kb, "KB")
    assert {"model.safetensors", "optimizer.safetensors"} <= set(where), where
    assert find_checkpoint(out).name == "step_00000003"
    # model.pt too: the old one survives
    ballast.unlink()
    path = export_model(out / "model.pt", model, {}, step=3)
    whole = path.read_bytes()
    stat = os.statvfs(disk)
    ballast.write_bytes(bytes(stat.f_bavail * stat.f_frsize - 8192))
    try: export_model(path, model, {}, step=4)
    except RunError as e: assert "ENOSPC" in str(e) and "model.pt" in str(e)
    else: raise AssertionError("exported onto a full disk")
    assert path.read_bytes() == whole and read_weights(path)[1]["step"] == 3
    assert [p.name for p in out.iterdir() if p.name.startswith(".model")] == []
    # a heartbeat on a full disk must not end the run
    from nsa_nb.monitoring.heartbeat import Heartbeat, read_new
    with open(ballast, "ab") as f:
        try: f.write(bytes(1 << 20))
        except OSError: pass
    said = []
    hb = Heartbeat(out/"heartbeat_rank0.jsonl", 0, warn=said.append)
    for s in range(100): hb.progress(s, loss=1.0)
    assert hb.lost > 0 and len(said) == 1 and "ENOSPC" in said[0], (hb.lost, said)
    ballast.unlink()
    hb.progress(100, loss=1.0)
    records, _ = read_new(out/"heartbeat_rank0.jsonl", 0)
    assert records[-1]["step"] == 100 and len(records) == 101 - hb.lost
    print("done")


def test_full_disk_on_a_1_mb_tmpfs(tmp_path):
    "In a mount namespace of its own, so that no mount outlives the test."
    disk = tmp_path / "disk"
    disk.mkdir()
    inside = (
        f"mount -t tmpfs -o size=1m none {disk} && exec {sys.executable} -c 'import test_checkpoint_disk as t; "
        f"t.on_a_small_disk(\"{disk}\")'"
    )
    can = (
        subprocess.run(
            ["unshare", "-m", "sh", "-c", f"mount -t tmpfs -o size=1m none {disk}"], capture_output=True
        ).returncode
        == 0
        if Path("/usr/bin/unshare").exists() or Path("/bin/unshare").exists()
        else False
    )
    if not can: pytest.skip("a tmpfs cannot be mounted here; the file-size limit below covers the error path")
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    r = subprocess.run(["unshare", "-m", "sh", "-c", inside], capture_output=True, text=True, timeout=120,
                       env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    assert r.returncode == 0 and r.stdout.strip().endswith("done"), r.stdout + r.stderr


def limited(out: Path, limit: int, queue) -> None:
    "Runs in a child: no file may grow over `limit` bytes."
    model, opt = make()
    train(model, opt, 3)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    queue.put(refused(out, model, opt, 3, errno.EFBIG))


@pytest.mark.parametrize("limit,name", [(10_000, "model.safetensors"), (100_000, "optimizer.safetensors")])
def test_a_write_that_fails(tmp_path, limit, name):
    "The same through a limit on file size, which needs no rights."
    model, opt = make()
    train(model, opt, 2)
    save_checkpoint(tmp_path, 2, model=model, optimizer=opt, state={})
    queue = FORK.Queue()
    p = FORK.Process(target=limited, args=(tmp_path, limit, queue))
    p.start()
    message = queue.get(timeout=60)
    p.join(60)
    assert p.exitcode == 0 and f"while writing {name}" in message, message
    train(model, opt, 1)
    save_checkpoint(tmp_path, 3, model=model, optimizer=opt, state={})  # room again
    assert find_checkpoint(tmp_path).name == "step_00000003"


def test_an_exception_while_saving_leaves_nothing(tmp_path):
    model, opt = make()
    save_checkpoint(tmp_path, 2, model=model, optimizer=opt, state={})
    for error in (KeyboardInterrupt, ValueError):
        def boom(point, error=error):
            if point == "rng_written": raise error()
        with pytest.raises(error): save_checkpoint(tmp_path, 3, model=model, optimizer=opt, state={}, on_point=boom)
        assert sorted(p.name for p in (tmp_path/CHECKPOINTS).iterdir()) == [".lock", "latest", "step_00000002"]


def test_out_dir_that_cannot_be_written(tmp_path):
    (tmp_path/"file").write_text("")
    model, opt = make()
    with pytest.raises(RunError, match="ENOTDIR|EEXIST"):
        save_checkpoint(tmp_path / "file", 1, model=model, optimizer=opt, state={})


def test_large_files_are_verified_in_chunks(tmp_path):
    "Memory while verifying does not grow with the file."
    model = nn.Linear(4096, 4096, bias=False)          # 64 MiB
    path = save_checkpoint(tmp_path, 1, model=model, state={})
    import tracemalloc

    tracemalloc.start()
    verify_checkpoint(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20, peak
    assert load_checkpoint(path, model)["step"] == 1
