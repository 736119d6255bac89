"""nsa bench tune on real kernels, in Triton's interpreter: every kernel can be launched alone with other sizes,
and other sizes give the same results."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
SCRIPT = """
import torch
from nsa_nb.bench.measure import parse_shape
from nsa_nb.bench.tune import Card, agree, neighbours, kernel_call
from nsa_nb.kernels.tuning import DEFAULTS, tiles
card, case = Card("fp32", "cpu", jobs=0), (parse_shape("H2G1D16"), 144)
for kernel in DEFAULTS:
    old = tiles(kernel, 16, 16, 32)
    want = card.run(kernel, old, *case)
    assert want and all(x.numel() and not x.isnan().any() for x in want), kernel
    other = next(n for n in neighbours(old) if n["BM"] != old["BM"])
    assert card.compile(kernel, [other], [case]) == [None], kernel
    assert agree(card.run(kernel, other, *case), want), kernel
    kernel_call.cache_clear()
print("all", len(DEFAULTS))
"""


def test_each_kernel_alone():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("all ")


def test_the_verb_is_known():
    from nsa_nb.verbs import bench_verb
    with pytest.raises(SystemExit) as e: bench_verb(["tune", "--help"])
    assert e.value.code == 0


@pytest.mark.parametrize(
    "args, words",
    [
        (["--shapes", "A,H2G1D300"], "up to 256"), (["--seconds", "nan"], "--seconds nan"),
        (["--seconds", "inf"], "--seconds inf"), (["--budget", "-4"], "--budget -4"),
        (["--budget", "nan"], "--budget nan"), (["--lengths", ""], "--lengths ''"), (["--out", "."], "is a folder"),
    ],
)
def test_wrong_use_is_told_first(args, words):
    from nsa_nb.errors import UsageError
    from nsa_nb.verbs import bench_verb
    with pytest.raises(UsageError, match=words): bench_verb(["tune", *args])


@pytest.mark.parametrize(
    "text",
    [
        "[]", "null", '{"rows_fwd/64/16": 5}', '{"rows_fwd/64/16": {"BM": 64}}',
        '{"rows_fwd/64/16": {"BM": 48, "BN": 64, "num_warps": 8, "num_stages": 3}}',
    ],
)
def test_a_spoilt_file_does_not_stop_the_kernels(tmp_path, monkeypatch, text):
    from nsa_nb.kernels import tuning
    (tmp_path/"card.json").write_text(text)
    monkeypatch.setattr(tuning, "cache_file", lambda: tmp_path / "card.json")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    tuning.sizes_changed()
    try:
        with pytest.warns(UserWarning, match="card.json.*nsa bench tune"):
            assert tuning.tiles("rows_fwd", 64, 64, 16, 232448) == tuning.DEFAULTS["rows_fwd"][64, 16]
    finally: tuning.sizes_changed()
