/* The scene that fault_sweep.c plays: each call may fail; what depends on one that failed is left out. */

enum { FILLED = 4096 }; /* bytes of an allocation that work touches */

static void memory_of_all_kinds(CUstream stream)
{
    const CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                       .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    const CUDA_ARRAY_DESCRIPTOR flat = {.Width = 64, .Height = 64, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
    const CUDA_ARRAY3D_DESCRIPTOR deep = {.Width = 16, .Height = 16, .Depth = 16, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
    CUdeviceptr memory, base;
    CUmemoryPool pool;
    CUarray array;
    void *host;
    size_t size, free_bytes, total_bytes;
    unsigned type;
    if (TRY(cuMemAlloc(&memory, 3 * MIB))) {
        hold(MEMORY, memory, 0);
        (void)TRY(cuMemsetD8(memory, 5, FILLED));
        (void)TRY(cuMemsetD32Async(memory, 7, FILLED / 4, stream));
        (void)TRY(cuMemGetAddressRange(&base, &size, memory + 100));
        (void)TRY(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory));
    }
    if (TRY(cuMemAlloc(&memory, 4096)))
        hold(MEMORY, memory, 0);
    if (TRY(cuMemAllocPitch(&memory, &size, 1000, 64, 4)))
        hold(MEMORY, memory, 0);
    if (TRY(cuMemAllocManaged(&memory, 2 * MIB, CU_MEM_ATTACH_GLOBAL)))
        hold(MEMORY, memory, 0);
    if (TRY(cuMemAllocAsync(&memory, MIB, stream))) {
        hold(ORDERED, memory, (uint64_t)stream);
        (void)TRY(cuMemsetD8Async(memory, 1, FILLED, stream));
    }
    if (TRY(cuMemPoolCreate(&pool, &properties))) {
        hold(POOL, (uint64_t)pool, 0);
        if (TRY(cuMemAllocFromPoolAsync(&memory, 2 * MIB, pool, stream)))
            hold(ORDERED, memory, (uint64_t)stream);
    }
    if (TRY(cuArrayCreate(&array, &flat)))
        hold(ARRAY, (uint64_t)array, 0);
    if (TRY(cuArray3DCreate(&array, &deep)))
        hold(ARRAY, (uint64_t)array, 0);
    if (TRY(cuMemHostAlloc(&host, 65536, 0)))
        hold(HOST, (uint64_t)host, 0);
    (void)TRY(cuMemGetInfo(&free_bytes, &total_bytes));
    (void)TRY(cuDeviceTotalMem(&total_bytes, 0));
}

static void own_mappings(void)
{
    CUmemAllocationProp property = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE},
                                    .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
    const CUmemAccessDesc rights = {.location = property.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle, again;
    CUdeviceptr range;
    int file;
    for (int exported = 0; exported < 2; exported++) {
        if (!TRY(cuMemAddressReserve(&range, 4 * MIB, 0, 0, 0)))
            continue;
        hold(RANGE, range, 4 * MIB);
        if (!TRY(cuMemCreate(&handle, 2 * MIB, &property, 0)))
            continue;
        hold(HANDLE, handle, 0);
        if (exported && TRY(cuMemExportToShareableHandle(&file, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)))
            close(file);
        if (!TRY(cuMemMap(range + 2 * MIB, 2 * MIB, 0, handle, 0)))
            continue;
        hold(MAPPING, range + 2 * MIB, 2 * MIB);
        if (TRY(cuMemSetAccess(range + 2 * MIB, 2 * MIB, &rights, 1)))
            (void)TRY(cuMemsetD32(range + 2 * MIB, 9, FILLED / 4));
        if (TRY(cuMemRetainAllocationHandle(&again, (void *)(range + 2 * MIB))))
            hold(HANDLE, again, 0);
    }
}

/* A call that failed has spoilt the capture, if it reached the driver; and it has to be ended in any case. */
static bool end_capture(CUstream stream, bool captured, CUgraph *graph)
{
    const int expected = code;
    if (captured && TRY(cuStreamEndCapture(stream, graph)))
        return true;
    *graph = NULL;
    code = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    const bool ended = TRY(cuStreamEndCapture(stream, graph));
    code = expected;
    return ended && *graph != NULL;
}

static void graphs(CUstream stream)
{
    CUdeviceptr inside, memory;
    CUgraph graph;
    CUgraphExec executable;
    if (!TRY(cuMemAlloc(&memory, MIB)))
        return;
    hold(MEMORY, memory, 0);
    if (!TRY(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)))
        return;
    bool captured = TRY(launch(stream, 1000)) && TRY(cuMemsetD32Async(memory, 3, FILLED / 4, stream));
    captured = captured && TRY(cuMemAllocAsync(&inside, MIB, stream)) && TRY(cuMemsetD8Async(inside, 1, FILLED, stream));
    if (!end_capture(stream, captured, &graph))
        return;
    hold(GRAPH, (uint64_t)graph, 0);
    if (!captured || !TRY(cuGraphInstantiate(&executable, graph, 0)))
        return;
    hold(EXECUTABLE, (uint64_t)executable, 0);
    if (TRY(cuGraphLaunch(executable, stream)))
        hold(MEMORY, inside, 0); /* no node of the graph frees it */
    (void)TRY(cuStreamSynchronize(stream));
}

