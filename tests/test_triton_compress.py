"""φ on kernels and the layer around it: on a GPU against float64 on the same card, and that nothing waits for the
device; in Triton's interpreter the layer against the torch backend.

Run as a script it is the interpreter's part: TRITON_INTERPRET must be set before Triton is imported, so the
test starts a process."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from zygote import search_path

from nsa_nb import choices, op
from nsa_nb.attention import NSAAttention
from nsa_nb.compress import PHIS, Compressor
from nsa_nb.config import load_config
from nsa_nb.geometry import Geometry
from nsa_nb.model import TinyLM, build_model
from nsa_nb.kernels.packing import compressed_borders
from nsa_nb.kernels.compress import triton_compress

ROOT = Path(__file__).resolve().parents[1]
# SPEC's; mlp rounds its operand and two products
TOL = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SIZES = dict(dim=32, n_heads=4, n_kv_groups=2, d_k=16, d_v=8, l=8, d=4, l_sel=8, n_sel=4, w=12)
cuda = pytest.mark.cuda
phis = pytest.mark.parametrize("phi", PHIS)


def rel(a, b):
    return (
        ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()
        if b.numel() and b.any()
        else a.double().norm().item()
    )


def compress(phi, l, d, S, cu, B, G, Dk, Dv, dtype, seed=0):
    """Kernels, and the plain definition in float64 from the same numbers: (name, result, truth) of outputs and all
    gradients."""
    torch.manual_seed(seed)
    lo = [Compressor(phi, l, d, G, D) for D in (Dk, Dv)]
    hi = [Compressor(phi, l, d, G, D).double().cuda() for D in (Dk, Dv)]
    for a, b in zip(lo, hi):
        for p in a.parameters(): torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
        a.to("cuda", dtype)
        b.load_state_dict(a.state_dict())
    joint = [torch.randn(B, S, 3, G, D).to("cuda", dtype).requires_grad_() for D in (Dk, Dv)]
    up = [j.detach().double().requires_grad_() for j in joint]
    at = cu and torch.tensor(cu, dtype=torch.int32, device="cuda")
    got = triton_compress(
        *lo, *(j[:, :, 1] for j in joint), at, None if cu is None else compressed_borders(at, Geometry(l, d, l, 3, 1))
    )
    want = [m(j[:, :, 1], None if cu is None else [b - a for a, b in zip(cu, cu[1:])]) for m, j in zip(hi, up)]
    n = want[0].shape[1]
    do = [torch.randn_like(x) for x in got]
    assert got[0].shape == (B, max(0, (S - l) // d + 1), G, Dk) and not any(x[:, n:].any() for x in got)
    names = ["k", "v", "dk", "dv"] + [
        f"{m}.{n}" for m, c in zip(("phi_k", "phi_v"), lo) for n, _ in c.named_parameters()
    ]
    ga = torch.autograd.grad(got, joint + [p for m in lo for p in m.parameters()], do)
    gb = torch.autograd.grad(want, up + [p for m in hi for p in m.parameters()], [x[:, :n].double() for x in do])
    return list(zip(names, [*(x[:, :n] for x in got), *ga], [*want, *gb]))


@cuda
@pytest.mark.parametrize("dtype", TOL, ids=lambda d: str(d)[6:])
@phis
@pytest.mark.parametrize(
    "l,d,S,cu,B,G,Dk,Dv",
    [
        (32, 16, 2048, None, 2, 2, 64, 64), (32, 16, 31, None, 1, 2, 64, 64), (32, 16, 32, None, 1, 1, 64, 64),
        (16, 16, 333, None, 1, 4, 128, 128), (64, 8, 700, None, 1, 2, 192, 128), (9, 3, 100, None, 3, 1, 24, 40),
        (32, 16, 3000, [0, 1, 1, 33, 700, 731, 3000], 1, 2, 64, 64), (32, 16, 90, [0, 31, 62, 90], 1, 2, 64, 64),
    ],
)
def test_against_float64(phi, l, d, S, cu, B, G, Dk, Dv, dtype):
    for name, got, want in compress(phi, l, d, S, cu, B, G, Dk, Dv, dtype):
        assert rel(got, want) <= TOL[dtype], (name, rel(got, want))


@cuda
@phis
def test_repeats_bit_for_bit(phi):
    a, b = (compress(phi, 32, 16, 20_000, [0, 999, 12_345, 20_000], 1, 2, 64, 64, torch.bfloat16) for _ in range(2))
    for (name, x, _), (_, y, _) in zip(a, b): assert torch.equal(x, y), name


@cuda
@phis
@pytest.mark.parametrize("rope", ["before", "after", "none"])
@pytest.mark.parametrize("cu", [None, [0, 1, 9, 9, 300, 500]], ids=["row", "packed"])
def test_the_layer_on_kernels_equals_torch(phi, rope, cu):
    torch.manual_seed(0)
    layer = NSAAttention(**SIZES, phi=phi, cmp_rope=rope).cuda()
    x = torch.randn(1, 500, 32, device="cuda", requires_grad=True)
    cu = cu and torch.tensor(cu, dtype=torch.int32, device="cuda")
    both = []
    for layer.backend in ("triton", "torch"):
        y = layer(x, cu)
        # that one's is 0 but for rounding
        both.append(
            [
                y,
                *torch.autograd.grad(
                    y.sin().sum(), [x, *(p for n, p in layer.named_parameters() if n != "phi_k.fc2.bias")]
                ),
            ]
        )
    # fp32 scores within rounding of the cut may choose other blocks
    for a, b in zip(*both): assert rel(a, b) < 1e-4


@cuda
@phis
def test_forward_and_backward_never_wait_for_the_device(phi):
    m = TinyLM(vocab=64, dim=32, n_layers=2, n_heads=4, n_kv_groups=2, phi=phi, grad_checkpointing=True).cuda()
    ids = torch.randint(0, 64, (2, 300), device="cuda")
    cu = torch.tensor([0, 5, 200, 300, 450, 600], dtype=torch.int32, device="cuda")
    m.collect_stats(True)
    m(ids, cu, max_seqlen=300).sum().backward()            # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for borders in (cu, None): m(ids, borders, max_seqlen=300).sum().backward()
    finally: torch.cuda.set_sync_debug_mode("default")
    assert m.read_stats()["sel_k_mean"] > 0


@pytest.mark.parametrize(
    "environ,S,want",
    [
        ({}, 3000, "v3"), ({}, 9000, "v2"), ({"NSA_SEL_RANGES_V2": "0"}, 3000, "v1"),
        ({"NSA_SEL_RANGES_V2": "1"}, 3000, "v2"), ({"NSA_SEL_RANGES_V2_MIN_S": "500"}, 600, "v2"),
        ({"NSA_SEL_RANGES_V2_MIN_S": "700"}, 600, "v3"),
    ],
)
def test_the_variables_choose_the_algorithm(environ, S, want, monkeypatch):
    "From the environment through the config and the model to the operation; max_seqlen, not the row, is what counts."
    class Seen(Exception): pass
    def stop(*args): raise Seen(args[11])  # its parameter `algorithm`

    monkeypatch.setattr(choices, "unsupported", lambda *a: None)
    monkeypatch.setattr(op, "triton_attention", stop)
    cfg = load_config(
        overrides={
            "runtime.backend": "triton", "model.dim": 16, "model.n_heads": 2, "model.n_kv_groups": 1, "model.d_k": 4,
            "model.d_v": 4,
        },
        environ=environ,
    )
    model = build_model(cfg, 8)
    ids = torch.zeros(1, max(S, 9000), dtype=torch.int64)
    cu = torch.tensor([0, *range(S, ids.shape[1], S), ids.shape[1]], dtype=torch.int32)
    with pytest.raises(Seen) as e, torch.no_grad(): model(ids, cu, max_seqlen=S)
    assert str(e.value) == want


def test_no_triton_when_the_variable_says_so(monkeypatch):
    cfg = load_config(overrides={"runtime.backend": "triton"}, environ={"NSA_USE_TRITON_SEL": "0"})
    monkeypatch.setattr(op, "triton_attention", None)
    build_model(cfg, 8)(torch.zeros(1, 40, dtype=torch.int64))


def interpreted():
    "The layer on kernels against the torch backend, and the operators under torch.library's own checks."
    from nsa_nb.kernels.compress import compress_backward_op, compress_op, gather_backward_op, gather_op
    torch.manual_seed(0)
    x = torch.randn(1, 30, 32, requires_grad=True)
    for phi, rope, borders in (
        ("avg", "before", [0, 3, 12, 30]), ("conv", "after", [0, 3, 12, 30]), ("mlp", "after", None),
        ("mlp", "before", [0, 9, 30]),
    ):
        layer = NSAAttention(**SIZES, phi=phi, cmp_rope=rope)
        both = []
        cu = borders and torch.tensor(borders, dtype=torch.int32)
        params = [p for n, p in layer.named_parameters() if n != "phi_k.fc2.bias"]
        for layer.backend in ("triton", "torch"):
            y = layer(x, cu)
            both.append([y, *torch.autograd.grad(y.sin().sum(), [x, *params])])
        for a, b in zip(*both): assert rel(a, b) < 1e-5, (phi, rope, borders, rel(a, b))
    k, v = torch.randn(1, 20, 2, 6, requires_grad=True), torch.randn(1, 20, 2, 4, requires_grad=True)
    cu = torch.tensor([0, 9, 20], dtype=torch.int32)
    cu_cmp = compressed_borders(cu, Geometry(8, 4, 8, 3, 1))
    w = [torch.randn(2, 8, D, requires_grad=True) for D in (6, 4)]
    p = [torch.randn(8, D, requires_grad=True) for D in (6, 4)]
    for f, args in (
        (compress_op, (k, v, None, None, None, None, 8, 4)), (compress_op, (k, v, *w, cu, cu_cmp, 8, 4)),
        (gather_op, (k, v, *p, cu, cu_cmp, 8, 4)), (gather_op, (k, v, *p, None, None, 8, 4)),
    ):
        torch.library.opcheck(f, args)
        grads = [torch.randn_like(x) for x in f(*args)]
        kept = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
        if f is gather_op:
            torch.library.opcheck(gather_backward_op, (*grads, *kept[4:], 20))
        else:
            torch.library.opcheck(
                compress_backward_op, (*grads, *(kept[:2] if args[2] is not None else (None, None)), *kept[2:], 20)
            )

    def phi(mod, k, v): return triton_compress(*mod, k, v, cu, cu_cmp)
    for name in PHIS:
        mod = [Compressor(name, 8, 4, 2, D) for D in (6, 4)]
        for a, b in zip(torch.compile(phi, fullgraph=True, backend="aot_eager")(mod, k, v), phi(mod, k, v)):
            assert torch.equal(a, b)
    told_by_a_layer()
    print("same")


def told_by_a_layer():
    "What Triton was asked for and PyTorch does is told once, counted, and in the audit."
    def counted(layer, x):
        before = op.fallbacks.counts["selection_triton"]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            layer(x)
            layer(x)
        return (op.fallbacks.counts["selection_triton"] - before) / 2, [str(w.message) for w in told]
    x = torch.randn(1, 20, 32)
    for more, n, reason in (
        (dict(), 0, None), (dict(l=1, d=1), 1, "head width 16, l=1"), (dict(d_k=4), 1, "head width 4, l=8"),
        (dict(d_v=6), 1, "head width 6, l=8"),
    ):
        layer = NSAAttention(**SIZES | more, backend="triton")
        calls, told = counted(layer, x)
        found = layer.audit(20, torch.float32)
        assert calls == len(told) == n and (n == 0 or reason in told[0]), (more, calls, told)
        assert (found["backend"], found["compressed"]) == ("triton", "own Triton kernel" + ", φ by PyTorch" * n)
        assert found["fallbacks"] == (dict(selection_triton=told[0]) if n else {})
    layer = NSAAttention(**SIZES, backend="triton").double()
    calls, told = counted(layer, x.double())
    # the projections' turn, φ, the branches
    assert calls == len(told) == 3 and all("dtype torch.float64" in t for t in told), told
    found = layer.audit(20, torch.float64)
    assert (
        found["backend"] == "torch"
        and found["compressed"].startswith("torch backend")
        and all(t in found["fallbacks"]["selection_triton"] for t in told)
    ), found
    # Triton was not chosen
    assert counted(NSAAttention(**SIZES | dict(l=1, d=1), backend="torch"), x) == (0, [])


def test_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, cwd=ROOT,
        env=os.environ | dict(TRITON_INTERPRET="1", PYTHONPATH=search_path()),
    )
    assert done.returncode == 0 and done.stdout.endswith("same\n"), done.stdout[-1000:] + done.stderr[-3000:]


if __name__ == "__main__": interpreted()
