// CUDA C++ on the runtime API, for a statically linked cudart: two streams, events, stream-ordered allocation, a captured graph.
//
// Speaks the line protocol of cases/__main__.py:  `check` -> {"digest": ...}   `time SECONDS` -> {"ns": of one step}
// Knows nothing of the hook.

#include <cuda_runtime.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr int words = 1 << 15, block = 256, kernels = 10, rounds = 100;

__global__ void mix(uint32_t *data, uint32_t salt)
{
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    data[i] = data[i] * 1664525u + 1013904223u + i + salt;
}

void check(cudaError_t result, const char *what)
{
    if (result != cudaSuccess) {
        std::fprintf(stderr, "runtime_program: %s: %s\n", what, cudaGetErrorString(result));
        std::exit(1);
    }
}

class Work {
public:
    Work()
    {
        check(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking), "cudaStreamCreate");
        check(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking), "cudaStreamCreate");
        check(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming), "cudaEventCreate");
        check(cudaMalloc(&data, bytes), "cudaMalloc");
        check(cudaStreamBeginCapture(first, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
        launches(first, data, kernels);
        cudaGraph_t graph;
        check(cudaStreamEndCapture(first, &graph), "cudaStreamEndCapture");
        check(cudaGraphInstantiate(&instance, graph, 0), "cudaGraphInstantiate");
    }

    void step()
    {
        uint32_t *scratch;
        check(cudaGraphLaunch(instance, first), "cudaGraphLaunch");
        check(cudaEventRecord(ready, first), "cudaEventRecord");
        check(cudaStreamWaitEvent(second, ready, 0), "cudaStreamWaitEvent");
        check(cudaMallocAsync(&scratch, bytes, second), "cudaMallocAsync");
        check(cudaMemcpyAsync(scratch, data, bytes, cudaMemcpyDeviceToDevice, second), "cudaMemcpyAsync");
        launches(second, scratch, 2);
        check(cudaMemcpyAsync(data, scratch, bytes, cudaMemcpyDeviceToDevice, second), "cudaMemcpyAsync");
        check(cudaFreeAsync(scratch, second), "cudaFreeAsync");
        check(cudaEventRecord(ready, second), "cudaEventRecord");
        check(cudaStreamWaitEvent(first, ready, 0), "cudaStreamWaitEvent");
    }

    void finish() { check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }

    // The mean over at least half of this time, after steps that fill caches.
    double step_ns(double seconds)
    {
        for (long steps = 4;; steps *= 2) {
            finish();
            auto begin = std::chrono::steady_clock::now();
            for (long i = 0; i < steps; i++)
                step();
            finish();
            double ns = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count();
            if (steps > 4 && ns >= seconds * 5e8)
                return ns / static_cast<double>(steps);
        }
    }

    uint64_t digest()
    {
        std::vector<uint32_t> host(words);
        for (uint32_t i = 0; i < words; i++)
            host[i] = i * 2654435761u;
        check(cudaMemcpy(data, host.data(), bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
        for (int i = 0; i < rounds; i++)
            step();
        finish();
        check(cudaMemcpy(host.data(), data, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
        uint64_t value = 14695981039346656037u;
        for (uint32_t word : host)
            value = (value ^ word) * 1099511628211u;
        return value;
    }

private:
    static constexpr size_t bytes = words * sizeof(uint32_t);
    cudaStream_t first, second;
    cudaEvent_t ready;
    cudaGraphExec_t instance;
    uint32_t *data;

    static void launches(cudaStream_t stream, uint32_t *where, int count)
    {
        for (int i = 0; i < count; i++)
            mix<<<words / block, block, 0, stream>>>(where, static_cast<uint32_t>(i));
        check(cudaGetLastError(), "launch");
    }
};

} // namespace

int main()
{
    char line[128];
    double seconds;
    std::printf("{\"ready\": true}\n");
    std::fflush(stdout);
    Work *work = nullptr;
    while (std::fgets(line, sizeof line, stdin) != nullptr) {
        if (work == nullptr)
            work = new Work;
        if (std::strncmp(line, "check", 5) == 0) {
            std::printf("{\"digest\": \"%016llx\", \"versions\": {\"cudart (static)\": \"%d.%d\"}}\n",
                        static_cast<unsigned long long>(work->digest()), CUDART_VERSION / 1000,
                        CUDART_VERSION % 1000 / 10);
        } else if (std::sscanf(line, "time %lf", &seconds) == 1) {
            std::printf("{\"ns\": %.1f}\n", work->step_ns(seconds));
        } else {
            return 2;
        }
        std::fflush(stdout);
    }
    delete work;
    return 0;
}
