"""File systems that lack what a disk has: links, locks, flushes of folders, permissions, renames; and names that
are too long.

A run is a fork whose calls are replaced by ones that raise what such a file system answers."""

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_data_tokens import MAKE
from test_train import events, metrics, nsa, out, progress, steps, text, zygote  # noqa: F401
from zygote import search_path

from nsa_nb import artifacts
from nsa_nb.artifacts import FileLock, folder_lock, point_at, pointed_at, write_atomic
from nsa_nb.monitoring.checkpoint_files import list_checkpoints, verify_checkpoint
from nsa_nb.training.checkpoint import find_checkpoint, load_checkpoint, prune_checkpoints, save_checkpoint
from nsa_nb.generate import load_trained
from nsa_nb.config import load_config
from nsa_nb.bootstrap import bootstrap
from nsa_nb.errors import UsageError
from nsa_nb.training.optim import build_optimizer
from nsa_nb.monitoring.run_folder import file_system_limits, prepare_out_dir, running_pid
from nsa_nb.data.text import local_source
from nsa_nb.data.token_cache import open_tokens
from nsa_nb.data.tokenizer import ByteTokenizer

# Python to run first: the calls of a file system without links, locks, folder fsync and permissions
LACKS = """
import errno, fcntl, os
def refuses(number, only, then):
    def call(*args, **kw):
        if only(*args): raise OSError(number, os.strerror(number))
        return then(*args, **kw)
    return call
always, is_folder = lambda *args: True, lambda fd: os.path.isdir(f"/proc/self/fd/{fd}")
os.symlink = refuses(errno.LINK, always, os.symlink)
os.link = refuses(errno.EPERM, always, os.link)
os.chmod = refuses(errno.EPERM, always, os.chmod)
fcntl.flock = fcntl.lockf = refuses(errno.LOCK, always, fcntl.flock)
os.fsync = refuses(errno.SYNC, is_folder, os.fsync)
"""

def lacks(link="EPERM", lock="ENOLCK", sync="EINVAL") -> str:
    return LACKS.replace("LINK", link).replace(".LOCK", f".{lock}").replace("SYNC", sync)


@pytest.fixture

def small(text):
    return [
        "--config", "train_showcase", "--dim", 32, "--n-heads", 4, "--d-k", 8, "--d-v", 8, "--seq-len", 64,
        "--batch-size", 2, "--sample-tokens", 0, "--eval-batches", 1, "--eval-every", 0, "--dataset", "local",
        "--local-path", text, "--out-dir", "run",
    ]


@pytest.fixture
def model():
    torch.manual_seed(0)
    m = torch.nn.Linear(4, 3)
    return m, build_optimizer(m, lr=0.1, weight_decay=0.0)



def save(out, step, model):
    return save_checkpoint(out, step, model=model[0], optimizer=model[1], state={"tokens": step})


def refuses(number, only=lambda *args: True, then=None):
    def call(*args, **kw):
        if only(*args): raise OSError(number, os.strerror(number))
        return then(*args, **kw)
    return call


# --- a whole run

@pytest.mark.parametrize(
    "answers", [("EPERM", "ENOLCK", "EINVAL"), ("ENOTSUP", "ENOTSUP", "EBADF"), ("EACCES", "EINVAL", "EACCES")],
    ids=" ".join,
)
def test_a_run_lives_with_it(nsa, out, small, answers):
    """It says what is missing, saves, resumes, is signalled; each reader of `latest` takes the file; nobody sees a
    traceback."""
    before = lacks(*answers)
    latest = out/"checkpoints"/"latest"
    code, said = nsa("train", *small, "--steps", 6, "--save-every", 2, "--keep-last", 2, before=before)
    assert code == 0 and "Traceback" not in said, said
    for words in (
        f"no symbolic links ({answers[0]}", "no file locks (flock)", f"folders cannot be flushed ({answers[2]}",
        "permissions cannot be set (EPERM",
    ):
        assert words in said, said
    assert (
        steps(out) == [4, 6]
        and latest.is_file()
        and not latest.is_symlink()
        and latest.read_text() == "step_00000006\n"
    )
    assert verify_checkpoint(latest)["step"] == 6 and load_trained(latest)[1].train.steps == 6
    for p in list_checkpoints(out): verify_checkpoint(p)
    assert not list(out.rglob("*.owner")) and not list(out.rglob(".nsa-try-*")) and running_pid(out) is None
    code, said = nsa("train", *small, "--steps", 8, "--resume", "run/checkpoints/latest", before=before)
    assert code == 0 and "resumed from" in said and "at step 6" in said and "Traceback" not in said, said
    assert latest.read_text() == "step_00000008\n"
    code, said = nsa("generate", "--model", "run/checkpoints/latest", "--max-new-tokens", 2, before=before)
    assert code == 0 and "Traceback" not in said, said
    code, said = nsa("report", "--dir", "run", before=before)
    assert "Traceback" not in said and code in (0, 1, 3), said
    code, said = nsa("preflight", *small, "--resume", "run/checkpoints/latest", before=before)
    row, = [line for line in said.splitlines() if "file system" in line]
    assert (
        code == 3
        and "look" in row
        and "no symbolic links" in row
        and "no file locks" in row
        and "step_00000008" in said
    ), said


