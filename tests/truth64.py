"""The operation and its gradients in float64 on any device, a document, a group and some query rows at a time.

oracle.py is the truth, in loops over single numbers; this says the same with whole tensors, so that thousands
of rows on a GPU take milliseconds.
It imports nothing from nsa_nb; test_truth64.py holds it to the oracle.
"""

from __future__ import annotations

import math

import torch

F64 = torch.float64
INPUTS = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
BRANCHES = ("cmp", "sel", "win")
DENSE = 4096      # documents up to here are masked, longer ones gathered


def softmax(logits, mask):
    "Over the last axis where mask; rows that see nothing are 0."
    logits = logits.masked_fill(~mask, -math.inf)
    top = logits.detach().amax(-1, keepdim=True) if logits.shape[-1] else logits
    e = torch.exp(logits - top.masked_fill(top == -math.inf, 0))
    return e / e.sum(-1, keepdim=True).masked_fill(~mask.any(-1, keepdim=True), 1)


def attend(q, K, V, mask, scale):
    "q [T,h,D]; K, V [n,D] with mask [T,n], or each query's own [T,n,D]."
    own = "tnd" if K.dim() == 3 else "nd"
    p = softmax(torch.einsum(f"thd,{own}->thn", q, K) * scale, mask[:, None])
    return torch.einsum(f"thn,{own}->thd", p, V), p


