/* Physical memory that processes share by descriptor.
 *
 * The file names the process that is charged: the creator or, after the creator has released the memory, the next importer.
 */
#include "vmm/vmm.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

SIM_EXPORT CUresult CUDAAPI cuMemExportToShareableHandle(void *shareableHandle, CUmemGenericAllocationHandle handle,
                                                         CUmemAllocationHandleType handleType, unsigned long long flags)
{
    NVS_SIM_ENTER_FIND(sim_physical *physical, nvs_sim_physical(handle, &physical));
    NVS_SIM_CHECK(shareableHandle != NULL && flags == 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(handleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_NOT_SUPPORTED);
    NVS_SIM_CHECK(physical->properties.requestedHandleTypes == handleType, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(!physical->imported, CUDA_ERROR_INVALID_VALUE); /* as in driver 580 */
    if (physical->charged)
        NVS_SIM_CHECK(nvs_sim_charge_record_write(physical->file, physical->bytes, (int32_t)getpid(), physical->device->gpu),
                      CUDA_ERROR_OPERATING_SYSTEM);
    int copy = dup(physical->file);
    NVS_SIM_CHECK(copy >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    memcpy(shareableHandle, &copy, sizeof copy);
    return CUDA_SUCCESS;
}

/* Makes a file of shared memory physical memory of this process, charged here if no other process is charged. */
static CUresult adopt(int file, size_t bytes, sim_physical *out)
{
    sim_charge_record record;
    if (pread(file, &record, sizeof record, (off_t)bytes) != (ssize_t)sizeof record)
        return CUDA_ERROR_INVALID_VALUE;
    sim_device *device = nvs_sim_device_of_gpu(record.gpu);
    if (device == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    const bool charge = record.process == 0;
    if (charge && !nvs_sim_charge(device->gpu, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (charge)
        (void)nvs_sim_charge_record_write(file, bytes, (int32_t)getpid(), record.gpu);
    *out = (sim_physical){.magic = SIM_PHYSICAL, .references = 1, .bytes = bytes, .file = file, .device = device,
                          .charged = charge, .imported = true};
    out->properties = (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                            .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device->ordinal}};
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *osHandle,
                                                           CUmemAllocationHandleType shHandleType)
{
    struct stat info;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(handle != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(shHandleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_NOT_SUPPORTED);
    const int file = fcntl((int)(uintptr_t)osHandle, F_DUPFD_CLOEXEC, 0);
    NVS_SIM_CHECK(file >= 0, CUDA_ERROR_INVALID_VALUE);
    sim_physical *physical = calloc(1, sizeof *physical);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (physical != NULL && fstat(file, &info) == 0 && info.st_size > SIM_CHARGE_RECORD_BYTES)
        result = adopt(file, (size_t)info.st_size - SIM_CHARGE_RECORD_BYTES, physical);
    if (result != CUDA_SUCCESS) {
        close(file);
        free(physical);
        return result;
    }
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)physical;
    return CUDA_SUCCESS;
}
