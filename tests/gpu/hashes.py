"""Hashes of what the kernels compute, to see that a change of layout changed no bit.

    python tests/gpu/hashes.py OUT.json [--small]        # --small: sizes for Triton's interpreter on a CPU
    python tests/gpu/hashes.py --compare A.json B.json   # exit code 1 where they differ

Each case is an entry of OUT.json: the SHA-256 of every output and gradient. Inputs are drawn on the host, so two
checkouts on one machine get equal ones. The two checkouts need only SPEC.md's public names in common: run the
script of this one
with PYTHONPATH set to the other."""

import argparse
import hashlib
import json
import sys

import torch
from torch import Tensor

SIZES = {"small": dict(l=8, d=4, l_sel=16, n_sel=4, w=24), "A": {}, "narrow": dict(l=16, d=8, l_sel=32, n_sel=8, w=128)}
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def digest(x: Tensor) -> str:
    "First digits of the SHA-256 of a tensor's bytes."
    flat = x.detach().contiguous().cpu().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def drawn(seed: int, *shape: int, device, dtype) -> Tensor:
    "Normal numbers, drawn on the host."
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).to(device, dtype)


def borders(S: int, parts: int, device) -> Tensor:
    "Documents of unequal lengths, one of them a single token."
    inner = torch.linspace(0, 1, parts)[1:-1].pow(1.7).mul(S).long().clamp(2, S - 2).unique()
    return torch.cat([torch.tensor([0, 1]), inner, torch.tensor([S])]).to(device, torch.int32)


def operation(sizes: dict, S: int, H: int, G: int, Dk: int, Dv: int, dtype, device, packed: bool, **choice) -> dict:
    "nsa_attention forward and backward."
    from nsa_nb.attention import nsa_attention
    from nsa_nb.geometry import Geometry
    geo = Geometry(**sizes)
    cu = borders(S, 6, device) if packed else None
    lengths = (cu[1:] - cu[:-1]).tolist() if packed else [S]
    N = sum(geo.num_cmp(n) for n in lengths)
    B = 1 if packed else 2
    shapes = dict(q=(S, H, Dk), k_cmp=(N, G, Dk), v_cmp=(N, G, Dv), k_sel=(S, G, Dk), v_sel=(S, G, Dv),
                  k_win=(S, G, Dk), v_win=(S, G, Dv), gates=(S, H, 3))
    leaves = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        x = drawn(seed, B, *shape, device=device, dtype=dtype)
        leaves[name] = (x.sigmoid() if name == "gates" else x).requires_grad_()
    o, aux = nsa_attention(**leaves, **sizes, cu_seqlens=cu, backend="triton", return_aux=True, **choice)
    alone = nsa_attention(**leaves, **sizes, cu_seqlens=cu, backend="triton", **choice)
    found = {f"aux {k}": digest(v) for k, v in aux.items()} | {"o": digest(o), "o alone": digest(alone)}
    alone.backward(drawn(99, *alone.shape, device=device, dtype=dtype))
    return found | {f"d{k}": digest(v.grad) for k, v in leaves.items()}


def layer(sizes: dict, S: int, dtype, device, packed: bool, heads: tuple[int, int, int], **kind) -> dict:
    "NSAAttention forward and backward: projections, RoPE, φ, gates."
    from nsa_nb.attention import NSAAttention
    H, G, D = heads
    torch.manual_seed(0)
    attn = NSAAttention(dim=H * D, n_heads=H, n_kv_groups=G, d_k=D, d_v=D, backend="triton", **sizes, **kind)
    attn = attn.to(device, dtype)
    x = drawn(1, 1 if packed else 2, S, H * D, device=device, dtype=dtype).requires_grad_()
    o = attn(x, cu_seqlens=borders(S, 5, device)) if packed else attn(x)
    o.backward(drawn(2, *o.shape, device=device, dtype=dtype))
    grads = {f"d{n}": digest(p.grad) for n, p in attn.named_parameters() if p.grad is not None}
    return {"o": digest(o), "dx": digest(x.grad)} | grads


def model_of(sizes: dict, device, dtype, attention: str = "nsa"):
    "A language model with two layers."
    from nsa_nb.model import TinyLM
    torch.manual_seed(0)
    wide = torch.device(device).type == "cuda"
    H, G, D = (12, 2, 64) if wide else (4, 2, 16)
    model = TinyLM(vocab=256, dim=H * D, n_layers=2, n_heads=H, n_kv_groups=G, d_k=D, d_v=D, attention=attention,
                   **(dict(l=32, d=16, l_sel=64, n_sel=16, w=512) | sizes))
    for attn in model.attentions(): attn.backend = "triton"
    return model.to(device, dtype)


def training(sizes: dict, S: int, dtype, device, attention: str) -> dict:
    "Loss and gradients of a language model on packed documents."
    model = model_of(sizes, device, dtype, attention)
    ids = torch.randint(0, 256, (1, S), generator=torch.Generator().manual_seed(3)).to(device)
    loss = model.nll(ids, ids.roll(-1, 1), cu_seqlens=borders(S, 5, device))
    loss.backward()
    return {"loss": digest(loss)} | {f"d{n}": digest(p.grad) for n, p in model.named_parameters()}


