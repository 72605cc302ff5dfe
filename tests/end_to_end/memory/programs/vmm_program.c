/* A program that manages virtual memory itself, at random: vmm_program SEED CHECKS MIB
 *
 * It creates, maps (several times), unmaps, retains, releases, exports, writes and reads physical memory by handles, up to MIB in all,
 * and checks CHECKS times what it reads against what it wrote last, through whichever mapping.  At the end everything is given back.
 * One line of JSON says what happened; anything that the driver refuses is a failure, but for an export that others leave no room for.
 */
#include "cuda_program.h"

enum { HANDLES = 12, VIEWS = 3 };

typedef struct owned {
    CUmemGenericAllocationHandle handle;
    size_t bytes;
    uint64_t generation; /* what is in it; 0: nothing was written */
    int references, views, exportable;
    CUdeviceptr view[VIEWS];
} owned;

static owned all[HANDLES];
static uint64_t dice, generations;
static unsigned long failures, mismatches, checks, maps, exports;
static size_t in_use, most;
static unsigned char *buffer;

static uint32_t roll(uint32_t sides)
{
    dice ^= dice << 13;
    dice ^= dice >> 7;
    dice ^= dice << 17;
    return (uint32_t)(dice >> 32) % sides;
}

static int failed(const char *what, CUresult result)
{
    if (result == CUDA_SUCCESS)
        return 0;
    failures++;
    fprintf(stderr, "%s: %d\n", what, (int)result);
    return 1;
}

static void fill(uint64_t generation, size_t bytes)
{
    uint64_t value = generation * UINT64_C(0x9e3779b97f4a7c15), *at = (uint64_t *)(void *)buffer;
    for (size_t i = 0; i < bytes / sizeof *at; i++) {
        value += UINT64_C(0x9e3779b97f4a7c15);
        at[i] = value ^ (value >> 29);
    }
}

static int same(uint64_t generation, size_t bytes)
{
    uint64_t value = generation * UINT64_C(0x9e3779b97f4a7c15);
    const uint64_t *at = (const uint64_t *)(const void *)buffer;
    for (size_t i = 0; i < bytes / sizeof *at; i++) {
        value += UINT64_C(0x9e3779b97f4a7c15);
        if (at[i] != (value ^ (value >> 29)))
            return 0;
    }
    return 1;
}

static void create(owned *one)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    size_t bytes = (1 + roll(12)) * 2 * MIB;
    if (in_use + bytes > most)
        return;
    *one = (owned){.bytes = bytes, .references = 1, .exportable = roll(4) == 0};
    if (one->exportable)
        prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | CU_MEM_HANDLE_TYPE_FABRIC;
    if (failed("cuMemCreate", cuMemCreate(&one->handle, bytes, &prop, 0)))
        one->references = 0;
    else
        in_use += bytes;
}

static void map(owned *one)
{
    const CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr at;
    if (one->references == 0 || one->views == VIEWS || failed("cuMemAddressReserve", cuMemAddressReserve(&at, one->bytes, 0, 0, 0)))
        return;
    if (failed("cuMemMap", cuMemMap(at, one->bytes, 0, one->handle, 0))) {
        cuMemAddressFree(at, one->bytes);
        return;
    }
    failed("cuMemSetAccess", cuMemSetAccess(at, one->bytes, &access, 1));
    one->view[one->views++] = at;
    maps++;
}

static void gone(owned *one)
{
    if (one->references != 0 || one->views != 0)
        return;
    in_use -= one->bytes;
    *one = (owned){0};
}

static void unmap(owned *one)
{
    if (one->views == 0)
        return;
    CUdeviceptr at = one->view[--one->views];
    failed("cuMemUnmap", cuMemUnmap(at, one->bytes));
    failed("cuMemAddressFree", cuMemAddressFree(at, one->bytes));
    gone(one);
}

static void release(owned *one)
{
    if (one->references == 0)
        return;
    failed("cuMemRelease", cuMemRelease(one->handle));
    one->references--;
    gone(one);
}

static void retain(owned *one)
{
    CUmemGenericAllocationHandle handle;
    if (one->views == 0 || one->references == 2)
        return;
    size_t inside = roll((uint32_t)(one->bytes / 4096)) * (size_t)4096;
    if (failed("cuMemRetainAllocationHandle", cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)(one->view[0] + inside))))
        return;
    if (one->handle != handle) {
        fprintf(stderr, "another handle for the same memory\n");
        failures++;
    }
    one->references++;
}

static void put(owned *one)
{
    if (one->views == 0)
        return;
    one->generation = ++generations;
    fill(one->generation, one->bytes);
    failed("cuMemcpyHtoD", cuMemcpyHtoD(one->view[roll((uint32_t)one->views)], buffer, one->bytes));
}

static void check(owned *one)
{
    if (one->views == 0 || one->generation == 0)
        return;
    memset(buffer, 0, one->bytes);
    failed("cuMemcpyDtoH", cuMemcpyDtoH(buffer, one->view[roll((uint32_t)one->views)], one->bytes));
    checks++;
    mismatches += !same(one->generation, one->bytes);
}

static void export(const owned *one)
{
    int descriptor = -1;
    if (one->references == 0 || !one->exportable)
        return;
    CUresult result = cuMemExportToShareableHandle(&descriptor, one->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (result == CUDA_ERROR_OUT_OF_MEMORY || failed("cuMemExportToShareableHandle", result))
        return;
    exports++;
    close(descriptor);
}

static void step(void)
{
    owned *one = &all[roll(HANDLES)];
    switch (roll(13)) {
    case 0: case 1: case 2:
        if (one->references == 0 && one->views == 0) {
            create(one);
            map(one);
        } else {
            map(one);
        }
        break;
    case 3: unmap(one); break;
    case 4: release(one); break;
    case 5: retain(one); break;
    case 6: case 7: put(one); break;
    case 12: export(one); break;
    default: check(one); break;
    }
}

int main(int count, char **words)
{
    if (count != 4)
        return 2;
    dice = strtoull(words[1], NULL, 10) * 2654435761u + 88172645463325252u;
    most = strtoull(words[3], NULL, 10) * MIB;
    buffer = malloc(32 * MIB);
    if (buffer == NULL)
        return 1;
    begin();
    for (const unsigned long wanted = strtoul(words[2], NULL, 10); checks < wanted && failures == 0;)
        step();
    for (owned *one = all; one < all + HANDLES; one++) {
        check(one);
        while (one->references != 0)
            release(one);
        while (one->views != 0)
            unmap(one);
    }
    printf("{\"checks\": %lu, \"maps\": %lu, \"exports\": %lu, \"mismatches\": %lu, \"failures\": %lu, \"left\": %lu}\n", checks, maps,
           exports, mismatches, failures, (unsigned long)of_hook().allocated_bytes);
    free(buffer);
    return mismatches != 0 || failures != 0 || complaints != 0;
}
