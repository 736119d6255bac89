"A setting acts, or somebody hears that it does not: every field, by what it needs (issue 16, row 13)."
import json
import re
from pathlib import Path

import pytest
import torch

from nsa_nb.data import source
from nsa_nb.config_command import config_main
from nsa_nb.generate import generate_text
from nsa_nb.preflight import preflight_main
from nsa_nb.config import ALWAYS, NEEDS, Machine, config_names, idle_note, idle_settings, load_config, save_config
from nsa_nb.envvars import ENV_VARS
from nsa_nb.errors import EXIT_OK, EXIT_USAGE, UsageError
from nsa_nb.model import TinyLM
from nsa_nb.options import guarded
from nsa_nb.schema import FIELDS, RunConfig
from nsa_nb.data.source import stream_source
from nsa_nb.train import main as train_main, train

LAPTOP = Machine(gpu=False, kernels=False, processes=1)
SERVER = Machine(gpu=True, kernels=True, processes=8)

# a value that asks for something, for each field that does not act in every run
ASKS = {"nsa.l": 32, "nsa.d": 4, "nsa.l_sel": 64, "nsa.n_sel": 4, "nsa.w": 16, "nsa.n_init": 2, "nsa.n_local": 1,
        "nsa.phi": "conv", "nsa.gate": "softmax", "nsa.gate_temp": 3.0, "nsa.cmp_rope": "after",
        "nsa.shared_kv": True, "data.tokenizer_path": "nowhere", "data.local_path": "nowhere.txt",
        "data.val_fraction": .3, "data.cross_documents": True, "data.cache_dir": "nowhere",
        "data.hf_dataset": "no/where", "data.hf_revision": "none-such", "data.hf_name": "other",
        "data.hf_split": "other", "data.data_files": "http://127.0.0.1:9/a.parquet", "data.prefetch": False,
        "data.doc_batch": 3, "data.loader_timeout": 1.0, "data.report_docs": 1, "data.synthetic_on_fail": True,
        "data.queue": 2, "data.warmup_batches": 3, "data.warmup_timeout": 1.0,
        "runtime.backend": "torch", "runtime.use_triton_sel": False, "runtime.use_flash": False,
        "runtime.fa2_enabled": True, "runtime.fa2_win": True, "runtime.fa2_min_len_win": 99,
        "runtime.fa2_cmp": True, "runtime.fa2_min_len_cmp": 99, "runtime.selection": "v2",
        "runtime.selection_v2_min_s": 99, "runtime.sel_pack": False, "runtime.sel_varlen": False,
        "runtime.prefill_tile": 7, "runtime.force_parity": True, "runtime.strict_asserts": True,
        "runtime.debug_compare": True, "runtime.merge_micro_batches": True, "runtime.memory_check": False,
        "runtime.parallel": "fsdp", "runtime.grad_compression": "bf16", "runtime.ddp_safe": True, "train.muon_lr": .1,
        "train.decay_steps": 1, "train.min_lr_ratio": .5,
        "monitor.warn_entropy_mean": 1.0, "monitor.crit_entropy_mean": .4, "monitor.warn_max_gate": .5,
        "monitor.crit_max_gate": .99, "monitor.warn_collapse_frac": .05, "monitor.crit_collapse_frac": .9,
        "monitor.crit_patience": 1}
