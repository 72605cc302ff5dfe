/* Random allocations and frees in one arena: no two overlap, each is aligned and inside, and all can be had again at the end. */
#include "swap/swap.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCKS = 4096 + 37, HELD = 300, STEPS = 60000 };

static unsigned char owner[BLOCKS];

static void paint(uint64_t at, uint64_t bytes, int before, int after)
{
    for (uint64_t i = at / NVS_ARENA_BLOCK; i < (at + bytes + NVS_ARENA_BLOCK - 1) / NVS_ARENA_BLOCK; i++) {
        if (i >= BLOCKS || owner[i] != before) {
            printf("block %llu is not %s\n", (unsigned long long)i, before ? "ours" : "free");
            exit(1);
        }
        owner[i] = (unsigned char)after;
    }
}

int main(int argc, char **argv)
{
    nvs_arena arena;
    struct {
        uint64_t at, bytes;
    } held[HELD] = {{0, 0}};
    uint32_t dice = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 1;
    uint64_t all;
    if (!nvs_arena_init(&arena, (uint64_t)BLOCKS * NVS_ARENA_BLOCK, NVS_ARENA_BLOCK))
        return 1;
    for (int step = 0; step < STEPS; step++) {
        dice = dice * 1664525u + 1013904223u;
        unsigned slot = (dice >> 8) % HELD;
        if (held[slot].bytes != 0) {
            paint(held[slot].at, held[slot].bytes, 1, 0);
            nvs_arena_give(&arena, held[slot].at, held[slot].bytes);
            held[slot].bytes = 0;
            continue;
        }
        uint64_t bytes = 1 + (dice >> 4) % ((dice & 7) == 0 ? 200000 : 4000);
        if (!nvs_arena_take(&arena, bytes, &held[slot].at))
            continue;
        held[slot].bytes = bytes;
        if (held[slot].at % NVS_ARENA_BLOCK != 0)
            return 1;
        paint(held[slot].at, bytes, 0, 1);
    }
    for (unsigned slot = 0; slot < HELD; slot++)
        if (held[slot].bytes != 0)
            nvs_arena_give(&arena, held[slot].at, held[slot].bytes);
    if (!nvs_arena_take(&arena, (uint64_t)BLOCKS * NVS_ARENA_BLOCK, &all) || all != 0 || arena.free_blocks != 0)
        return 1;
    free(arena.used);
    puts("sound");
    return 0;
}