@torch.no_grad()
def decoding(sizes: dict, prompt: int, steps: int, dtype, device, batch: int) -> dict:
    "A prompt, then one token at a time, through growing caches and through what generation replays."
    model = model_of(sizes, device, dtype).eval()
    ids = torch.randint(0, 256, (batch, prompt + steps), generator=torch.Generator().manual_seed(4)).to(device)
    found = {}
    for way in ("growing", "replayed"):
        caches = model.new_caches()
        logits = model(ids[:, :prompt], caches=caches)
        step = model.decode_step(caches, prompt + steps) if way == "replayed" else lambda new: model(new, caches=caches)
        rows = [logits[:, -1].clone()]
        for i in range(prompt, prompt + steps): rows.append(step(ids[:, i:i + 1])[:, -1].clone())
        found[way] = digest(torch.stack(rows))
    return found


def cases(small: bool, device: str):
    "Name and a call, one after the other."
    S, sizes = (70, "small") if small else (2048, "A")
    on_a_card = [(12, 2, 64, 64), (64, 4, 128, 128), (8, 2, 96, 64), (3, 3, 64, 64)]
    heads = [(4, 2, 16, 16), (4, 1, 16, 8)] if small else on_a_card
    kinds = ["fp32"] if small else ["bf16", "fp16", "fp32"]
    ways = [dict(selection=s, window="own") for s in ("v1", "v2", "v3")] + ([] if small else [dict(window="fa2")])
    lengths = [S] if small else [S, 515, 8192]
    for H, G, Dk, Dv in heads:
        for kind in kinds:
            for n in lengths:
                for choice in ways:
                    for packed in (False, True):
                        if choice["window"] == "fa2" and (kind == "fp32" or Dk != Dv): continue
                        if n == 8192 and (kind != "bf16" or H == 8): continue
                        name = f"op S={n} H={H} G={G} D={Dk},{Dv} {kind} {choice} packed={packed}"
                        yield name, operation, (SIZES[sizes], n, H, G, Dk, Dv, FORMATS[kind], device, packed), choice
    narrow = "small" if small else "narrow"
    for selection in ("v1", "v2", "v3"):
        given = (SIZES[narrow], S // 2 + 1, 4, 2, 32, 32, torch.float32, device, True)
        yield f"op narrow {selection}", operation, given, dict(selection=selection, window="own")
    group = (4, 2, 16) if small else (12, 2, 64)
    for kind in kinds[:1]:
        for more in (dict(phi="avg"), dict(phi="conv"), dict(phi="mlp"), dict(shared_kv=True),
                     dict(gate="softmax", gate_temp=0.7), dict(cmp_rope="after"), dict(cmp_rope="none")):
            for packed in (False, True):
                given = (SIZES[sizes], S, FORMATS[kind], device, packed, group)
                yield f"layer {kind} {more} packed={packed}", layer, given, more
    for attention in ("nsa", "dense"):
        if small and attention == "dense": continue
        yield f"training {attention}", training, (SIZES[sizes], S, FORMATS[kinds[0]], device, attention), {}
    for batch in (1, 2) if small else (1, 4, 33):
        prompt, steps = (37, 6) if small else (1000, 40)
        yield f"decoding batch={batch}", decoding, (SIZES[sizes], prompt, steps, FORMATS[kinds[0]], device, batch), {}


def compare(a: str, b: str) -> int:
    "Which values differ; the exit code."
    left, right = (json.load(open(p))["cases"] for p in (a, b))
    missing = sorted(left.keys() ^ right.keys())
    values = [(case, name) for case in left.keys() & right.keys() for name in left[case].keys() | right[case].keys()]
    wrong = sorted((c, n) for c, n in values if left[c].get(n) != right[c].get(n))
    for case in missing: print(f"only in one of them: {case}")
    for case, name in wrong[:40]: print(f"differs: {case}: {name}")
    print(f"{len(left)} cases, {len(values)} values, {len(wrong)} differ, {len(missing)} cases in one file alone")
    return int(bool(wrong or missing))


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out", nargs="?")
    ap.add_argument("--small", action="store_true")
    ap.add_argument("--compare", nargs=2)
    args = ap.parse_args()
    if args.compare: return compare(*args.compare)
    device = "cpu" if args.small else "cuda"
    found = {}
    for name, f, given, choice in cases(args.small, device):
        try: found[name] = f(*given, **choice)
        except Exception as e: found[name] = {"error": f"{type(e).__name__}: {' '.join(str(e).split())[:160]}"}
        if "error" in found[name]: print(f"{name}: {found[name]['error']}", flush=True)
    card = torch.cuda.get_device_name() if device == "cuda" else "CPU, interpreter"
    with open(args.out, "w") as out: json.dump(dict(card=card, torch=torch.__version__, cases=found), out, indent=1)
    print(f"{len(found)} cases, {sum('error' in v for v in found.values())} failed, written to {args.out}")
    return 0


if __name__ == "__main__": sys.exit(main())