static void another_context(void)
{
    CUcontext other, popped;
    CUdeviceptr memory;
    CUstream stream;
    if (!TRY(cuCtxCreate(&other, NULL, 0, 0)))
        return;
    hold(CONTEXT, (uint64_t)other, 0); /* its memory and stream end with it */
    if (TRY(cuMemAlloc(&memory, MIB)) && TRY(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING)))
        (void)TRY(cuMemsetD8Async(memory, 1, FILLED, stream));
    (void)TRY(cuCtxPopCurrent(&popped));
    if (TRY(cuCtxPushCurrent(primary)))
        (void)TRY(cuCtxPopCurrent(&popped));
}

static void scene(void)
{
    CUstream stream, other;
    CUevent event;
    CUdevice device;
    char bytes[4096] = {0};
    CUdeviceptr memory;
    if (!TRY(cuCtxSetCurrent(primary)) || !TRY(cuCtxGetDevice(&device)))
        return;
    if (!TRY(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING)))
        return;
    hold(STREAM, (uint64_t)stream, 0);
    if (TRY(cuStreamCreateWithPriority(&other, CU_STREAM_DEFAULT, 0)))
        hold(STREAM, (uint64_t)other, 0);
    if (TRY(cuEventCreate(&event, CU_EVENT_DEFAULT))) {
        hold(EVENT, (uint64_t)event, 0);
        (void)(TRY(cuEventRecord(event, stream)) && TRY(cuStreamWaitEvent(stream, event, 0)));
    }
    memory_of_all_kinds(stream);
    if (TRY(cuMemAlloc(&memory, 2 * MIB))) {
        hold(MEMORY, memory, 0);
        (void)TRY(cuMemcpyHtoD(memory, bytes, sizeof bytes));
        (void)TRY(cuMemcpyHtoDAsync(memory, bytes, sizeof bytes, stream));
        (void)TRY(cuMemcpyDtoDAsync(memory + MIB, memory, FILLED, stream));
        (void)TRY(cuMemcpyDtoH(bytes, memory, sizeof bytes));
        (void)TRY(cuMemsetD2D8(memory, 512, 1, 100, 100));
    }
    (void)TRY(launch(stream, 2000));
    (void)TRY(cuLaunchHostFunc(stream, nothing, NULL));
    own_mappings();
    graphs(stream);
    (void)TRY(cuStreamSynchronize(stream));
    another_context();
    if (TRY(cuCtxSetCurrent(primary)))
        (void)TRY(cuCtxSynchronize());
}
