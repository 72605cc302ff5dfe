/* A driver of a few functions with exact bookkeeping, so that the memory side can be driven alone: any inner call can be made
 * to fail, and what the driver really holds is known.
 *
 * Built together with memory_stand_in.c and the hook's folders memory, swap, ipc and hooks/memory.
 */
#include "driver/cuda_api.h"
#include "ipc/ipc.h"
#include "memory_fake.h"

#include <pthread.h>
#include <stdlib.h>

_Thread_local CUcontext fake_current = (CUcontext)(uintptr_t)0x100;
_Thread_local bool fake_stream_captures;

/* --- the driver --- */

enum { SLOTS = 4096, DEVICE = 1, MANAGED, POOLED, HANDLE, ARRAY, MAPPED };

typedef struct block {
    uint64_t key, bytes;
    unsigned kind, references, mappings;
    CUcontext context;
    uint64_t backing;
} block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static block blocks[SLOTS];
static uint64_t next_key = UINT64_C(0x700000000000);
static uint64_t free_keys[SLOTS];
static unsigned free_count;
static _Atomic unsigned calls, fail_at;
static _Atomic bool events_done = true;
static CUresult fail_with = CUDA_ERROR_UNKNOWN;
fake_prefetch fake_prefetches[256];
unsigned fake_prefetch_count;
static bool old_prefetch;
static _Thread_local CUcontext pushed_over; /* one deep is all that is needed */
static CUcontext gone;

/* Every inner call passes here; the chosen one fails before it does anything. */
#define FAKE_CALL()                                                                                     \
    do {                                                                                                \
        unsigned number = atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed) + 1;               \
        if (number == atomic_load_explicit(&fail_at, memory_order_relaxed))                             \
            return fail_with;                                                                           \
    } while (0)

static block *find(uint64_t key, unsigned kinds_from, unsigned kinds_to)
{
    for (unsigned i = 0; i < SLOTS; i++)
        if (blocks[i].kind >= kinds_from && blocks[i].kind <= kinds_to && blocks[i].kind != 0 && blocks[i].key == key)
            return &blocks[i];
    return NULL;
}