# for each need: settings under which it does not hold
BREAKS = {"with model.attention nsa": {"model.attention": "dense"}, "with nsa.gate softmax": {},
          "with data.tokenizer gpt2": {}, "with data.dataset local or fineweb_edu_local": {},
          "with text: data.dataset other than synthetic": {"data.dataset": "synthetic"},
          "with data.dataset stdlib or local": {"data.dataset": "synthetic"}, "with data.dataset fineweb_edu": {},
          "without web addresses in data.data_files": {"data.dataset": "fineweb_edu",
                                                       "data.data_files": "http://127.0.0.1:9/a.parquet"},
          "without data.data_files": {"data.dataset": "fineweb_edu", "data.data_files": "sample/*.parquet"},
          "with data.dataset fineweb_edu or fineweb_edu_local": {},
          "with data.prefetch true": {"STREAM": 1, "data.prefetch": False},
          "with data.warmup_batches of 2 or more": {"STREAM": 1},
          "with runtime.force_parity false": {"runtime.force_parity": True},
          "with runtime.backend auto or triton": {"runtime.backend": "torch"},
          "with runtime.use_triton_sel true": {"runtime.use_triton_sel": False},
          "with runtime.use_flash true": {"runtime.use_flash": False},
          "where runtime.fa2_enabled or fa2_win asks for FlashAttention-2": {},
          "where runtime.fa2_win does not say otherwise": {"runtime.fa2_win": False},
          "to switch it off (false): FlashAttention-2 can't serve the compressed branch": {},
          "to switch it off (-1): FlashAttention-2 can't serve the compressed branch": {},
          "with runtime.selection adaptive": {"runtime.selection": "v1"},
          "with data.cross_documents false": {"data.cross_documents": True},
          "with runtime.sel_varlen false or null": {"runtime.sel_varlen": True},
          "with runtime.prefill_batched true": {"runtime.prefill_batched": False},
          "with train.accumulate_grad_batches of 2 or more": {},
          "with runtime.parallel ddp": {"runtime.parallel": "fsdp"},
          "with train.optimizer muon": {}, "with train.lr_schedule wsd": {},
          "with train.lr_schedule cosine or wsd": {"train.lr_schedule": "constant"}}
MACHINE = {"where Triton kernels run", "on a GPU", "with several processes",
           "on a GPU, or with a streamed data.dataset"}
PAIRS = [(key, need) for key, needs in NEEDS.items() for need in needs]


def breaking(need, stream_folder="d"):
    "Settings under which a need does not hold."
    more = dict(BREAKS[need.when])
    if more.pop("STREAM", None): more |= {"data.dataset": "fineweb_edu_local", "data.local_path": str(stream_folder)}
    return more


# ---- the table is whole

def test_every_field_is_in_the_table_or_always_acts():
    assert not NEEDS.keys() & ALWAYS
    new = set(FIELDS) - NEEDS.keys() - ALWAYS
    assert not new, "say in 0_base/080_config when these act (NEEDS), or that they act in every run (ALWAYS)"
    assert NEEDS.keys() | ALWAYS <= set(FIELDS)


def test_every_need_and_every_field_of_the_table_is_tried_here():
    assert {n.when for _, n in PAIRS if not n.machine} == set(BREAKS)
    assert {n.when for _, n in PAIRS if n.machine} == MACHINE
    assert set(ASKS) == set(NEEDS)
    default = RunConfig().flat()
    for key, value in ASKS.items(): assert value != default[key], key


# ---- what is said of each

@pytest.mark.parametrize("key,need", [pytest.param(k, n, id=f"{k}-{n.when}") for k, n in PAIRS if not n.machine])
def test_each_setting_that_cannot_act_is_refused_or_told(key, need, tmp_path):
    "On the command line refused with the remedy, in a file or a variable told; and with the remedy the need holds."
    more = {k: v for k, v in breaking(need).items() if k != key}
    settings = more | {key: ASKS[key]}
    if ASKS[key] is not False:      # else it only switches off what is not there: told
        with pytest.raises(UsageError) as e: load_config(None, settings, {})
        line = next(l for l in str(e.value).splitlines() if l.startswith(f"{key}={ASKS[key]!r}"))
        assert need.when in line and "leave it out" in line
        for k, v in need.give.items():
            option = k.partition(".")[2].replace("_", "-")
            assert f"--{'no-' if v is False else ''}{option}" in line
    path = tmp_path/"mine.yaml"
    path.write_text(json.dumps(nest(settings)))      # JSON is YAML
    cfg = load_config(path, None, {})
    found = {i.key: i for i in idle_settings(cfg)}
    assert found[key].need == need and found[key].source == f"file:{path}"
    clears = key == "runtime.fa2_enabled" and "fa2_win" in need.when      # from a higher layer it reaches the branches
    for var in [v for v in ENV_VARS.values() if v.field == key and v.name != "NSA_SEL_RANGES_V2" and not clears]:
        file = write(tmp_path/"more.yaml", more) if more else None
        cfg = load_config(file, None, {var.name: str(ASKS[key])})
        assert key in {i.key for i in idle_settings(cfg)}
    if need.give:
        file = {"data.local_path": "d"} if need.give.get("data.dataset") == "local" else {}
        mended = RunConfig(**nest(settings | need.give | file))
        assert need.holds(mended, None), "the remedy does not help"


