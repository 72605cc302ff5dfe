/* Calls that edit a graph which has been launched before, one kind at a time; and a kernel that notices when its GPU is taken away.
 *
 *   (no argument)   a line "NAME COUNT" in: so many calls of that kind; out: "RESULT NS", the first failure and the median time
 *   probe NS        spins on the GPU for so long, says "spinning" when it does, and in the end "GAPS LARGEST_NS": how often the kernel
 *                   stood still for 20 us and more, which is when the GPU runs another process's work
 */
#define SPINS
#include "cuda_program.h"

static const char watching[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry nvs_probe(.param .u64 duration, .param .u64 out)\n{\n"
    "  .reg .u64 %a<9>;\n  .reg .pred %p<3>;\n"
    "  ld.param.u64 %a0, [duration];\n  ld.param.u64 %a1, [out];\n"
    "  mov.u64 %a2, %globaltimer;\n  add.u64 %a3, %a2, %a0;\n  mov.u64 %a4, %a2;\n"
    "  mov.u64 %a5, 0;\n  mov.u64 %a6, 0;\n  mov.u64 %a7, 1;\n"
    "  st.volatile.global.u64 [%a1], %a7;\n  membar.sys;\n"
    "look:\n  mov.u64 %a7, %globaltimer;\n  sub.u64 %a8, %a7, %a4;\n  mov.u64 %a4, %a7;\n"
    "  setp.gt.u64 %p1, %a8, 20000;\n  @%p1 add.u64 %a5, %a5, 1;\n  max.u64 %a6, %a6, %a8;\n"
    "  setp.lt.u64 %p2, %a7, %a3;\n  @%p2 bra look;\n"
    "  st.volatile.global.u64 [%a1+8], %a5;\n  st.volatile.global.u64 [%a1+16], %a6;\n  ret;\n}\n";

enum { BYTES = 1 << 20 };

static CUstream stream;
static CUdeviceptr memory;
static CUevent event, other_event;
static CUgraph graph, changed, child, other_child;
static CUgraphExec exec;
static CUgraphNode kernel_node, copy_node, set_node, host_node, event_node, child_node;
static uint64_t duration = 1000;
static void *arguments[] = {&duration};
static CUDA_KERNEL_NODE_PARAMS kernel_params;
static CUDA_MEMCPY3D copy_params;
static CUDA_MEMSET_NODE_PARAMS set_params;
static CUDA_HOST_NODE_PARAMS host_params;

static void on_host(void *ignored) {}

static void build(CUgraph *out, uint64_t *nodes_duration)
{
    CUgraphNode ignored;
    arguments[0] = nodes_duration;
    OK(cuGraphCreate(out, 0));
    const bool first = out == &graph;
    OK(cuGraphAddKernelNode(first ? &kernel_node : &ignored, *out, NULL, 0, &kernel_params));
    OK(cuGraphAddMemcpyNode(first ? &copy_node : &ignored, *out, NULL, 0, &copy_params, primary));
    OK(cuGraphAddMemsetNode(first ? &set_node : &ignored, *out, NULL, 0, &set_params, primary));
    OK(cuGraphAddHostNode(first ? &host_node : &ignored, *out, NULL, 0, &host_params));
    OK(cuGraphAddEventRecordNode(first ? &event_node : &ignored, *out, NULL, 0, event));
    OK(cuGraphAddChildGraphNode(first ? &child_node : &ignored, *out, NULL, 0, child));
}

static void prepare(void)
{
    static uint64_t longer = 2000;
    OK(cuMemAlloc(&memory, 2 * BYTES));
    OK(cuEventCreate(&event, CU_EVENT_DEFAULT));
    OK(cuEventCreate(&other_event, CU_EVENT_DEFAULT));
    kernel_params = (CUDA_KERNEL_NODE_PARAMS){
        .func = busy, .gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1, .blockDimY = 1, .blockDimZ = 1, .kernelParams = arguments};
    copy_params = (CUDA_MEMCPY3D){.srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = memory, .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                                  .dstDevice = memory + BYTES, .WidthInBytes = BYTES, .Height = 1, .Depth = 1};
    set_params = (CUDA_MEMSET_NODE_PARAMS){.dst = memory, .value = 1, .elementSize = 1, .width = BYTES, .height = 1};
    host_params = (CUDA_HOST_NODE_PARAMS){.fn = on_host};
    CUgraphNode ignored;
    for (int i = 0; i < 2; i++) {
        CUgraph *made = i == 0 ? &child : &other_child;
        OK(cuGraphCreate(made, 0));
        OK(cuGraphAddKernelNode(&ignored, *made, NULL, 0, &kernel_params));
    }
    build(&graph, &duration);
    build(&changed, &longer);
    OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    for (int i = 0; i < 3; i++)
        OK(cuGraphLaunch(exec, stream));
    OK(cuStreamSynchronize(stream));
}

/* --- one call of each kind; `odd` changes something each time --- */

static CUresult edit_kernel(bool odd)
{
    duration = odd ? 1500 : 1000;
    arguments[0] = &duration;
    return cuGraphExecKernelNodeSetParams(exec, kernel_node, &kernel_params);
}

static CUresult edit_copy(bool odd)
{
    copy_params.WidthInBytes = odd ? BYTES / 2 : BYTES;
    return cuGraphExecMemcpyNodeSetParams(exec, copy_node, &copy_params, primary);
}

static CUresult edit_set(bool odd)
{
    set_params.value = odd;
    return cuGraphExecMemsetNodeSetParams(exec, set_node, &set_params, primary);
}

static CUresult edit_host(bool odd)
{
    host_params.userData = odd ? &duration : NULL;
    return cuGraphExecHostNodeSetParams(exec, host_node, &host_params);
}

static CUresult edit_event(bool odd)
{
    return cuGraphExecEventRecordNodeSetEvent(exec, event_node, odd ? other_event : event);
}

static CUresult edit_child(bool odd)
{
    return cuGraphExecChildGraphNodeSetParams(exec, child_node, odd ? other_child : child);
}

static CUresult edit_any(bool odd)
{
    CUgraphNodeParams any = {.type = CU_GRAPH_NODE_TYPE_MEMSET};
    any.memset = (CUDA_MEMSET_NODE_PARAMS_v2){.dst = memory, .value = odd, .elementSize = 1, .width = BYTES, .height = 1, .ctx = primary};
    return cuGraphExecNodeSetParams(exec, set_node, &any);
}

static CUresult edit_enabled(bool odd)
{
    return cuGraphNodeSetEnabled(exec, kernel_node, !odd); /* enabled in the end */
}

static CUresult edit_update(bool odd)
{
    CUgraphExecUpdateResultInfo ignored;
    return cuGraphExecUpdate(exec, odd ? changed : graph, &ignored);
}

static CUresult do_upload(bool odd)
{
    CUresult edited = edit_kernel(odd); /* else there may be nothing to upload */
    CUresult result = cuGraphUpload(exec, stream);
    return edited != CUDA_SUCCESS ? edited : result != CUDA_SUCCESS ? result : cuStreamSynchronize(stream);
}

static CUresult do_instantiate(bool odd)
{
    CUgraphExec made;
    CUresult result = cuGraphInstantiateWithFlags(&made, odd ? changed : graph, 0);
    return result == CUDA_SUCCESS ? cuGraphExecDestroy(made) : result;
}

static CUresult do_instantiate_and_upload(bool odd)
{
    CUDA_GRAPH_INSTANTIATE_PARAMS how = {.flags = CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD, .hUploadStream = stream};
    CUgraphExec made;
    CUresult result = cuGraphInstantiateWithParams(&made, odd ? changed : graph, &how);
    if (result == CUDA_SUCCESS)
        result = cuStreamSynchronize(stream);
    return result == CUDA_SUCCESS ? cuGraphExecDestroy(made) : result;
}

static CUresult do_launch(bool odd)
{
    CUresult result = cuGraphLaunch(exec, stream);
    return result == CUDA_SUCCESS ? cuStreamSynchronize(stream) : result;
}

static CUresult nothing(bool odd)
{
    return CUDA_SUCCESS;
}

static const struct kind {
    const char *name; /* +: the call is to wait for the lease */
    CUresult (*call)(bool odd);
} kinds[] = {
    {"+launch", do_launch},
    {"+upload", do_upload},
    {"+instantiate", do_instantiate},
    {"+instantiate_and_upload", do_instantiate_and_upload},
    {"nothing", nothing},
    {"kernel", edit_kernel},
    {"copy", edit_copy},
    {"memset", edit_set},
    {"host", edit_host},
    {"event", edit_event},
    {"child", edit_child},
    {"any", edit_any},
    {"enabled", edit_enabled},
    {"update", edit_update},
};

enum { KINDS = sizeof kinds / sizeof *kinds, MOST = 100000 };

static int by_size(const void *a, const void *b)
{
    const uint64_t *left = a, *right = b;
    return *left < *right ? -1 : *left > *right;
}

static void serve(void)
{
    static uint64_t took[MOST];
    char name[64];
    int count;
    while (scanf("%62s %d", name, &count) == 2 && count > 0 && count <= MOST) {
        CUresult result = CUDA_SUCCESS;
        const struct kind *kind = NULL;
        for (int i = 0; i < KINDS; i++)
            if (strcmp(kinds[i].name + (kinds[i].name[0] == '+'), name) == 0)
                kind = &kinds[i];
        if (kind == NULL)
            exit(8);
        for (int i = 0; i < count; i++) {
            uint64_t begin = now_ns();
            CUresult here = kind->call(i % 2 == 0);
            took[i] = now_ns() - begin;
            result = result == CUDA_SUCCESS ? here : result;
        }
        qsort(took, (size_t)count, sizeof *took, by_size);
        printf("%d %llu\n", (int)result, (unsigned long long)took[count / 2]);
        fflush(stdout);
    }
}

static void probe(uint64_t ns)
{
    CUfunction spin;
    void *shared;
    CUdeviceptr out;
    OK(cuModuleLoadData(&module, watching));
    OK(cuModuleGetFunction(&spin, module, "nvs_probe"));
    OK(cuMemHostAlloc(&shared, 4096, CU_MEMHOSTALLOC_DEVICEMAP));
    OK(cuMemHostGetDevicePointer(&out, shared, 0));
    volatile uint64_t *seen = shared;
    memset(shared, 0, 4096);
    void *parameters[] = {&ns, &out};
    OK(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
    while (seen[0] == 0 && cuStreamQuery(stream) == CUDA_ERROR_NOT_READY) {
    }
    puts("spinning");
    fflush(stdout);
    OK(cuStreamSynchronize(stream));
    printf("%llu %llu\n", (unsigned long long)seen[1], (unsigned long long)seen[2]);
}

int main(int count, char **words)
{
    begin();
    stream = new_stream();
    if (count == 3 && strcmp(words[1], "probe") == 0) {
        probe(strtoull(words[2], NULL, 10));
        return 0;
    }
    prepare();
    puts("ready");
    fflush(stdout);
    serve();
    return 0;
}
