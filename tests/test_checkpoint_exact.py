"A saved and loaded run is the uninterrupted one, bit for bit, also in another process; any changed byte is refused."
import copy
import multiprocessing as mp
import random
import shutil

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from nsa_nb.monitoring.checkpoint_files import MANIFEST, list_checkpoints, verify_checkpoint
from nsa_nb.training.checkpoint import find_checkpoint, load_checkpoint, prune_checkpoints, save_checkpoint
from nsa_nb.errors import UsageError
from nsa_nb.model import TinyLM
from nsa_nb.training.optim import build_optimizer, lr_at, set_lr, step_if_finite
from nsa_nb.training.snapshot import optimizer_state
from nsa_nb.weights import CheckpointError

torch.set_num_threads(1)
FORK = mp.get_context("forkserver")
FORK.set_forkserver_preload(["torch._dynamo", "nsa_nb.model", "nsa_nb.training.checkpoint", "nsa_nb.training.optim"])
SCHEDULE = dict(lr=3e-3, warmup_steps=4, steps=12, schedule="cosine", min_lr_ratio=0.1)


def make(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    model = TinyLM(
        vocab=32, dim=32, n_layers=2, n_heads=4, n_kv_groups=2, d_k=8, d_v=8, l=8, d=4, l_sel=8, n_sel=3, w=8
    )
    return model, build_optimizer(model, lr=1.0, weight_decay=0.1)


def train(model, opt, start, stop, poison=()):
    "NSA steps whose data come from all global random generators; a poisoned step has an infinite gradient."
    log = []
    for s in range(start, stop):
        set_lr(opt, lr_at(s, **SCHEDULE))
        ids = (torch.randint(0, 32, (2, 24)) + int(np.random.randint(32)) + random.randrange(32)) % 32
        loss = torch.nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        if s in poison: next(model.parameters()).grad[0, 0] = float("inf")
        r = step_if_finite(opt, model, 1.0)
        log.append((s, loss.item(), r.norm, r.applied, opt.param_groups[0]["lr"]))
    return log


def bits(model, opt):
    return {
        **model.state_dict(), **optimizer_state(opt, model)[0], "t": torch.rand(3),
        "n": torch.tensor(np.random.rand(3)), "g": torch.tensor([random.gauss(0, 1), np.random.standard_normal()]),
    }


def same(a, b): return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def resume_in_child(out, stop, queue):
    torch.set_num_threads(1)
    model, opt = make(seed=123)
    start = load_checkpoint(find_checkpoint(out), model, opt)["step"]
    log = train(model, opt, start, stop, poison=(8,))
    save_checkpoint(out, stop, model=model, optimizer=opt, state={})
    queue.put(log)


@pytest.mark.parametrize("cut", [1, 3, 8, 9])        # inside warmup, before and after the refused step
def test_resumed_in_other_processes_twice(tmp_path, cut):
    model, opt = make(0)
    straight = train(model, opt, 0, 12, poison=(8,))
    expected = bits(model, opt)
    assert [x[3] for x in straight] == [s != 8 for s in range(12)]
    model, opt = make(0)
    log = train(model, opt, 0, cut, poison=(8,))
    save_checkpoint(tmp_path, cut, model=model, optimizer=opt, state={})
    queue = FORK.Queue()
    for stop in (10, 12):
        p = FORK.Process(target=resume_in_child, args=(tmp_path, stop, queue))
        p.start()
        log += queue.get(timeout=120)
        p.join(60)
    model, opt = make(7)
    assert load_checkpoint(find_checkpoint(tmp_path), model, opt)["step"] == 12
    assert log == straight                               # losses, norms and learning rates, to the last digit
    assert same(bits(model, opt), expected)


def test_saving_does_not_move_the_run(tmp_path):
    "With and without checkpoints, the same bits."
    model, opt = make(0)
    train(model, opt, 0, 6)
    expected = bits(model, opt)
    model, opt = make(0)
    for s in range(6):
        train(model, opt, s, s + 1)
        save_checkpoint(tmp_path, s + 1, model=model, optimizer=opt, state={})
        prune_checkpoints(tmp_path, 2)
    assert same(bits(model, opt), expected)
    assert [verify_checkpoint(p)["step"] for p in list_checkpoints(tmp_path)] == [6, 5]


def test_another_shape_is_refused_without_a_trace(tmp_path):
    model, opt = make(0)
    train(model, opt, 0, 2)
    path = save_checkpoint(tmp_path, 2, model=model, optimizer=opt, state={})
    other = TinyLM(
        vocab=32, dim=32, n_layers=1, n_heads=4, n_kv_groups=2, d_k=8, d_v=8, l=8, d=4, l_sel=8, n_sel=3, w=8
    )
    oopt = build_optimizer(other, lr=1.0)
    before = copy.deepcopy(other.state_dict())
    rng = torch.get_rng_state()
    with pytest.raises(UsageError, match="theirs is 2 blocks.* the configuration's 1 blocks.*unknown"):
        load_checkpoint(path, other, oopt)
    assert same(before, other.state_dict()) and torch.equal(rng, torch.get_rng_state()) and not oopt.state


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    model, opt = make(0)
    for s in (1, 2):
        train(model, opt, s - 1, s)
        save_checkpoint(out, s, model=model, optimizer=opt, state={"tokens": s * 48, "note": "é"})
    return out


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_refused_and_auto_falls_back(saved, data):
    newest = list_checkpoints(saved)[0]
    file = data.draw(st.sampled_from(sorted(newest.iterdir())))
    whole = file.read_bytes()
    kind = data.draw(st.sampled_from(["flip", "cut", "grow", "delete", "swap", "zero"]))
    at = data.draw(st.integers(0, len(whole) - 1))
    if kind == "flip": damaged = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1:]
    elif kind == "cut": damaged = whole[:at]
    elif kind == "grow": damaged = whole + b"\0"
    elif kind == "zero": damaged = bytes(len(whole))     # what some file systems leave after a power cut
    elif kind == "swap": damaged = (list_checkpoints(saved)[1]/file.name).read_bytes()
    try:
        if kind == "delete": file.unlink()
        else: file.write_bytes(damaged)
        said = []
        try: manifest = verify_checkpoint(newest)
        except CheckpointError as e: assert file.name in str(e)
        else:       # white space in the manifest, which changes nothing that it says
            assert file.name == MANIFEST and kind == "flip" and manifest["step"] == 2
            return
        assert find_checkpoint(saved, "auto", said.append).name == "step_00000001"
        assert len(said) == 2 and file.name in said[0] and "step_00000001" in said[1]
        with pytest.raises(CheckpointError): load_checkpoint(newest, *make(0))
    finally: file.write_bytes(whole)


def test_a_copied_out_dir_still_works(saved, tmp_path):
    "cp -rL follows the link, rsync keeps it: both are found, and saving on works."
    for links in (True, False):
        out = tmp_path / str(links)
        shutil.copytree(saved, out, symlinks=links)
        model, opt = make(5)
        assert load_checkpoint(find_checkpoint(out), model, opt)["step"] == 2
        assert load_checkpoint(find_checkpoint("-", out/"checkpoints"/"latest"), model, opt)["step"] == 2
        save_checkpoint(out, 3, model=model, optimizer=opt, state={}, warn=lambda m: None)
        assert find_checkpoint(out).name == "step_00000003" and (out/"checkpoints"/"latest").is_symlink()