def nest(settings):
    out = {}
    for k, v in settings.items(): out.setdefault(k.partition(".")[0], {})[k.partition(".")[2]] = v
    return out


def write(path, settings):
    save = RunConfig(**nest(settings))
    save_config(save, path)
    return path


@pytest.mark.parametrize("key", sorted({k for k, n in PAIRS if n.machine}))
def test_what_the_machine_stands_against_is_told_and_never_refused(key):
    settings = {key: ASKS[key]} | ({"runtime.fa2_win": True} if key == "runtime.fa2_min_len_win" else {})
    cfg = load_config(None, settings, {})
    assert [i for i in idle_settings(cfg, SERVER) if i.key == key] == []
    assert [i.need.machine for i in idle_settings(cfg, LAPTOP) if i.key == key] == [True]
    layer_tells = key in ("runtime.fa2_enabled", "runtime.fa2_win")      # with the layer's own reason: test_counters.py
    assert layer_tells or key in idle_note(cfg, LAPTOP)


def test_shipped_configs_load_without_a_word():
    for name in config_names():
        for machine in (None, LAPTOP, SERVER): assert idle_note(load_config(name, None, {}), machine) is None, name


def test_a_saved_config_says_no_more_than_its_run_did(tmp_path):
    "Its fields are all written down; those that keep their defaults ask for nothing."
    save_config(load_config("train_showcase", {"train.steps": 3}, {}), tmp_path/"config.yaml")
    assert idle_note(load_config(tmp_path/"config.yaml", None, {}), LAPTOP) is None


def test_the_variables_that_runbooks_export_are_never_an_error():
    "Whatever the configuration: told at most, in one line."
    export = dict(NSA_USE_FA2="1", NSA_USE_FA2_WIN="1", NSA_USE_FA2_CMP="1", NSA_FA2_MIN_LEN_WIN="512",
                  NSA_FA2_MIN_LEN_CMP="512", NSA_USE_TRITON_SEL="1", NSA_USE_SEL_PACK="1", NSA_USE_SEL_VARLEN="1",
                  NSA_SEL_RANGES_V2="1", NSA_SEL_RANGES_V2_MIN_S="2048", NSA_PREFILL_BATCHED="1",
                  NSA_PREFILL_TILE="64", NSA_FORCE_PARITY="0", NSA_STRICT_ASSERTS="0", NSA_FWE_DOC_BATCH="64",
                  NSA_FWE_PREFETCH="1",
                  NSA_FWE_Q="8", NSA_FWE_WARMUP_BATCHES="32", NSA_FWE_WARMUP_TIMEOUT="90", NSA_DDP_SAFE="1",
                  NSA_SDPA_AUDIT="1", NSA_TOKENIZER="byte", NSA_BATCH_SIZE="2", NSA_ACCUM="2")
    for name in (None, *config_names()):
        for more in ({}, {"model.attention": "dense"}, {"data.dataset": "synthetic"}):
            note = idle_note(load_config(name, more, export), LAPTOP)
            assert note.count("\n") == 0 and "NSA_FWE_Q" in note and "NSA_DDP_SAFE" in note


# ---- the command