def group_scores(p, n_blocks, l, d, l_sel):
    "Eq. 9 and Eq. 10: p [T,h,N] -> [T, n_blocks]; score j = sum of p over m < l_sel/d, n < l/d at (l_sel/d) j + m - n."
    T, _, N = p.shape
    p, out = p.detach().sum(1), p.new_zeros(T, n_blocks)
    for m in range(l_sel // d):
        for n in range(l // d):
            i = torch.arange(n_blocks, device=p.device) * (l_sel // d) + m - n
            ok = (i >= 0) & (i < N)
            out[:, ok] += p[:, i[ok]]
    return out


def choose(scores, cur, n_sel, n_init, n_local):
    "scores [T, nb], cur [T] -> int32 [T, n_sel], ascending, -1 at the end; equal scores: the lower index."
    nb = scores.shape[1]
    j = torch.arange(nb, device=scores.device)[None]
    s = scores.masked_fill((j < n_init) | (j > cur[:, None] - n_local), math.inf).masked_fill(
        j > cur[:, None], -math.inf
    )
    value, order = s.sort(dim=1, descending=True, stable=True)
    order = order.masked_fill(value == -math.inf, nb)[:, :n_sel]
    order = torch.cat([order, order.new_full((order.shape[0], n_sel - order.shape[1]), nb)], 1).sort(1).values
    return order.masked_fill(order == nb, -1).to(torch.int32)


def one_group(q, kc, vc, ks, vs, kw, vw, t, given, *, l, d, l_sel, n_sel, w, n_init, n_local, scale):
    """q [T,h,Dk] at positions t [T] of a document, keys and values of one group; given [T,n_sel] replaces the own
    choice. o's [T,h,Dv], indices, scores."""
    n = ks.shape[0]
    N = kc.shape[0]
    dev = q.device
    o_cmp, p = attend(q, kc, vc, (torch.arange(N, device=dev) * d + l - 1)[None] <= t[:, None], scale)
    nb = -(-n // l_sel)
    scores = group_scores(p, nb, l, d, l_sel)
    own = choose(scores, t // l_sel, n_sel, n_init, n_local)
    use = (own if given is None else given).long()
    if n <= DENSE:
        u = torch.arange(n, device=dev)
        chosen = torch.zeros(len(t), nb + 1, dtype=torch.bool, device=dev).scatter_(1, use % (nb + 1), True)[:, :nb]
        o_sel, _ = attend(q, ks, vs, chosen[:, u // l_sel] & (u <= t[:, None]), scale)
        o_win, _ = attend(q, kw, vw, (u <= t[:, None]) & (u > t[:, None] - w), scale)
    else:
        u = (use[..., None] * l_sel + torch.arange(l_sel, device=dev)).flatten(1)
        ok = (use >= 0).repeat_interleave(l_sel, 1) & (u <= t[:, None])
        at = u.clamp(0, n - 1)
        o_sel, _ = attend(q, ks[at], vs[at], ok, scale)
        u = t[:, None] - torch.arange(min(w, n), device=dev)
        o_win, _ = attend(q, kw[u.clamp_min(0)], vw[u.clamp_min(0)], u >= 0, scale)
    return o_cmp, o_sel, o_win, own, scores


def truth(
    inputs,
    do=None,
    *,
    l,
    d,
    l_sel,
    n_sel,
    w,
    n_init=1,
    n_local=2,
    scale=None,
    cu=None,
    indices=None,
    rows=None,
    dos=None,
):
    """Everything by name, float64: o, o_cmp, o_sel, o_win, indices (the own choice), scores [.., nb] (-inf past
    the document), and with
    do (and dos, of the three branches' outputs) the gradients of INPUTS. cu: borders as a list. indices: the
    selection used.
    rows: sorted query rows of one sequence (B = 1, no cu) that alone are worked out: o, indices, scores, q and
    gates then have just these, and
    do is their cotangent. k_cmp may have spare blocks at its end.
    """
    leaves = [
        x.detach().to(F64).requires_grad_(do is not None)
        for x in ([inputs[0][:, rows], *inputs[1:7], inputs[7][:, rows]] if rows is not None else inputs)
    ]
    q, kc, vc, ks, vs, kw, vw, gates = leaves
    B = ks.shape[0]
    S = ks.shape[1]
    G = ks.shape[2]
    h = q.shape[2] // ks.shape[2]
    dev = q.device
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    sizes = dict(l=l, d=d, l_sel=l_sel, n_sel=n_sel, w=w, n_init=n_init, n_local=n_local, scale=scale)
    nb = -(-S // l_sel)
    outs = []
    for b in range(B):
        docs = []
        first = 0
        for s, e in zip(cu or [0, S], (cu or [0, S])[1:]):
            if s == e: continue
            N = 0 if e - s < l else (e - s - l) // d + 1
            tok, blk = slice(s, e), slice(first, first + N)
            first += N
            at, t = (tok, torch.arange(e - s, device=dev)) if rows is None else (slice(None), rows)
            groups = [
                one_group(
                    q[b, at, g * h : (g + 1) * h], kc[b, blk, g], vc[b, blk, g], ks[b, tok, g], vs[b, tok, g],
                    kw[b, tok, g], vw[b, tok, g], t, None if indices is None else indices[b, at, g], **sizes,
                )
                for g in range(G)
            ]
            pad = lambda x: torch.cat([x, x.new_full((x.shape[0], nb - x.shape[1]), -math.inf)], 1)
            docs.append(
                [torch.cat([x[i] for x in groups], 1) for i in range(3)]
                + [torch.stack([x[3] for x in groups], 1), torch.stack([pad(x[4]) for x in groups], 1)]
            )
        outs.append([torch.cat([x[i] for x in docs]) for i in range(5)])
    o_cmp, o_sel, o_win, own, scores = (torch.stack([x[i] for x in outs]) for i in range(5))
    o = sum(gates[..., i, None] * x for i, x in enumerate((o_cmp, o_sel, o_win)))
    res = dict(o=o, o_cmp=o_cmp, o_sel=o_sel, o_win=o_win)
    grads = {}
    if do is not None:
        roots = [o, *(x for x, y in zip((o_cmp, o_sel, o_win), dos or ()) if y is not None)]
        cot = [do.to(F64), *(y.to(F64) for y in dos or () if y is not None)]
        got = torch.autograd.grad(roots, leaves, cot, allow_unused=True)
        grads = {name: torch.zeros_like(x) if y is None else y for name, x, y in zip(INPUTS, leaves, got)}
    return {k: v.detach() for k, v in res.items()} | dict(indices=own, scores=scores) | grads


def valid(indices, *, l_sel, n_sel, n_init, n_local, cu=None, rows=None):
    """bool [B,S,G]: ascending, unique, -1 at the end, within the candidates, the forced blocks there, exactly
    min(n_sel, cur + 1) of them."""
    B, S, G, n = indices.shape
    dev = indices.device
    x = indices.long()
    t = torch.arange(S, device=dev) if rows is None else rows
    if cu is not None: t = torch.cat([torch.arange(b - a, device=dev) for a, b in zip(cu, cu[1:])])
    cur = (t // l_sel)[None, :, None]
    held = (x >= 0).sum(-1)
    want = (cur + 1).clamp_max(n_sel)
    place = torch.arange(n, device=dev)
    ok = (n == n_sel) & (held == want) & (x.amax(-1) <= cur) & (x.amin(-1) >= -1)
    ok &= (((x[..., 1:] > x[..., :-1]) | (place[1:] >= want[..., None])).all(-1)) & (
        (x >= 0) == (place < want[..., None])
    ).all(-1)
    for i in range(n_init): ok &= (x == i).any(-1) | (cur < i)
    for i in range(n_local): ok &= (x == (cur - i)[..., None]).any(-1) | (cur < i)
    return ok


def allowed(t, name, inputs, do, scale, tol, u):
    """Largest ||got - want||: tol ||want||, or 4 u of what one rounding of the branches' outputs moves where more
    than that cancels.

    ds = p (g do.v - g do.o): with one key the two are equal, the exact dq and dk are 0, and an o rounded to u
    leaves about u g |do| |o| / sqrt(Dv) a row.
    With many keys |o| shrinks as ds does, and the floor stays under tol ||want||.
    """
    want = t[name]
    x = dict(zip(INPUTS, inputs))
    rms = lambda y: math.sqrt(float(y.double().square().sum(-1).mean())) if y.numel() else 0.0
    floor = 0.0
    for i, b in enumerate(BRANCHES):
        row = (x["gates"][..., i].double() * do.double().norm(dim=-1) * t[f"o_{b}"].norm(dim=-1)) / math.sqrt(
            do.shape[-1]
        )
        if name == f"k_{b}": floor = scale * float((row * x["q"].double().norm(dim=-1)).norm())
        if name == "q": floor = math.hypot(floor, scale * float(row.norm()) * rms(x[f"k_{b}"]))
    return max(tol * float(want.norm()), 4 * u * floor)