static CUresult add(unsigned kind, uint64_t bytes, uint64_t *key)
{
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (fake_current == NULL && kind != HANDLE)
        return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < SLOTS; i++) {
        if (blocks[i].kind != 0)
            continue;
        if (free_count != 0 && bytes <= (UINT64_C(2) << 20)) {
            *key = free_keys[--free_count]; /* the same address again, as soon as possible */
        } else {
            *key = next_key;
            next_key += (bytes + (UINT64_C(2) << 20)) & ~((UINT64_C(2) << 20) - 1);
        }
        blocks[i] = (block){.key = *key, .bytes = bytes, .kind = kind, .references = 1,
                            .context = kind == HANDLE || kind == MAPPED ? NULL : fake_current};
        result = CUDA_SUCCESS;
        break;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static CUresult drop(uint64_t key, unsigned from, unsigned to)
{
    pthread_mutex_lock(&lock);
    block *found = find(key, from, to);
    if (found != NULL) {
        if (found->bytes <= (UINT64_C(2) << 20) && free_count < SLOTS)
            free_keys[free_count++] = found->key;
        found->kind = 0;
    }
    pthread_mutex_unlock(&lock);
    return found != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult fake_alloc(CUdeviceptr *out, size_t bytes)
{
    uint64_t key;
    FAKE_CALL();
    CUresult result = add(DEVICE, bytes, &key);
    *out = result == CUDA_SUCCESS ? key : *out;
    return result;
}

static CUresult fake_managed(CUdeviceptr *out, size_t bytes, unsigned int flags)
{
    uint64_t key;
    FAKE_CALL();
    CUresult result = add(MANAGED, bytes, &key);
    *out = result == CUDA_SUCCESS ? key : *out;
    return result;
}

static CUresult fake_free(CUdeviceptr pointer)
{
    FAKE_CALL();
    return drop(pointer, DEVICE, POOLED);
}

static CUresult fake_pitch(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    *pitch = (width + 511) / 512 * 512;
    return fake_alloc(out, *pitch * height);
}

static CUresult fake_alloc_async(CUdeviceptr *out, size_t bytes, CUstream stream)
{
    uint64_t key;
    FAKE_CALL();
    CUresult result = add(POOLED, fake_stream_captures ? 0 : bytes, &key); /* a capture reserves an address only */
    *out = result == CUDA_SUCCESS ? key : *out;
    return result;
}

static CUresult fake_free_async(CUdeviceptr pointer, CUstream stream)
{
    FAKE_CALL();
    return drop(pointer, DEVICE, POOLED);
}

static CUmemoryPool current_pool = (CUmemoryPool)(uintptr_t)0x10;

static CUresult fake_alloc_from_pool(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    return fake_alloc_async(out, bytes, stream);
}

static CUresult fake_pool_create(CUmemoryPool *out, const CUmemPoolProps *props)
{
    static uintptr_t last = 0x1000;
    FAKE_CALL();
    *out = (CUmemoryPool)(last += 0x10);
    return CUDA_SUCCESS;
}

static CUresult fake_pool_destroy(CUmemoryPool pool)
{
    FAKE_CALL();
    return CUDA_SUCCESS;
}

static CUresult fake_current_pool(CUmemoryPool *out, CUdevice device)
{
    *out = current_pool;
    return CUDA_SUCCESS;
}

static CUresult fake_create(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *prop, unsigned long long flags)
{
    uint64_t key;
    FAKE_CALL();
    CUresult result = add(HANDLE, bytes, &key);
    *out = result == CUDA_SUCCESS ? key : *out;
    return result;
}

/* Under `lock`. */
static void end_handle(block *handle)
{
    if (handle != NULL && handle->references == 0 && handle->mappings == 0)
        handle->kind = 0;
}

static CUresult fake_release(CUmemGenericAllocationHandle handle)
{
    FAKE_CALL();
    pthread_mutex_lock(&lock);
    block *found = find(handle, HANDLE, HANDLE);
    bool valid = found != NULL && found->references != 0;
    if (valid) {
        found->references--;
        end_handle(found);
    }
    pthread_mutex_unlock(&lock);
    return valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult fake_map(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    FAKE_CALL();
    pthread_mutex_lock(&lock);
    block *of = find(handle, HANDLE, HANDLE);
    for (unsigned i = 0; of != NULL && i < SLOTS; i++) {
        if (blocks[i].kind != 0)
            continue;
        blocks[i] = (block){.key = pointer, .bytes = 0, .kind = MAPPED, .backing = handle};
        of->mappings++;
        result = CUDA_SUCCESS;
        break;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static CUresult fake_unmap(CUdeviceptr pointer, size_t bytes)
{
    FAKE_CALL();
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < SLOTS; i++) {
        if (blocks[i].kind != MAPPED || blocks[i].key - pointer >= bytes)
            continue;
        block *handle = find(blocks[i].backing, HANDLE, HANDLE);
        blocks[i].kind = 0;
        handle->mappings--;
        end_handle(handle);
    }
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static CUresult fake_retain(CUmemGenericAllocationHandle *out, void *address)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    FAKE_CALL();
    pthread_mutex_lock(&lock);
    block *mapping = find((uint64_t)(uintptr_t)address, MAPPED, MAPPED);
    if (mapping != NULL) {
        *out = mapping->backing;
        find(mapping->backing, HANDLE, HANDLE)->references++;
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static CUresult fake_array(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *of)
{
    uint64_t key;
    FAKE_CALL();
    CUresult result = add(ARRAY, of->Width * (of->Height ? of->Height : 1) * (of->Depth ? of->Depth : 1) * of->NumChannels * 4, &key);
    if (result == CUDA_SUCCESS)
        *out = (CUarray)(uintptr_t)key;
    return result;
}

static CUresult fake_array_destroy(CUarray array)
{
    FAKE_CALL();
    return drop((uint64_t)(uintptr_t)array, ARRAY, ARRAY);
}

static CUresult fake_info(size_t *free_bytes, size_t *total)
{
    FAKE_CALL();
    *total = UINT64_C(16) << 30;
    *free_bytes = *total - fake_held() - (UINT64_C(1) << 30);
    return CUDA_SUCCESS;
}

static CUresult fake_total(size_t *total, CUdevice device)
{
    FAKE_CALL();
    *total = UINT64_C(16) << 30;
    return CUDA_SUCCESS;
}

static CUresult fake_attribute(int *out, CUdevice_attribute attribute, CUdevice device)
{
    *out = 1;
    return CUDA_SUCCESS;
}

static CUresult fake_current_context(CUcontext *out)
{
    *out = fake_current;
    return CUDA_SUCCESS;
}

static CUresult fake_push(CUcontext context)
{
    FAKE_CALL();
    if (context == gone)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    pushed_over = fake_current;
    fake_current = context;
    return CUDA_SUCCESS;
}

static CUresult fake_pop(CUcontext *out)
{
    *out = fake_current;
    fake_current = pushed_over;
    return CUDA_SUCCESS;
}

static CUresult fake_exchange(CUstreamCaptureMode *mode)
{
    return CUDA_SUCCESS;
}

static CUresult fake_is_capturing(CUstream stream, CUstreamCaptureStatus *out)
{
    *out = fake_stream_captures ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

static CUresult fake_stream_context(CUstream stream, CUcontext *out)
{
    FAKE_CALL();
    *out = fake_current;
    return CUDA_SUCCESS;
}

static CUresult fake_stream_id(CUstream stream, unsigned long long *out)
{
    FAKE_CALL();
    *out = (uintptr_t)stream;
    return CUDA_SUCCESS;
}

static CUresult fake_make_handle(void **out, unsigned int flags)
{
    FAKE_CALL();
    *out = malloc(1); /* so that a leak or a use after the end is seen by a sanitizer */
    return *out != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult fake_event_destroy(CUevent event)
{
    free(event);
    return CUDA_SUCCESS;
}

static CUresult fake_event_record(CUevent event, CUstream stream)
{
    FAKE_CALL();
    *(volatile char *)event = 1;
    return CUDA_SUCCESS;
}

static CUresult fake_event_query(CUevent event)
{
    if (*(volatile char *)event != 1)
        abort();
    return atomic_load_explicit(&events_done, memory_order_relaxed) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static CUresult fake_event_wait(CUevent event)
{
    FAKE_CALL();
    return CUDA_SUCCESS;
}

static CUresult note_prefetch(CUdeviceptr pointer, size_t bytes, bool out)
{
    pthread_mutex_lock(&lock);
    block *found = NULL;
    for (unsigned i = 0; i < SLOTS && found == NULL; i++)
        if (blocks[i].kind == MANAGED && pointer - blocks[i].key < blocks[i].bytes)
            found = pointer - blocks[i].key + bytes <= blocks[i].bytes ? &blocks[i] : NULL;
    if (fake_prefetch_count < 256)
        fake_prefetches[fake_prefetch_count++] = (fake_prefetch){pointer, bytes, out};
    pthread_mutex_unlock(&lock);
    return found != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult fake_prefetch_v2(CUdeviceptr pointer, size_t bytes, CUmemLocation where, unsigned int flags, CUstream stream)
{
    FAKE_CALL();
    return note_prefetch(pointer, bytes, where.type == CU_MEM_LOCATION_TYPE_HOST);
}

static CUresult fake_prefetch_v1(CUdeviceptr pointer, size_t bytes, CUdevice where, CUstream stream)
{
    FAKE_CALL();
    return note_prefetch(pointer, bytes, where == CU_DEVICE_CPU);
}

static CUresult fake_pointer(void *data, CUpointer_attribute attribute, CUdeviceptr pointer)
{
    FAKE_CALL();
    *(unsigned int *)data = 1; /* what managed memory says to all that is asked here */
    return CUDA_SUCCESS;
}

static CUresult fake_not_supported(void)
{
    return CUDA_ERROR_NOT_SUPPORTED;
}

nvs_function nvs_real_resolve(nvs_id id)
{
    switch ((int)id) {
#define FAKE(symbol, function)  \
    case NVS_ID_##symbol:       \
        return (nvs_function)(function);
        FAKE(cuMemAlloc_v2, fake_alloc)
        FAKE(cuMemAllocManaged, fake_managed)
        FAKE(cuMemFree_v2, fake_free)
        FAKE(cuMemAllocPitch_v2, fake_pitch)
        FAKE(cuMemAllocAsync, fake_alloc_async)
        FAKE(cuMemFreeAsync, fake_free_async)
        FAKE(cuMemAllocFromPoolAsync, fake_alloc_from_pool)
        FAKE(cuMemPoolCreate, fake_pool_create)
        FAKE(cuMemPoolDestroy, fake_pool_destroy)
        FAKE(cuDeviceGetMemPool, fake_current_pool)
        FAKE(cuMemCreate, fake_create)
        FAKE(cuMemRelease, fake_release)
        FAKE(cuMemMap, fake_map)
        FAKE(cuMemUnmap, fake_unmap)
        FAKE(cuMemRetainAllocationHandle, fake_retain)
        FAKE(cuArray3DCreate_v2, fake_array)
        FAKE(cuArrayDestroy, fake_array_destroy)
        FAKE(cuMemGetInfo_v2, fake_info)
        FAKE(cuDeviceTotalMem_v2, fake_total)
        FAKE(cuDeviceGetAttribute, fake_attribute)
        FAKE(cuCtxGetCurrent, fake_current_context)
        FAKE(cuCtxPushCurrent_v2, fake_push)
        FAKE(cuCtxPopCurrent_v2, fake_pop)
        FAKE(cuThreadExchangeStreamCaptureMode, fake_exchange)
        FAKE(cuStreamIsCapturing, fake_is_capturing)
        FAKE(cuStreamGetCtx, fake_stream_context)
        FAKE(cuStreamGetId, fake_stream_id)
        FAKE(cuStreamCreate, fake_make_handle)
        FAKE(cuEventCreate, fake_make_handle)
        FAKE(cuEventDestroy_v2, fake_event_destroy)
        FAKE(cuEventRecord, fake_event_record)
        FAKE(cuEventQuery, fake_event_query)
        FAKE(cuEventSynchronize, fake_event_wait)
        FAKE(cuMemPrefetchAsync_v2, fake_prefetch_v2)
        FAKE(cuMemPrefetchAsync, fake_prefetch_v1)
        FAKE(cuPointerGetAttribute, fake_pointer)
    }
    return (nvs_function)fake_not_supported;
}

bool nvs_real_exists(nvs_id id)
{
    return !(old_prefetch && id == NVS_ID_cuMemPrefetchAsync_v2);
}

/* --- for the tests --- */

void fake_fail(unsigned call, int result)
{
    fail_with = (CUresult)result;
    atomic_store_explicit(&calls, 0, memory_order_relaxed);
    atomic_store_explicit(&fail_at, call, memory_order_relaxed);
}

unsigned fake_calls(void)
{
    return atomic_load_explicit(&calls, memory_order_relaxed);
}

void fake_set_events_done(bool done)
{
    atomic_store_explicit(&events_done, done, memory_order_relaxed);
}

void fake_set_context(uint64_t context)
{
    fake_current = (CUcontext)(uintptr_t)context;
}

void fake_set_current_pool(uint64_t pool)
{
    current_pool = (CUmemoryPool)(uintptr_t)pool;
}

void fake_set_next_key(uint64_t key)
{
    next_key = key;
    free_count = 0;
}

void fake_forget(uint64_t key)
{
    (void)drop(key, DEVICE, POOLED);
}

void fake_set_old_driver(bool old)
{
    old_prefetch = old;
}

void fake_destroy_context(uint64_t context)
{
    pthread_mutex_lock(&lock);
    gone = (CUcontext)(uintptr_t)context;
    for (unsigned i = 0; i < SLOTS; i++)
        if (blocks[i].kind != 0 && blocks[i].context == (CUcontext)(uintptr_t)context)
            blocks[i].kind = 0;
    pthread_mutex_unlock(&lock);
    nvs_memory_context_gone((CUcontext)(uintptr_t)context);
    nvs_ipc_context_gone((CUcontext)(uintptr_t)context);
}

uint64_t fake_held(void)
{
    uint64_t sum = 0;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < SLOTS; i++)
        if (blocks[i].kind != 0)
            sum += (blocks[i].bytes + 511) / 512 * 512;
    pthread_mutex_unlock(&lock);
    return sum;
}
