"""Long sequences on a GPU: 16k against the torch backend, offsets past 2³¹, memory at 128k, a million tokens. One
process, as each takes much of the card.

    pytest tests/test_triton_long.py -s            # --slow adds the million tokens

At these lengths float64 is worked out for sampled queries only (truth64.py); the cotangent is 0 elsewhere, so
that dk and dv are sums over the same few queries, and whole tensors are compared."""

import time

import pytest
import torch
from nsa_nb.attention import nsa_attention
from nsa_nb.geometry import Geometry
from nsa_nb.kernels.inverted_index import chunk_tokens
from nsa_nb.selection import selections_agree
from nsa_nb.kernels.select import scratch_bytes
from truth64 import INPUTS, truth, valid
from triton_cases import ALGORITHMS, BF16, OUTPUTS, SHAPES, TOL, tb

pytestmark = pytest.mark.cuda
PAPER = Geometry()


def inputs(S, geo, H, G, D, dtype, seed=0):
    gen = torch.Generator("cuda").manual_seed(seed)
    r = lambda *s: torch.randn(*s, generator=gen, device="cuda", dtype=dtype)
    return [
        r(1, S, H, D), *(r(1, geo.num_cmp(S), G, D) for _ in range(2)), *(r(1, S, G, D) for _ in range(4)),
        r(1, S, H, 3).sigmoid(),
    ]


def outputs_and_gradients(xs, do, geo, algorithm):
    leaves = [x.detach().requires_grad_(do is not None) for x in xs]
    *outs, indices = tb.triton_attention(*leaves, geo, xs[0].shape[-1] ** -0.5, None, algorithm)
    got = dict(zip(OUTPUTS, (x.detach() for x in outs))) | dict(indices=indices)
    return got if do is None else got | dict(zip(INPUTS, torch.autograd.grad(outs[0], leaves, do)))


class Rows:
    "The sampled rows of a tensor that has been given back."
    def __init__(self, rows): self.rows = rows
    def __getitem__(self, _): return self.rows


