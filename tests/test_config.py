"""What the config notebooks cannot show by themselves: every field, every variable, every layer, files on a disk,
processes."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings, strategies as st

from nsa_nb.config import config_dir, config_names, config_sources, load_config, read_layers, save_config, show_config
from nsa_nb.envvars import ENV_VARS, FLAG, env_table, read_env
from nsa_nb.errors import UsageError
from nsa_nb.schema import FIELDS, NSAConfig, RunConfig, fa2_applies

# name → what a run with it must have, from the project's contract
SHIPPED = {
    "train_showcase": dict(steps=200, seq_len=128, batch_size=8, accumulate_grad_batches=1),
    "m7c_125m_1xa100_production": dict(steps=50_000, seq_len=2048, batch_size=1, accumulate_grad_batches=4),
    "m7c_125m_2xa100_production": dict(steps=50_000, seq_len=2048, batch_size=2, accumulate_grad_batches=2),
    "m7c_125m_fast_log": dict(seq_len=1024, log_every=5, accumulate_grad_batches=16),
    "m7c_125m_24g": dict(seq_len=4096, batch_size=2, accumulate_grad_batches=8),
    "m7c_125m_40g": dict(seq_len=4096, batch_size=4, accumulate_grad_batches=4),
    "m7c_125m_80g": dict(seq_len=4096, batch_size=8, accumulate_grad_batches=2),
    "runbook_s512": dict(seq_len=512, batch_size=2), "runbook_s1024": dict(seq_len=1024, batch_size=2),
    "runbook_s2048": dict(seq_len=2048, batch_size=2),
    "runbook_prod_2048": dict(steps=50_000, seq_len=2048, batch_size=1, accumulate_grad_batches=4),
}
PROFILES = {f"profiles/{p}" for p in ("a100", "h100", "rtx4090", "v100")}


def load(name=None, overrides=None, **environ): return load_config(name, overrides, environ)


# ---- shipped configs

def test_exactly_the_promised_configs_are_shipped():
    assert set(config_names()) == set(SHIPPED) | PROFILES


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_config(name):
    cfg = load(name)
    for key, value in SHIPPED[name].items(): assert getattr(cfg.train, key) == value, key
    assert cfg.train.out_dir == f"artifacts/{name}"
    assert cfg.train.seed == 1337 and cfg.data.dataset == "stdlib" and cfg.data.tokenizer == "byte"
    if name == "train_showcase": return
    m, n, t = cfg.model, cfg.nsa, cfg.train
    assert (m.dim, m.n_layers, m.n_heads, m.n_kv_groups, m.d_k, m.d_v, m.ffn_width) == (768, 12, 12, 2, 64, 64, 2048)
    assert (n.l, n.d, n.l_sel, n.n_sel, n.w, n.phi) == (32, 16, 64, 16, 512, "avg")
    assert (t.lr, t.lr_schedule, t.warmup_steps, t.weight_decay, t.grad_clip) == (2e-4, "cosine", 2000, 0.01, 1.0)
    assert cfg.runtime.precision == "bf16"


def test_production_cadence():
    for name in ("m7c_125m_1xa100_production", "m7c_125m_2xa100_production", "runbook_prod_2048"):
        t = load(name).train
        assert (t.save_every, t.eval_every, t.log_every) == (5000, 1000, 20)
        assert t.batch_size * t.accumulate_grad_batches * t.seq_len == 8192


def test_showcase_is_the_defaults_and_is_small():
    cfg = load("train_showcase")
    assert cfg == RunConfig()
    assert (
        cfg.model.dim, cfg.model.n_layers, cfg.model.n_heads, cfg.model.n_kv_groups, cfg.model.d_k, cfg.model.d_v,
    ) == (128, 1, 8, 2, 16, 16)
    assert (cfg.nsa.l, cfg.nsa.d, cfg.nsa.l_sel, cfg.nsa.n_sel, cfg.nsa.w) == (16, 8, 32, 8, 64)
    assert cfg.train.lr == 3e-4 and cfg.runtime.precision == "fp32"
    assert 50 <= cfg.train.save_every < cfg.train.steps   # a run that is killed has something to resume from


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_a_profile_changes_the_runtime_only(profile, tmp_path):
    assert {k.partition(".")[0] for k in read_layers(profile)} == {"runtime"}
    (tmp_path/"mine.yaml").write_text(f"include: [m7c_125m_1xa100_production, {profile}]\n")
    mine, base = load(tmp_path/"mine.yaml"), load("m7c_125m_1xa100_production")
    assert (mine.model, mine.nsa, mine.train) == (base.model, base.nsa, base.train)
    for key, (_, source) in read_layers(profile).items():
        assert config_sources(mine)[key] == (load(profile).flat()[key], source) and source == f"file:{profile}"


def test_the_configs_are_in_the_package():
    setup = (config_dir().parent.parent/"setup.py")
    if not setup.exists(): pytest.skip("installed without its source")
    for p in config_dir().rglob("*.yaml"):
        assert p.parent.relative_to(config_dir().parent).as_posix() + "/*.yaml" in setup.read_text()


# ---- precedence

INTS = ["train.steps", "train.batch_size", "train.accumulate_grad_batches", "train.log_every", "model.n_layers"]
VAR = {v.field: v.name for v in ENV_VARS.values()}


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(INTS), st.tuples(*[st.none() | st.integers(1, 99)]*3), min_size=1))
def test_the_highest_layer_that_speaks_wins(tmp_path_factory, said):
    f = tmp_path_factory.mktemp("c")/"c.yaml"
    f.write_text(yaml.safe_dump({k: v[0] for k, v in said.items() if v[0]} or None))
    env = {VAR[k]: str(v[1]) for k, v in said.items() if v[1] and k in VAR}
    cfg = load_config(f, {k: v[2] for k, v in said.items() if v[2]}, env)
    for key in INTS:
        file, env_value, cli = said.get(key, (None,)*3)
        layers = [(cli, "cli"), (env_value if key in VAR else None, f"env:{VAR.get(key)}"), (file, f"file:{f}"),
                  (RunConfig().flat()[key], "default")]
        assert config_sources(cfg)[key] == next(l for l in layers if l[0] is not None)


def test_config_variable_and_command_line(monkeypatch):
    assert load(CONFIG="runbook_s512").train.seq_len == 512
    assert load("runbook_s1024", CONFIG="runbook_s512").train.seq_len == 1024
    assert load(CONFIG="configs/runbook_s2048.yaml").train.seq_len == 2048   # as old runbooks write it
    assert load(CONFIG="").train.seq_len == 128
    with pytest.raises(UsageError, match="'runbook_s51'.*variable CONFIG.*did you mean 'runbook_s512'"):
        load(CONFIG="runbook_s51")
    monkeypatch.setenv("NSA_BATCH_SIZE", "3")
    assert load_config().train.batch_size == 3 and load_config(environ={}).train.batch_size == 8


def test_fa2_switches():
    on = dict(NSA_USE_FA2="1")
    assert [fa2_applies(load(**on).runtime, b, 512) for b in ("win", "cmp")] == [True, True]
    assert [fa2_applies(load(**on, NSA_USE_FA2_WIN="0").runtime, b, 512) for b in ("win", "cmp")] == [False, True]
    assert [fa2_applies(load(NSA_USE_FA2="0", NSA_USE_FA2_CMP="1").runtime, b, 512) for b in ("win", "cmp")] == [
        False,
        True,
    ]
    assert not fa2_applies(load(**on, NSA_FA2_MIN_LEN_WIN="-1").runtime, "win", 10**6)
    # the common switch of a higher layer reaches a branch that a lower layer had switched
    assert fa2_applies(load(None, {"runtime.fa2_enabled": False}, NSA_USE_FA2_WIN="1").runtime, "win", 512) is False
    assert fa2_applies(load(None, {"runtime.fa2_win": True}, NSA_USE_FA2="0").runtime, "win", 512) is True


# ---- environment

SAMPLE = {int: [("7", 7)], float: [("2.5", 2.5), ("3", 3.0)]}
FLAGS = [("1", True), ("0", False), ("true", True), ("No", False)]


@pytest.mark.parametrize("var", [v for v in ENV_VARS.values() if v.field], ids=lambda v: v.name)
def test_each_variable_sets_its_field(var):
    samples = FLAGS if var.kind is FLAG else list(var.kind.items()) if isinstance(var.kind, dict) else SAMPLE[var.kind]
    for text, value in samples:
        cfg = load_config(environ={var.name: text})
        assert config_sources(cfg)[var.field] == (value, f"env:{var.name}")
        assert {k for k, (_, s) in config_sources(cfg).items() if s != "default"} == {var.field}
    with pytest.raises(UsageError, match=f"{var.name}='nonsense'.*allowed"): read_env({var.name: "nonsense"})
    assert load_config(environ={var.name: " "}) == RunConfig()
    assert f"| `{var.name}` | `{var.field}` |" in env_table()


def test_every_promised_variable_is_known():
    promised = """
        CONFIG NSA_TOKENIZER NSA_BATCH_SIZE NSA_ACCUM NSA_USE_FA2 NSA_USE_FA2_WIN NSA_USE_FA2_CMP
        NSA_FA2_MIN_LEN_WIN NSA_FA2_MIN_LEN_CMP NSA_USE_TRITON_SEL NSA_USE_SEL_PACK NSA_USE_SEL_VARLEN
        NSA_SEL_RANGES_V2 NSA_SEL_RANGES_V2_MIN_S NSA_PREFILL_BATCHED NSA_PREFILL_TILE NSA_FORCE_PARITY
        NSA_STRICT_ASSERTS NSA_DEBUG_COMPARE NSA_DEBUG_TIMING NSA_ENV_STATIC NSA_ROPE_SCALE NSA_SDPA_AUDIT
        NSA_FWE_DOC_BATCH NSA_FWE_PREFETCH NSA_FWE_Q NSA_FWE_WARMUP_BATCHES NSA_FWE_WARMUP_TIMEOUT
        NSA_DDP_SAFE DDP_SAFE
    """.split()
    assert sorted(ENV_VARS) == sorted(promised)
    assert {v.field for v in ENV_VARS.values() if v.field} <= set(FIELDS)


def test_out_of_range_from_the_environment_names_the_variable():
    with pytest.raises(UsageError, match=r"train.batch_size=0: .*1 \(from env:NSA_BATCH_SIZE\)"):
        load(NSA_BATCH_SIZE="0")
    with pytest.raises(UsageError, match=r"NSA_BATCHSIZE.*did you mean 'NSA_BATCH_SIZE'"): load(NSA_BATCHSIZE="1")


def test_no_other_module_reads_settings_from_the_environment():
    for f in config_dir().parent.rglob("*.py"):
        assert (
            not re.search(r"(environ\b[^\n]*|getenv\()[\[(]\s*[\"'](NSA_|DDP_SAFE|CONFIG)", f.read_text())
            or f.stem == "config"
        ), f.name


# ---- keys and values

@pytest.mark.parametrize("key", [k for k in FIELDS if len(k.partition(".")[2]) >= 6])
def test_a_key_with_a_letter_missing_is_refused_with_the_right_one(key, tmp_path):
    section, _, name = key.partition(".")
    for typo in {name[:i] + name[i + 1 :] for i in (1, len(name) // 2, len(name) - 1)} - {
        k.partition(".")[2] for k in FIELDS
    }:
        (tmp_path/"c.yaml").write_text(f"{section}: {{{typo}: 1}}\n")
        with pytest.raises(
            UsageError, match=re.escape(f"unknown config key '{section}.{typo}': did you mean '{section}.")
        ):
            load(tmp_path / "c.yaml")
        with pytest.raises(UsageError, match=re.escape(f"'{section}.{typo}'")): load(None, {f"{section}.{typo}": 1})


@pytest.mark.parametrize(
    "text,value", [("2e-4", 2e-4), ("2E-4", 2e-4), ("2.0e-4", 2e-4), ("'0.0002'", 2e-4), ("1", 1.0), (".5e-3", 5e-4)]
)
def test_numbers_as_people_write_them(text, value, tmp_path):
    (tmp_path/"c.yaml").write_text(f"train:\n  lr: {text}\n")
    for lr in (load(tmp_path / "c.yaml").train.lr, load(None, {"train.lr": text.strip("'")}).train.lr):
        assert lr == value and type(lr) is float


@pytest.mark.parametrize(
    "key,text",
    [
        ("train.lr", "yes"), ("train.lr", ".nan"), ("train.lr", ".inf"), ("train.lr", "fast"), ("train.lr", "[1]"),
        ("train.steps", "true"), ("train.steps", "1.5"), ("train.steps", "~"), ("train.steps", "-1"),
        ("train.out_dir", "~"), ("train.out_dir", "null"), ("train.steps", "0x10"), ("train.steps", "1:30"),
        ("train.out_dir", "''"), ("model.d_k", "15"), ("runtime.device", "gpu"), ("runtime.precision", "fp8"),
        ("runtime.fa2_win", "maybe"), ("data.dataset", "local"), ("train.keep_last", "0"), ("train.grad_clip", "0"),
        ("monitor.warn_max_gate", "0.95"),
    ],
)
def test_bad_values_are_refused_by_name(key, text, tmp_path):
    section, _, name = key.partition(".")
    (tmp_path/"c.yaml").write_text(f"{section}:\n  {name}: {text}\n")
    with pytest.raises(UsageError) as e: load(tmp_path/"c.yaml")
    assert f"{section}." in str(e.value)


@pytest.mark.parametrize(
    "bad,words",
    [
        (dict(model=dict(n_heads=12, n_kv_groups=5)), ("model.n_heads=12", "n_kv_groups=5")),
        (dict(nsa=dict(l=30, d=8)), ("nsa.l=30", "d=8")),
        (dict(nsa=dict(l=16, d=16, l_sel=40)), ("nsa.l_sel=40", "d=16")),
        (dict(nsa=dict(l=64, d=8, l_sel=32)), ("nsa.l=64", "l_sel=32")),
        (dict(nsa=dict(n_sel=4, n_init=2, n_local=3)), ("nsa.n_sel=4", "2+3=5")),
        (dict(nsa=dict(w=0)), ("nsa.w=0", "1")),
        *[(dict(nsa={k: v}), (f"nsa.{k}={v}", "1")) for k in ("l", "d", "l_sel", "n_sel") for v in (0, -3)],
        *[(dict(nsa={k: v}), (f"nsa.{k}={v}", "0")) for k in ("n_init", "n_local") for v in (-1, -3)],
        *[
            (dict(model={k: 0}), (f"model.{k}=0",))
            for k in ("dim", "n_layers", "n_heads", "n_kv_groups", "d_k", "d_v", "ffn_dim")
        ],
    ],
)
def test_sizes_that_do_not_fit(bad, words):
    with pytest.raises(ValueError) as e: RunConfig(**bad)
    assert isinstance(e.value, UsageError)
    for w in words: assert w in str(e.value)


@settings(max_examples=200, deadline=None)
@given(*[st.integers(1, 12)]*4, *[st.integers(0, 3)]*2)
def test_block_sizes_pass_exactly_when_they_fit(l, d, l_sel, n_sel, n_init, n_local):
    fits = l % d == 0 and l_sel % d == 0 and l <= l_sel and n_sel >= n_init + n_local
    try: NSAConfig(l=l, d=d, l_sel=l_sel, n_sel=n_sel, n_init=n_init, n_local=n_local)
    except UsageError: assert not fits
    else: assert fits


# ---- files

def some_value(field, draw):
    "A value that the field takes, or its default where rules tie it to others."
    t = field.annotation
    bounds = {
        type(m).__name__: getattr(m, type(m).__name__.lower())
        for m in field.metadata
        if type(m).__name__ in ("Ge", "Gt", "Le", "Lt")
    }
    if t is int: return draw(st.integers(bounds.get("Ge", 0), bounds.get("Le", 10**9)))
    if t is bool: return draw(st.booleans())
    if t == (str | None):  # a path may begin with ~ and hold $NAME: not here
        text = st.text(
            st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="$~"), min_size=1,
            max_size=50,
        )
        return draw(st.none() | text.filter(lambda s: s.strip() != "null"))
    if t is float and set(bounds) <= {"Ge", "Gt"}: return draw(st.floats(1e-300, 1e300))
    return field.default


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_saving_and_loading_is_exact(tmp_path_factory, data):
    tied = ("model.", "nsa.", "monitor.", "data.dataset")
    nested = {}      # by keyword: whether they act together is another question (test_acts.py)
    for key, f in FIELDS.items():
        if not key.startswith(tied):
            nested.setdefault(key.partition(".")[0], {})[key.partition(".")[2]] = some_value(f, data.draw)
    cfg = RunConfig(**nested)
    path = tmp_path_factory.mktemp("c")/"config.yaml"
    save_config(cfg, path)
    assert load(path) == cfg and load(path).model_dump() == cfg.model_dump()
    assert RunConfig(**cfg.model_dump()) == cfg


def test_the_dump_is_plain_and_loads_beside_weights():
    dump = load("m7c_125m_80g").model_dump()
    plain = lambda o: all(map(plain, o.values())) if type(o) is dict else type(o) in (int, float, str, bool, type(None))
    assert plain(dump)
    buf = io.BytesIO()
    torch.save({"cfg": dump}, buf)
    buf.seek(0)
    assert torch.load(buf, weights_only=True)["cfg"] == dump


def test_includes_are_relative_to_their_file_and_later_wins(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    (tmp_path/"sub/one.yaml").write_text("train: {steps: 1, lr: 1e-3, seed: 1}\n")
    (tmp_path/"two.yml").write_text("include: sub/one\ntrain: {steps: 2, seed: 2}\n")
    (tmp_path/"mine.yaml").write_text("include: [two.yml, profiles/v100]\ntrain: {steps: 3}\nruntime:\n")
    cfg = load(tmp_path/"mine.yaml")
    assert (cfg.train.steps, cfg.train.seed, cfg.train.lr, cfg.runtime.use_triton_sel) == (3, 2, 1e-3, False)
    assert config_sources(cfg)["train.lr"] == (1e-3, "file:sub/one")
    assert load("../mine.yaml") == cfg == load("../mine")


@pytest.mark.parametrize(
    "text,words",
    [
        ("include: me\n", "circle"), ("include: {a: 5}\n", "include={'a': '5'}"),
        ("include: [nowhere]\n", "'nowhere', included by"), ("train: [1]\n", "train=['1']"),
        ("nonsense: 1\n", "unknown config key"), ("trian: {}\n", "did you mean the section 'train'"),
        ("train:\n  steps: 1\n steps: 2\n", "me.yaml:3"), ("? [a, b]\n: 1\n", "me.yaml:1"),
        ("5\n", "a config is sections"), ("\x00", "me.yaml"),
    ],
)
def test_broken_files(text, words, tmp_path):
    (tmp_path/"me.yaml").write_text(text)
    with pytest.raises(UsageError) as e: load(tmp_path/"me.yaml")
    assert words in str(e.value) and "me" in str(e.value)


def test_not_text_and_not_there(tmp_path):
    (tmp_path/"bin.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="bin.yaml"): load(tmp_path/"bin.yaml")
    with pytest.raises(UsageError, match="did you mean 'runbook_s2048'.*train_showcase"): load("runbok_s2048")
    with pytest.raises(UsageError, match="no file and no shipped config"): load(tmp_path)
    assert load((tmp_path/"empty.yaml").write_text("# nothing\n") and tmp_path/"empty.yaml") == RunConfig()


def test_show_lists_every_field_with_its_source():
    lines = show_config(load("train_showcase", {"train.steps": 30}, NSA_ACCUM="2")).splitlines()
    assert [l.split()[0] for l in lines] == list(FIELDS)
    assert [l.split() for l in lines if l.startswith(("train.steps", "train.accum"))] == [
        ["train.steps", "30", "cli"], ["train.accumulate_grad_batches", "2", "env:NSA_ACCUM"]]


def test_a_config_cannot_be_changed_afterwards():
    cfg = load("train_showcase")
    for obj, name in ((cfg.train, "steps"), (cfg, "train"), (cfg.train, "new")):
        with pytest.raises(ValueError): setattr(obj, name, 1)


def test_reading_a_config_needs_no_torch():
    code = "import sys, nsa_nb.config as c; c.load_config('runbook_s512', environ={}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(config_dir()).parent.parent).returncode == 0