@pytest.mark.parametrize("argv,says", [
    (["--local-path", "own.txt"], ["data.local_path='own.txt'", "give --dataset local"]),
    (["--gate-temp", "2"], ["nsa.gate_temp=2.0", "give --gate softmax"]),
    (["--muon-lr", "0.1"], ["give --optimizer muon"]), (["--decay-steps", "9"], ["give --lr-schedule wsd"]),
    (["--data-files", "http://x/a.parquet"], ["give --dataset fineweb_edu"])])
def test_the_command_names_what_to_give(argv, says, tmp_path, capsys):
    (tmp_path/"own.txt").write_text("my own text " * 999)
    for main in (train_main, preflight_main, lambda args: config_main(["check", *args])):
        assert guarded(main, [*argv, "--out-dir", str(tmp_path/"run")] if main is train_main else argv) == EXIT_USAGE
        err = capsys.readouterr().err
        for words in says: assert words in err, err
    assert not (tmp_path/"run").exists()


def test_config_check_names_what_it_checked(monkeypatch, capsys):
    monkeypatch.setenv("CONFIG", "runbook_s512")
    assert guarded(config_main, ["check"]) == EXIT_OK and capsys.readouterr().out == "runbook_s512: right\n"
    monkeypatch.delenv("CONFIG")
    monkeypatch.setenv("NSA_FWE_Q", "2")
    assert guarded(config_main, ["check"]) == EXIT_OK
    said = capsys.readouterr()
    assert said.out == "defaults: right\n" and "NSA_FWE_Q (acts only with data.dataset fineweb_edu" in said.err


# ---- and they truly have no effect

TINY = {"model.dim": 16, "model.n_heads": 2, "model.n_kv_groups": 1, "model.d_k": 8, "model.d_v": 8,
        "train.seq_len": 48, "train.batch_size": 2, "train.steps": 2, "train.log_every": 1, "train.eval_every": 0,
        "train.warmup_steps": 1, "train.save_every": 0, "train.sample_tokens": 2, "monitor.leak_probe_every": 0,
        "train.eval_batches": 1, "monitor.heartbeat_every": 1, "runtime.device": "cpu", "train.async_save": False}
VOLATILE = re.compile(r"(?m)^(\d+,[^,]+,[^,]+),[^,]+,")      # tokens per second


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    "run(settings) → training.csv without its rates, val.csv, samples.txt; each run once."
    top = tmp_path_factory.mktemp("acts")
    kept = {}
    folder = top/"rows"
    folder.mkdir()
    (folder/"a.jsonl").write_text("".join(f'{{"text": "document {i} of the stream, with some words in it"}}\n'
                                          for i in range(200)))

    def run(settings):
        key = repr(sorted(settings.items(), key=str))
        if key not in kept:
            out = top/f"run{len(kept)}"
            everything = TINY | {"data.cache_dir": str(top/"cache")} | settings | {"train.out_dir": str(out)}
            cfg = RunConfig(**nest(everything))      # by keyword: nothing is refused
            torch.use_deterministic_algorithms(False)
            train(cfg)
            training, *others = ((out/name).read_text() for name in ("training.csv", "val.csv", "samples.txt"))
            kept[key] = VOLATILE.sub(r"\1,", training), *others
        return kept[key]
    run.folder = folder
    threads = torch.get_num_threads()
    torch.set_num_threads(1)      # products this small only wait for a second thread
    yield run
    torch.set_num_threads(threads)


ELSEWHERE = {"with data.dataset stdlib or local", "without web addresses in data.data_files",
             "without data.data_files", "with runtime.prefill_batched true"}      # below: they shape no training
TRAINED = sorted({n.when for _, n in PAIRS if not n.machine} - ELSEWHERE)


def fits(base, keys):
    "The settings of ASKS for these fields that a configuration takes all together."
    out = {k: ASKS[k] for k in keys if k not in base}
    if "data.local_path" in out and base.get("data.dataset") == "fineweb_edu_local": del out["data.local_path"]
    return out


