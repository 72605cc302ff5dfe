/* The report of one process: JSON in a directory that nvshare-run made.  It is written when CUDA starts, so that a process that is killed has a
 * report, and again at exit. */
#define _GNU_SOURCE /* program_invocation_name */
#include "detector.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static char path[PATH_MAX];
static pid_t owner;

void nvs_report_open(const char *directory)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    owner = getpid();
    /* After exec the next program reports under the same process id. */
    int length = snprintf(path, sizeof path, "%s/%ld-%lld%09ld.json", directory, (long)owner, (long long)now.tv_sec, now.tv_nsec);
    if (length < 0 || (size_t)length >= sizeof path)
        path[0] = 0;
}

/* Bytes beyond ASCII are written as Latin-1, as JSON needs characters. */
static void put_text(FILE *file, const char *text)
{
    fputc('"', file);
    for (const unsigned char *at = (const unsigned char *)text; *at != 0; at++) {
        if (*at == '"' || *at == '\\')
            fprintf(file, "\\%c", *at);
        else if (*at < 0x20 || *at >= 0x7f)
            fprintf(file, "\\u%04x", *at);
        else
            fputc(*at, file);
    }
    fputc('"', file);
}

static void put_truth(FILE *file, const char *name, bool value)
{
    fprintf(file, ",\"%s\":%s", name, value ? "true" : "false");
}

static void put_work(FILE *file, const nvs_tally *tally, const char *name, nvs_work kind)
{
    fprintf(file, ",\"%s\":{\"ran\":%llu,\"gated\":%llu,\"own\":%llu}", name, (unsigned long long)tally->ran[kind],
            (unsigned long long)tally->gated[kind], (unsigned long long)tally->own[kind]);
}

static void put_report(FILE *file, const nvs_findings *findings, const nvs_tally *tally)
{
    fprintf(file, "{\"version\":1,\"pid\":%ld,\"program\":", (long)owner);
    put_text(file, program_invocation_name);
    put_truth(file, "complete", findings->complete);
    put_truth(file, "hooked", findings->hooked);
    put_truth(file, "active", findings->active);
    put_truth(file, "matched", findings->matched);
    fprintf(file, ",\"cupti\":%u,\"error\":", findings->cupti);
    if (findings->error != NULL)
        put_text(file, findings->error);
    else
        fputs("null", file);
    put_work(file, tally, "kernels", NVS_WORK_KERNEL);
    put_work(file, tally, "copies", NVS_WORK_COPY);
    put_work(file, tally, "memsets", NVS_WORK_MEMSET);
    fprintf(file, ",\"gated_calls\":%llu,\"lost_records\":%llu,\"escaped\":[", (unsigned long long)tally->gated_calls,
            (unsigned long long)tally->lost_records);
    for (unsigned i = 0; i < tally->escape_count; i++) {
        const nvs_escape *one = &tally->escapes[i];
        fputs(i == 0 ? "{\"function\":" : ",{\"function\":", file);
        put_text(file, one->function);
        fputs(",\"symbol\":", file);
        put_text(file, one->symbol);
        fprintf(file, ",\"calls\":%llu,\"ran\":%llu}", (unsigned long long)one->calls, (unsigned long long)one->ran);
    }
    fputs("]}\n", file);
}

bool nvs_report_is_ours(void)
{
    return path[0] != 0 && getpid() == owner;
}

void nvs_report_write(const nvs_findings *findings)
{
    static nvs_tally tally;
    char fresh[PATH_MAX + 8];
    int saved = errno;
    if (!nvs_report_is_ours())
        return;
    nvs_tally_copy(&tally);
    snprintf(fresh, sizeof fresh, "%s.new", path);
    FILE *file = fopen(fresh, "we");
    if (file != NULL) {
        put_report(file, findings, &tally);
        bool written = ferror(file) == 0;
        if (fclose(file) != 0 || !written || rename(fresh, path) != 0)
            (void)unlink(fresh); /* the older report stays */
    }
    errno = saved;
}
