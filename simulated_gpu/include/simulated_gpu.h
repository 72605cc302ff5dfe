/* The simulated GPU: the state that processes share, and the interface for tests.
 *
 * All processes on the same simulated cards map the state file (NVSHARE_SIM_STATE).  The file begins with nvs_sim_shared; the trace,
 * a ring of nvs_sim_record, starts at trace_offset.  simulated_gpu/trace.py reads the same layout: a change of the layout raises
 * NVS_SIM_VERSION in both files.  The layout has only integers of fixed size, no pointers.
 */
#ifndef SIMULATED_GPU_H
#define SIMULATED_GPU_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#define NVS_SIM_MAGIC 0x5550476d6953764eull /* "NvSimGPU" in memory */
#define NVS_SIM_VERSION 6u
#define NVS_SIM_MAX_GPUS 32u
#define NVS_SIM_MAX_PROCESSES 1024u
#define NVS_SIM_TRACE_RECORDS (1u << 20)
#define NVS_SIM_FOREIGN (1u << 30) /* above all process ids */

enum { /* nvs_sim_record.kind */
    NVS_SIM_KERNEL = 1,
    NVS_SIM_COPY = 2,
    NVS_SIM_MEMSET = 3,
    NVS_SIM_PREFETCH = 4,
    NVS_SIM_GRAPH = 5, /* any work of a graph launch */
};

typedef struct nvs_sim_record { /* one ended operation; 56 bytes */
    _Atomic uint64_t sequence;  /* 1 + the number of the record; written last, and 0 during the writing */
    uint64_t start_ns;          /* CLOCK_MONOTONIC */
    uint64_t end_ns;
    uint64_t stream;            /* id of the stream, unique in its process */
    uint64_t bytes;             /* moved or set; 0 for kernels */
    uint64_t work_ns;           /* its duration on an idle GPU; end_ns - start_ns is longer if other programs ran */
    uint32_t process_id;
    uint16_t gpu;               /* index in nvs_sim_shared.gpus, independent of CUDA_VISIBLE_DEVICES */
    uint16_t kind;
} nvs_sim_record;

typedef struct nvs_sim_gpu {
    uint8_t uuid[16];
    uint64_t capacity_bytes;
    uint32_t card;     /* number of the physical card, as NVML counts */
    uint32_t instance; /* 0: the whole card; else 1 + the number of the MIG instance */
    uint64_t context_switches; /* ends of time slices before the work of their program */
    uint64_t integrated;       /* 1: its memory is that of the machine, so page-locked host memory comes from it too */
} nvs_sim_gpu;

/* The time slices of a program on a GPU.  A program is a process, or all clients of MPS together. */
typedef struct nvs_sim_program {
    uint64_t slice_start_ns, slice_end_ns; /* the newest slice; the end may move */
    uint64_t since_ns;                     /* the clocks run at these rates from then to the end of the slice */
    uint64_t clock_ns[2];                  /* the clocks at since_ns, one for each MPS priority: the progress of a kernel without end */
    uint32_t rate[2];                      /* millionths */
} nvs_sim_program;

typedef struct nvs_sim_slicer { /* of one GPU */
    nvs_sim_program clients;    /* of MPS */
    uint32_t last;              /* the program with the last slice: an index in processes, or NVS_SIM_MAX_PROCESSES for the clients */
    uint32_t last_process_id;   /* the process id of that program; 0 for the clients */
    uint64_t checked_ns;        /* the last search for dead clients of MPS */
} nvs_sim_slicer;

typedef struct nvs_sim_request { /* a step of a checkpoint, for the restore thread of a process */
    uint32_t step;       /* of device/checkpoint.c */
    uint32_t timeout_ms; /* lock; 0: none */
    uint32_t mapped;     /* restore: one bit for each GPU that the caller named; 0: every GPU stays */
    uint8_t target[NVS_SIM_MAX_GPUS]; /* restore: the GPU on which the contents of each GPU go on */
} nvs_sim_request;

#define NVS_SIM_RESULTS 8u

typedef struct nvs_sim_checkpoint {
    _Atomic uint32_t state;   /* CUprocessState */
    _Atomic uint32_t thread;  /* thread id of the restore thread; 0: there is none */
    _Atomic uint32_t asked;   /* requests ever made, by any process; futex of the restore thread */
    _Atomic uint32_t answered; /* requests ever finished; futex of the callers */
    nvs_sim_request request;  /* the newest; written with the lock while asked == answered */
    _Atomic uint32_t results[NVS_SIM_RESULTS]; /* CUresult of request N at N % NVS_SIM_RESULTS */
} nvs_sim_checkpoint;

typedef struct nvs_sim_process { /* unused if process_id is 0 */
    uint32_t process_id;                     /* in the state file's PID namespace; elsewhere NVS_SIM_FOREIGN and more */
    uint32_t local_id;                       /* in its own PID namespace */
    uint64_t pid_namespace;                  /* inode of /proc/self/ns/pid */
    uint64_t start_time;                     /* field 22 of /proc/PID/stat: detects a reused process id */
    uint64_t mps_priority;                   /* of a client of MPS: 0 normal, 1 below */
    uint64_t fixed_bytes[NVS_SIM_MAX_GPUS];  /* device memory that cannot move */
    uint64_t paged_bytes[NVS_SIM_MAX_GPUS];  /* resident managed memory; other processes may page it out */
    uint64_t attached[NVS_SIM_MAX_GPUS];     /* its contexts there */
    uint64_t busy_ns[NVS_SIM_MAX_GPUS];      /* sum of work_ns of its ended work */
    uint32_t demand[NVS_SIM_MAX_GPUS];       /* of a client of MPS: the multiprocessors for its running kernels, in millionths */
    _Atomic uint32_t wake[NVS_SIM_MAX_GPUS]; /* futex on which its executor of the GPU sleeps */
    nvs_sim_program programs[NVS_SIM_MAX_GPUS];
    nvs_sim_checkpoint checkpoint;
} nvs_sim_process;

typedef struct nvs_sim_shared {
    uint64_t magic;
    uint32_t version;
    uint32_t gpu_count;
    uint64_t trace_offset; /* bytes from the start of the file */
    uint64_t trace_records;
    _Atomic uint64_t trace_next; /* records ever begun; the ring holds the newest trace_records */
    nvs_sim_gpu gpus[NVS_SIM_MAX_GPUS];
    pthread_mutex_t lock; /* process-shared and robust; guards the fields below, and context_switches */
    uint32_t processes_used; /* the entries from here on were never in use */
    uint64_t pid_namespace;  /* of the process that created the file */
    nvs_sim_process processes[NVS_SIM_MAX_PROCESSES];
    nvs_sim_slicer slicers[NVS_SIM_MAX_GPUS];
} nvs_sim_shared;

/* Faults of this process, in addition to NVSHARE_SIM_FAULTS.  The simulated libcuda.so.1 exports these functions for dlsym.
 * The nth call of the function from now on (1 is the next; 0 is every call) returns `result` and does nothing.
 * `function` is an exported symbol or a name without its version suffix (cuMemAlloc also means cuMemAlloc_v2). */
void nvs_sim_fail(const char *function, uint64_t nth, int result);
void nvs_sim_clear_faults(void);

/* The observer of this process's calls; NULL removes it.  It runs on the calling thread before anything else, without a lock. */
void nvs_sim_observe(void (*call)(const char *function));

#endif
