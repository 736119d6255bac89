"""kill -9 at every stage of a save, and at random moments: the last good checkpoint is found, loads, and training
goes on to the same bits."""

import multiprocessing as mp
import os
import random
import shutil
import signal
import time

import pytest
import torch
from torch import nn

from nsa_nb.artifacts import CHECKPOINTS, LATEST
from nsa_nb.monitoring.checkpoint_files import STATE, list_checkpoints, verify_checkpoint
from nsa_nb.training.checkpoint import POINTS, find_checkpoint, load_checkpoint, save_checkpoint, write_snapshot
from nsa_nb.training.optim import build_optimizer
from nsa_nb.training.snapshot import Background, HostBuffers, optimizer_state, take_snapshot

torch.set_num_threads(1)
# children start from a clean process that has imported the slow parts already
FORK = mp.get_context("forkserver")
# the optimizer imports _dynamo
FORK.set_forkserver_preload(["torch._dynamo", "nsa_nb.training.checkpoint", "nsa_nb.training.optim"])


def make(seed=0, width=16):
    torch.manual_seed(seed)
    random.seed(seed)
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Dropout(0.3), nn.Linear(width, 3))
    return model, build_optimizer(model, lr=0.01, weight_decay=0.1)


def train(model, opt, steps):
    for _ in range(steps):
        loss = model(torch.randn(8, 6)).square().mean() * random.uniform(0.5, 1.5)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()


def bits(model, opt):
    return [*model.state_dict().values(), *(v for _, v in sorted(optimizer_state(opt, model)[0].items())),
            torch.get_rng_state(), torch.tensor(random.getstate()[1])]


def same(a, b): return len(a) == len(b) and all(map(torch.equal, a, b))


def straight(steps):
    model, opt = make()
    train(model, opt, steps)
    return bits(model, opt)


def resumed(out, fresh_if_none=False):
    path = find_checkpoint(out, warn=lambda m: None)
    model, opt = make() if path is None else make(seed=77)
    step = 0 if path is None else load_checkpoint(path, model, opt)["step"]
    return model, opt, step


# ---- what the killed process does (top level, so that the child can import it)

def _die(at):
    return lambda point: os.kill(os.getpid(), signal.SIGKILL) if point == at else None


def child_save(out, upto, at):
    torch.set_num_threads(1)
    model, opt, step = resumed(out)
    train(model, opt, upto - step)
    save_checkpoint(
        out, upto, model=model, optimizer=opt, state={"tokens": upto}, on_point=_die(at), warn=lambda m: None
    )


def child_save_behind(out, upto, at):
    "The same in a thread, while training goes on."
    torch.set_num_threads(1)
    model, opt, step = resumed(out)
    train(model, opt, upto - step)
    snap = take_snapshot(upto, model=model, optimizer=opt, state={"tokens": upto}, buffers=HostBuffers())
    writer = Background()
    writer.start(lambda: write_snapshot(out, snap, on_point=_die(at), warn=lambda m: None))
    while writer.fetch() is None: train(model, opt, 1)


def child_save_forever_behind(out):
    torch.set_num_threads(1)
    model, opt, step = resumed(out)
    buffers = HostBuffers()
    writer = Background()
    (out/"ready").touch()
    while True:
        train(model, opt, 1)
        step += 1
        writer.fetch(wait=True)
        snap = take_snapshot(step, model=model, optimizer=opt, state={"tokens": step}, buffers=buffers)
        writer.start(lambda: write_snapshot(out, snap))


def child_save_other(out, step, at):
    torch.set_num_threads(1)
    model, opt = make(seed=5)
    rename = os.rename

    def killed_after_aside(a, b):
        rename(a, b)
        if at == "aside" and ".old-" in str(b): os.kill(os.getpid(), signal.SIGKILL)
    os.rename = killed_after_aside
    save_checkpoint(
        out, step, model=model, optimizer=opt, state={"tokens": step}, on_point=_die(at), warn=lambda m: None
    )


def child_save_forever(out):
    torch.set_num_threads(1)
    model, opt, step = resumed(out)
    (out/"ready").touch()
    while True:
        train(model, opt, 1)
        step += 1
        save_checkpoint(out, step, model=model, optimizer=opt, state={"tokens": step})


def killed(target, *args, after=None):
    p = FORK.Process(target=target, args=args)
    p.start()
    if after is not None:
        until = time.monotonic() + 60
        while not (args[0]/"ready").exists() and time.monotonic() < until: time.sleep(0.005)
        (args[0] / "ready").unlink()
        time.sleep(after)
        os.kill(p.pid, signal.SIGKILL)
    p.join(60)
    assert p.exitcode == -signal.SIGKILL, p.exitcode


# ---- tests

