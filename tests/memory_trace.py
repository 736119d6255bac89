"""What PyTorch's partitioner keeps of a compiled block from forward to backward; run as a program it prints one
JSON line a case. Nothing is computed: it stops when the graphs are known."""

import contextlib
import json
import os

os.environ["TRITON_INTERPRET"] = "1"      # the kernels' operators are traced on a CPU, not run

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from nsa_nb.config import load_config
from nsa_nb.memory import block_memory, loss_bytes
from nsa_nb.model import build_model, run_block, run_tail

N = 2048


class Known(Exception): pass


def kept(cfg, what: str, e: int) -> int:
    "Bytes, without what is there anyway: the arguments."
    found = []

    def partition(joint, inputs, **kw):
        forward, _ = min_cut_rematerialization_partition(joint, inputs, **kw)
        out = next(n for n in forward.graph.nodes if n.op == "output").args[0]
        found.extend(
            n.meta["val"]
            for n in out[kw["num_fwd_outputs"] :]
            if n.op != "placeholder" and isinstance(n.meta["val"], torch.Tensor)
        )
        raise Known

    torch._dynamo.reset()
    model = build_model(cfg, 256)
    block = model.blocks[0]
    x = torch.randn(1, N, cfg.model.dim, requires_grad=True)
    cu = torch.tensor([0, 700, N], dtype=torch.int32)
    place = block.attn.place(1, N, cu, x.device)
    build = lambda f: torch.compile(
        f,
        backend=aot_autograd(fw_compiler=lambda g, i: g, decompositions=select_decomp_table(), partition_fn=partition),
        fullgraph=True, dynamic=False,
    )
    with contextlib.suppress(Exception), torch.autocast("cpu", torch.bfloat16) if e == 2 else contextlib.nullcontext():
        if what == "tail": build(run_tail)(model.norm, model.head, x, torch.zeros(1, N, dtype=torch.long))
        else: build(run_block)(block, x, place.cu, N, place, cfg.runtime.gradient_checkpointing)
    assert found, "the partitioner was not reached"
    return sum(v.numel() * v.element_size() for v in found)


CASES = [
    ("block", 2, "off", {}), ("block", 2, "selective", {}),
    ("block", 4, "off", {"nsa.phi": "conv", "model.n_heads": 6}), ("tail", 2, "off", {}),
]

if __name__ == "__main__":
    for what, e, keep, over in CASES:
        cfg = load_config(
            "m7c_125m_1xa100_production",
            {
                "model.n_layers": 1, "runtime.device": "cpu", "runtime.backend": "triton",
                "runtime.gradient_checkpointing": keep, **over,
            },
            environ={},
        )
        b = block_memory(cfg, e, keep)
        stream = 4 * cfg.model.dim
        counted = (
            loss_bytes(cfg, 256, e, N, True)[0] - N * stream if what == "tail" else N * (b.kept - stream) + b.weights
        )
        print(json.dumps(dict(case=[what, e, keep, over], asked=kept(cfg, what, e), counted=counted)), flush=True)
