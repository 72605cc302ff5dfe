/* The state file: its creation, its lock, and the processes that use it.  Both simulated libraries link this.
 *
 * Programs in containers have PID namespaces of their own, where process ids of other namespaces mean nothing.  Each process therefore
 * locks the byte of the file with the number of its entry: for others a free byte says that the process has ended.  Within one namespace
 * /proc decides, since a forked child keeps its parent's lock, and a program may close all descriptors.
 */
#define _GNU_SOURCE /* F_OFD_SETLK */
#include "base/base.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TRACE_OFFSET ((sizeof(nvs_sim_shared) + 4095) & ~(uint64_t)4095)
#define FILE_BYTES (TRACE_OFFSET + (uint64_t)NVS_SIM_TRACE_RECORDS * sizeof(nvs_sim_record))

enum { FIRST_DESCRIPTOR = 200 }; /* above the numbers that scripts use */
static int lock_file = -1;

_Static_assert(sizeof(nvs_sim_record) == 56, "simulated_gpu/trace.py reads 56 bytes a record");

static uint64_t parse_bytes(const char *text, const char **end)
{
    static const char units[] = "KMGT";
    char *rest;
    double value = strtod(text, &rest);
    const char *unit = *rest != '\0' ? strchr(units, *rest) : NULL;
    if (rest == text || value <= 0)
        return 0;
    for (const char *power = units; unit != NULL && power <= unit; power++)
        value *= rest[1] == 'B' ? 1000 : 1024;
    rest += unit != NULL ? 1 + (rest[1] == 'i' && rest[2] == 'B') : 0;
    *end = rest + (*rest == 'B');
    return (uint64_t)value;
}

/* GPUS[xCAPACITY].  environment.py validates the same grammar, with better messages. */
static bool parse_spec(const char *spec, uint32_t *gpus, uint64_t *capacity)
{
    char *rest;
    unsigned long count = strtoul(spec, &rest, 10);
    const char *end = rest;
    *capacity = 16ull << 30;
    if (rest == spec || count == 0 || count > NVS_SIM_MAX_GPUS)
        return false;
    if (*rest == 'x')
        *capacity = parse_bytes(rest + 1, &end);
    *gpus = (uint32_t)count;
    return *end == '\0' && *capacity >= (1ull << 20);
}

/* Unique to the card and instance, and the same on every machine. */
static void make_uuid(uint8_t uuid[16], uint32_t card, uint32_t instance)
{
    static const uint8_t base[16] = {0x51, 0xa1, 0x5e, 0xed, 0, 0, 0x40, 0, 0x80, 0, 0, 0, 0, 0, 0, 0};
    memcpy(uuid, base, sizeof base);
    uuid[5] = (uint8_t)instance;
    uuid[14] = (uint8_t)(card >> 8);
    uuid[15] = (uint8_t)card;
}

/* The number of equal instances of the card in NVSHARE_SIM_MIG=GPU:N[,GPU:N]; 0: the card is not split. */
static uint32_t mig_instances(uint32_t card)
{
    const char *text = getenv("NVSHARE_SIM_MIG");
    while (text != NULL && *text != '\0') {
        unsigned number, count;
        if (sscanf(text, "%u:%u", &number, &count) == 2 && number == card && count >= 1 && count <= 7)
            return count;
        text = strchr(text, ',');
        text = text == NULL ? NULL : text + 1;
    }
    return 0;
}

/* 0 without /proc: as if all processes were of one namespace. */
static uint64_t own_pid_namespace(void)
{
    struct stat found;
    return stat("/proc/self/ns/pid", &found) == 0 ? (uint64_t)found.st_ino : 0;
}

static bool fill(nvs_sim_shared *shared)
{
    const char *spec = getenv("NVSHARE_SIMULATE");
    uint32_t cards = 1;
    const char *integrated = getenv("NVSHARE_SIM_INTEGRATED");
    uint64_t capacity = 16ull << 30;
    if (spec != NULL && *spec != '\0' && !parse_spec(spec, &cards, &capacity)) {
        nvs_sim_say("NVSHARE_SIMULATE=%.64s is not GPUS[xCAPACITY], for example 2x8GiB (1 to %u GPUs, at least 1MiB)", spec,
                    NVS_SIM_MAX_GPUS);
        return false;
    }
    shared->version = NVS_SIM_VERSION;
    shared->trace_offset = TRACE_OFFSET;
    shared->trace_records = NVS_SIM_TRACE_RECORDS;
    for (uint32_t card = 0; card < cards; card++) {
        uint32_t split = mig_instances(card), parts = split != 0 ? split : 1;
        for (uint32_t part = 0; part < parts && shared->gpu_count < NVS_SIM_MAX_GPUS; part++) {
            nvs_sim_gpu *gpu = &shared->gpus[shared->gpu_count++];
            gpu->card = card;
            gpu->instance = split != 0 ? part + 1 : 0;
            gpu->capacity_bytes = capacity / parts;
            gpu->integrated = integrated != NULL && strcmp(integrated, "1") == 0;
            make_uuid(gpu->uuid, card, gpu->instance);
        }
    }
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&shared->lock, &attributes);
    pthread_mutexattr_destroy(&attributes);
    shared->pid_namespace = own_pid_namespace();
    shared->magic = NVS_SIM_MAGIC;
    return true;
}

