"""The Triton backend on a GPU, each algorithm of the selected branch, against float64 on the same card
(truth64.py). When it last ran stands in tests/gpu_runs.md.

    pytest tests/test_triton.py -n 14 --dist loadgroup        # a shape of the pool compiles in one process

Tiny shapes in Triton's interpreter are tested by the notebooks and test_triton_ops.py on any machine; long
sequences by test_triton_long.py."""

import warnings

import pytest
import torch
from nsa_nb.attention import NSAAttention, nsa_attention
from nsa_nb.kernels import choice
from nsa_nb.kernels.flash import rows_forward
from nsa_nb.geometry import Geometry
from nsa_nb.kernels.inverted_index import inverted_index
from nsa_nb.kernels.select import triton_select
from triton_cases import (
    ALGORITHMS, BF16, EACH, F32, INPUTS, OUTPUTS, POOL, SHAPES, TOL, Config, Shape, compare, drawn, make, record, run,
    tb,
)
from truth64 import softmax, truth

pytestmark = pytest.mark.cuda
algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS)
PAPER, SMALL = SHAPES["paper"], SHAPES["fp32"]


def group(name): return pytest.mark.xdist_group(name)


def both(f):
    return pytest.mark.parametrize(
        "shape",
        [pytest.param(PAPER, id="bf16", marks=group("bf16")), pytest.param(SMALL, id="fp32", marks=group("fp32"))],
    )(f)


# ---------------------------------------------------------------- values and gradients

@pytest.mark.parametrize(
    "shape,packed,i",
    [
        pytest.param(s, p, i, marks=group(f"{s.name} {p}"), id=f"{s.name}-{'packed' if p else 'plain'}-{i}")
        for s in POOL
        for p in (False, True)
        for i in range(EACH)
    ],
)
def test_random_configurations(shape, packed, i, record_property):
    record(record_property, compare(drawn(shape, packed, i)))


def of(shape, S, **more): return Config(shape, S, **(dict(w=512, n_init=1, n_local=2, cu=None, seed=S) | more))


# Rows of CASES.md; those on h, d_v ≠ d_k, n_sel = 12 and bf16 are in the pool
CASES = {
    "no compressed block, 1": of(PAPER, 1), "no compressed block, 31": of(PAPER, 31),
    "one compressed block, 32": of(PAPER, 32), "33 tokens": of(PAPER, 33), "more places than blocks": of(PAPER, 100),
    "documents 0, 1, 32, 33, 200": of(PAPER, 200, cu=(0, 1, 32, 33, 200)),
    "an empty document": of(PAPER, 150, cu=(0, 70, 70, 150)),
    "empty documents at both ends": of(PAPER, 70, cu=(0, 0, 70, 70)), "one document": of(PAPER, 333, cu=(0, 333)),
    "documents of one token": of(PAPER, 5, cu=(0, 1, 2, 3, 4, 5)),
    "documents too short for a block": of(PAPER, 90, cu=(0, 31, 60, 90)), "window 1": of(SMALL, 333, w=1),
    "window 2": of(SMALL, 333, w=2), "window 512": of(SMALL, 333, w=512),
    "a window without an end": of(SMALL, 333, w=2**31 - 1), "a longer one": of(PAPER, 200, w=2**40, cu=(0, 70, 200)),
    "logits 50 times as large": of(SMALL, 333, loud=50.0),
    "B 2, S 128, n_sel 2": of(Shape("two", F32, 1, 2, 16, 16, 8, 4, 16, 2, B=2), 128, n_local=1, w=16),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=group("bf16" if c.shape is PAPER else "fp32")) for n, c in CASES.items()]
)
def test_cases(name):
    compare(CASES[name])


def tiny_first_query(inputs):
    inputs[0].mul_(10)
    inputs[0][:, 0] = 0.01


@both
def test_every_query_has_its_own_softmax(shape): compare(of(shape, 333, w=100), change=tiny_first_query)


