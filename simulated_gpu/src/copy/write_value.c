/* Values that a stream writes to memory. */
#include "copy/copy.h"

static CUresult write_value(CUstream handle, CUdeviceptr pointer, uint64_t value, uint32_t bytes)
{
    sim_stream *stream;
    NVS_SIM_TRY(nvs_sim_stream(handle, &stream));
    if (pointer % bytes != 0 || !nvs_sim_kernel_reaches(stream->context, (uintptr_t)pointer, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    sim_work work = {.kind = OP_WRITE_VALUE, .u.write = {.pointer = pointer, .value = value, .bytes = bytes}};
    return nvs_sim_submit(stream, &work);
}

NVS_SIM_ENTRY(cuStreamWriteValue32_v2, (CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags),
              write_value(stream, addr, value, 4))
NVS_SIM_ENTRY(cuStreamWriteValue64_v2, (CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags),
              write_value(stream, addr, value, 8))
