/* The bypass detector's books: which calls passed the gate, what ran on the GPU, and what escaped.
 *
 * libnvshare_verify.so is no part of the hook.  The driver loads it into every CUDA process of `nvshare-run --verify`
 * (CUDA_INJECTION64_PATH); it sees the driver's calls and the GPU's work through CUPTI (cupti.c), asks the hook, on the
 * calling thread, whether the call is inside the gate, and writes a report at exit (report.c).
 */
#ifndef NVS_VERIFY_H
#define NVS_VERIFY_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef enum nvs_work { NVS_WORK_KERNEL, NVS_WORK_COPY, NVS_WORK_MEMSET, NVS_WORK_KINDS } nvs_work;

typedef struct nvs_escape {
    const char *function; /* the driver's entry point */
    char *symbol;         /* kernel, "" where there is none or it is not known */
    uint64_t calls, ran;
} nvs_escape;

enum { NVS_MOST_ESCAPES = 512 };

typedef struct nvs_books {
    uint64_t ran[NVS_WORK_KINDS], gated[NVS_WORK_KINDS];
    uint64_t own[NVS_WORK_KINDS]; /* the driver's, beside a call that submits nothing, such as loading a module; and the hook's moves */
    uint64_t gated_calls, lost_records;
    nvs_escape escapes[NVS_MOST_ESCAPES]; /* the last one takes what finds no place */
    unsigned escape_count;
} nvs_books;

typedef enum nvs_passage { NVS_PASSAGE_NONE, NVS_PASSAGE_GATED, NVS_PASSAGE_HOOK } nvs_passage; /* HOOK: on a thread of the hook's */

/* A driver call begins, on this thread; `correlations` are those that work may name it by (0: none). */
void nvs_books_call(const char *function, const char *symbol, nvs_passage passage, uint32_t correlation, uint32_t outer_correlation);

/* Work ran.  `matched` false: nothing is known of it but that it did. */
void nvs_books_work(nvs_work kind, const char *symbol, uint32_t correlation, bool matched);
void nvs_books_lost(uint64_t records);
void nvs_books_copy(nvs_books *out);

typedef struct nvs_findings {
    const char *error; /* NULL, or why nothing could be seen */
    bool complete;     /* written at the end of the process */
    bool hooked;       /* the hook is in this process */
    bool active;       /* and took part: its gates were closed until a coordinator opened them */
    bool matched;      /* work could be matched with calls */
    uint32_t cupti;    /* version of its API */
} nvs_findings;

/* JSON, replaced at once.  Where to: see nvs_report_open; nothing happens in a child of a fork. */
void nvs_report_open(const char *directory);
bool nvs_report_is_ours(void);
void nvs_report_write(const nvs_findings *findings);

#endif
