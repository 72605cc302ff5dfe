/* The bypass detector: counts the GPU's work by whether its call was inside the gate, and reports calls that were not.
 *
 * The detector is a library that the driver loads into every CUDA process (CUDA_INJECTION64_PATH; reports.py).  It receives the driver's calls and the GPU's work from CUPTI (cupti.c), asks the hook, on the calling thread,
 * whether the call is inside the gate (nvshare_gate_depth), counts (tally.c), and writes a report at exit (report.c).
 */
#ifndef NVS_DETECTOR_H
#define NVS_DETECTOR_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef enum nvs_work { NVS_WORK_KERNEL, NVS_WORK_COPY, NVS_WORK_MEMSET, NVS_WORK_KINDS } nvs_work;

typedef struct nvs_escape { /* calls outside of the gate */
    const char *function; /* the driver's entry point */
    char *symbol;         /* the kernel; "": none, or not known */
    uint64_t calls, ran;
} nvs_escape;

enum { NVS_MOST_ESCAPES = 512 };

typedef struct nvs_tally {
    uint64_t ran[NVS_WORK_KINDS], gated[NVS_WORK_KINDS];
    uint64_t own[NVS_WORK_KINDS]; /* the hook's moves, and the driver's own work in a call that submits none, such as loading a module */
    uint64_t gated_calls, lost_records;
    nvs_escape escapes[NVS_MOST_ESCAPES]; /* the last entry stands for all further ones */
    unsigned escape_count;
} nvs_tally;

typedef enum nvs_passage { NVS_PASSAGE_NONE, NVS_PASSAGE_GATED, NVS_PASSAGE_HOOK } nvs_passage; /* HOOK: on a thread of the hook */

/* A driver call begins on this thread.  Its work has one of the two correlation ids; 0: none. */
void nvs_tally_call(const char *function, const char *symbol, nvs_passage passage, uint32_t correlation, uint32_t outer_correlation);

/* Work ran.  `matched` false: its call is not known. */
void nvs_tally_work(nvs_work kind, const char *symbol, uint32_t correlation, bool matched);
void nvs_tally_lost(uint64_t records);
void nvs_tally_copy(nvs_tally *out);

typedef struct nvs_findings {
    const char *error; /* why CUPTI does not work; NULL: it does */
    bool complete;     /* written at the end of the process */
    bool hooked;       /* the hook is in this process */
    bool active;       /* the hook was enabled: its gates were closed until a coordinator opened them */
    bool matched;      /* work could be matched with calls */
    uint32_t cupti;    /* version of its API */
} nvs_findings;

void nvs_report_open(const char *directory);
bool nvs_report_is_ours(void); /* false in the child of a fork */
void nvs_report_write(const nvs_findings *findings); /* replaces the file; without effect in the child of a fork */

#endif
