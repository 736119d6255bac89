"nsa data bootstrap, smoke and audit, as commands, against a server that fails."
import json
import os
import signal

import pytest
from fineweb_server import fineweb, serve
from test_stream import write
from test_stream_faults import BIG, MODEL, QUICK, zygote  # noqa: F401

SMALL = ["--seq-len", 64, "--batch-size", 2, "--val-fraction", .1]
SLOW = QUICK + "\nimport nsa_nb.bootstrap as t; t.STEP_BYTES = 3000"


def test_bootstrap_killed_at_any_time_makes_the_same_file(zygote, tmp_path):
    with serve(BIG()) as s:
        args = ["data", "bootstrap", "--bytes", "40kB", "--data-files", s.urls]
        code, said = zygote.run(*args, "--out", "a.jsonl", cwd=tmp_path, before=QUICK)
        assert code == 0 and "documents" in said, said
        part = tmp_path/"b.jsonl.part"
        state = tmp_path/"b.jsonl.part.json"
        s.slow = .03
        for size in (6_000, 20_000):
            run = zygote.start(*args, "--out", "b.jsonl", cwd=tmp_path, before=SLOW)
            run.until(lambda: state.exists() and json.loads(state.read_text())["size"] > size)
            run.kill(signal.SIGKILL)
            assert run.wait() == -9
            assert part.exists() and not (tmp_path/"b.jsonl").exists()
        s.slow, s.faults[:] = 0, [503, "drop", "early"]
        n = len(s.log)
        code, said = zygote.run(*args, "--out", "b.jsonl", cwd=tmp_path, before=SLOW)
        assert code == 0 and (tmp_path/"b.jsonl").read_bytes() == (tmp_path/"a.jsonl").read_bytes(), said
        assert not part.exists() and not state.exists() and len(s.log) > n
        docs = [json.loads(l) for l in (tmp_path/"b.jsonl").read_text().splitlines()]
        assert len({d["id"] for d in docs}) == len(docs) and 40_000 <= sum(len(d["text"]) for d in docs) < 41_000


def test_bootstrap_refusals(zygote, tmp_path):
    with serve() as s:
        args = ["data", "bootstrap", "--data-files", s.urls, "--out", "a.jsonl"]
        code, said = zygote.run(*args, "--bytes", "900TB", cwd=tmp_path)
        assert code == 2 and "ask for at most" in said and not list(tmp_path.glob("a.jsonl")), said
        code, said = zygote.run(*args, "--bytes", "lots", cwd=tmp_path)
        assert code == 2 and "5GB" in said
        code, said = zygote.run(*args, "--byte", "5GB", cwd=tmp_path)
        assert code == 2 and "'--bytes'" in said or "--bytes" in said
        # once they were ignored
        for more in (["--dataset", "stdlib"], ["--dataset", "local", "--local-path", "x.txt"]):
            code, said = zygote.run(*args, "--bytes", "1kB", *more, cwd=tmp_path)
            assert code == 2 and "data.data_files" in said and "give --dataset fineweb_edu, or leave it out" in said, (
                said
            )
            code, said = zygote.run("data", "bootstrap", "--out", "a.jsonl", "--bytes", "1kB", *more, cwd=tmp_path)
            assert (
                code == 2
                and f"--dataset {more[1]}: nsa data bootstrap brings a stream" in said
                and not (tmp_path / "a.jsonl").exists()
            ), said
        code, said = zygote.run(
            "data", "bootstrap", "--bytes", "1kB", "--out", "a.jsonl", cwd=tmp_path, env=dict(HF_HUB_OFFLINE="1")
        )
        assert code == 2 and "HF_HUB_OFFLINE" in said and "--data-files" in said and "--dataset local" not in said, said
        s.always = 503
        code, said = zygote.run(*args, "--bytes", "1kB", "--loader-timeout", 1, cwd=tmp_path)
        assert code == 1 and "HTTP 503" in said and "call again to go on" in said, said
        s.always = None
        code, said = zygote.run(*args, "--bytes", "1kB", cwd=tmp_path)
        assert code == 0, said
        code, said = zygote.run(*args, "--bytes", "1kB", cwd=tmp_path)
        assert code == 2 and "is there already" in said
        code, said = zygote.run(
            "data", "bootstrap", "--bytes", "1GB", "--data-files", s.urls, "--out", "all.jsonl", cwd=tmp_path
        )
        assert (
            code == 0
            and "the source has no more" in said
            and len((tmp_path / "all.jsonl").read_text().splitlines()) == 120
        )


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_bootstrap_into_a_folder_that_cannot_be_written(zygote, tmp_path):
    (tmp_path / "ro").mkdir()
    (tmp_path / "ro").chmod(0o500)
    with serve() as s:
        code, said = zygote.run(
            "data", "bootstrap", "--bytes", "1kB", "--data-files", s.urls, "--out", "ro/a.jsonl", cwd=tmp_path
        )
    assert code == 2 and "cannot be written" in said


