"""The count of a step's memory against what PyTorch itself says, and what preflight makes of it. Against a GPU:
see tests/gpu_runs.md."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from zygote import search_path

from nsa_nb import preflight as module
from nsa_nb.config import load_config
from nsa_nb.memory import peak_memory, remedy
from nsa_nb.monitoring.checks import CheckTable
from nsa_nb.preflight import preflight

HERE = Path(__file__).parent


def test_what_a_block_keeps_is_what_the_partitioner_keeps():
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path()}
    ended = subprocess.run(
        [sys.executable, str(HERE / "memory_trace.py")], env=env, capture_output=True, text=True, timeout=300
    )
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert ended.returncode == 0 and len(found) == 4, ended.stderr[-3000:]
    # what a learned compression keeps of its few weights and positions is not counted
    for f in found: assert abs(f["counted"] / f["asked"] - 1) < 0.006, f


def rows(tmp_path, **over):
    table = preflight(
        load_config(
            "m7c_125m_1xa100_production", {"runtime.device": "cpu", "train.out_dir": str(tmp_path / "run"), **over},
            environ={},
        )
    )
    return {r.name: r for r in table.rows}


def test_preflight_shows_the_activations_of_each_choice(tmp_path):
    for keep in ("off", "selective", "full"):
        row = rows(tmp_path, **{"runtime.gradient_checkpointing": keep})["checkpointing"]
        sizes = [
            float(part.split()[1].replace(",", ""))
            for part in row.value.split("peak: ")[1].split(", ")
            if part[0] in "osf"
        ]
        assert (
            row.value.startswith(f"gradient checkpointing {keep};")
            and sizes == sorted(sizes, reverse=True)
            and sizes[0] > 3 * sizes[2]
        ), row


@pytest.mark.parametrize("gib,level", [(100, "green"), (0.5, "red")])
def test_a_gpu_without_room_is_red_and_has_a_remedy(tmp_path, monkeypatch, gib, level):
    cuda = torch.device("cuda")
    monkeypatch.setattr(module, "pick_device", lambda cfg: cuda)
    monkeypatch.setattr(module, "gpu_room", lambda device: int(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("P", (), dict(total_memory=80 << 30)))
    cfg = load_config("m7c_125m_1xa100_production", environ={})
    table = CheckTable("Preflight")
    module._device_rows(table, cfg, 256, 74_000_000)
    row = next(r for r in table.rows if r.name == "memory")
    assert row.level == level and (row.remedy == "") == (level == "green") and "activations" in row.value, row


def test_the_remedy_fits():
    cfg = load_config("m7c_125m_80g", environ={})
    for gib in (2, 3, 5, 8, 12):
        said = remedy(cfg, 256, 74_000_000, gib * 2**30, 16).split()
        rows = int(said[said.index("--batch-size") + 1]) if "--batch-size" in said else 16
        keep = (
            said[said.index("--gradient-checkpointing") + 1]
            if "--gradient-checkpointing" in said
            else cfg.runtime.gradient_checkpointing
        )
        assert (
            said[0] == "a"
            or peak_memory(cfg, 256, 74_000_000, rows, keep=keep, passes=1 if rows == 16 else 2).total <= gib * 2**30
        ), (gib, said)