@pytest.mark.parametrize("when", TRAINED)
def test_a_setting_whose_need_does_not_hold_changes_nothing(when, runs):
    "All fields that have this need, set at once, against the run without them: equal numbers, to the last digit."
    need = next(n for _, n in PAIRS if n.when == when)
    base = breaking(need, runs.folder)
    if "data.dataset" not in base:      # a small text, but where the path itself is asked about
        local = {"data.dataset": "local", "data.local_path": str(runs.folder)}
        base |= {"data.dataset": "synthetic"} if need is NEEDS["data.local_path"][0] else local
    asked = fits(base, [k for k, n in PAIRS if n.when == when])
    cfg = RunConfig(**nest(base | asked))
    assert not need.holds(cfg, None), "this base does not break the need"
    assert runs(base | asked) == runs(base)


def test_what_needs_a_gpu_or_more_processes_changes_nothing_without(runs):
    base = {"data.dataset": "synthetic"}
    asked = fits(base, [k for k, n in PAIRS if n.machine]) | {"runtime.fa2_cmp": True}
    del asked["runtime.grad_compression"]      # not with fsdp
    assert runs(base | asked) == runs(base) == runs(base | {"runtime.grad_compression": "bf16"})


def test_the_cache_folder_of_data_that_have_no_cache(runs, tmp_path):
    for base in ({"data.dataset": "synthetic"},
                 {"data.dataset": "fineweb_edu_local", "data.local_path": str(runs.folder)}):
        assert runs(base | {"data.cache_dir": str(tmp_path/"cache")}) == runs(base)
    assert not (tmp_path/"cache").exists()


def test_fields_of_the_hub_beside_addresses_and_patterns(monkeypatch):
    "Addresses are the whole list of files; a pattern takes the place of subset and split."
    monkeypatch.setattr(source, "unreachable", lambda *args: None)
    def data(**kw): return RunConfig(data=dict(dataset="fineweb_edu") | kw).data
    asked = {k.partition(".")[2]: v for k, v in ASKS.items() if k.startswith("data.hf_")}
    files = "http://127.0.0.1:9/a.parquet"
    assert stream_source(data(data_files=files, **asked)) == stream_source(data(data_files=files))
    calls = []
    class Hub:
        class config: data_files = None
        @staticmethod
        def load_dataset_builder(name, subset, data_files, revision):
            calls.append((name, subset, list(data_files.values()), revision))
            Hub.config.data_files = {split: ["hf://datasets/a/b@c/d.parquet".replace("a/b", "a%2Fb")]
                                     for split in data_files}
            return Hub
        @staticmethod
        def get_token(): return None
    monkeypatch.setattr(source, "import_module", lambda name: Hub)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    got = [stream_source(data(data_files="d/*.parquet", **more))
           for more in ({}, dict(hf_name="other", hf_split="other"))]
    assert calls[0] == calls[1] and got[0].files == got[1].files


def test_a_tile_without_batched_prefill(runs, tmp_path, monkeypatch):
    "generate goes token by token, whatever the tile."
    runs({"data.dataset": "synthetic"})
    path = sorted(runs.folder.parent.glob("run*/model.pt"))[0]
    seen = []
    generate = TinyLM.generate
    def spy(self, *args, **kw):
        seen.append(kw.get("prefill_tile"))
        return generate(self, *args, **kw)
    monkeypatch.setattr(TinyLM, "generate", spy)
    texts = []
    for tile in (0, 7):
        saved = torch.load(path, weights_only=True)
        saved["cfg"]["runtime"] |= dict(prefill_batched=False, prefill_tile=tile)
        torch.save(saved, tmp_path/"model.pt")
        texts.append(generate_text(tmp_path/"model.pt", "some words to go on with", 4))
    assert texts[0] == texts[1] and seen == [1, 1]


def test_the_table_is_in_the_docs():
    "By its own code, so that it cannot fall behind."
    notebook = (Path(__file__).resolve().parents[1]/"nbs"/"0_base"/"080_config.ipynb").read_text()
    assert "Markdown(needs_table())" in notebook
