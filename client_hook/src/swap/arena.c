/* A bitmap of blocks: small allocations that share a chunk, and segments that share a reservation.  First fit keeps used blocks together.
 *
 * Each allocation begins at a block, so its alignment is the 512 bytes that cuMemAlloc gives in practice (256 are promised).
 */
#include "swap/swap.h"

static bool is_used(const nvs_segment *arena, uint32_t block)
{
    return (arena->used[block / 64] >> (block % 64)) & 1;
}

/* The first free block at or after this one; `blocks` when there is none. */
static uint32_t next_free(const nvs_segment *arena, uint32_t block)
{
    while (block < arena->blocks) {
        uint64_t free_ones = ~arena->used[block / 64] >> (block % 64);
        if (free_ones != 0) {
            block += (uint32_t)__builtin_ctzll(free_ones);
            return block < arena->blocks ? block : arena->blocks;
        }
        block = (block / 64 + 1) * 64;
    }
    return arena->blocks;
}

/* The length of the run of free blocks from this one on, up to `enough`. */
static uint32_t free_run(const nvs_segment *arena, uint32_t block, uint32_t enough)
{
    uint32_t at = block;
    while (at < arena->blocks && at - block < enough) {
        uint64_t used = arena->used[at / 64] >> (at % 64);
        if (used != 0) {
            at += (uint32_t)__builtin_ctzll(used);
            break;
        }
        at = (at / 64 + 1) * 64;
    }
    at = at < arena->blocks ? at : arena->blocks;
    return at - block;
}

static void mark(nvs_segment *arena, uint32_t block, uint32_t count, bool used)
{
    for (uint32_t end = block + count; block < end;) {
        uint32_t bit = block % 64, here = 64 - bit < end - block ? 64 - bit : end - block;
        uint64_t mask = (here == 64 ? ~UINT64_C(0) : (UINT64_C(1) << here) - 1) << bit;
        if (used)
            arena->used[block / 64] |= mask;
        else
            arena->used[block / 64] &= ~mask;
        block += here;
    }
}

static uint64_t blocks_of(const nvs_segment *arena, uint64_t bytes)
{
    return (bytes + arena->block_bytes - 1) / arena->block_bytes;
}

bool nvs_arena_take(nvs_segment *arena, uint64_t bytes, CUdeviceptr *out)
{
    uint64_t needed = blocks_of(arena, bytes);
    if (needed > arena->free_blocks || needed > arena->longest)
        return false;
    uint32_t wanted = (uint32_t)needed, longest = 0;
    for (uint32_t block = next_free(arena, 0); block < arena->blocks;) {
        uint32_t run = free_run(arena, block, wanted);
        if (run >= wanted) {
            mark(arena, block, wanted, true);
            arena->free_blocks -= wanted;
            *out = arena->base + (uint64_t)block * arena->block_bytes;
            return true;
        }
        longest = run > longest ? run : longest;
        block = next_free(arena, block + run);
    }
    arena->longest = longest; /* all runs were measured */
    return false;
}

void nvs_arena_give(nvs_segment *arena, CUdeviceptr pointer, uint64_t bytes)
{
    uint32_t block = (uint32_t)((pointer - arena->base) / arena->block_bytes), count = (uint32_t)blocks_of(arena, bytes);
    if (pointer < arena->base || block >= arena->blocks || count > arena->blocks - block || !is_used(arena, block))
        return; /* not an allocation of this arena */
    mark(arena, block, count, false);
    arena->free_blocks += count;
    arena->longest = arena->free_blocks; /* an upper bound, until the next failed search measures it */
}