static nvs_sim_shared *map(int file)
{
    void *place = mmap(NULL, FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    return place != MAP_FAILED ? place : NULL;
}

/* Sizes and fills a new file, and closes it.  NULL after a message.  Its blocks exist from now on: a full disk is an error here, and no
 * SIGBUS later. */
static nvs_sim_shared *map_new(int file)
{
    const int error = file < 0 ? errno : posix_fallocate(file, 0, (off_t)FILE_BYTES);
    nvs_sim_shared *shared = error == 0 ? map(file) : NULL;
    if (shared == NULL) {
        nvs_sim_say("cannot create the state of simulated GPUs (%llu MiB): %s", (unsigned long long)FILE_BYTES >> 20,
                    strerror(error != 0 ? error : errno));
    } else if (!fill(shared)) {
        munmap(shared, FILE_BYTES);
        shared = NULL;
    }
    if (file >= 0)
        close(file);
    return shared;
}

/* Fills a temporary file and links it to the path: no process sees a half-written file. */
static bool create(const char *path)
{
    char temporary[4096];
    const int length = snprintf(temporary, sizeof temporary, "%s.%ld.%lu.new", path, (long)getpid(), (unsigned long)nvs_sim_now_ns());
    if (length < 0 || (size_t)length >= sizeof temporary) {
        nvs_sim_say("NVSHARE_SIM_STATE is too long a path");
        return false;
    }
    const int file = open(temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file < 0) {
        nvs_sim_say("cannot create the state file %s: %s", path, strerror(errno));
        return false;
    }
    nvs_sim_shared *shared = map_new(file);
    const bool linked = shared != NULL && (link(temporary, path) == 0 || errno == EEXIST);
    if (shared != NULL) {
        if (!linked)
            nvs_sim_say("cannot put the state file at %s: %s", path, strerror(errno));
        munmap(shared, FILE_BYTES);
    }
    unlink(temporary);
    return linked;
}

nvs_sim_shared *nvs_sim_shared_open(void)
{
    const char *path = getenv("NVSHARE_SIM_STATE");
    struct stat info;
    if (path == NULL || *path == '\0')
        return map_new((int)syscall(SYS_memfd_create, "simulated_gpu", 1u /* MFD_CLOEXEC */));
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0 && errno == ENOENT) {
        if (!create(path))
            return NULL;
        file = open(path, O_RDWR | O_CLOEXEC);
    }
    if (file < 0) {
        nvs_sim_say("cannot open the state file %s: %s", path, strerror(errno));
        return NULL;
    }
    nvs_sim_shared *shared = fstat(file, &info) == 0 && (uint64_t)info.st_size >= FILE_BYTES ? map(file) : NULL;
    if (shared != NULL && shared->magic == NVS_SIM_MAGIC && shared->version == NVS_SIM_VERSION) {
        lock_file = fcntl(file, F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR);
        close(file);
        return shared;
    }
    close(file);
    if (shared != NULL)
        munmap(shared, FILE_BYTES);
    nvs_sim_say("%s is not a state file of this version; remove it or name another in NVSHARE_SIM_STATE", path);
    return NULL;
}

void nvs_sim_shared_lock(nvs_sim_shared *shared)
{
    /* After a holder was killed nothing needs repair: each sum is one word, and a wrong clock affects only running kernels. */
    if (pthread_mutex_lock(&shared->lock) == EOWNERDEAD)
        pthread_mutex_consistent(&shared->lock);
}

void nvs_sim_shared_unlock(nvs_sim_shared *shared) { pthread_mutex_unlock(&shared->lock); }

