"""The Mosaic GPU kernel of `selective_attention`, for Hopper: TMA, wgmma, and warpgroups with a task each.

One warpgroup copies blocks of keys and values to shared memory by TMA, two compute, 64 rows each, on what has arrived;
barriers per buffer tell what has landed and what is used up. Rows are packed and key blocks skipped as in the Triton
kernel. All that is particular to a version of jax, or to its interpreter, stands in the functions at the end.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxtyping import Array, Bool, Float, Int

from jfuse.pallas.key_blocks import END, NEAR, NEAR_END, WHOLE, visit
from jfuse.pallas.merge import NEGATIVE

COMPUTE = 2  # warpgroups
ROWS = 64  # of a warpgroup: the rows of one wgmma
BUFFERS = 2
LOG2E = math.log2(math.e)
SIZES = (64, 96, 128)


def selective_attention_mosaic(
    q: Float[Array, "R N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    row_positions: Int[Array, " R"],
    key_positions: Int[Array, " S"],
    visible: Bool[Array, " S"] | None,
    window: Int[Array, ""],
    *,
    interpret: bool = False,
    key_block: int = 128,
) -> tuple[Float[Array, "R N H"], Float[Array, "R N"]]:
    """Attention output and log-sum-exp, as `partial_attention` defines them; bfloat16 or float16, a size of `SIZES`.

    A batch made by `vmap` runs one by one: each has keys enough to fill the card.
    """
    run = functools.partial(_selective_attention, interpret=interpret, key_block=key_block)
    return jax.custom_batching.sequential_vmap(run)(q, k, v, row_positions, key_positions, visible, window)


def _selective_attention(q, k, v, row_positions, key_positions, visible, window, *, interpret, key_block):
    (rows, heads, size), (keys, kv_heads, _) = q.shape, k.shape
    group = heads // kv_heads
    positions = jnp.repeat(row_positions, group)
    plan = visit(k, v, positions, key_positions, visible, window, row_block=COMPUTE * ROWS, key_block=key_block)
    packed = q.reshape(rows, kv_heads, group, size).transpose(1, 0, 2, 3).reshape(kv_heads, rows * group, size)
    padded = plan.row_positions.shape[0]
    packed = jnp.pad(packed, ((0, 0), (0, padded - rows * group), (0, 0)))
    tail = ((0, plan.bounds.shape[1] - keys), (0, 0), (0, 0))
    kernel = mosaic_gpu.kernel(
        functools.partial(_kernel, size=size, dtype=q.dtype, key_block=key_block, interpret=interpret),
        out_type=[
            jax.ShapeDtypeStruct(packed.shape, v.dtype),
            jax.ShapeDtypeStruct((kv_heads, padded), jnp.float32),
        ],
        grid=(kv_heads, plan.ranges.shape[0]),
        grid_names=("head", "block"),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        compiler_params=mosaic_gpu.CompilerParams(approx_math=True),
        **_interpreted(interpret),
    )
    # Ranges lie flat, so that each is one scalar load.
    out, lse = kernel(
        plan.ranges.reshape(-1), plan.row_positions, plan.bounds, packed, jnp.pad(plan.k, tail), jnp.pad(plan.v, tail)
    )
    out, lse = (a[:, : rows * group].reshape(kv_heads, rows, group, *a.shape[2:]) for a in (out, lse))
    return out.transpose(1, 0, 2, 3).reshape(q.shape), lse.transpose(1, 0, 2).reshape(rows, heads)


def _kernel(range_ref, row_ref, bound_ref, q_ref, k_ref, v_ref, out_ref, lse_ref, *, size, dtype, key_block, interpret):
    swizzle = mosaic_gpu.find_swizzle(size * 16)
    tiles = (mosaic_gpu.TilingTransform((8, 8 * swizzle // 16)), mosaic_gpu.SwizzleTransform(swizzle))
    weight_tiles = (mosaic_gpu.TilingTransform((8, 64)), mosaic_gpu.SwizzleTransform(128))
    scratch = [
        mosaic_gpu.SMEM((COMPUTE, ROWS, size), dtype, transforms=tiles),
        mosaic_gpu.SMEM((BUFFERS, key_block, size), dtype, transforms=tiles),
        mosaic_gpu.SMEM((BUFFERS, key_block, size), dtype, transforms=tiles),
        mosaic_gpu.SMEM((BUFFERS, 2, key_block), jnp.int32),
        mosaic_gpu.SMEM((COMPUTE, ROWS), jnp.int32),
        mosaic_gpu.SMEM((COMPUTE, ROWS), jnp.float32),
        mosaic_gpu.Barrier(num_arrivals=2, num_barriers=COMPUTE),  # rows and their positions have landed
        mosaic_gpu.Barrier(num_arrivals=3, num_barriers=BUFFERS),  # keys and their bounds have landed
        mosaic_gpu.Barrier(num_barriers=BUFFERS),  # values have landed
        mosaic_gpu.Barrier(num_arrivals=COMPUTE, num_barriers=BUFFERS),  # keys are used up
        mosaic_gpu.Barrier(num_arrivals=COMPUTE, num_barriers=BUFFERS),  # values are used up
    ]
    if interpret:  # the interpreter takes the left operand of a product from shared memory only
        scratch.append(mosaic_gpu.SMEM((COMPUTE, ROWS, key_block), dtype, transforms=weight_tiles))

    def run(
        q_smem, k_smem, v_smem, bound_smem, row_smem, lse_smem, q_here, k_here, v_here, k_used, v_used, *weight_smem
    ):
        group, head = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("head")
        # The last rows see most keys; they start first, so that no core is left with them at the end.
        block = q_ref.shape[1] // (COMPUTE * ROWS) - 1 - jax.lax.axis_index("block")
        whole, end, near, near_end = (range_ref[4 * block + i] for i in (WHOLE, END, NEAR, NEAR_END))
        steps = end + near_end - near

        @pl.when(group < COMPUTE)
        def compute():
            mosaic_gpu.set_max_registers(232, action="increase")
            mine = pl.ds(block * (COMPUTE * ROWS) + group * ROWS, ROWS)
            rows = q_smem.at[group]
            mosaic_gpu.copy_gmem_to_smem(q_ref.at[head, mine], rows, q_here.at[group])
            mosaic_gpu.copy_gmem_to_smem(row_ref.at[mine], row_smem.at[group], q_here.at[group])
            mosaic_gpu.barrier_wait(q_here.at[group])
            tile = mosaic_gpu.Layout.WGMMA
            position = _load(row_smem.at[group], tile.reduce(1), interpret)

            def step(i, carry, *, masked):
                out, top, total = carry
                slot = jax.lax.rem(i, jnp.int32(BUFFERS))
                mosaic_gpu.barrier_wait(k_here.at[slot])
                scores = _product(rows, k_smem.at[slot].T, (ROWS, key_block)) * (LOG2E / math.sqrt(size))
                if masked:
                    first, last = (
                        jax.lax.broadcast_in_dim(
                            _load(bound_smem.at[slot, bound], tile.reduce(0), interpret), scores.shape, [1]
                        )
                        for bound in range(2)
                    )
                    at = jax.lax.broadcast_in_dim(position, scores.shape, [0])
                    scores = jnp.where((first <= at) & (at <= last), scores, NEGATIVE)
                mosaic_gpu.barrier_arrive(k_used.at[slot])
                new_top = jnp.maximum(top, scores.max(axis=1))
                decay = jnp.exp2(top - new_top)
                weights = jnp.exp2(scores - jax.lax.broadcast_in_dim(new_top, scores.shape, [0]))
                total = total * decay + weights.sum(axis=1)
                out *= jax.lax.broadcast_in_dim(decay, out.shape, [0])
                mosaic_gpu.barrier_wait(v_here.at[slot])
                out = _add_product(out, weights.astype(dtype), v_smem.at[slot], weight_smem, group)
                mosaic_gpu.barrier_arrive(v_used.at[slot])
                return out, new_top, total

            carry = (
                _laid(jnp.zeros((ROWS, size), jnp.float32), tile, interpret),
                _laid(jnp.full((ROWS,), NEGATIVE, jnp.float32), tile.reduce(1), interpret),
                _laid(jnp.zeros((ROWS,), jnp.float32), tile.reduce(1), interpret),
            )
            carry = jax.lax.fori_loop(jnp.int32(0), whole, functools.partial(step, masked=False), carry)
            out, top, total = jax.lax.fori_loop(whole, steps, functools.partial(step, masked=True), carry)
            # A row that saw only masked keys has top NEGATIVE; padding rows are let into whole blocks.
            seen = (top > NEGATIVE / 2) & (position >= 0)
            total = jnp.where(seen, total, 1.0)
            share = jnp.where(seen, 1.0 / total, 0.0)
            rows[...] = (out * jax.lax.broadcast_in_dim(share, out.shape, [0])).astype(dtype)
            lse_smem.at[group][...] = jnp.where(seen, top / LOG2E + jnp.log(total), NEGATIVE)
            mosaic_gpu.commit_smem()
            mosaic_gpu.copy_smem_to_gmem(rows, out_ref.at[head, mine])
            mosaic_gpu.copy_smem_to_gmem(lse_smem.at[group], lse_ref.at[head, mine])
            mosaic_gpu.wait_smem_to_gmem(0)

        @pl.when(group == COMPUTE)
        def copy():
            mosaic_gpu.set_max_registers(40, action="decrease")

            def fetch(i):
                slot = jax.lax.rem(i, jnp.int32(BUFFERS))
                here = pl.ds(jnp.where(i < end, i, near + i - end) * key_block, key_block)
                mosaic_gpu.copy_gmem_to_smem(k_ref.at[here, head], k_smem.at[slot], k_here.at[slot])
                for bound in range(2):
                    mosaic_gpu.copy_gmem_to_smem(bound_ref.at[bound, here], bound_smem.at[slot, bound], k_here.at[slot])
                mosaic_gpu.copy_gmem_to_smem(v_ref.at[here, head], v_smem.at[slot], v_here.at[slot])

            def used(i):
                slot = jax.lax.rem(i, jnp.int32(BUFFERS))
                mosaic_gpu.barrier_wait(k_used.at[slot])
                mosaic_gpu.barrier_wait(v_used.at[slot])

            ahead = jnp.minimum(steps, BUFFERS)

            @pl.loop(jnp.int32(0), ahead)
            def _(i):
                fetch(i)

            @pl.loop(ahead, steps)
            def _(i):
                used(i)
                fetch(i)

            @pl.loop(jnp.int32(0), ahead)  # no barrier may end in a phase that nobody has waited for
            def _(i):
                used(i)

    pl.run_scoped(run, *scratch, collective_axes="warpgroup")


def _product(a, b, shape):
    def multiply(accumulator):
        mosaic_gpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(multiply, mosaic_gpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _add_product(total, a, b, buffer, group):
    """Total + a @ b with the left operand in registers; through `buffer`, if there is one, in shared memory."""
    if buffer:
        (smem,) = buffer
        smem.at[group][...] = a
        mosaic_gpu.commit_smem()
        return total + _product(smem.at[group], b, total.shape)
    return pl.run_state(lambda ref: mosaic_gpu.wgmma(ref, a, b))(mosaic_gpu.WGMMAAccumulatorRef.init(total))


def _load(ref, layout, interpret):
    if interpret:
        return ref[...]
    index = ((),) if jax.__version_info__ < (0, 11) else ()
    return mosaic_gpu.load(ref, *index, layout=layout, optimized=False)


def _laid(array, layout, interpret):
    return array if interpret else mosaic_gpu.layout_cast(array, layout)


def _interpreted(interpret):
    # The interpreter came with jax 0.11.
    return {"interpret": mosaic_gpu.InterpretGPUParams()} if interpret else {}  # pyright: ignore[reportAttributeAccessIssue]