def test_one_run_a_folder_without_flock(nsa, out, small, tmp_path):
    "The second is refused, a signal finds the first, and a killed one holds nothing."
    endless = [*small, "--steps", 100_000, "--save-every", 0, "--log-every", 1, "--heartbeat-every", 1]
    run = nsa.start("train", *endless, before=lacks())
    run.until(progress(out))
    code, said = nsa("train", *endless, before=lacks())
    assert code == 2 and f"in use by process {run.pid}" in said and "Traceback" not in said, said
    code, said = nsa("signal", "--dir", "run", "save", before=lacks())
    assert code == 0 and "saved: " in said and Path(said.split("saved: ")[1].strip()).is_dir(), said
    run.kill(signal.SIGKILL)
    run.wait()
    assert (out/"run.pid.owner").exists()
    code, said = nsa("signal", "--dir", "run", "save", before=lacks())
    assert code == 2 and "no run is alive" in said
    at = steps(out)[-1]
    code, said = nsa("train", *small, "--steps", at + 2, "--resume", "auto", before=lacks())
    assert code == 0 and metrics(out)["step"] == at + 2 and not (out/"run.pid.owner").exists(), said


def test_a_python_without_fcntl(nsa, out, small):
    "As on Windows: a run, its lock, the token cache."
    without = "import sys\nsys.modules['fcntl'] = None\n"
    code, said = nsa("train", *small, "--steps", 2, "--cache-dir", "cache", before=without)
    assert code == 0 and "no file locks (flock)" in said and "Traceback" not in said, said
    assert metrics(out)["step"] == 2 and not (out/"run.pid.owner").exists()


@pytest.mark.parametrize(
    "link", ["step_00000004", "step_00000004\n", "step_00000004\r\n"], ids=["as archived", "as written", "from Windows"]
)
def test_an_archive_that_kept_the_link_as_a_file(nsa, out, small, link):
    assert nsa("train", *small, "--steps", 4)[0] == 0
    latest = out / "checkpoints" / "latest"
    latest.unlink()
    latest.write_bytes(link.encode())
    code, said = nsa("train", *small, "--steps", 6, "--resume", latest)
    assert code == 0 and "at step 4" in said and latest.is_symlink() and os.readlink(latest) == "step_00000006", said
    latest.unlink()
    latest.write_text("step_00000009")
    code, said = nsa("train", *small, "--steps", 7, "--resume", latest)
    assert code == 2 and "names step_00000009, which is not there" in said and "Traceback" not in said, said


def test_no_rename_over_a_file_is_said_before_the_first_step(nsa, out, small):
    before = (
        "import errno, os\n"
        "def replace(*a, **k): raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))\n"
        "os.replace = replace\n"
    )
    code, said = nsa("train", *small, "--steps", 4, before=before)
    assert (
        code == 2
        and "cannot be replaced by a rename (EXDEV" in said
        and "choose another --out-dir" in said
        and "Traceback" not in said
    ), said
    assert not (out/"checkpoints").exists() and nsa("train", *small, "--steps", 2)[0] == 0


def test_names_that_are_too_long(nsa, out, small, tmp_path):
    "300 characters; and a name that is long, but not too long, in everything that a run does with it."
    for argv in (
        ["train", *small[:-1], "n" * 300], ["preflight", *small[:-1], "n" * 300],
        ["train", *small, "--resume", "n" * 300], ["signal", "--dir", "n" * 300, "save"],
    ):
        code, said = nsa(*argv, "--steps", 2) if argv[0] != "signal" else nsa(*argv)
        assert code in (1, 2) and "Traceback" not in said, (argv, said)
    long = "n" * 250
    code, said = nsa("train", *small[:-1], long, "--steps", 2)
    assert code == 0, said
    code, said = nsa("train", *small[:-1], long, "--steps", 2, "--fresh")      # its old name would be too long
    assert code == 2 and "--fresh: " in said and "move it by hand" in said and "Traceback" not in said, said
    for name in ("m" * 255, "é" * 127):
        write_atomic(tmp_path / name, "x")
        assert (tmp_path / name).read_text() == "x"