@both
@pytest.mark.parametrize("gate", [0, 1, 2])
def test_each_branch_alone(gate, shape):
    def alone(inputs): inputs[7][:] = torch.eye(3).to(inputs[7])[gate]
    c = of(shape, 400, w=100)
    compare(c, change=alone)
    inputs, do = make(c)
    alone(inputs)
    for a in ALGORITHMS:
        got = run(inputs, do, c, a)
        assert torch.equal(got["o"], got[OUTPUTS[1 + gate]])
        for other in {0, 1, 2} - {gate}:
            assert not got[INPUTS[1 + 2 * other]].any() and not got[INPUTS[2 + 2 * other]].any(), (a, other)


@group("bf16")
@pytest.mark.parametrize("S", [1, 31, 32, 33])
def test_queries_that_see_no_compressed_block(S):
    def alone(inputs): inputs[7][:] = torch.eye(3).to(inputs[7])[0]
    c = of(PAPER, S)
    inputs, do = make(c)
    alone(inputs)
    for a in ALGORITHMS:
        got = run(inputs, do, c, a)
        for name in ("o", "o_cmp", "q"): assert not got[name][:, :31].any(), (a, name)
        assert (
            not got["gates"][:, :31, :, 0].any()
            and all(x.isfinite().all() for x in got.values())
            and bool(got["o_cmp"][:, 31:].any()) == (S > 31)
        )


@pytest.mark.parametrize("which", [(1, 0, 1), (0, 1, 0), (1, 1, 1)], ids=str)
@both
def test_gradients_through_the_branches_outputs(shape, which):
    "return_aux gives o_cmp, o_sel, o_win: a loss may use them beside o, or alone."
    c = of(shape, 300, w=100)
    inputs, do = make(c)
    dos = [torch.randn_like(do) if x else None for x in which]
    for first in (do, None):
        cot = do if first is not None else torch.zeros_like(do)
        for a in ALGORITHMS:
            got = run(inputs, first, c, a, dos)
            t = truth(inputs, cot, **vars(c.geo), indices=got["indices"], dos=dos)
            for name in INPUTS:        # do_branch = γ do + more is rounded to the dtype once more: twice the tolerance
                err, size = float((got[name].double() - t[name]).norm()), float(t[name].norm())
                assert err <= 2 * TOL[shape.dtype] * size, (a, name, err, size)


@pytest.mark.parametrize("cu", [None, (0, 1, 64, 133, 400)], ids=["plain", "packed"])
@both
def test_work_in_many_parts(shape, cu, monkeypatch):
    "What long sequences do, on a short one: scores of few queries at a time, partial results of 64 queries at a time."
    monkeypatch.setattr("nsa_nb.kernels.select.scratch_bytes", lambda S: 2048)
    monkeypatch.setattr(tb, "chunk_tokens", lambda *_: 64)
    compare(of(shape, 400, w=100, cu=cu))


# ---------------------------------------------------------------- selection

