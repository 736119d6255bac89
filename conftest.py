"Order of the checks, what needs a GPU, and the count of what was skipped for want of one."
import os
from pathlib import Path

import pytest

# Tests must not depend on what the shell that starts them has set for runs.
for name in [n for n in os.environ if n.startswith("NSA_") or n in ("CONFIG", "DDP_SAFE")]: del os.environ[name]

WANTS = {"cuda": (1, "needs a GPU"), "multigpu": (2, "needs two GPUs")}


def pytest_addoption(parser): parser.addoption("--slow", action="store_true", help="run tests marked slow too")


def gpus() -> int:
    import torch
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_collection_modifyitems(config, items):
    "Unit tests first, then the runbooks, then the docs; mark what this machine cannot run."
    rank = lambda item: sum(2**i for i, m in enumerate(("runbook", "docs")) if item.get_closest_marker(m))
    items.sort(key=rank)   # stable: files keep their order
    have = gpus() if any(i.get_closest_marker(m) for i in items for m in WANTS) else 0
    for item in items:
        for mark, (n, reason) in WANTS.items():
            if have < n and item.get_closest_marker(mark): item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))


def pytest_terminal_summary(terminalreporter, config):
    from tests.ci.nbdev_tests import skipped_cells
    reasons = [str(r.longrepr[2]) for r in terminalreporter.stats.get("skipped", []) if isinstance(r.longrepr, tuple)]
    want = sum(any(reason in r for _, reason in WANTS.values()) for r in reasons)
    cells = skipped_cells(Path(config.rootpath)/"nbs")
    gpu = cells["cuda"] + cells["multigpu"]
    terminalreporter.write_line(
        f"Skipped for want of a GPU: {gpu} notebook cells, {want} tests. "
        f"Skipped for their length: {cells['slow']} cells, {sum('slow' in r for r in reasons)} tests."
    )
