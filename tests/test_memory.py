"""16k tokens forward and backward on a CPU stay under 2 GB, and nothing as large as a table of S x S scores is made."""
import json
import os
import subprocess
import sys
from pathlib import Path

from zygote import search_path

CODE = r"""
import json, resource, sys
from pathlib import Path
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

class Largest(TorchDispatchMode):
    "The largest tensor that any operation returned. Its storage counts: a view is as large as what it shows."
    numel, ops, phase, by_phase = 0, 0, "forward", {}
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.ops += 1
                self.by_phase[self.phase] = self.by_phase.get(self.phase, 0) + 1
                if x.numel() > self.numel:
                    self.numel, self.where = x.numel(), (self.phase, str(func), list(x.shape))
        return out

def rss():
    "Most memory this process has held so far, MiB. ru_maxrss has the forking parent's too; VmHWM begins at exec."
    try: return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    except OSError:
        unit = 2 ** 20 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
torch.set_num_threads(1)
torch.ones(8) @ torch.ones(8)
out = dict(torch_alone=rss())
from nsa_nb.attention import NSAAttention
S = int(sys.argv[1])
torch.manual_seed(0)
a = NSAAttention(dim=128, n_heads=8, n_kv_groups=2, d_k=16, d_v=16, l=16, d=8, l_sel=32, n_sel=8, w=64, backend="torch")
x = torch.randn(1, S, 128, requires_grad=True)
out["before"] = rss()
mode = Largest()
with mode:
    y = a(x)
    mode.phase = "backward"
    y.sum().backward()
finite = all(bool(torch.isfinite(t).all()) for t in [y, x.grad, *(p.grad for p in a.parameters())])
out |= dict(peak=rss(), numel=mode.numel, where=mode.where, by_phase=mode.by_phase, finite=finite)
print(json.dumps(out))
"""


def measure(S):
    root = Path(__file__).resolve().parent.parent
    env = os.environ | dict(PYTHONPATH=search_path(root), OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", CODE, str(S)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_16k_tokens_forward_and_backward():
    S, H, d = 16384, 8, 8
    m = measure(S)
    print(f"\n16k tokens: peak {m['peak']:.0f} MiB, of it {m['torch_alone']:.0f} the interpreter with torch alone; "
          f"largest tensor {m['numel'] / 1e6:.1f}M numbers, {m['where']}")
    assert m["finite"]
    assert m["peak"] < 2048
    assert m["by_phase"]["backward"] > 100, "the backward was watched too"
    # S x S and H x S x S/d are both 268M numbers here; half of the smaller would already be a table of scores
    assert m["numel"] < min(S * S, H * S * S // d) / 2
