"A cause is said once, with its own remedy, never with another fault's (issue 16, row 20)."
import json
import re
from contextlib import closing

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nsa_nb.config import load_config
from nsa_nb.errors import EXIT_OK, EXIT_USAGE, RunError, UsageError
from nsa_nb.data.loader import open_run_data
from nsa_nb.options import guarded
from nsa_nb.preflight import preflight
from nsa_nb.data.source import LOCAL_TEXT
from nsa_nb.train import main as train_main

GONE = ["--dataset", "fineweb_edu", "--data-files", "http://127.0.0.1:9/a.parquet"]      # nobody listens on port 9
SMALL = ["--dim", "32", "--seq-len", "32", "--batch-size", "2", "--steps", "2", "--eval-every", "0", "--save-every",
         "0", "--sample-tokens", "0", "--eval-batches", "1", "--device", "cpu", "--leak-probe-every", "0"]
REMEDIES = dict(less="val_fraction", text="give files with text", mend="mend that file", other=LOCAL_TEXT,
                unpack="unpack it")


def parts(text):
    "The clauses of a message that are long enough to carry a cause, a path or a remedy."
    return [p for p in re.split(r"[:;,]\s|\n", text) if len(p.strip()) >= 12]


def assert_once(text, remedy=None, cause=None):
    "No clause twice; this remedy and no other one's; the cause once."
    found = parts(text)
    assert len(found) == len(set(found)), f"said twice: {[p for p in found if found.count(p) > 1]} in {text!r}"
    assert {k for k, words in REMEDIES.items() if words in text} == ({remedy} if remedy else set()), text
    if cause: assert text.count(cause) == 1, text


def test_a_source_that_is_gone_with_synthetic_tokens_asked_for(tmp_path, capsys):
    "The example: it was said four times, with advice on data.val_fraction."
    assert guarded(train_main, [*GONE, *SMALL, "--synthetic-on-fail", "--out-dir", str(tmp_path/"run")]) == EXIT_OK
    said = capsys.readouterr()
    log = [l for l in (said.out + said.err).splitlines() if l.startswith(("note", "error", "failed"))]
    assert_once("\n".join(log), "other", "cannot be reached")
    for words in ("SYNTHETIC tokens from step 0 on", "SYNTHETIC tokens for validation"):
        assert sum(words in l for l in log) == 1
    events = [json.loads(l) for l in (tmp_path/"run"/"heartbeat_rank0.jsonl").read_text().splitlines()]
    for e in [e for e in events if e["msg"] == "loader_error"]: assert_once(e["error"], "other", "cannot be reached")


def test_a_source_that_is_gone(tmp_path, capsys):
    assert guarded(train_main, [*GONE, *SMALL, "--out-dir", str(tmp_path/"run")]) == EXIT_USAGE
    assert_once(capsys.readouterr().err, "other", "cannot be reached")


@pytest.mark.parametrize("stand_in", [False, True])
def test_preflight_of_a_source_that_is_gone(stand_in, tmp_path):
    cfg = load_config(None, {"data.dataset": "fineweb_edu", "data.data_files": "http://127.0.0.1:9/a.parquet",
                             "data.synthetic_on_fail": stand_in, "train.out_dir": str(tmp_path/"run")}, {})
    row, = [r for r in preflight(cfg).rows if r.name == "data"]
    assert_once(row.remedy, "other", "cannot be reached")
    assert row.level == ("yellow" if stand_in else "red") and ("SYNTHETIC" in row.remedy) == stand_in


def jsonl(*texts): return "".join(json.dumps(dict(text=t)) + "\n" for t in texts).encode()
def table(**columns):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