# --- the pieces

@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF, errno.EACCES, errno.EPERM, errno.ENOTSUP, errno.EISDIR])
def test_a_save_where_folders_cannot_be_flushed(tmp_path, model, monkeypatch, number):
    monkeypatch.setattr(os, "fsync", refuses(number, lambda fd: stat.S_ISDIR(os.fstat(fd).st_mode), os.fsync))
    path = save(tmp_path, 1, model)
    assert verify_checkpoint(path)["step"] == 1 and find_checkpoint(tmp_path) == path.resolve()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_fault_of_the_disk_is_still_one(tmp_path, model, monkeypatch, number):
    "What no file system lacks is raised, named, and costs no earlier checkpoint."
    save(tmp_path, 1, model)
    for call in ("fsync", "symlink"):
        with monkeypatch.context() as m:
            m.setattr(os, call, refuses(number))
            with pytest.raises(RuntimeError, match=errno.errorcode[number]): save(tmp_path, 2, model)
        assert (
            verify_checkpoint(find_checkpoint(tmp_path))["step"] in (1, 2)
            and verify_checkpoint(tmp_path / "checkpoints" / "latest")["step"] == 1
        )


def test_the_order_of_a_save_without_links(tmp_path, model, monkeypatch):
    "`latest` is the last thing that changes, and changes in one step."
    monkeypatch.setattr(os, "symlink", refuses(errno.EPERM))
    save(tmp_path, 1, model)
    seen = []
    root = tmp_path/"checkpoints"
    replace = os.replace
    def watched(a, b):
        if Path(b).name == "latest":
            seen.append(((root / "latest").read_text(), verify_checkpoint(root / "step_00000002")["step"]))
        return replace(a, b)
    monkeypatch.setattr(os, "replace", watched)
    save(tmp_path, 2, model)
    assert (
        seen == [("step_00000001\n", 2)]
        and (root / "latest").read_text() == "step_00000002\n"
        and not list(root.glob(".tmp-*"))
    )
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "checkpoints", copy / "checkpoints")
    other = torch.nn.Linear(4, 3)
    assert load_checkpoint(copy / "checkpoints" / "latest", other)["tokens"] == 2 and torch.equal(
        other.weight, model[0].weight
    )


def test_a_checkpoint_that_cannot_be_removed_does_not_end_the_run(nsa, out, small):
    before = (
        "import errno, os\nrename = os.rename\ndef keeps(a, b):\n    if '/.tmp-' in str(b) and "
        "str(a).endswith('step_00000002'): raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))\n"
        "    return rename(a, b)\nos.rename = keeps\n"
    )
    code, said = nsa("train", *small, "--steps", 6, "--save-every", 2, "--keep-last", 1, before=before)
    assert (
        code == 0 and "step_00000002 stays: it cannot be removed (Permission denied)" in said and steps(out) == [2, 6]
    ), said


def test_folders_of_a_lower_layer(tmp_path, model, monkeypatch):
    "overlayfs answers EXDEV to the rename of a folder that lies in an image: it is copied, or removed where it is."
    for step in (1, 2, 3): save(tmp_path, step, model)
    root = tmp_path/"checkpoints"
    rename = os.rename
    layer = {"step_00000001", "step_00000003"}
    monkeypatch.setattr(
        os, "rename", refuses(errno.EXDEV, lambda a, b: Path(a).name in layer and Path(a).parent == root, rename)
    )
    assert [p.name for p in prune_checkpoints(tmp_path, 2)] == ["step_00000001"] and not list(root.glob("*00001*"))
    with torch.no_grad(): model[0].weight += 1
    with pytest.warns(UserWarning, match="holds another state of this step"): save(tmp_path, 3, model)
    assert [verify_checkpoint(p)["step"] for p in list_checkpoints(tmp_path)] == [3, 3, 2]
    with pytest.raises(UsageError, match="--fresh: .*move it by hand"):
        (tmp_path / "training.csv").write_text("step\n1\n")
        monkeypatch.setattr(os, "rename", refuses(errno.EBUSY))
        prepare_out_dir(tmp_path, fresh=True)


