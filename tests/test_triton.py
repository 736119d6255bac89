"""The Triton backend on a GPU: against the reference in float64 on the same card. When it last ran stands in tests/gpu_runs.md.

Tiny shapes in Triton's interpreter are tested by the notebooks 18, 19, 21 and 26 on any machine."""
import random

import pytest
import torch

from nsa_nb.attention import NSAAttention, nsa_attention
from nsa_nb.selection import importance, selections_agree
from nsa_nb.geometry import Geometry
from test_cuda import BLOCKS, make

pytestmark = pytest.mark.cuda
TOL = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}      # SPEC's for the first two; fp16 has 3 bits more than bf16
NAMES = ("o", "dq", "dk_cmp", "dv_cmp", "dk_sel", "dv_sel", "dk_win", "dv_win", "dgates")


def run(backend, xs, sizes, cu=None, gate=None):
    g = xs[7] if gate is None else xs[7] * torch.eye(3, device="cuda", dtype=xs[7].dtype)[gate]
    o, aux = nsa_attention(*xs[:7], g, **sizes, backend=backend, cu_seqlens=cu, return_aux=True)
    do = torch.randn(o.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).to(o)
    return [o, *torch.autograd.grad((o * do).sum(), xs)], aux["indices"], do


def scores(xs, sizes, lengths):
    "Group scores in float64, for the agreement of selections."
    geo = Geometry(**sizes)
    q, k = xs[0].double(), xs[1].double()
    B, S, H, D = q.shape; G = k.shape[2]
    s = torch.einsum("btghd,bkgd->btghk", q.unflatten(2, (G, -1)), k) * D**-0.5
    seen = torch.arange(k.shape[1], device="cuda") * geo.d + geo.l - 1 <= torch.arange(S, device="cuda")[:, None]
    s = s.masked_fill(~seen[None, :, None, None], float("-inf"))
    p = torch.nan_to_num(s.softmax(-1), 0.0)
    return importance(p, geo, geo.num_sel(S)).sum(3)


def compare(xs, sizes, dtype, cu=None, gate=None, lengths=None):
    hi = [x.detach().double().requires_grad_() for x in xs]
    (a, ia, do), (b, ib, _) = run("triton", xs, sizes, cu, gate), run("reference", hi, sizes, cu, gate)
    if not torch.equal(ia, ib):
        assert cu is None
        geo, h = Geometry(**sizes), xs[0].shape[2] // xs[1].shape[2]
        bound = 2.0**-20 * h * (geo.l // geo.d) * (geo.l_sel // geo.d)           # 14_selection says why
        ok = selections_agree(ia, ib, scores(xs, sizes, lengths), bound)
        assert ok.all(), f"selections differ by more than rounding in {(~ok).sum().item()} of {ok.numel()}"
        return None                                  # other blocks, other sums: values are compared where selections are equal
    # Where a query sees one key (S = 1, w = 1) dq and dk cancel to exactly 0: p (dp − Σ p dp). What cancels is about |do| |v| |k| / √D a row, more than |do|;
    # the error of such a gradient is held against a tenth of |do|.
    worst = {n: ((x.double() - y).norm() / torch.maximum(y.norm(), 0.1 * do.double().norm())).item() for n, x, y in zip(NAMES, a, b)}
    assert max(worst.values()) <= TOL[dtype], worst
    return max(worst.values())


def config(i):
    rng = random.Random(i)
    d = rng.choice([4, 8, 16]); l = d * rng.choice([1, 2, 4]); l_sel = max(l, d * rng.choice([2, 4, 8]))
    l_sel = -(-l_sel // d) * d
    sizes = dict(l=l, d=d, l_sel=l_sel, n_sel=rng.choice([3, 4, 8, 12, 16, 33]), w=rng.choice([1, 2, 17, 64, 512]))
    return sizes, rng.choice([1, 2, 4]), rng.choice([1, 2, 3, 4, 6, 8, 16]), rng.choice([16, 32, 64, 128]), rng.choice([1, 2, l - 1 or 1, l, l + 1, 100, 333, 700])


@pytest.mark.parametrize("dtype", TOL, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("i", range(70))
def test_random_configurations(i, dtype):
    sizes, G, h, D, S = config(i)
    compare(make(S, sizes, G * h, G, D, dtype, seed=i), sizes, dtype)


@pytest.mark.parametrize("gate", [0, 1, 2])
def test_each_branch_alone(gate):
    compare(make(500, BLOCKS["showcase"], 12, 2, 64, torch.float32), BLOCKS["showcase"], torch.float32, gate=gate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_packed_documents(dtype):
    for cu in ([0, 1, 32, 33, 200], [0, 31, 63, 64], [0, 15, 16, 500, 900]):
        lengths = [b - a for a, b in zip(cu, cu[1:])]
        xs = make(cu[-1], BLOCKS["paper"], 12, 2, 64, dtype, lengths)
        compare(xs, BLOCKS["paper"], dtype, cu=torch.tensor(cu, dtype=torch.int32, device="cuda"))


def test_widths_of_keys_and_values_may_differ():
    sizes = BLOCKS["small"]
    for Dk, Dv in ((192, 128), (64, 128), (256, 256), (24, 40)):
        xs = make(150, sizes, 4, 2, Dk, torch.float32)
        for i in (2, 4, 6): xs[i] = torch.randn(*xs[i].shape[:-1], Dv, device="cuda", requires_grad=True)
        compare(xs, sizes, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("phi", ["avg", "conv", "mlp"])
def test_the_past_keeps_its_bits(phi, dtype):
    torch.manual_seed(0)
    layer = NSAAttention(96, 12, 2, 16, 16, **BLOCKS["showcase"], phi=phi, backend="triton").to("cuda", dtype)
    x = torch.randn(1, 1400, 96, device="cuda", dtype=dtype)
    with torch.no_grad():
        base = layer(x)
        for t in (1, 15, 16, 17, 31, 32, 33, 511, 512, 513, 1030, 1399):
            y = x.clone(); y[:, t:] = 20 * torch.randn_like(y[:, t:])
            assert torch.equal(base[:, :t], layer(y)[:, :t]), t


def test_forward_and_backward_repeat_bit_for_bit():
    xs = make(3000, BLOCKS["paper"], 12, 2, 64, torch.bfloat16)
    a, b = run("triton", xs, BLOCKS["paper"])[0], run("triton", xs, BLOCKS["paper"])[0]
    for n, x, y in zip(NAMES, a, b): assert torch.equal(x, y), n


def test_a_case_the_kernels_do_not_serve_falls_back_and_says_so_once():
    from nsa_nb import triton_backend
    triton_backend._said.clear()
    xs = make(50, BLOCKS["small"], 4, 2, 16, torch.float64)
    with pytest.warns(UserWarning, match="torch backend is used instead of triton: dtype"): a = nsa_attention(*xs, **BLOCKS["small"], backend="triton")
    assert torch.equal(a, nsa_attention(*xs, **BLOCKS["small"], backend="torch"))


def test_long_sequences_agree_with_the_torch_backend():
    torch.manual_seed(0)
    xs = make(16384, BLOCKS["paper"], 6, 1, 64, torch.float32)
    (a, ia, do), (b, ib, _) = run("triton", xs, BLOCKS["paper"]), run("torch", xs, BLOCKS["paper"])
    same = (ia == ib).all(-1).float().mean().item()
    assert same > 0.999                                # fp32 against fp32: a few scores lie within rounding of the cut
    for n, x, y in zip(NAMES, a, b): assert (x - y).norm() / y.norm() <= (5e-2 if same < 1 else 2e-5), n
