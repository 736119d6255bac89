"""Native Sparse Attention written a second time, as literally as the equations allow, to check the package against.

It imports nothing from nsa_nb. Everything is torch float64 inside plain loops over sequences, heads and queries, so
autograd over those loops gives the gradients. Nothing here is fast, nothing is masked: a key that a query may not
see is never gathered. Symbols are the paper's (arXiv 2502.11089): l, d, l_sel (the paper's l'), n_sel, w.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch

F64 = torch.float64
INPUTS = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")  # nsa_attention's float inputs, in order


# ---------------------------------------------------------------- rotary positions

def rope(x, positions, base=10000.0, rope_scale=1.0):
    """Half-split rotation of x [S, heads, D]: channel i turns together with channel i + D/2 by pos/rope_scale *
    base^(-2i/D).

    The angle is a float32 number, as in the package: frequency, position and their product are each rounded to
    float32.
    """
    S, _, D = x.shape
    rows = []
    for s in range(S):
        first = x[s, :, : D // 2]
        second = x[s, :, D // 2:]
        pos = torch.tensor(float(positions[s]), dtype=torch.float32) / torch.tensor(rope_scale, dtype=torch.float32)
        freq = torch.tensor([base ** (-2.0 * i / D) for i in range(D // 2)], dtype=torch.float32)
        angle = (pos * freq).to(F64)
        cos = torch.cos(angle)
        sin = torch.sin(angle)
        rows.append(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
    return torch.stack(rows)


# ---------------------------------------------------------------- compression

def n_blocks(S, l, d):
    """How many complete blocks of l tokens, one every d tokens, S tokens hold."""
    return 0 if S < l else (S - l) // d + 1


def n_visible(t, l, d):
    """How many compressed blocks end at or before token t: those with i*d + l - 1 <= t."""
    i = 0
    while i * d + l - 1 <= t:
        i += 1
    return i


def _each_block(x, l, d, phi):
    blocks = [phi(x[i * d: i * d + l]) for i in range(n_blocks(x.shape[0], l, d))]
    return torch.stack(blocks) if blocks else x[:0]


def compress_avg(x, l, d):
    "x [S, G, D] -> [N, G, D], block i the mean of tokens i*d ... i*d+l-1."
    return _each_block(x, l, d, lambda block: sum(block[j] for j in range(l)) / l)


def compress_conv(x, weight, l, d):
    "weight [l, G, D]: one number for each offset in the block and each channel."
    return _each_block(x, l, d, lambda block: sum(weight[j] * block[j] for j in range(l)))


def compress_mlp(x, pe, w1, b1, w2, b2, l, d):
    """pe [l, G, D] is added to the block's tokens; each group's l*D numbers (token after token) go through
    w1 [G, hidden, l*D], SiLU, w2 [G, D, hidden]. b1 [G, hidden] and b2 [G, D] may be None.
    """
    def phi(block):
        out = []
        for g in range(block.shape[1]):
            flat = torch.cat([block[j, g] + pe[j, g] for j in range(l)])
            hidden = w1[g] @ flat + (0 if b1 is None else b1[g])
            hidden = hidden / (1 + torch.exp(-hidden))
            out.append(w2[g] @ hidden + (0 if b2 is None else b2[g]))
        return torch.stack(out)
    if n_blocks(x.shape[0], l, d) == 0:
        return x.new_zeros(0, x.shape[1], w2.shape[1])
    return _each_block(x, l, d, phi)


# ---------------------------------------------------------------- one softmax

def attend(q_t, K, V, scale):
    """One query q_t [Dk] against the keys K [n, Dk], values V [n, Dv] it sees: output [Dv] and weights [n]; n = 0
    gives zeros."""
    if K.shape[0] == 0:
        return V.new_zeros(V.shape[1]), K.new_zeros(0)
    logits = (K @ q_t) * scale
    e = torch.exp(logits - logits.max().detach())
    p = e / e.sum()
    return p @ V, p


# ---------------------------------------------------------------- importance and selection

def importance(p_cmp, n_sel_blocks, l, d, l_sel):
    """Paper Eq. 9 for one query and one head, 0-based: p_slc[j] = sum over m < l_sel/d and n < l/d of
    p_cmp[(l_sel/d)*j + m - n]. p_cmp holds only the visible blocks; anything outside it counts 0.
    """
    p_slc = []
    for j in range(n_sel_blocks):
        total = 0.0
        for m in range(l_sel // d):
            for n in range(l // d):
                i = (l_sel // d) * j + m - n
                if 0 <= i < len(p_cmp):
                    total += p_cmp[i]
        p_slc.append(total)
    return p_slc


def forced_blocks(cur, n_init, n_local):
    "The first n_init and the last n_local of the candidates 0 ... cur."
    return {j for j in range(cur + 1) if j < n_init or j > cur - n_local}


def select(scores, cur, n_sel, n_init, n_local):
    """Ascending selected blocks of one query of one group, padded with -1 to n_sel. scores [cur + 1], equal
    scores: lower index."""
    if cur + 1 <= n_sel:
        chosen = set(range(cur + 1))
    else:
        chosen = forced_blocks(cur, n_init, n_local)
        rest = [j for j in range(cur + 1) if j not in chosen]
        rest.sort(key=lambda j: (-scores[j], j))
        chosen = chosen | set(rest[: n_sel - len(chosen)])
    return sorted(chosen) + [-1] * (n_sel - len(chosen))


# ---------------------------------------------------------------- the op

@dataclass
class Result:
    o: torch.Tensor          # [B, S, H, Dv]
    o_cmp: torch.Tensor
    o_sel: torch.Tensor
    o_win: torch.Tensor
    indices: torch.Tensor    # int32 [B, S, G, n_sel], the oracle's own choice even when it was handed another
    scores: list             # scores[b][t][g]: Eq. 10 scores of the candidates 0 ... cur of that query, floats
    rel: list                # rel[b][t][g]: relative rounding error that float32 scores may have (see score_rounding)


def score_rounding(q_t, K_cmp, scale, l, d, l_sel, heads):
    """First-order bound on the relative error of a float32 computation of the Eq. 10 score of one query of one
    group.

    u = 2^-24. A logit is a sum of Dk products times the scale: off by at most (Dk + 2) u L, L the largest
    scale * sum |q_c k_c|. It enters a softmax weight twice (numerator and normaliser): relative 2 (Dk + 2) u L.
    exp, the normaliser's sum of N terms and the division add (N + 8) u; adding up the score's
    heads * (l_sel/d) * (l/d) non-negative terms adds as many u. All terms are >= 0, so the relative bound
    carries over to the sum.
    """
    if K_cmp.shape[0] == 0:
        return 0.0
    u = 2.0 ** -24
    Dk = q_t.shape[-1]
    N = K_cmp.shape[0]
    L = float((K_cmp.abs() @ q_t.abs().T).max()) * abs(scale)
    return 2 * (Dk + 2) * u * L + (N + 8) * u + heads * (l_sel // d) * (l // d) * u


def _one_sequence(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, *, l, d, l_sel, n_sel, w, n_init, n_local, scale,
                  given=None):
    """q [S,H,Dk], k_cmp [N,G,Dk] ... of one sequence. `given` [S,G,n_sel] replaces the oracle's selection in the
    selected branch."""
    S, H, _ = q.shape
    G = k_sel.shape[1]
    Dv = v_sel.shape[-1]
    h = H // G
    assert k_cmp.shape[0] == n_blocks(S, l, d), (k_cmp.shape, S, l, d)
    outs = {name: [[None] * H for _ in range(S)] for name in ("cmp", "sel", "win")}
    indices = torch.full((S, G, n_sel), -1, dtype=torch.int32)
    scores = []
    rel = []
    for t in range(S):
        cur = t // l_sel
        scores.append([]), rel.append([])
        for g in range(G):
            heads = range(g * h, (g + 1) * h)
            vis = n_visible(t, l, d)
            group_score = [0.0] * (cur + 1)
            for a in heads:
                outs["cmp"][t][a], p = attend(q[t, a], k_cmp[:vis, g], v_cmp[:vis, g], scale)
                p_slc = importance(p.tolist(), cur + 1, l, d, l_sel)            # Eq. 9; .tolist(): no gradient
                group_score = [s + p_j for s, p_j in zip(group_score, p_slc)]   # Eq. 10
            scores[t].append(group_score)
            rel[t].append(
                score_rounding(q[t, heads.start : heads.stop].detach(), k_cmp[:vis, g].detach(), scale, l, d, l_sel, h)
            )
            own = select(group_score, cur, n_sel, n_init, n_local)
            indices[t, g] = torch.tensor(own, dtype=torch.int32)
            use = own if given is None else given[t, g].tolist()
            tokens = [u for j in use if j >= 0 for u in range(j * l_sel, (j + 1) * l_sel) if u <= t]
            window = [u for u in range(t - w + 1, t + 1) if u >= 0]
            for a in heads:
                outs["sel"][t][a], _ = attend(q[t, a], k_sel[tokens, g], v_sel[tokens, g], scale)
                outs["win"][t][a], _ = attend(q[t, a], k_win[window, g], v_win[window, g], scale)
    o_cmp, o_sel, o_win = (torch.stack([torch.stack(row) for row in outs[name]]).reshape(S, H, Dv)
                           for name in ("cmp", "sel", "win"))
    o = gates[..., 0:1] * o_cmp + gates[..., 1:2] * o_sel + gates[..., 2:3] * o_win
    return o, o_cmp, o_sel, o_win, indices, scores, rel


def attention(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, *, l=32, d=16, l_sel=64, n_sel=16, w=512, n_init=1,
              n_local=2, scale=None, cu_seqlens=None, indices=None):
    """The whole op, arguments as nsa_attention's (float64 tensors). `indices` [B,S,G,n_sel] makes the selected branch
    use another's selection, so that a tie broken by rounding does not hide whether the rest agrees.
    """
    B, S = q.shape[:2]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    borders = [0, S] if cu_seqlens is None else [int(c) for c in cu_seqlens]
    assert cu_seqlens is None or (B == 1 and borders[0] == 0 and borders[-1] == S)
    batch = []
    for b in range(B):
        docs = []
        first_block = 0
        for start, stop in zip(borders[:-1], borders[1:]):
            if start == stop:
                continue
            N = n_blocks(stop - start, l, d)
            tok, blk = slice(start, stop), slice(first_block, first_block + N)
            first_block += N
            docs.append(_one_sequence(
                q[b, tok], k_cmp[b, blk], v_cmp[b, blk], k_sel[b, tok], v_sel[b, tok], k_win[b, tok], v_win[b, tok],
                gates[b, tok], l=l, d=d, l_sel=l_sel, n_sel=n_sel, w=w, n_init=n_init, n_local=n_local, scale=scale,
                given=None if indices is None else indices[b, tok]))
        assert first_block == k_cmp.shape[1], (first_block, k_cmp.shape)
        cat = [torch.cat([doc[i] for doc in docs]) for i in range(5)]
        batch.append(cat + [sum((doc[5] for doc in docs), []), sum((doc[6] for doc in docs), [])])
    stacked = [torch.stack([one[i] for one in batch]) for i in range(5)]
    return Result(*stacked, [one[5] for one in batch], [one[6] for one in batch])


def attention_and_grads(inputs, do, **kw):
    """inputs: the eight tensors of INPUTS in any dtype (their exact values are taken to float64); do: the output's
    cotangent."""
    leaves = [x.detach().to(F64).requires_grad_() for x in inputs]
    res = attention(*leaves, **kw)
    grads = torch.autograd.grad(res.o, leaves, do.detach().to(F64), allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads)]
    return res, dict(zip(INPUTS, grads))


def selection_disagreements(res, other, *, l_sel, n_sel, n_init, n_local, cu_seqlens=None):
    """Where another selection [B,S,G,n_sel] is wrong, as messages; an empty list means that the two agree.

    Every row must be ascending, unique, -1-padded at the end, within the candidates, hold the forced blocks and
    exactly
    min(n_sel, cur + 1) blocks. A block that only one side picked must score within rounding of the n-th score
    s_n (the lowest
    score that won a free place): with r = score_rounding and float32 scores s(1 +- r), a wrongly picked block has
    s >= s_n (1 - r)/(1 + r) and a wrongly dropped one s <= s_n (1 + r)/(1 - r), so |s - s_n| <= 2r/(1 - r) * s_n.
    To that comes an absolute heads-and-blocks-independent 2^-100: weights under float32's 2^-126 become 0, and
    there are far
    fewer than 2^26 of them in a score. With r = 0 on both sides equal scores have no slack: the lower index
    must win.
    """
    bad = []
    B, S, G, _ = other.shape
    borders = [0, S] if cu_seqlens is None else [int(c) for c in cu_seqlens]
    starts = [max(c for c in borders if c <= s) for s in range(S)]
    if other.dtype != torch.int32:
        bad.append(f"dtype {other.dtype}, wanted int32")
    for b in range(B):
        for s in range(S):
            cur = (s - starts[s]) // l_sel
            for g in range(G):
                row = other[b, s, g].tolist()
                own = [j for j in res.indices[b, s, g].tolist() if j >= 0]
                where = f"b={b} s={s} g={g} cur={cur}: {row} against {own}"
                picked = [j for j in row if j >= 0]
                if row != picked + [-1] * (n_sel - len(picked)) or any(i >= j for i, j in zip(picked, picked[1:])):
                    bad.append(f"not ascending, unique and -1-padded at the end: {where}")
                elif len(picked) != min(n_sel, cur + 1) or any(j > cur for j in picked):
                    bad.append(f"wrong count or a future block: {where}")
                elif not forced_blocks(cur, n_init, n_local) <= set(picked):
                    bad.append(f"a forced block is missing: {where}")
                elif picked != own:
                    score, r = res.scores[b][s][g], res.rel[b][s][g]
                    free = [j for j in own if j not in forced_blocks(cur, n_init, n_local)]
                    s_n = min(score[j] for j in free)
                    slack = (2 * r / (1 - r) if r < 1 else math.inf) * s_n + 2.0 ** -100
                    for j in set(picked) ^ set(own):
                        if abs(score[j] - s_n) > slack:
                            bad.append(f"block {j} scores {score[j]!r}, the n-th {s_n!r}, slack {slack:.3g}: {where}")
    return bad


# ---------------------------------------------------------------- the module

def gate_values(x, layers, n_heads, kind="sigmoid", temp=1.0):
    """Gates [S, H, 3] from x [S, dim]. `layers` is a list of (weight [out, in], bias [out] or None) with SiLU
    between them;
    the last one gives H*3 numbers, head after head, in the order cmp, sel, win.
    """
    y = x
    for n, (weight, bias) in enumerate(layers):
        y = y / (1 + torch.exp(-y)) if n else y
        y = y @ weight.T + (0 if bias is None else bias)
    y = y.reshape(x.shape[0], n_heads, 3)
    if kind == "sigmoid":
        return 1 / (1 + torch.exp(-y))
    e = torch.exp((y - y.max(dim=-1, keepdim=True).values.detach()) / temp)
    return e / e.sum(dim=-1, keepdim=True)


def module(weights, x, *, n_heads, n_kv_groups, d_k, d_v, l, d, l_sel, n_sel, w, n_init=1, n_local=2, phi="avg",
           cmp_rope=None, gate="sigmoid", gate_temp=1.0, rope_scale=1.0, rope_base=10000.0, shared_kv=False,
           cu_seqlens=None, indices=None):
    """An attention layer: x [B, S, dim] -> (y [B, S, dim], Result).

    weights: q [H*Dk, dim], k_cmp, k_sel, k_win [G*Dk, dim], v_cmp, v_sel, v_win [G*Dv, dim], o [dim, H*Dv],
    gate: layers for
    gate_values, and phi_k, phi_v: the tuples of arguments of compress_conv or compress_mlp. With shared_kv the
    three K are
    one tensor, k, and the three V one, v.
    """
    cmp_rope = cmp_rope or ("before" if phi == "avg" else "after")
    compress = {"avg": lambda y, p: compress_avg(y, l, d), "conv": lambda y, p: compress_conv(y, *p, l, d),
                "mlp": lambda y, p: compress_mlp(y, *p, l, d)}[phi]
    B, S, _ = x.shape
    borders = [0, S] if cu_seqlens is None else [int(c) for c in cu_seqlens]
    def heads(y, name, n, dim):
        name = name[0] if shared_kv and name[0] in "kv" else name
        return (y @ weights[name].T).reshape(y.shape[0], n, dim)
    rows = []
    for b in range(B):
        parts = {name: [] for name in INPUTS}
        for start, stop in zip(borders[:-1], borders[1:]):
            if start == stop:
                continue
            y = x[b, start:stop]
            pos = list(range(stop - start))
            turn = lambda z, at=pos: rope(z, at, rope_base, rope_scale)
            k_cmp = heads(y, "k_cmp", n_kv_groups, d_k)
            k_cmp = compress(turn(k_cmp) if cmp_rope == "before" else k_cmp, weights.get("phi_k"))
            if cmp_rope == "after" and len(k_cmp):
                k_cmp = turn(k_cmp, [i * d for i in range(len(k_cmp))])
            parts["q"].append(turn(heads(y, "q", n_heads, d_k)))
            parts["k_cmp"].append(k_cmp)
            parts["v_cmp"].append(compress(heads(y, "v_cmp", n_kv_groups, d_v), weights.get("phi_v")))
            parts["k_sel"].append(turn(heads(y, "k_sel", n_kv_groups, d_k)))
            parts["v_sel"].append(heads(y, "v_sel", n_kv_groups, d_v))
            parts["k_win"].append(turn(heads(y, "k_win", n_kv_groups, d_k)))
            parts["v_win"].append(heads(y, "v_win", n_kv_groups, d_v))
            parts["gates"].append(gate_values(y, weights["gate"], n_heads, gate, gate_temp))
        rows.append([torch.cat(parts[name]) for name in INPUTS])
    res = attention(*(torch.stack([row[i] for row in rows]) for i in range(8)), l=l, d=d, l_sel=l_sel, n_sel=n_sel, w=w,
                    n_init=n_init, n_local=n_local, cu_seqlens=cu_seqlens, indices=indices)
    return res.o.reshape(B, S, n_heads * d_v) @ weights["o"].T, res


# ---------------------------------------------------------------- how far apart

def rel_err(got, want):
    """||got - want|| / ||want|| in float64; where want is all zeros, 0 if got is too and inf otherwise. NaN or inf
    in got gives inf."""
    got = got.detach().to(F64)
    want = want.detach().to(F64)
    assert got.shape == want.shape, (got.shape, want.shape)
    if not torch.isfinite(got).all():
        return math.inf
    diff, size = float((got - want).norm()), float(want.norm())
    return (0.0 if diff == 0 else math.inf) if size == 0 else diff / size