def test_smoke(zygote, tmp_path):
    with serve() as s:
        args = ["data", "smoke", *SMALL, "--dataset", "fineweb_edu", "--data-files", s.urls, "--loader-timeout", 2]
        code, said = zygote.run(*args, cwd=tmp_path)
        assert (
            code == 0
            and all(w in said for w in ("p50", "p95", "bookmark", "two ranks share", "validation"))
            and "STOP" not in said
        ), said
        s.always = 404
        code, said = zygote.run(*args, cwd=tmp_path)
        assert code == 1 and "HTTP 404" in said, said
    code, said = zygote.run(*args, cwd=tmp_path)
    assert code == 2 and "--local-path FILE" in said, said


def test_audit_of_a_run_that_was_tampered_with(zygote, tmp_path):
    write(tmp_path/"d", fineweb())
    code, said = zygote.run(
        "train", "--config", "train_showcase", "--dim", 32, "--n-heads", 4, "--d-k", 8, "--d-v", 8, *SMALL, "--dataset",
        "fineweb_edu_local", "--local-path", "d", "--steps", 6, "--eval-every", 0, "--save-every", 0, "--sample-tokens",
        0, "--out-dir", "run", "--device", "cpu", cwd=tmp_path,
    )
    assert code == 0, said
    code, said = zygote.run("data", "audit", "--dir", "run", "--source", cwd=tmp_path)
    assert code == 0 and "rows compared with the source" in said, said
    path = tmp_path/"run"/"consumed_rank0.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:3] + lines[4:]) + "\n")
    code, said = zygote.run("data", "audit", "--dir", "run", cwd=tmp_path)
    assert code == 1 and "FAULT" in said and "step 2, rank 0 of 1: no record" in said, said
    code, said = zygote.run("data", "audit", "--dir", "d", cwd=tmp_path)
    assert code == 2 and "consumed_rank0.jsonl" in said


def test_text_that_is_not_utf8_is_told_by_all(zygote, tmp_path):
    """A Latin-1 file of JSON lines, as a stream, as local text and copied: one note each, with the count and the
    place; metrics.json has it too."""
    lines = [
        json.dumps(dict(text="Stra\u00dfe " * 20 if k == 6 else "some words " * 20), ensure_ascii=False).encode(
            "latin1"
        )
        + b"\n"
        for k in range(200)
    ]
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.jsonl").write_bytes(b"".join(lines))
    for dataset in ("fineweb_edu_local", "local"):
        out = tmp_path/dataset
        code, said = zygote.run(
            "train", "--config", "train_showcase", *MODEL, "--dataset", dataset, "--local-path", "d", "--out-dir", out,
            "--steps", 3, "--save-every", 0, cwd=tmp_path,
        )
        assert (
            code == 0
            and said.count("a.jsonl of" if dataset != "local" else "a.jsonl is") == 1
            and said.count("is not UTF-8 text: 20 of its characters were replaced") == 1
            and "iconv" in said
        ), said
    assert (
        "the first in row 6" in (tmp_path / "fineweb_edu_local" / "train.log").read_text()
        and json.loads((tmp_path / "fineweb_edu_local" / "metrics.json").read_text())["replaced"] == 20
    )
    code, said = zygote.run(
        "data", "bootstrap", "--dataset", "fineweb_edu_local", "--local-path", "d", "--bytes", "20kB", "--out",
        "b.jsonl", cwd=tmp_path,
    )
    assert code == 0 and said.count("is not UTF-8 text: 20 of its characters were replaced") == 1, said
