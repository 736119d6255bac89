"One thing is read one way: a setting wherever it is written, a file whichever data set reads it (issue 16, row 10)."
import json
import os
from contextlib import closing

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings, strategies as st

from nsa_nb import config as config_module
from nsa_nb.config import load_config
from nsa_nb.bootstrap import bootstrap
from nsa_nb.envvars import ENV_VARS
from nsa_nb.errors import EXIT_USAGE, RunError, UsageError
from nsa_nb.data.loader import open_run_data
from nsa_nb.options import StrictParser, add_config_options, config_overrides, guarded
from nsa_nb.data.remote import Patience
from nsa_nb.schema import FIELDS, RunConfig
from nsa_nb.data.source import stream_source
from nsa_nb.data.rows import file_rows
from nsa_nb.data.text import Replaced, clean_text, local_source
from nsa_nb.train import main as train_main

# ---- settings

TEXTS = ["8", "010", "0o10", "0x10", "1_000", "1,000", "1e3", "1e-4", "1E4", ".5", "5.", "+3", "-1", "1.5", "1:30",
         "05:30:00", "2026-01-01", "１０",
         "on", "off", "yes", "No", "true", "FALSE", "y", "null", "NULL", "none", "~", "nan", ".nan", "inf", ".inf",
         "auto", "CPU", "nsa", "GPT2", "conv", "v2", "1e400"]
VARIABLES = {v.field: v for v in ENV_VARS.values() if v.field
             and v.name not in ("NSA_SEL_RANGES_V2", "DDP_SAFE")}      # the first has words of its own
PARSER = StrictParser(prog="nsa")
add_config_options(PARSER)
OPTIONS = {a.dest: a for a in PARSER._actions if a.dest in FIELDS and a.nargs != 0
           and type(a).__name__ == "_StoreAction"}      # those that take a value


def answer(f, key):
    "The field's value with its type, or that it was refused in words that name the field or its variable."
    try: value = f().flat()[key]
    except UsageError as e:
        named = [key.partition(".")[2], *([VARIABLES[key].name] if key in VARIABLES else [])]
        assert any(name in str(e) for name in named), (key, str(e))
        return "refused"
    return type(value).__name__, value


def answers(key, text, path, quoted):
    "What each way of writing a setting makes of one text."
    section, _, name = key.partition(".")
    shown = "'" + text.replace("'", "''") + "'" if quoted else text
    path.write_text(f"{section}:\n  {name}: {shown}\n", encoding="utf-8")
    ways = dict(keyword=lambda: RunConfig(**{section: {name: text}}),
                overrides=lambda: load_config(None, {key: text}, {}), file=lambda: load_config(path, None, {}))
    if key in OPTIONS:
        option = next(o for o in OPTIONS[key].option_strings if o.startswith("--"))
        ways["command line"] = lambda: load_config(None, config_overrides(PARSER.parse_args([f"{option}={text}"])), {})
    if key in VARIABLES and text.strip(): ways["variable"] = lambda: load_config(None, None,
        {VARIABLES[key].name: text})      # an empty variable is none
    return {way: answer(f, key) for way, f in ways.items()}


@pytest.fixture
def no_acting(monkeypatch):
    "Here the question is what a text means, not whether the setting acts (test_acts.py)."
    monkeypatch.setattr(config_module, "refuse_idle", lambda cfg: None)


@pytest.mark.parametrize("section", RunConfig.model_fields)
def test_a_text_means_the_same_wherever_it_is_written(section, tmp_path, no_acting):
    for key in [k for k in FIELDS if k.startswith(f"{section}.")]:
        for text in TEXTS:
            got = answers(key, text, tmp_path/"c.yaml", quoted=False)
            assert len(set(map(repr, got.values()))) == 1, (key, text, got)


ALPHABET = st.sampled_from(list("0123456789") + list("+-._:eEnulltruofasyNT~x ") + ["null", "true", "1_0", "e-"])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["train.steps", "train.lr", "train.keep_last", "train.grad_clip", "runtime.fa2_win",
                        "runtime.sel_pack", "data.hf_name", "train.out_dir", "nsa.cmp_rope",
                        "runtime.gradient_checkpointing", "runtime.merge_micro_batches", "runtime.fa2_min_len_win",
                        "data.tokenizer"]),
       st.lists(ALPHABET, max_size=6).map("".join))
def test_any_text_means_the_same_wherever_it_is_written(tmp_path_factory, key, text):
    path = tmp_path_factory.getbasetemp()/"any.yaml"
    kept = config_module.refuse_idle
    config_module.refuse_idle = lambda cfg: None
    try: got = answers(key, text, path, quoted=True)
    finally: config_module.refuse_idle = kept
    assert len(set(map(repr, got.values()))) == 1, (key, text, got)


