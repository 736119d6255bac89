"""Every kernel of the package compiles for A100, RTX 4090 and H100 on a machine that has none of them, and fits
their shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytest.importorskip("triton")


def compiled(tmp_path, *args) -> dict:
    "What tests/kernel_compile.py found; a process of its own, for it must not be Triton's interpreter."
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | dict(OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/kernel_compile.py"), "--json", str(tmp_path / "rows.json"), *args],
        capture_output=True, text=True, env=env,
    )
    print(done.stdout)
    assert (tmp_path/"rows.json").exists(), done.stderr[-3000:]
    return json.loads((tmp_path/"rows.json").read_text())


def check(found: dict):
    bad = [f"{r['kernel']}, {r['case']}, sm_{r['target']}: {r['error']}" for r in found["rows"] if "error" in r]
    assert not bad, "\n".join(bad)
    assert not found["missing"], f"no case of tests/kernel_compile.py launches {found['missing']}: add a call to CASES"


@pytest.mark.parametrize("targets", [{80, 90}, pytest.param({89}, marks=pytest.mark.slow)], ids=str)
def test_each_kernel_compiles_without_a_card(targets, tmp_path):
    found = compiled(tmp_path, "--targets", ",".join(map(str, targets)))
    check(found)
    at = {}
    for r in found["rows"]:
        # compiled to the end, not only as far as its shared memory
        if "dot" in r: at.setdefault(r["kernel"], set()).add(r["target"])
    assert set(at) == {r["kernel"] for r in found["rows"]}
    assert all(compiled_for == targets for compiled_for in at.values()), at
    if 90 in targets: assert "wgmma" in {r.get("dot") for r in found["rows"]}, "an H100 has its own matrix instruction"
    assert all(r.get("dot") != "wgmma" for r in found["rows"] if r["target"] < 90)


@pytest.mark.slow
def test_each_case_compiles_for_each_target(tmp_path):
    check(compiled(tmp_path, "--every-target"))
