"What the environment says of a process among others and can't be: refused in seconds, exit code 2, by its name."
import socket
import time

import pytest
from test_train import MODEL, text, zygote  # noqa: F401
from test_world import Job, free_port

SECONDS = 60      # of this loaded machine; left alone each of these waits for half an hour, or for ever
TWO = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
BAD = [("RANK", "2"), ("RANK", "-1"), ("RANK", "x"), ("RANK", "1.0"), ("RANK", "0x1"), ("RANK", "1_0"), ("RANK", ""),
       ("LOCAL_RANK", "2"), ("LOCAL_RANK", "-1"), ("LOCAL_RANK", "x"), ("LOCAL_RANK", ""),
       ("WORLD_SIZE", "0"), ("WORLD_SIZE", "-2"), ("WORLD_SIZE", "two"), ("WORLD_SIZE", "1e9"), ("WORLD_SIZE", ""),
       ("MASTER_PORT", ""), ("MASTER_PORT", "x"), ("MASTER_PORT", "0"), ("MASTER_PORT", "70000"), ("MASTER_PORT", "-1"),
       ("MASTER_ADDR", ""), ("MASTER_ADDR", "no.such.name.invalid"), ("MASTER_ADDR", "a" * 70),
       ("GLOO_SOCKET_IFNAME", "none7")]


@pytest.fixture
def refused(zygote, tmp_path):
    "refused(env, …) → what `nsa train` said, in seconds and with exit code 2; nothing is written."
    def f(env: dict, *more) -> str:
        began = time.monotonic()
        code, said = zygote.run("train", "--config", "train_showcase", "--steps", 1, "--out-dir", "run", *more,
                                cwd=tmp_path, env=env, timeout=SECONDS)
        assert code == 2 and "Traceback" not in said and time.monotonic() - began < SECONDS, (code, said)
        assert not (tmp_path/"run").exists()
        return said
    return f


@pytest.mark.parametrize("name,value", BAD)
def test_a_variable_that_cannot_be(refused, name, value):
    said = refused(TWO | dict(MASTER_PORT=str(free_port())) | {name: value})
    assert name in said and (value in said or not value.strip())


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK"])
def test_a_rank_without_a_world(refused, zygote, tmp_path, name):
    "It would train alone, beside others that do too; --ddp 0 says that this is meant."
    assert f"{name}='1' is set and WORLD_SIZE not" in refused({name: "1"})
    code, said = zygote.run("train", "--dataset", "synthetic", *MODEL, "--steps", 1, "--eval-batches", 1,
                            "--sample-tokens", 0, "--out-dir", "run", "--ddp", 0, cwd=tmp_path, env={name: "1"})
    assert code == 0, said


def test_a_gpu_that_is_not_there(zygote, tmp_path):
    "Two GPUs, and the third process of this machine."
    cards = ("import torch\ntorch.cuda.is_available = lambda: True\ntorch.cuda.device_count = lambda: 2\n"
             "from nsa_nb import train\nimport nsa_nb.cli\ntrain.pick_device = lambda cfg: torch.device('cuda')\n")
    env = TWO | dict(RANK="2", LOCAL_RANK="2", WORLD_SIZE="4", MASTER_PORT=str(free_port()))
    code, said = zygote.run("train", "--device", "cuda", "--out-dir", "run", cwd=tmp_path, before=cards, env=env,
                            timeout=SECONDS)
    assert code == 2 and "LOCAL_RANK=2, and PyTorch sees 2 CUDA devices" in said, said


@pytest.mark.parametrize("ranks", [(0, 1, 1), (0, 0, 1)], ids=str)
def test_one_rank_given_twice(zygote, tmp_path, ranks):
    "All of them hear of it, with one that never came: a world of four."
    port = str(free_port())
    runs = [zygote.start("train", "--config", "train_showcase", "--out-dir", "run", cwd=tmp_path,
                         env=dict(TWO, RANK=str(r), WORLD_SIZE="4", MASTER_PORT=port)) for r in ranks]
    assert [r.wait(SECONDS) for r in runs] == [2] * 3, "\n".join(r.text() for r in runs)
    twice = max(ranks, key=ranks.count)
    for r in runs:
        says = (f"RANK={twice} is given to two processes", f"can't be opened by RANK={twice}")
        assert any(s in r.text() for s in says), r.text()


def test_a_port_that_somebody_has(zygote, tmp_path):
    with socket.socket() as s:
        s.bind(("", 0))
        s.listen()
        env = TWO | dict(MASTER_PORT=str(s.getsockname()[1]))
        code, said = zygote.run("train", "--config", "train_showcase", "--out-dir", "run", cwd=tmp_path, env=env,
                                timeout=SECONDS)
    assert code == 2 and "MASTER_PORT=" in said and "EADDRINUSE" in said and "Traceback" not in said, said


def test_ranks_that_are_right_still_meet(zygote, tmp_path, text):
    small = ["--config", "train_showcase", *MODEL, "--dataset", "local", "--local-path", text, "--batch-size", 2]
    job = Job(
        zygote, 2, [*small, "--steps", 2, "--sample-tokens", 0, "--eval-batches", 1, "--out-dir", "run"], tmp_path
    )
    assert job.wait() == [0, 0], job.text()


@pytest.mark.parametrize("rank", ["2", "x"])
def test_the_variable_that_is_wrong_before_those_that_are_missing(refused, zygote, tmp_path, rank):
    env = dict(RANK=rank, WORLD_SIZE="2")
    assert f"RANK={rank!r}: must be" in refused(env)
    code, said = zygote.run("preflight", "--config", "train_showcase", "--dataset", "synthetic", cwd=tmp_path, env=env)
    assert code == 1 and "[ STOP ] launch" in said and f"RANK={rank!r}" in said, said