def sampled(S, geo, n=64):
    "Query rows: the first and the last, around borders of blocks and of the window, and others by chance."
    some = [0, geo.l - 1, geo.w, S // 2, S // 2 + geo.l_sel - 1, S - geo.l_sel - 1, S - 2, S - 1]
    gen = torch.Generator().manual_seed(0)
    return torch.tensor(sorted({*some, *torch.randint(0, S, (n - len(some),), generator=gen).tolist()}), device="cuda")


def check_rows(got, xs, do, geo, rows):
    """The sampled queries' outputs and dq, and the whole of dk and dv, against float64 on the kernels' selection;
    that selection against float64's scores."""
    dtype = xs[0].dtype
    h = xs[0].shape[2] // xs[3].shape[2]
    indices = got["indices"][:, rows]
    sizes = dict(l_sel=geo.l_sel, n_sel=geo.n_sel, n_init=geo.n_init, n_local=geo.n_local)
    assert valid(indices, **sizes, rows=rows).all()
    t = truth(xs, None if do is None else do[:, rows], **vars(geo), indices=indices, rows=rows)
    ok = selections_agree(indices, t["indices"], t["scores"], 2.0**-20 * h * (geo.l // geo.d) * (geo.l_sel // geo.d))
    assert ok.all(), f"{(~ok).sum().item()} of {ok.numel()} selections differ by more than rounding"
    errors = {}
    for name in OUTPUTS + (INPUTS if do is not None else ()):
        x = got[name][:, rows] if name in OUTPUTS + ("q", "gates") else got[name]
        errors[name] = float((x.double() - t[name]).norm() / t[name].norm())
        assert errors[name] <= TOL[dtype], (name, errors[name])
    return errors, (indices == t["indices"]).all(-1).float().mean().item()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", ["paper", "fp32 h6"])
def test_16k_tokens_agree_with_the_torch_backend(name, algorithm):
    """They round differently, so a few selections differ: the cotangent is 0 on those queries, and on the others
    each may err by one tolerance."""
    s = SHAPES[name]
    S = 16384 - (odd := name != "paper")
    geo = Geometry(s.l, s.d, s.l_sel, s.n_sel, 512 - odd)
    dtype = s.dtype
    xs = inputs(S, geo, s.h, 1, s.Dk, dtype)
    do = torch.randn_like(xs[0])
    leaves = [x.requires_grad_() for x in xs]
    o, aux = nsa_attention(*leaves, **vars(geo), backend="torch", return_aux=True)
    got = outputs_and_gradients(xs, None, geo, algorithm)
    same = (aux["indices"] == got["indices"]).all(-1)                              # [1, S, G]
    assert same.float().mean() > 0.995
    row = same.all(-1)[..., None, None]
    do = do * row
    want = dict(zip(INPUTS, torch.autograd.grad(o, leaves, do)))
    got = outputs_and_gradients(xs, do, geo, algorithm)
    for name, x, y in (("o", got["o"] * row, o.detach() * row), *((n, got[n], want[n]) for n in INPUTS)):
        err = float((x.double() - y.double()).norm() / y.double().norm())
        assert err <= 2 * TOL[dtype], (name, err)


@pytest.mark.parametrize("algorithm", ["v1", "v2", "v3_skip"])
def test_offsets_past_2_to_the_31(algorithm):
    """One row of 349,600 tokens, 24 heads of 256: offsets in q, in o and in the keys, which are slices of one such
    tensor, pass 2³¹ elements. Checked at sampled queries, the last ones among them."""
    s = SHAPES["widest"]
    S = 349600
    G = 8
    geo = Geometry(s.l, s.d, s.l_sel, s.n_sel, 512)
    H = G * s.h
    D = s.Dk
    gen = torch.Generator("cuda").manual_seed(0)
    r = lambda *n: torch.randn(*n, generator=gen, device="cuda", dtype=BF16)
    big = r(1, S, H, D)
    N = geo.num_cmp(S)
    assert big.numel() > 2**31
    xs = [
        big, r(1, N, G, D), r(1, N, G, D), big[:, :, :G], big[:, :, G : 2 * G], big[:, :, 2 * G :], big[:, :, :G],
        r(1, S, H, 3).sigmoid(),
    ]
    rows = sampled(S, geo, 16)
    got = outputs_and_gradients(xs, None, geo, algorithm)
    for name in OUTPUTS: got[name] = Rows(got[name][:, rows].clone())                 # room for float64
    errors, same = check_rows(got, xs, None, geo, rows)
    print(
        f"\n{algorithm}: {S:,} tokens, {H} heads of {D}: largest relative error {max(errors.values()):.2e}, "
        f"{same:.1%} of sampled selections float64's own"
    )


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["v1", "v2", "v3_skip"])
def test_gradients_past_2_to_the_31(algorithm):
    """The same sizes backward: dq, the cotangent and the branches' outputs pass 2³¹ elements. The cotangent is 0
    but for sampled queries, the last ones among them."""
    s = SHAPES["widest"]
    S = 349600
    G = 8
    geo = Geometry(s.l, s.d, s.l_sel, s.n_sel, 512)
    H = G * s.h
    D = s.Dk
    if torch.cuda.get_device_properties(0).total_memory < 120 << 30: pytest.skip("needs some 90 GiB")
    xs = inputs(S, geo, H, G, D, BF16)
    rows = sampled(S, geo, 16)
    assert xs[0].numel() > 2**31
    do = torch.zeros_like(xs[0])
    do[:, rows] = torch.randn(1, len(rows), H, D, device="cuda", dtype=BF16)
    got = outputs_and_gradients(xs, do, geo, algorithm)
    for name in ("o_cmp", "o_sel", "o_win", "o", "q", "gates"): got[name] = Rows(got[name][:, rows].clone())
    errors, same = check_rows(got, xs, do, geo, rows)
    print(
        f"\n{algorithm}: {S:,} tokens, {H} heads of {D}, backward: largest relative error "
        f"{max(errors.values()):.2e}, {same:.1%} of sampled selections float64's own"
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_table_of_scores_is_made(algorithm):
    """Peak of forward and backward at 128k tokens of shape A beyond inputs, outputs and gradients. The bound is
    what is known to be needed, and a slack far smaller than a table
    S × S/64 with one byte a block and group: no table of scores, a head's or a group's, fits under it but the
    bounded one of the selection."""
    S, H, G, D, geo = 131072, 12, 2, 64, PAPER
    xs = inputs(S, geo, H, G, D, BF16)
    do = torch.randn_like(xs[0])
    outputs_and_gradients(xs, do, geo, algorithm)  # compile
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = outputs_and_gradients(xs, do, geo, algorithm)
    # o_cmp, o_sel, o_win and indices are results here
    extra = torch.cuda.max_memory_allocated() - before - sum(x.numel() * x.element_size() for x in got.values())
    q, kv = S * H * D * 2, S * G * D * 2
    # lse, γ, δ of three branches; dq of the selected branch; scores of the queries at work
    limit = 3 * 3 * S * H * 4 + q + scratch_bytes(S)
    # dk and dv of a branch in fp32; 16 parts of the compressed ones
    limit += 2 * kv * 2 + 2 * 16 * (kv // 16) * 2
    if algorithm in ("v1", "v2"):
        entries = chunk_tokens(S, 1, geo.n_sel * H * D * 2) * geo.n_sel               # of a chunk of queries, a group
        # a row each, with its lse; lists; sums of segments
        limit += entries * H * (D * 2 + 4) + S * geo.n_sel * G * 4 + 2 * entries // 512 * G * geo.l_sel * D * 2 * 4
    slack = 64 * 2**20
    table = S * (S // 64) * G
    limit += slack
    print(
        f"\n{algorithm}: {extra / 2**20:.0f} MiB beyond results, allowed {limit / 2**20:.0f}; S × S/64 a group in "
        f"fp32 would be {4 * table / 2**20:.0f}, S × S/16 a head {4 * S * (S // 16) * H / 2**20:.0f}"
    )
    assert slack <= table / 8 and extra <= limit


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["v2", "v3_skip", "v1"])
def test_a_million_tokens(algorithm):
    S = 2**20
    H = 12
    G = 2
    D = 64
    geo = PAPER
    xs = inputs(S, geo, H, G, D, BF16)
    rows = sampled(S, geo)
    do = torch.zeros_like(xs[0])
    do[:, rows] = torch.randn(1, len(rows), H, D, device="cuda", dtype=BF16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    got = outputs_and_gradients(xs, do, geo, algorithm)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated()
    for name in ("o_cmp", "o_sel", "o_win", "o", "q", "gates"):                       # room for float64
        got[name] = Rows(got[name][:, rows].clone())
    errors, same = check_rows(got, xs, do, geo, rows)
    print(
        f"\n{algorithm}: 1,048,576 tokens, forward and backward {seconds:.2f} s with compilation, peak "
        f"{peak / 2**30:.1f} GiB of which {before / 2**30:.1f} inputs; "
        f"{same:.1%} of sampled selections float64's own; relative errors "
        + ", ".join(f"{n} {e:.1e}" for n, e in errors.items())
    )
    assert peak < 76 * 2**30
