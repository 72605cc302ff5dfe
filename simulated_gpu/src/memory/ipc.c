/* Legacy IPC: device memory that another process maps as well.
 *
 * The first export moves an allocation into a file of its own, at the same address.  The handle names a descriptor of the exporter,
 * and importers open it through /proc.  The memory is charged to the exporter.
 * Allocations below 64 KiB cannot be exported (a real driver exports the block that contains them).  Events have no handles.
 */
#include "memory/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct label { /* the contents of a handle; also behind the memory in the file */
    char magic[8];
    int32_t process_id, file;
    uint64_t bytes, mapped_bytes, id;
    uint32_t gpu;
    uint8_t zero[20];
} label;
_Static_assert(sizeof(label) == sizeof(CUipcMemHandle), "the size is CUDA's");

static const char magic[8] = "simIPC1";

static label label_of(const sim_allocation *one)
{
    label made = {.process_id = getpid(), .file = one->ipc.file - 1, .bytes = one->bytes, .mapped_bytes = one->mapped_bytes,
                  .id = one->id, .gpu = one->device->gpu};
    memcpy(made.magic, magic, sizeof magic);
    return made;
}

/* Moves the bytes into a file, which is then mapped at their address. */
static CUresult move_into_file(sim_allocation *one)
{
    const int file = (int)syscall(SYS_memfd_create, "simulated_gpu_shared", 1u /* MFD_CLOEXEC */);
    void *copy = MAP_FAILED;
    if (file < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    one->ipc.file = file + 1;
    const label content = label_of(one);
    if (ftruncate(file, (off_t)(one->mapped_bytes + sizeof content)) == 0 &&
        pwrite(file, &content, sizeof content, (off_t)one->mapped_bytes) == (ssize_t)sizeof content)
        copy = mmap(NULL, one->mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (copy != MAP_FAILED) {
        nvs_sim_transfers_wait();
        memcpy(copy, (void *)one->base, one->mapped_bytes);
        munmap(copy, one->mapped_bytes);
        if (mmap((void *)one->base, one->mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) != MAP_FAILED)
            return CUDA_SUCCESS;
    }
    close(file);
    one->ipc.file = 0;
    return CUDA_ERROR_MAP_FAILED;
}

SIM_EXPORT CUresult CUDAAPI cuIpcGetMemHandle(CUipcMemHandle *pHandle, CUdeviceptr dptr)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_CHECK(pHandle != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(context->error);
    const uintptr_t address = (uintptr_t)dptr;
    sim_allocation *one = nvs_sim_find(address);
    NVS_SIM_CHECK(one != NULL && one->kind == MEM_DEVICE, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(one->mapped_bytes != 0, CUDA_ERROR_NOT_SUPPORTED);
    if (one->ipc.file == 0)
        NVS_SIM_TRY(move_into_file(one));
    const label content = label_of(one);
    memcpy(pHandle, &content, sizeof *pHandle);
    return CUDA_SUCCESS;
}

static sim_allocation *find_import(const sim_context *context, const label *wanted)
{
    NVS_SIM_EACH_ALLOCATION(one)
        if (one->kind == MEM_IMPORTED && one->context == context && one->ipc.id == wanted->id && one->ipc.process == wanted->process_id)
            return one;
    return NULL;
}

/* The file of the memory; -1: the handle is no longer valid. */
static int open_file(const label *wanted)
{
    char path[64];
    label found;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", wanted->process_id, wanted->file);
    const int file = open(path, O_RDWR | O_CLOEXEC);
    if (file >= 0 &&
        (pread(file, &found, sizeof found, (off_t)wanted->mapped_bytes) != (ssize_t)sizeof found || memcmp(&found, wanted, sizeof found) != 0)) {
        close(file);
        return -1;
    }
    return file;
}

static CUresult import(sim_context *context, const label *wanted, CUdeviceptr *out)
{
    sim_device *device = nvs_sim_device_of_gpu(wanted->gpu);
    const int file = open_file(wanted);
    if (file < 0)
        return CUDA_ERROR_INVALID_HANDLE;
    void *memory = mmap(NULL, wanted->mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED)
        return CUDA_ERROR_MAP_FAILED;
    sim_allocation made = {.base = (uintptr_t)memory, .bytes = wanted->bytes, .mapped_bytes = wanted->mapped_bytes, .kind = MEM_IMPORTED,
                           .device = device != NULL ? device : context->device, .context = context,
                           .ipc = {.id = wanted->id, .process = wanted->process_id, .references = 1}};
    CUresult result = nvs_sim_insert(&made);
    if (result != CUDA_SUCCESS)
        munmap(memory, wanted->mapped_bytes);
    else
        *out = (CUdeviceptr)(uintptr_t)memory;
    return result;
}

static CUresult open_handle(CUdeviceptr *pdptr, const CUipcMemHandle *handle, unsigned int flags)
{
    label wanted;
    memcpy(&wanted, handle, sizeof wanted);
    sim_context *context;
    NVS_SIM_TRY(nvs_sim_need_current(&context));
    if (pdptr == NULL || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || memcmp(wanted.magic, magic, sizeof magic) != 0 ||
        wanted.mapped_bytes == 0 || wanted.bytes > wanted.mapped_bytes || wanted.mapped_bytes > (uint64_t)1 << 46)
        return CUDA_ERROR_INVALID_VALUE;
    if (wanted.process_id == getpid())
        return CUDA_ERROR_INVALID_CONTEXT;
    sim_allocation *again = find_import(context, &wanted);
    if (again == NULL)
        return import(context, &wanted, pdptr);
    again->ipc.references++;
    *pdptr = again->base;
    return CUDA_SUCCESS;
}

NVS_SIM_ENTRY(cuIpcOpenMemHandle, (CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags), open_handle(pdptr, &handle, Flags))
NVS_SIM_ENTRY(cuIpcOpenMemHandle_v2, (CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags), open_handle(pdptr, &handle, Flags))

SIM_EXPORT CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr dptr)
{
    NVS_SIM_ENTER_CONTEXT();
    sim_allocation *one = nvs_sim_find_base(dptr);
    NVS_SIM_CHECK(one != NULL && one->kind == MEM_IMPORTED, CUDA_ERROR_INVALID_VALUE);
    if (--one->ipc.references != 0)
        return CUDA_SUCCESS;
    nvs_sim_device_wait(context->device); /* as in the driver, work that uses it ends first */
    return nvs_sim_release((uintptr_t)dptr);
}