@pytest.mark.parametrize("key,text,value",
                         [("train.steps", "010", 10), ("train.steps", "1_000", 1000), ("train.steps", "1e3", 1000),
                          ("train.lr", "1e-4", 1e-4), ("runtime.sel_pack", "off", False),
    ("runtime.gradient_checkpointing", "on", "full"), ("runtime.gradient_checkpointing", "off", "off"),
    ("train.grad_clip", "~", None), ("data.tokenizer", "GPT2", "gpt2"), ("train.out_dir", "5", "5")])
def test_what_a_text_means(key, text, value, tmp_path):
    assert set(answers(key, text, tmp_path/"c.yaml", quoted=False).values()) == {(type(value).__name__, value)}


def test_a_fault_says_file_line_and_what_was_found(tmp_path):
    (tmp_path/"my.yaml").write_text("train:\n  lr: 1e-3\n  steps: 0o10\n")
    says = r"train.steps='0o10': must be a whole number \(from file:.*my.yaml, line 3\)"
    with pytest.raises(UsageError, match=says): load_config(tmp_path/"my.yaml", None, {})


# ---- files

def texts_of(path, dataset):
    "The documents of a path as a data set reads them, and how many characters were replaced; or why it does not."
    if dataset == "local":
        lost = []
        try: return list(local_source(path).documents(replaced=lambda p, n: lost.append(n))), sum(lost)
        except UsageError as e: return str(e)
    replaced = Replaced()
    out = []
    try:
        source = stream_source(RunConfig(data=dict(dataset=dataset, local_path=str(path))).data)
        for i in range(len(source.files)):
            for rows in file_rows(source, i, Patience(), replaced=replaced):
                out += [clean_text(t) for t in rows.texts if t]
    except (UsageError, RunError) as e: return str(e)
    return out, replaced.characters


DATASETS = ("local", "fineweb_edu_local")


@pytest.mark.parametrize("name", ["up.jsonl", "UP.JSONL", "Up.JsonL", "t.parquet", "T.PARQUET"])
@pytest.mark.parametrize("folder", [False, True])
def test_the_suffix_counts_in_any_case(name, folder, tmp_path):
    path = tmp_path/name
    if name.lower().endswith("jsonl"): path.write_text('{"text": "one"}\n{"text": "two"}\n')
    else: pq.write_table(pa.table(dict(text=["one", "two"])), path)
    for dataset in DATASETS: assert texts_of(tmp_path if folder else path, dataset) == (["one", "two"], 0), dataset


@pytest.mark.parametrize("name,says", [("a.jsonl.gz", "is compressed: unpack it (gunzip)"),
                                       ("a.parquet.zip", "is compressed: unpack it (unzip)"),
                                       ("a.json", "unknown kind '.json', allowed"),
                                       ("README", "unknown kind '', allowed")])
@pytest.mark.parametrize("dataset", DATASETS)
def test_what_nobody_reads_is_refused_alike(name, says, dataset, tmp_path):
    (tmp_path/name).write_bytes(b"\x1f\x8b")
    assert says in texts_of(tmp_path/name, dataset) and name in texts_of(tmp_path/name, dataset)
    if ".gz" in name or ".zip" in name: assert says in texts_of(tmp_path, dataset)      # the only thing in a folder
    assert "no such file or folder" in texts_of(tmp_path/"nowhere", dataset)


def test_a_stream_sends_plain_text_to_the_data_set_that_reads_it(tmp_path):
    (tmp_path/"book.txt").write_text("a book")
    assert texts_of(tmp_path/"book.txt", "local") == (["a book"], 0)
    assert "use --dataset local for .txt" in texts_of(tmp_path/"book.txt", "fineweb_edu_local")


def test_a_link_counts_by_its_own_name(tmp_path):
    "As the Hugging Face cache has them: the name is a link, the file behind it has no suffix."
    (tmp_path/"blob").write_text('{"text": "linked"}\n')
    (tmp_path/"train.jsonl").symlink_to(tmp_path/"blob")
    for dataset in DATASETS: assert texts_of(tmp_path/"train.jsonl", dataset) == (["linked"], 0)


def test_bootstrap_takes_and_writes_any_case(tmp_path):
    (tmp_path/"in").mkdir()
    (tmp_path/"in"/"UP.JSONL").write_text('{"text": "one"}\n')
    cfg = load_config(None, {"data.dataset": "fineweb_edu_local", "data.local_path": str(tmp_path/"in")}, {})
    assert bootstrap(cfg, 1, tmp_path/"OUT.JSONL", progress=False)["docs"] == 1
    with pytest.raises(UsageError, match="call it .jsonl"): bootstrap(cfg, 1, tmp_path/"out.json", progress=False)


# ---- rows

ROW = st.one_of(
    st.text(max_size=8).map(lambda t: json.dumps(dict(text=t), ensure_ascii=False).encode("utf-8", "surrogatepass")),
    st.text(st.characters(codec="latin-1"), min_size=1,
            max_size=6).map(lambda t: json.dumps(dict(text=t), ensure_ascii=False).encode("latin-1")),
    st.sampled_from([b'{"text": null}', b'{"text": ""}', b'{"text": "\\ud800 half a pair", "id": "\\ud800"}',
                     b'{"id": 3, "text": "with an id"}', b"", b" \t", b"\r", b'{"text": "crlf"}\r']))