@pytest.mark.parametrize("save", [child_save, child_save_behind], ids=["in the loop", "in the writer's thread"])
@pytest.mark.parametrize("at", POINTS)
def test_kill_at_each_point_with_an_earlier_checkpoint(tmp_path, at, save):
    model, opt = make()
    train(model, opt, 4)
    save_checkpoint(tmp_path, 4, model=model, optimizer=opt, state={"tokens": 4})
    killed(save, tmp_path, 7, at)
    after = POINTS.index(at) >= POINTS.index("renamed")
    model, opt, step = resumed(tmp_path)
    assert step == (7 if after else 4)
    assert same(bits(model, opt), straight(step))
    root = tmp_path/CHECKPOINTS
    assert not list(root.glob(".tmp-*")), "leftovers are removed when a checkpoint is looked for"
    assert (root/LATEST).resolve().name == ("step_00000007" if at == "latest_moved" else "step_00000004")
    train(model, opt, 7 - step)      # go on, and save the step that was cut off
    save_checkpoint(tmp_path, 7, model=model, optimizer=opt, state={"tokens": 7})
    assert sorted(p.name for p in root.glob("[!.]*")) == ["latest", "step_00000004", "step_00000007"]
    for p in list_checkpoints(tmp_path): verify_checkpoint(p)
    model, opt, step = resumed(tmp_path)
    assert step == 7 and same(bits(model, opt), straight(7))
    assert os.readlink(root/LATEST) == "step_00000007"


@pytest.mark.parametrize("at", POINTS)
def test_kill_in_the_very_first_save(tmp_path, at):
    killed(child_save, tmp_path, 3, at)
    path = find_checkpoint(tmp_path)
    assert (path is not None) == (POINTS.index(at) >= POINTS.index("renamed"))
    child_save(tmp_path, 3, None)
    model, opt, step = resumed(tmp_path)
    assert step == 3 and same(bits(model, opt), straight(3))


def test_killed_twice_and_resumed_twice(tmp_path):
    killed(child_save, tmp_path, 3, "latest_moved")
    killed(child_save, tmp_path, 5, "optimizer_written")
    killed(child_save, tmp_path, 5, "renamed")
    killed(child_save, tmp_path, 9, "fsynced")
    child_save(tmp_path, 9, None)
    model, opt, step = resumed(tmp_path)
    assert step == 9 and same(bits(model, opt), straight(9))


@pytest.mark.parametrize("at", ["fsynced", "aside", "renamed"])
def test_kill_while_another_state_of_the_same_step_is_saved(tmp_path, at):
    "The older state of the step is never lost, whatever name it has."
    model, opt = make()
    train(model, opt, 4)
    save_checkpoint(tmp_path, 4, model=model, optimizer=opt, state={"tokens": 4})
    killed(child_save_other, tmp_path, 4, at)
    whole = list_checkpoints(tmp_path)
    for p in whole: verify_checkpoint(p)
    old = [p for p in whole if p.name == ("step_00000004" if at == "fsynced" else "step_00000004.old-1")]
    model, opt = make(seed=9)
    load_checkpoint(old[0], model, opt)
    assert same(bits(model, opt), straight(4))
    assert (
        find_checkpoint(tmp_path).name
        == {"fsynced": "step_00000004", "aside": "step_00000004.old-1", "renamed": "step_00000004"}[at]
    )


@pytest.mark.parametrize(
    "save", [child_save_forever, child_save_forever_behind], ids=["in the loop", "in the writer's thread"]
)
def test_kill_at_random_moments(tmp_path, save):
    "A process that does nothing but save is killed again and again; each time the newest whole checkpoint is right."
    rng = random.Random(0)
    last = 0
    for _ in range(12):
        killed(save, tmp_path, after=rng.random() * 0.2)
        said = []
        path = find_checkpoint(tmp_path, warn=said.append)
        assert not said, said                    # what has a name is whole
        if path is None: continue
        step = verify_checkpoint(path)["step"]
        assert step >= last, "a kill must not lose a finished checkpoint"
        last = step
        for p in list_checkpoints(tmp_path)[2:]: shutil.rmtree(p)
    assert last > 0
    model, opt, step = resumed(tmp_path)
    assert step == last and same(bits(model, opt), straight(last))


def test_a_search_does_not_disturb_a_save(tmp_path):
    "A dashboard that looks for checkpoints while one is being written must not remove the temporary folder."
    model, opt = make()
    seen = []

    def look(point):
        if point == "optimizer_written":
            seen.append(find_checkpoint(tmp_path))
            assert list((tmp_path / CHECKPOINTS).glob(".tmp-*"))

    path = save_checkpoint(tmp_path, 1, model=model, optimizer=opt, state={}, on_point=look)
    assert seen == [None]
    verify_checkpoint(path)


def test_corrupt_folder_of_the_same_step_is_moved_aside(tmp_path):
    child_save(tmp_path, 4, None)
    child_save(tmp_path, 7, None)
    bad = tmp_path/CHECKPOINTS/"step_00000007"
    data = bytearray((bad / STATE).read_bytes())
    data[20] ^= 1
    (bad / STATE).write_bytes(data)
    said = []
    assert find_checkpoint(tmp_path, warn=said.append).name == "step_00000004"
    assert STATE in said[0] and "step_00000004" in said[1]
    child_save(tmp_path, 7, None)
    assert (bad.with_name("step_00000007.corrupt-1")/STATE).read_bytes() == bytes(data)
    model, opt, step = resumed(tmp_path)
    assert step == 7 and same(bits(model, opt), straight(7))
