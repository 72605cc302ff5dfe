/* A bitmap of blocks: small allocations that share a chunk, and segments that share a reservation.  First fit keeps used blocks together. */
#include "swap/swap.h"

#include <stdlib.h>

/* The first free block at or after this one; `blocks` when there is none. */
static uint32_t next_free(const nvs_arena *arena, uint32_t block)
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
static uint32_t free_run(const nvs_arena *arena, uint32_t block, uint32_t enough)
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

static void mark(nvs_arena *arena, uint32_t block, uint32_t count, bool used)
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

static uint64_t blocks_of(const nvs_arena *arena, uint64_t bytes)
{
    return (bytes + arena->block_bytes - 1) / arena->block_bytes;
}

bool nvs_arena_init(nvs_arena *arena, uint64_t bytes, uint32_t block_bytes)
{
    const uint32_t blocks = (uint32_t)(bytes / block_bytes);
    *arena = (nvs_arena){calloc((blocks + 63) / 64, sizeof *arena->used), block_bytes, blocks, blocks, blocks};
    return arena->used != NULL;
}

bool nvs_arena_take(nvs_arena *arena, uint64_t bytes, uint64_t *offset)
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
            *offset = (uint64_t)block * arena->block_bytes;
            return true;
        }
        longest = run > longest ? run : longest;
        block = next_free(arena, block + run);
    }
    arena->longest = longest; /* all runs were measured */
    return false;
}

void nvs_arena_give(nvs_arena *arena, uint64_t offset, uint64_t bytes)
{
    const uint32_t count = (uint32_t)blocks_of(arena, bytes);
    mark(arena, (uint32_t)(offset / arena->block_bytes), count, false);
    arena->free_blocks += count;
    arena->longest = arena->free_blocks; /* an upper bound, until the next failed search measures it */
}