def test_pointers(tmp_path, monkeypatch):
    "A file that is no pointer is left as it is; a link and a file replace each other."
    latest = tmp_path/"latest"
    for content in (b"", b"step_1", b"../step_00000001", b"\xff" * 300, b"step_00000001/x"):
        latest.write_bytes(content)
        assert pointed_at(latest) == latest
    assert point_at(latest, "step_00000001") and latest.is_symlink() and pointed_at(latest) == latest
    monkeypatch.setattr(os, "symlink", refuses(errno.EPERM))
    assert not point_at(latest, "step_00000002") and pointed_at(latest).name == "step_00000002"
    assert pointed_at(tmp_path/"elsewhere") == tmp_path/"elsewhere"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.EACCES, errno.ENOSYS])
def test_locks_by_another_means(tmp_path, monkeypatch, number):
    "Between processes, over kills."
    import fcntl
    monkeypatch.setattr(fcntl, "flock", refuses(number))
    script = (
        f"import fcntl, sys\n"
        f"def no(*a): raise OSError({number}, 'no')\n"
        f"fcntl.flock = no\n"
        f"from nsa_nb.artifacts import FileLock\n"
        f"print(FileLock(sys.argv[1]).take(), flush=True)\n"
        f"sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "x")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": search_path()},
    )
    assert other.stdout.readline() == "True\n"
    lock = FileLock(tmp_path/"x")
    assert not lock.take() and lock.holder().pid == other.pid
    other.kill()
    other.wait()
    assert lock.holder() is None and lock.take() and lock.means == "owner file"
    lock.release()
    with folder_lock(tmp_path, 0) as a, folder_lock(tmp_path, 0) as b: assert (a, b) == (True, False)
    monkeypatch.setattr(FileLock, "_claim", lambda self: True)  # nothing at all keeps others out
    assert [limit.what for limit in file_system_limits(tmp_path)] == ["locks"] and "start one" in file_system_limits(
        tmp_path
    )[0].reason


def test_one_maker_of_tokens_without_flock(tmp_path):
    file = tmp_path/"a.jsonl"
    file.write_text("".join(json.dumps({"text": f"document {i} " * (i % 100 + 1)}) + "\n" for i in range(2000)))
    script = "import fcntl, os\ndef no(*a): raise OSError(37, 'no locks')\nfcntl.flock = no\n" + MAKE
    makers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(file), str(tmp_path), "", str(tmp_path / "log")], stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    assert len({m.communicate(timeout=120)[0] for m in makers}) == 1 and [m.returncode for m in makers] == [0, 0]
    assert (tmp_path/"log").read_text().split() == ["tokens", "sorted", "meta", "renamed"]      # one did the work


def test_token_cache_and_data_tools_on_such_a_disk(tmp_path, monkeypatch):
    "No lock is no other process; no permissions are no error."
    import fcntl

    file = tmp_path / "text" / "a.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(50)))
    monkeypatch.setattr(fcntl, "flock", refuses(errno.ENOLCK))
    monkeypatch.setattr(os, "chmod", refuses(errno.EPERM))
    monkeypatch.setattr(os, "fsync", refuses(errno.EINVAL, lambda fd: stat.S_ISDIR(os.fstat(fd).st_mode), os.fsync))
    tokens = open_tokens(local_source(file), ByteTokenizer(), tmp_path/"cache")
    assert np.array_equal(open_tokens(local_source(file), ByteTokenizer(), tmp_path/"cache").tokens, tokens.tokens)
    cfg = load_config(None, {"data.dataset": "fineweb_edu_local", "data.local_path": str(file.parent)}, environ={})
    assert bootstrap(cfg, 200, tmp_path / "got.jsonl", progress=False)["docs"] > 0 and sorted(
        p.name for p in tmp_path.glob("got*")
    ) == ["got.jsonl"]
    held = FileLock(tmp_path/"more.jsonl.part")
    assert held.take()
    with pytest.raises(UsageError, match=f"being written by process {os.getpid()}"):
        bootstrap(cfg, 200, tmp_path / "more.jsonl", progress=False)


def test_names_differ_by_more_than_case():
    "On a file system that takes Latest for latest."
    names = [v for k, v in vars(artifacts).items() if k.isupper() and isinstance(v, str)]
    assert len({n.lower() for n in names}) == len(names) > 10