/* Field 22 of /proc/PID/stat; 0 if the process is dead or a zombie. */
static uint64_t start_time(uint32_t process_id)
{
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%u/stat", process_id);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return 0;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    if (length <= 0)
        return 0;
    text[length] = '\0';
    const char *after = strrchr(text, ')');
    char state;
    long threads;
    unsigned long long started;
    const char *fields = " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %ld %*d %llu";
    if (after == NULL || sscanf(after + 1, fields, &state, &threads, &started) != 3)
        return 0;
    if ((state == 'Z' || state == 'X') && threads <= 1)
        return 0;
    return started;
}

/* OFD locks end with the last descriptor of the opened file, in whichever PID namespace their holder is. */
static bool entry_lock(uint32_t index, int command, short kind, struct flock *lock)
{
    *lock = (struct flock){.l_type = kind, .l_whence = SEEK_SET, .l_start = (off_t)index, .l_len = 1};
    return lock_file >= 0 && fcntl(lock_file, command, lock) == 0;
}

static bool has_ended(uint32_t index, const nvs_sim_process *process, uint64_t namespace)
{
    struct flock lock;
    if (process->pid_namespace == namespace)
        return start_time(process->local_id) != process->start_time;
    return entry_lock(index, F_OFD_GETLK, F_WRLCK, &lock) && lock.l_type == F_UNLCK;
}

static bool names(uint32_t id, uint64_t namespace, const nvs_sim_process *process)
{
    return process->process_id != 0 && process->local_id == id && process->pid_namespace == namespace;
}

bool nvs_sim_shared_names(uint32_t id, const nvs_sim_process *process) { return names(id, own_pid_namespace(), process); }

void nvs_sim_shared_reap(nvs_sim_shared *shared)
{
    const uint32_t own = (uint32_t)getpid();
    const uint64_t namespace = own_pid_namespace();
    for (uint32_t i = 0; i < shared->processes_used; i++) {
        nvs_sim_process *process = &shared->processes[i];
        if (process->process_id != 0 && !names(own, namespace, process) && has_ended(i, process, namespace))
            memset(process, 0, sizeof *process);
    }
}

nvs_sim_process *nvs_sim_shared_self(nvs_sim_shared *shared)
{
    const uint32_t own = (uint32_t)getpid(), unknown = NVS_SIM_MAX_PROCESSES;
    const uint64_t namespace = own_pid_namespace(), started = start_time(own);
    uint32_t found = unknown;
    struct flock lock;
    nvs_sim_shared_lock(shared);
    nvs_sim_shared_reap(shared);
    for (uint32_t i = 0; i < shared->processes_used; i++) {
        const nvs_sim_process *process = &shared->processes[i];
        const bool mine = names(own, namespace, process);
        if (mine || (process->process_id == 0 && found == unknown)) /* an entry of this process: left by the program before exec */
            found = i;
        if (mine)
            break;
    }
    if (found == unknown && shared->processes_used < NVS_SIM_MAX_PROCESSES)
        found = shared->processes_used++;
    nvs_sim_process *entry = found != unknown ? &shared->processes[found] : NULL;
    if (entry != NULL) {
        (void)entry_lock(found, F_OFD_SETLK, F_WRLCK, &lock); /* fails where an earlier owner's child holds it: no matter */
        memset(entry, 0, sizeof *entry);
        entry->start_time = started;
        entry->local_id = own;
        entry->pid_namespace = namespace;
        entry->process_id = namespace == shared->pid_namespace ? own : NVS_SIM_FOREIGN + found;
    }
    nvs_sim_shared_unlock(shared);
    return entry;
}

uint64_t nvs_sim_shared_used(nvs_sim_shared *shared, uint32_t gpu)
{
    uint64_t used = 0;
    for (uint32_t i = 0; i < shared->processes_used; i++)
        if (shared->processes[i].process_id != 0)
            used += shared->processes[i].fixed_bytes[gpu] + shared->processes[i].paged_bytes[gpu];
    return used;
}

nvs_sim_record *nvs_sim_shared_records(nvs_sim_shared *shared)
{
    return (nvs_sim_record *)(void *)((char *)shared + shared->trace_offset);
}

void nvs_sim_uuid_text(const uint8_t uuid[16], bool instance, char out[SIM_UUID_TEXT])
{
    int length = snprintf(out, SIM_UUID_TEXT, instance ? "MIG" : "GPU");
    for (int i = 0; i < 16; i++)
        length += snprintf(out + length, SIM_UUID_TEXT - (size_t)length, i % 2 == 0 && i <= 10 && i != 2 ? "-%02x" : "%02x", uuid[i]);
}