@group("mass")
@pytest.mark.parametrize("mass", range(13))
def test_importance_of_one_compressed_block(mass):
    """All of p_cmp on one block: the weights 1,2,2,2,1 on 4j-1 … 4j+3 decide the one free place; where two weigh
    the same the lower wins."""
    S, t, G = 448, 447, 2
    q = torch.ones(1, S, 12, 64, device="cuda", dtype=BF16)
    k = torch.zeros(1, (S - 32) // 16 + 1, G, 64, device="cuda", dtype=BF16)
    k[0, mass + 3] = 50
    kv = torch.zeros(1, S, G, 64, device="cuda", dtype=BF16)
    _, aux = nsa_attention(
        q, k, k, kv, kv, kv, kv, torch.ones(1, S, 12, 3, device="cuda", dtype=BF16), n_sel=4, w=8, return_aux=True,
        backend="triton",
    )
    weights = {j: {-1: 1, 0: 2, 1: 2, 2: 2, 3: 1}.get(mass + 3 - 4 * j, 0) for j in (1, 2, 3, 4)}
    want = max(weights, key=lambda j: (weights[j], -j))
    for g in range(G): assert aux["indices"][0, t, g].tolist() == sorted({0, 5, 6, want})


@group("ties")
@pytest.mark.parametrize("h", [1, 3, 6])
def test_equal_scores_go_to_the_lower_index(h):
    S = 600
    geo = Geometry(8, 4, 8, 6, 8)
    r = lambda *s: torch.randn(*s, generator=torch.Generator().manual_seed(h)).to("cuda", F32)
    q = r(1, S, h, 16)
    k = r(1, 1, 1, 16).expand(1, geo.num_cmp(S), 1, 16).contiguous()
    kv = r(1, S, 1, 16)
    lse = rows_forward(q, k, k, kv, kv, geo, 0.25)[2]
    indices = triton_select(q, k, lse, geo, 0.25)
    for t in range(S):
        cur = t // 8
        want = list(range(cur + 1)) if cur < 6 else [0, 1, 2, 3, cur - 1, cur]
        assert indices[0, t, 0].tolist() == want + [-1] * (6 - len(want)), t


@group("fp32")
@algorithms
def test_rows_that_select_nothing(algorithm):
    """Indices by hand, some rows −1 throughout: output 0, lse −∞, dq 0, and no share in dk and dv; holes of
    unequal length elsewhere."""
    c = of(SMALL, 200)
    (q, _, _, k, v, *_), do = make(c)
    geo = c.geo
    scale = 0.25
    B, S = q.shape[:2]
    G = 2
    gen = torch.Generator().manual_seed(1)
    idx = torch.full((B, S, G, 5), -1, dtype=torch.int32)
    for b in range(B):
        for t in range(S):
            for g in range(G):
                n = int(torch.randint(0, min(5, t // 16 + 1) + 1, (1,), generator=gen)) if t % 7 else 0
                idx[b, t, g, :n] = torch.randperm(t // 16 + 1, generator=gen)[:n].sort().values
    idx = idx.cuda()
    if algorithm == "v1": o, lse = tb.query_forward(q, k, v, idx, geo, scale)
    elif algorithm == "v2": o, lse, _ = tb.block_forward(q, k, v, idx, inverted_index(idx, 16), geo, scale)
    else: o, lse, _ = tb.tiles_forward(q, k, v, idx, geo, scale, algorithm == "v3_skip")
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    u = torch.arange(S, device="cuda")
    # [B, S, G, keys]
    mask = (idx.long()[..., None] == u // 16).any(3) & (u <= u[:, None])[None, :, None]
    p = softmax(
        torch.einsum("btghd,bugd->btghu", leaves[0].unflatten(2, (G, -1)), leaves[1]) * scale, mask[:, :, :, None]
    )
    want = torch.einsum("btghu,bugd->btghd", p, leaves[2]).flatten(2, 3)
    grads = torch.autograd.grad(want, leaves, do.double())
    nothing = (idx < 0).all(-1)
    assert nothing[:, ::7].all() and not o.unflatten(2, (G, -1))[nothing].any()
    rows = lse.view(B, G, S, -1).transpose(1, 2)
    assert (rows[nothing] == -float("inf")).all() and rows[~nothing].isfinite().all()
    gate = torch.ones_like(lse)
    delta = (do * o).sum(-1).unflatten(2, (G, -1)).transpose(1, 2).reshape(lse.shape).contiguous()
    if algorithm.startswith("v3"):
        dq, dk, dv = tb.tiles_backward(q, k, v, idx, do, lse, gate, delta, geo, scale, algorithm == "v3_skip")
    else:
        dq, dk, dv = tb.block_backward(q, k, v, idx, inverted_index(idx, 16), geo, scale, do, lse, delta, gate)
        if algorithm == "v1": dq = tb.query_dq(q, k, v, idx, do, lse, gate, delta, geo, scale)
    assert not dq.unflatten(2, (G, -1))[nothing].any()
    for name, x, y in (("o", o, want), *zip(("dq", "dk", "dv"), (dq, dk, dv), grads)):
        assert (x.double() - y).norm() <= 1e-5 * y.norm(), name


# ---------------------------------------------------------------- exactly

@group("masked")
def test_masked_keys_weigh_nothing():
    """Visible logits near −2·10⁶ and hidden ones near +2·10⁶ with values of −10³⁰: with a finite mask value, or a
    hidden key that has a share at all, it would show; so would weights divided by a rounded lse."""
    S, G, h = 330, 2, 2
    q = torch.full((1, S, G * h, 16), 1e3, device="cuda")
    k = torch.full((1, S, G, 16), -500.0, device="cuda")
    value = lambda k: torch.where(k > 0, -1e30, 1.0)
    for t in (17, 64, 200, 329):
        future, window = k.clone(), k.clone()
        future[:, t + 1:] *= -1                                  # hidden from every query up to t
        cmp = k[:, :(S - 8) // 4 + 1].clone()
        cmp[:, (t - 7) // 4 + 1:] *= -1
        window[:, t + 1 :] *= -1
        window[:, : max(0, t - 9)] *= -1  # and older than the window of 10 of query t
        gates = torch.ones(1, S, G * h, 3, device="cuda")
        for a in ("v1", "v2", "v3"):
            _, aux = nsa_attention(
                q, cmp, value(cmp), future, value(future), window, value(window), gates, l=8, d=4, l_sel=16, n_sel=5,
                w=10, backend="triton", selection=a, return_aux=True,
            )
            for name, first in (("o_cmp", 7), ("o_sel", 0), ("o_win", t)):
                assert (aux[name][:, first:t + 1] - 1).abs().max() < 1e-5, (a, name, t)


@group("masked")
@pytest.mark.parametrize("w", [1, 2, 512])
def test_window_is_exactly_w_keys(w):
    "Equal logits: the mean of the values of tokens max(0, t−w+1) … t; values 2^(t mod 8) and t mod 64."
    S, G = 700, 2
    t = torch.arange(S, device="cuda")
    v = torch.zeros(1, S, G, 16, device="cuda")
    v[..., 0], v[..., 1] = (2.0 ** (t % 8))[:, None], (t % 64).float()[:, None]
    z = torch.zeros(1, S, G, 16, device="cuda")
    cmp = z[:, :(S - 8) // 4 + 1]
    _, aux = nsa_attention(
        z.repeat(1, 1, 2, 1), cmp, cmp, z, z, z, v, torch.ones(1, S, 4, 3, device="cuda"), l=8, d=4, l_sel=16, n_sel=5,
        w=w, backend="triton", return_aux=True,
    )
    c = torch.cat([torch.zeros(1, 2, dtype=torch.float64, device="cuda"), v[0, :, 0, :2].double().cumsum(0)])
    lo = (t - w + 1).clamp_min(0)
    want = (c[t + 1] - c[lo]) / (t + 1 - lo)[:, None]
    torch.testing.assert_close(aux["o_win"][0, :, :, :2].double(), want[:, None].expand(S, 4, 2), rtol=1e-5, atol=0)


@group("bf16")
@algorithms
@pytest.mark.parametrize("cu", [None, (0, 1, 700, 733, 1904)], ids=["plain", "packed"])
def test_forward_and_backward_repeat_bit_for_bit(algorithm, cu):
    c = of(PAPER, 1904, cu=cu)
    inputs, do = make(c)
    a = run(inputs, do, c, algorithm)
    for _ in range(2):
        b = run(inputs, do, c, algorithm)
        for name in a: assert torch.equal(a[name], b[name]), name


@group("fp32")
def test_calls_with_other_sizes_in_between_change_no_bit():
    one = of(SMALL, 333, w=17)
    two = of(Shape("two", F32, 1, 2, 16, 16, 8, 4, 16, 2, B=2), 128, n_local=1, w=16)
    xs, ys = make(one), make(two)
    a, b = run(*xs, one, "v3"), run(*ys, two, "v3")
    for _ in range(2):
        for x, y in ((a, run(*xs, one, "v3")), (b, run(*ys, two, "v3"))):
            for name in x: assert torch.equal(x[name], y[name]), name


# ---------------------------------------------------------------- causality

T = (1, 15, 16, 17, 31, 32, 33, 511, 512, 513, 1030, 1399)


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(F32, id="fp32", marks=group("layer fp32")), pytest.param(BF16, id="bf16", marks=group("layer bf16"))],
)
@pytest.mark.parametrize("phi", ["avg", "conv", "mlp"])
@algorithms
def test_the_past_keeps_its_bits(phi, dtype, algorithm, monkeypatch):
    """An edit of every token from t on, small or large; packed too, where an edit of one document changes no
    other, before or after it."""
    monkeypatch.setattr("nsa_nb.choices.pick_selection", lambda *_: algorithm)
    torch.manual_seed(0)
    layer = NSAAttention(96, 12, 2, 16, 16, l=16, d=8, l_sel=32, n_sel=8, w=64, phi=phi, backend="triton").to(
        "cuda", dtype
    )
    x = torch.randn(1, 1400, 96, device="cuda", dtype=dtype)
    cu = (0, 1, 32, 33, 600, 1400)
    borders = torch.tensor(cu, dtype=torch.int32, device="cuda")
    with torch.no_grad():
        base, packed = layer(x), layer(x, cu_seqlens=borders)
        for t in T:
            y = x.clone()
            y[:, t:] = 20 * torch.randn_like(y[:, t:])
            other = layer(y)
            assert torch.equal(base[:, :t], other[:, :t]) and not torch.equal(base[:, t:], other[:, t:]), t
            assert torch.equal(packed[:, :t], layer(y, cu_seqlens=borders)[:, :t]), t
        for a, b in zip(cu, cu[1:]):
            y = x.clone()
            y[:, a:b] = 20 * torch.randn_like(y[:, a:b])
            other = layer(y, cu_seqlens=borders)
            assert (
                torch.equal(packed[:, :a], other[:, :a])
                and torch.equal(packed[:, b:], other[:, b:])
                and not torch.equal(packed[:, a:b], other[:, a:b])
            ), (a, b)


@algorithms
@both
def test_the_past_sends_no_gradient_to_the_future(shape, algorithm):
    for cu in (None, (0, 1, 200, 333)):
        c = of(shape, 333, w=100, cu=cu)
        inputs, do = make(c)
        for t in (1, 15, 16, 32, 65, 200, 300):
            past = do.clone()
            past[:, t:] = 0
            got = run(inputs, past, c, algorithm)
            for name in ("q", "k_sel", "v_sel", "k_win", "v_win", "gates"):
                assert not got[name][:, t:].any(), (cu, t, name)


@both
def test_a_document_that_is_not_finite_harms_no_other(shape):
    cu = (0, 50, 180, 333)
    c = of(shape, 333, w=100, cu=cu)
    inputs, do = make(c)
    for a in ALGORITHMS:
        base = run(inputs, do, c, a)
        for s, e in zip(cu, cu[1:]):
            for value in (float("nan"), float("inf")):
                bad = [x.clone() for x in inputs]
                for i in (0, 3, 4, 5, 6): bad[i][:, s:e] = value
                got = run(bad, do, c, a)
                for name in ("o", "indices", "q", "k_sel", "v_sel", "k_win", "v_win", "gates"):
                    assert torch.equal(got[name][:, :s], base[name][:, :s]) and torch.equal(
                        got[name][:, e:], base[name][:, e:]
                    ), (a, name, s, value)


# ---------------------------------------------------------------- what kernels do not serve

def test_what_the_kernels_do_not_serve_falls_back_and_says_so_once():
    def inputs(dtype=F32, Dk=8):
        gen = torch.Generator().manual_seed(0)
        r = lambda *s: torch.randn(*s, generator=gen).to("cuda", dtype)
        return [
            r(1, 50, 4, Dk), r(1, 11, 2, Dk), r(1, 11, 2, 8), r(1, 50, 2, Dk), r(1, 50, 2, 8), r(1, 50, 2, Dk),
            r(1, 50, 2, 8), r(1, 50, 4, 3),
        ]

    sizes = dict(l=8, d=4, l_sel=8, n_sel=4, w=12)
    choice._noted.clear()
    for reason, xs, kw in (
        ("dtype torch.float64", inputs(torch.float64), {}), ("head widths 257", inputs(Dk=257), {}),
        ("n_sel=65", inputs(), dict(n_sel=65)), ("scale=-1", inputs(), dict(scale=-1.0)),
    ):
        kw = sizes | kw
        with pytest.warns(UserWarning, match=f"torch backend is used instead of triton: {reason}"):
            a = nsa_attention(*xs, **kw, backend="triton")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            b = nsa_attention(*xs, **kw, backend="triton")
        assert torch.equal(a, b) and torch.equal(a, nsa_attention(*xs, **kw, backend="torch"))