# what is wrong → (file, its bytes, settings, words of the cause, whose remedy)
FAULTS = {"no rows": ("a.jsonl", b"", {}, "no text", "text"),
          "empty rows": ("a.jsonl", jsonl(None, "", None), {}, "no text", "text"),
          "none for validation": ("a.jsonl", jsonl(*(f"document {i}" for i in range(9))), {"data.val_fraction": 1e-9},
                                  "none of the 9 documents falls to validation", "less"),
          "a bad row": ("a.jsonl", jsonl("fine") + b'{"text": 5}\n', {}, 'a.jsonl:2: "text" must be a string', "mend"),
          "half a row": ("a.jsonl", jsonl("fine") + b'{"text": "ha', {}, "a.jsonl:2: not a JSON object", "mend"),
          "no column": ("a.parquet", table(body=["x"]), {}, 'need a column "text", got body', "mend"),
          "no Parquet": ("a.parquet", b"PAR1" + b"?" * 99, {}, "is no Parquet file", "mend"),
          "gone": (None, None, {}, "no such file or folder", None),
          "an empty folder": ("notes.doc", b"x", {}, "no .jsonl, .parquet file in this folder", None),
          "compressed": ("a.jsonl.gz", b"x", {}, "is compressed", "unpack")}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_of_a_folder_has_its_own_remedy(name, tmp_path):
    file, raw, more, cause, remedy = FAULTS[name]
    folder = tmp_path/"data"
    if file:
        folder.mkdir()
        (folder / file).write_bytes(raw)
    cfg = load_config(None, {"data.dataset": "fineweb_edu_local", "data.local_path": str(folder),
                             "train.seq_len": 16} | more, {})
    with pytest.raises(UsageError) as e, closing(open_run_data(cfg)) as data: data.refuse_bad_text()
    assert_once(str(e.value), remedy, cause)
    assert str(e.value).count(str(folder)) == 1, e.value


@pytest.mark.parametrize("prefetch", [True, False])
def test_all_for_validation_is_another_fault_than_no_text(prefetch, tmp_path):
    "0 documents to train on, since all are held out; and 0 documents."
    held_out = [f"document {i}" for i in range(3)]
    for texts, cause, remedy in (held_out, "all fall to validation", "less"), ([""], "no text", "text"):
        (tmp_path/"a.jsonl").write_bytes(jsonl(*texts))
        cfg = load_config(None, {"data.dataset": "fineweb_edu_local", "data.local_path": str(tmp_path/"a.jsonl"),
                                 "data.val_fraction": .5, "data.prefetch": prefetch, "train.seq_len": 16}, {})
        data = open_run_data(cfg)
        data.d = data.d.model_copy(update=dict(val_fraction=1.))      # the schema allows a half, which may do it too
        with pytest.raises(RunError) as e: data.train_batch(0, 1)
        data.close()
        assert_once(str(e.value), remedy, cause)
        assert str(e.value).count(str(tmp_path)) == 1


def test_a_fault_met_in_a_run_names_the_file_once(tmp_path):
    (tmp_path/"a.jsonl").write_bytes(jsonl(*(f"document {i}" for i in range(50))) + b'{"body": 1}\n')
    data = open_run_data(load_config(None, {"data.dataset": "fineweb_edu_local", "data.local_path": str(tmp_path),
                                            "data.val_fraction": .1, "train.seq_len": 16}, {}))
    with pytest.raises(RunError) as e:
        for step in range(99): data.train_batch(step, 4)
    data.close()
    assert_once(str(e.value), None, 'a.jsonl:51: need an object with the key "text", got keys body')
    assert str(e.value).count(str(tmp_path)) == 1


BAD_SETTINGS = [{"train.steps": "0x10"}, {"train.steps": 0}, {"train.out_dir": ""}, {"data.dataset": "local"},
                {"data.dataset": "wiki"}, {"model.n_heads": 7}, {"nsa.l": 15}, {"monitor.warn_max_gate": .95},
                {"train.stepz": 1}, {"data.local_path": "own.txt"}, {"nsa.gate_temp": 2}, {"runtime.device": "gpu"},
                {"runtime.fa2_cmp": True}]


@pytest.mark.parametrize("settings", BAD_SETTINGS, ids=str)
def test_a_refused_setting_is_said_once(settings):
    with pytest.raises(UsageError) as e: load_config(None, settings, {})
    assert_once(str(e.value))
    assert str(e.value).count("from cli") <= 1