FAULT = st.sampled_from([b'{"text": 5}', b'{"text": true}', b'{"text": ["a"]}', b'{"text": {"text": "nested"}}',
                         b'{"body": "x"}', b'{"data": {"text": "nested"}}', b"{}", b"[1]", b"NaN",
                         b'{"text": "half', b"\xa0", b"\xc2\xa0", b'{"text": "a"} {"text": "b"}', b"[" * 5000])


@settings(max_examples=80, deadline=None)
@example([b'{"text": "\\u0000"}'], None, False, False)      # a NUL that was meant
@given(st.lists(ROW, max_size=6), st.none() | st.tuples(st.integers(0, 6), FAULT), st.booleans(), st.booleans())
def test_rows_of_json_lines_are_one_thing_to_both(tmp_path_factory, rows, fault, mark, ends):
    rows = [r.replace(b"\n", b" ") for r in rows]
    if fault: rows.insert(fault[0], fault[1])
    path = tmp_path_factory.getbasetemp()/"rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" * mark + b"\n".join(rows) + b"\n" * ends)
    local, stream = (texts_of(path, dataset) for dataset in DATASETS)
    if isinstance(local, str):      # an error in equal words, but for local's whole path
        assert isinstance(stream, str) and local.endswith(stream), (local, stream)
    else: assert local == stream
    if fault:
        line = next(i for i, r in enumerate(rows, 1) if r is fault[1])
        assert f"rows.jsonl:{line}: " in local


@pytest.mark.parametrize("column,what", [(["a", None, "", "b"], ["a", "b"]),
                                         (pa.array(["a", "b"], pa.large_string()), ["a", "b"]),
                                         (pa.array(["a", "b"]).dictionary_encode(), ["a", "b"]),
    (pa.nulls(3), []), ([1, 2], "row 0: \"text\" must be a string, got int 1"),
    ([None, [1]], 'row 1: "text" must be a string, got list [1]'), ([dict(text="x")], "got dict"),
    ([b"raw"], "got bytes"), ([True], "got bool")])
def test_rows_of_a_table_are_one_thing_to_both(column, what, tmp_path):
    pq.write_table(pa.table(dict(text=column)), tmp_path/"a.parquet")
    for dataset in DATASETS:
        got = texts_of(tmp_path/"a.parquet", dataset)
        assert what in got and "a.parquet" in got if isinstance(what, str) else got == (what, 0), (dataset, got)


@pytest.mark.parametrize("raw,says", [("{}".encode("utf-16"), "is UTF-16: convert it: iconv -f UTF-16"),
                                      (b"\x1f\x8b\x08\x00rest", "is compressed (gzip): unpack it"),
                                      (b"PAR1....", "is a Parquet file: call it .parquet")])
@pytest.mark.parametrize("dataset", DATASETS)
def test_a_file_that_is_something_else_is_named(raw, says, dataset, tmp_path):
    (tmp_path/"a.jsonl").write_bytes(raw)
    assert says in texts_of(tmp_path/"a.jsonl", dataset)


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("name,raw", [("a.jsonl", b'{"text": null}\n{"text": ""}\n'), ("a.jsonl", b"\n\n"),
                                      ("a.jsonl", b""), ("a.parquet", None)])
def test_data_without_a_document_is_refused_alike(dataset, name, raw, tmp_path):
    if raw is None: pq.write_table(pa.table(dict(text=pa.nulls(3, pa.string()))), tmp_path/name)
    else: (tmp_path/name).write_bytes(raw)
    cfg = load_config(None, {"data.dataset": dataset, "data.local_path": str(tmp_path),
                             "train.seq_len": 16} | ({"data.cache_dir": str(tmp_path/"cache")}
                                                     if dataset == "local" else {}), {})
    says = "no text: the files are empty, or each row's text is null or empty"
    with pytest.raises(UsageError, match=says) as e, closing(open_run_data(cfg)) as data: data.refuse_bad_text()
    assert "val_fraction" not in str(e.value)


def test_what_is_no_text_does_not_train(tmp_path, capsys):
    (tmp_path/"own.txt").write_bytes(os.urandom(3000))
    assert guarded(train_main, ["--dataset", "local", "--local-path", str(tmp_path/"own.txt"), "--cache-dir",
                                str(tmp_path/"cache"), "--steps", "1", "--out-dir", str(tmp_path/"run")]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert "own.txt is no text" in said and "iconv" in said
    latin = "Ein Text über Füße. ".encode("latin-1") * 200      # text, though not UTF-8: a note, as before
    (tmp_path/"own.txt").write_bytes(latin)
    assert texts_of(tmp_path/"own.txt", "local")[1] == 600
