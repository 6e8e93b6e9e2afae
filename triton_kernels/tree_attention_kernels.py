"""Tree attention in Triton: the three kernels. `tree_attention.py` calls them and says what they compute.

Tokens of all rows lie one after another, [R * T, heads * D], so a tile is one block of a two-dimensional TMA descriptor. A tile's
partners come from its list, full ones (no pair is hidden) before partial ones; programs start with the longest lists. Scores are in
base 2: scale2 = scale * log2(e), as is lse2.

Visibility is one subtraction and one unsigned comparison: key k sees query q iff q - k, as unsigned, is below k's reach,
end - k. A negative q is above every reach.

Letters: M queries and N keys of a tile, H query heads, HKV key heads, D head size.
"""

import triton
import triton.language as tl


@triton.jit
def _hidden(scores, q_offset, q_position, k_offset, reach, k_position, WINDOW: tl.constexpr):
    """The scores [.., ..] with -inf where the query may not see the key. Arguments broadcast to the scores' shape."""
    visible = (q_offset - k_offset).to(tl.uint32, bitcast=True) < reach.to(tl.uint32, bitcast=True)
    if WINDOW > 0:
        visible = visible & (q_position - k_position < WINDOW)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _forward_block(
    q, k_desc, v_desc, column, start, q_offset, q_position, k_offset_ptr, reach_ptr, k_position_ptr,
    scale2, peak, total, acc,
    N: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    k = k_desc.load([start, column])
    scores = tl.dot(q, k.T, input_precision=PRECISION)
    if MASKED:
        keys = start + tl.arange(0, N)
        k_position = tl.load(k_position_ptr + keys)[None, :] if WINDOW > 0 else 0
        scores = _hidden(
            scores, q_offset[:, None], q_position[:, None], tl.load(k_offset_ptr + keys)[None, :],
            tl.load(reach_ptr + keys)[None, :], k_position, WINDOW,
        )  # fmt: skip
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale2)  # of scaled scores, scaled once a row
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak  # -inf - -inf is not a number
    weights = tl.exp2(scores * scale2 - base[:, None])
    shrink = tl.exp2(peak - base)
    acc = acc * shrink[:, None]
    v = v_desc.load([start, column])
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return new_peak, total * shrink + tl.sum(weights, 1), acc


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, q_offset_ptr, k_offset_ptr, reach_ptr, q_position_ptr, k_position_ptr,
    list_ptr, num_full_ptr, num_listed_ptr, order_ptr, scale2, out_ptr, lse_ptr,
    NUM_ROWS: tl.constexpr, TQ: tl.constexpr, TK: tl.constexpr, H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: M queries of one head. Writes out [R * TQ, H * D] and lse2 [H, R * TQ]."""
    head = tl.program_id(0) % H
    tile = tl.load(order_ptr + tl.program_id(0) // H)
    row = tile // (TQ // M)
    start = tile * M
    column = head // (H // HKV) * D
    q_desc = tl.make_tensor_descriptor(q_ptr, [NUM_ROWS * TQ, H * D], [H * D, 1], [M, D])
    k_desc = tl.make_tensor_descriptor(k_ptr, [NUM_ROWS * TK, HKV * D], [HKV * D, 1], [N, D])
    v_desc = tl.make_tensor_descriptor(v_ptr, [NUM_ROWS * TK, HKV * D], [HKV * D, 1], [N, D])
    queries = start + tl.arange(0, M)
    q_offset = tl.load(q_offset_ptr + queries)
    q_position = tl.load(q_position_ptr + queries) if WINDOW > 0 else q_offset
    q = q_desc.load([start, head * D])

    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    list_ptr += tile * (TK // N)
    num_full = tl.load(num_full_ptr + tile)
    num_listed = tl.load(num_listed_ptr + tile)
    for i in tl.range(0, num_full):
        key = row * TK + tl.load(list_ptr + i) * N
        peak, total, acc = _forward_block(
            q, k_desc, v_desc, column, key, q_offset, q_position, k_offset_ptr, reach_ptr, k_position_ptr,
            scale2, peak, total, acc, N, WINDOW, False, PRECISION,
        )  # fmt: skip
    for i in tl.range(num_full, num_listed):
        key = row * TK + tl.load(list_ptr + i) * N
        peak, total, acc = _forward_block(
            q, k_desc, v_desc, column, key, q_offset, q_position, k_offset_ptr, reach_ptr, k_position_ptr,
            scale2, peak, total, acc, N, WINDOW, True, PRECISION,
        )  # fmt: skip

    seen = total > 0
    acc = acc / tl.where(seen, total, 1.0)[:, None]
    out_desc = tl.make_tensor_descriptor(out_ptr, [NUM_ROWS * TQ, H * D], [H * D, 1], [M, D])
    out_desc.store([start, head * D], acc.to(out_ptr.dtype.element_ty))
    lse2 = tl.where(seen, peak + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    tl.store(lse_ptr + head * (NUM_ROWS * TQ) + queries, lse2)


@triton.jit
def _dq_block(
    q, d_out, lse2, delta, k_desc, v_desc, column, start, q_offset, q_position, k_offset_ptr, reach_ptr, k_position_ptr,
    scale2, dq,
    N: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    k = k_desc.load([start, column])
    v = v_desc.load([start, column])
    scores = tl.dot(q, k.T, input_precision=PRECISION) * scale2
    if MASKED:
        keys = start + tl.arange(0, N)
        k_position = tl.load(k_position_ptr + keys)[None, :] if WINDOW > 0 else 0
        scores = _hidden(
            scores, q_offset[:, None], q_position[:, None], tl.load(k_offset_ptr + keys)[None, :],
            tl.load(reach_ptr + keys)[None, :], k_position, WINDOW,
        )  # fmt: skip
    weights = tl.exp2(scores - lse2[:, None])
    d_weights = tl.dot(d_out, v.T, input_precision=PRECISION)
    d_scores = weights * (d_weights - delta[:, None])
    return tl.dot(d_scores.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, q_offset_ptr, k_offset_ptr, reach_ptr, q_position_ptr, k_position_ptr,
    list_ptr, num_full_ptr, num_listed_ptr, order_ptr, scale2, scale, d_out_ptr, lse_ptr, delta_ptr, dq_ptr,
    NUM_ROWS: tl.constexpr, TQ: tl.constexpr, TK: tl.constexpr, H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: M queries of one head. lse2 and delta [H, R * TQ], lse2 finite. Writes dq [R * TQ, H * D]."""
    head = tl.program_id(0) % H
    tile = tl.load(order_ptr + tl.program_id(0) // H)
    row = tile // (TQ // M)
    start = tile * M
    column = head // (H // HKV) * D
    q_desc = tl.make_tensor_descriptor(q_ptr, [NUM_ROWS * TQ, H * D], [H * D, 1], [M, D])
    d_out_desc = tl.make_tensor_descriptor(d_out_ptr, [NUM_ROWS * TQ, H * D], [H * D, 1], [M, D])
    k_desc = tl.make_tensor_descriptor(k_ptr, [NUM_ROWS * TK, HKV * D], [HKV * D, 1], [N, D])
    v_desc = tl.make_tensor_descriptor(v_ptr, [NUM_ROWS * TK, HKV * D], [HKV * D, 1], [N, D])
    queries = start + tl.arange(0, M)
    q_offset = tl.load(q_offset_ptr + queries)
    q_position = tl.load(q_position_ptr + queries) if WINDOW > 0 else q_offset
    q = q_desc.load([start, head * D])
    d_out = d_out_desc.load([start, head * D])
    lse2 = tl.load(lse_ptr + head * (NUM_ROWS * TQ) + queries)
    delta = tl.load(delta_ptr + head * (NUM_ROWS * TQ) + queries)

    dq = tl.zeros([M, D], tl.float32)
    list_ptr += tile * (TK // N)
    num_full = tl.load(num_full_ptr + tile)
    num_listed = tl.load(num_listed_ptr + tile)
    for i in tl.range(0, num_full):
        key = row * TK + tl.load(list_ptr + i) * N
        dq = _dq_block(
            q, d_out, lse2, delta, k_desc, v_desc, column, key, q_offset, q_position, k_offset_ptr, reach_ptr,
            k_position_ptr, scale2, dq, N, WINDOW, False, PRECISION,
        )  # fmt: skip
    for i in tl.range(num_full, num_listed):
        key = row * TK + tl.load(list_ptr + i) * N
        dq = _dq_block(
            q, d_out, lse2, delta, k_desc, v_desc, column, key, q_offset, q_position, k_offset_ptr, reach_ptr,
            k_position_ptr, scale2, dq, N, WINDOW, True, PRECISION,
        )  # fmt: skip
    dq_desc = tl.make_tensor_descriptor(dq_ptr, [NUM_ROWS * TQ, H * D], [H * D, 1], [M, D])
    dq_desc.store([start, head * D], (dq * scale).to(dq_ptr.dtype.element_ty))


@triton.jit
def _dkdv_block(
    k, v, k_offset, reach, k_position, q_desc, d_out_desc, lse_ptr, delta_ptr, q_offset_ptr, q_position_ptr,
    start, head, scale2, dk, dv,
    TOKENS: tl.constexpr, D: tl.constexpr, M: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    queries = start + tl.arange(0, M)
    q = q_desc.load([start, head * D])
    scores = tl.dot(k, q.T, input_precision=PRECISION) * scale2  # [N, M]
    if MASKED:
        q_position = tl.load(q_position_ptr + queries)[None, :] if WINDOW > 0 else 0
        scores = _hidden(
            scores, tl.load(q_offset_ptr + queries)[None, :], q_position, k_offset[:, None], reach[:, None],
            k_position[:, None], WINDOW,
        )  # fmt: skip
    lse2 = tl.load(lse_ptr + head * TOKENS + queries)
    weights = tl.exp2(scores - lse2[None, :])
    d_out = d_out_desc.load([start, head * D])
    dv = tl.dot(weights.to(d_out.dtype), d_out, dv, input_precision=PRECISION)
    d_weights = tl.dot(v, d_out.T, input_precision=PRECISION)
    delta = tl.load(delta_ptr + head * TOKENS + queries)
    d_scores = weights * (d_weights - delta[None, :])
    dk = tl.dot(d_scores.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, q_offset_ptr, k_offset_ptr, reach_ptr, q_position_ptr, k_position_ptr,
    list_ptr, num_full_ptr, num_listed_ptr, order_ptr, scale2, scale, d_out_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    NUM_ROWS: tl.constexpr, TQ: tl.constexpr, TK: tl.constexpr, H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: N keys of one key head, over its queries of all the query heads that read it. Writes dk and dv
    [R * TK, HKV * D]."""
    kv_head = tl.program_id(0) % HKV
    tile = tl.load(order_ptr + tl.program_id(0) // HKV)
    row = tile // (TK // N)
    start = tile * N
    group = H // HKV
    q_desc = tl.make_tensor_descriptor(q_ptr, [NUM_ROWS * TQ, H * D], [H * D, 1], [M, D])
    d_out_desc = tl.make_tensor_descriptor(d_out_ptr, [NUM_ROWS * TQ, H * D], [H * D, 1], [M, D])
    k_desc = tl.make_tensor_descriptor(k_ptr, [NUM_ROWS * TK, HKV * D], [HKV * D, 1], [N, D])
    v_desc = tl.make_tensor_descriptor(v_ptr, [NUM_ROWS * TK, HKV * D], [HKV * D, 1], [N, D])
    keys = start + tl.arange(0, N)
    k_offset = tl.load(k_offset_ptr + keys)
    reach = tl.load(reach_ptr + keys)
    k_position = tl.load(k_position_ptr + keys) if WINDOW > 0 else k_offset
    k = k_desc.load([start, kv_head * D])
    v = v_desc.load([start, kv_head * D])

    dk = tl.zeros([N, D], tl.float32)
    dv = tl.zeros([N, D], tl.float32)
    list_ptr += tile * (TQ // M)
    num_full = tl.load(num_full_ptr + tile) * group
    num_listed = tl.load(num_listed_ptr + tile) * group
    for i in tl.range(0, num_full):
        query = row * TQ + tl.load(list_ptr + i // group) * M
        dk, dv = _dkdv_block(
            k, v, k_offset, reach, k_position, q_desc, d_out_desc, lse_ptr, delta_ptr, q_offset_ptr, q_position_ptr,
            query, kv_head * group + i % group, scale2, dk, dv, NUM_ROWS * TQ, D, M, WINDOW, False, PRECISION,
        )  # fmt: skip
    for i in tl.range(num_full, num_listed):
        query = row * TQ + tl.load(list_ptr + i // group) * M
        dk, dv = _dkdv_block(
            k, v, k_offset, reach, k_position, q_desc, d_out_desc, lse_ptr, delta_ptr, q_offset_ptr, q_position_ptr,
            query, kv_head * group + i % group, scale2, dk, dv, NUM_ROWS * TQ, D, M, WINDOW, True, PRECISION,
        )  # fmt: skip
    dk_desc = tl.make_tensor_descriptor(dk_ptr, [NUM_ROWS * TK, HKV * D], [HKV * D, 1], [N, D])
    dv_desc = tl.make_tensor_descriptor(dv_ptr, [NUM_ROWS * TK, HKV * D], [HKV * D, 1], [N, D])
    dk_desc.store([start, kv_head * D], (dk * scale).to(dk_ptr.dtype.element_ty))
    dv_desc.store([start, kv_head * D], dv.to(dv_ptr.dtype.element_ty))
